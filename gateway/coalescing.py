"""Holds requests back while the rank that they go to computes the beginning of their prompt for another one."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from backends.leg import Booking
from backends.types import EngineKind
from backends.upstream.base import UpstreamCall
from backends.upstream.held_call import HeldCall
from gateway.prefixes import Prefixes
from gateway.prompts import Prompt
from routers.coalescing import Coalescing, Prefill
from routers.types import Placement, RankKey

# Longer than most prefills take; later a request waits in the engine's queue, as it would have done from the beginning.
LONGEST_HOLD_S: Final = 30.0
# A rank whose events did not tell of a prefill that has ended is not waited for by them for this long: its cache may be
# switched off, or what it sends be lost.
MUTE_S: Final = 60.0


class Coalescer:
    """Knows the prefills under way, and sends what waits for them.

    A request is placed and booked at once, so that the choices after it reckon with it; only its write waits, until
    nearly all that it shares is announced as cached, until the first output or the end of the request that computes it,
    or for ``LONGEST_HOLD_S``.

    Only for SGLang: vLLM finds blocks in the step in which they are computed.

    Args:
        min_tokens: Of a prompt's beginning that another request computes: with fewer none waits. 0 for never.
        prefixes: What is known of the caches.
        waited: Told how many seconds a request has waited.
        clock: Monotonic seconds.

    Attributes:
        held_total: Requests that have waited, or do.
        late_total: Those that went after ``LONGEST_HOLD_S``.
    """

    def __init__(
        self, min_tokens: int, prefixes: Prefixes, waited: Callable[[float], None], clock: Callable[[], float]
    ) -> None:
        self._coalescing = Coalescing(min_tokens) if min_tokens else None
        self._prefixes = prefixes
        self._waited = waited
        self._clock = clock
        self._sources: dict[Prefill, tuple[Prompt, Placement]] = {}
        self._stored: set[str] = set()
        self._mute_until: dict[RankKey, float] = {}
        self.held_total = 0
        self.late_total = 0

    @property
    def held(self) -> int:
        """Requests that wait now."""
        return self._coalescing.waiting if self._coalescing is not None else 0

    def __len__(self) -> int:
        """Prefills for which a request could wait."""
        return len(self._sources)

    def families(self) -> Iterator[Metric]:
        """What a scrape shows."""
        yield GaugeMetricFamily("forebay_held_requests", "Requests held back for what others compute.", self.held)
        yield CounterMetricFamily(
            "forebay_coalesced_total", "Requests that were held back for what others compute.", self.held_total
        )
        yield CounterMetricFamily(
            "forebay_coalesced_late_total",
            f"Those that were sent after {LONGEST_HOLD_S:.0f} s all the same.",
            self.late_total,
        )

    def send(
        self,
        prompt: Prompt,
        choice: Placement,
        booking: Booking,
        send: Callable[[], UpstreamCall],
        *,
        may_wait: bool,
        is_stream: bool,
        waited: Callable[[float], None] | None,
    ) -> tuple[UpstreamCall, Booking]:
        """Send a request, at once or when what it shares is there.

        Args:
            prompt: What is known of its prompt.
            choice: Where it goes.
            booking: What it has booked there.
            send: Sends it; never raises.
            may_wait: It has one prompt.
            is_stream: Its first output is seen before its end.
            waited: Told how many seconds it has waited, if it had to.

        Returns:
            The call, and the booking as it is to be used from now on.
        """
        coalescing, blocks, group = self._coalescing, choice.prompt, choice.candidate.group
        if coalescing is None or blocks is None or group is None or group.engine is not EngineKind.SGLANG:
            return send(), booking
        key, hashes, block_size = choice.candidate.key, blocks.sequence_hashes, blocks.block_size
        prefill = None
        if may_wait:
            cached = functools.partial(self._prefixes.announced_blocks, prompt, choice)
            prefill = coalescing.shared_with(key, hashes, block_size, cached)
        if prefill is not None:
            return self._hold(coalescing, prefill, choice, send, waited), booking
        if is_stream or self._hears_of(prompt, choice):
            prefill = coalescing.begin(key, hashes, block_size, choice.overlap_blocks or 0)
            if prefill is not None:
                self._sources[prefill] = prompt, choice
                end = functools.partial(self._end, coalescing, prefill)
                booking = _Prefilling(
                    booking, end if is_stream else functools.partial(self._answered, prefill, end), end
                )
        return send(), booking

    def _hears_of(self, prompt: Prompt, choice: Placement) -> bool:
        """Whether the events of the rank will tell when a prompt is cached there."""
        key = choice.candidate.key
        return self._clock() >= self._mute_until.get(key, 0.0) and self._prefixes.hears_of(prompt, choice)

    def _answered(self, prefill: Prefill, end: Callable[[], None]) -> None:
        """A request that shows nothing before its end has ended; its events should have told of its prefill."""
        if prefill.waiting:
            self._mute(prefill.key)
        end()

    def _mute(self, key: RankKey) -> None:
        now = self._clock()
        self._mute_until = {known: until for known, until in self._mute_until.items() if until > now}
        self._mute_until[key] = now + MUTE_S

    def _hold(
        self,
        coalescing: Coalescing,
        prefill: Prefill,
        choice: Placement,
        send: Callable[[], UpstreamCall],
        waited: Callable[[float], None] | None,
    ) -> UpstreamCall:
        assert choice.prompt is not None
        begun = self._clock()
        self.held_total += 1

        def send_now() -> UpstreamCall:
            seconds = self._clock() - begun
            self._waited(seconds)
            if waited is not None:
                waited(seconds)
            return send()

        def late() -> None:
            self.late_total += 1
            self._mute(prefill.key)
            self._ended(coalescing, prefill)  # nobody else waits for it any longer

        def left() -> None:
            timer.cancel()
            waiting.leave()

        def go() -> None:
            timer.cancel()
            call.send_now()

        call = HeldCall(send_now, left)
        waiting = coalescing.wait(prefill, choice.prompt.sequence_hashes, choice.prompt.block_size, go)
        timer = asyncio.get_running_loop().call_later(LONGEST_HOLD_S, late)
        return call

    def stored(self, worker_id: str) -> None:
        """A worker has announced blocks: see, once in a step of the loop, for whom they are."""
        if self._coalescing is None or worker_id in self._stored or not self._coalescing.on(worker_id):
            return
        self._stored.add(worker_id)
        asyncio.get_running_loop().call_soon(self._look, self._coalescing, worker_id)

    def _look(self, coalescing: Coalescing, worker_id: str) -> None:
        self._stored.discard(worker_id)
        # Those for which nobody waits yet are looked at too, since what was announced may be forgotten before they end.
        for prefill in coalescing.on(worker_id):
            blocks = self._prefixes.announced_blocks(*self._sources[prefill])
            coalescing.progressed(prefill, blocks)
            if blocks >= len(prefill.hashes):
                self._ended(coalescing, prefill)

    def _end(self, coalescing: Coalescing, prefill: Prefill) -> None:
        """A prefill is over; those that are stopped in the same step as it, such as all at a drain's end, do not go."""
        if prefill in self._sources:
            asyncio.get_running_loop().call_soon(self._ended, coalescing, prefill)

    def _ended(self, coalescing: Coalescing, prefill: Prefill) -> None:
        if self._sources.pop(prefill, None) is not None:
            coalescing.end(prefill)


class _Prefilling:
    """The booking of a request for which others wait."""

    __slots__ = ("_booking", "_end", "_shown")

    def __init__(self, booking: Booking, shown: Callable[[], None], end: Callable[[], None]) -> None:
        self._booking = booking
        self._shown = shown
        self._end = end

    def first_token(self) -> None:
        """The prefill is over."""
        self._booking.first_token()
        self._shown()

    def release(self) -> None:
        """Everything is."""
        self._booking.release()
        self._end()

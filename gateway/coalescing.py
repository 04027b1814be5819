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
from gateway.kv_silence import Position
from gateway.prefixes import Prefixes
from gateway.prompts import Prompt
from routers.coalescing import Coalescing, Prefill
from routers.types import Placement, PromptBlocks, RankKey

# Longer than most prefills take; later a request waits in the engine's queue, as it would have done from the beginning.
LONGEST_HOLD_S: Final = 30.0
# A rank that told nothing while it computed a prompt is not waited for by its events until it does, or for this long:
# its cache may be switched off, or what it sends be lost.
MUTE_S: Final = 60.0


class Coalescer:
    """Knows the prefills under way, and sends what waits for them.

    A request is placed and booked at once, so that the choices after it reckon with it; only its write waits, until
    nearly all that it shares is announced as cached, until the first output or the end of the request that computes it,
    or for ``LONGEST_HOLD_S``. What is there by then may be a beginning that many share; of those that share more, the
    first one to go is then waited for in the same way.

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
        self._by_events: set[Prefill] = set()
        self._stored: set[str] = set()
        self._mute: dict[RankKey, tuple[Position, float]] = {}
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
        lead = _Prefilling(booking)
        begins = functools.partial(self._begin, coalescing, prompt, choice, lead, is_stream=is_stream)
        if may_wait:
            shares = functools.partial(self._shares, coalescing, prompt, choice)
            prefill = shares(0)
            if prefill is not None:
                return self._hold(coalescing, prefill, blocks, shares, begins, send, waited), lead
        begins(choice.overlap_blocks or 0)
        return send(), lead

    def _shares(self, coalescing: Coalescing, prompt: Prompt, choice: Placement, there: int) -> Prefill | None:
        """What computes enough of a prompt to wait for, of which so many leading blocks are there at least."""
        blocks = choice.prompt
        assert blocks is not None

        def cached() -> int:
            return max(there, self._prefixes.announced_blocks(prompt, choice))

        return coalescing.shared_with(choice.candidate.key, blocks.sequence_hashes, blocks.block_size, cached)

    def _begin(
        self,
        coalescing: Coalescing,
        prompt: Prompt,
        choice: Placement,
        lead: "_Prefilling",
        cached_blocks: int,
        *,
        is_stream: bool,
    ) -> None:
        """A prompt is about to be computed, but for so many leading blocks: others may wait for it, if it is seen."""
        blocks = choice.prompt
        assert blocks is not None
        if is_stream or self._hears_of(prompt, choice):
            key = choice.candidate.key
            prefill = coalescing.begin(key, blocks.sequence_hashes, blocks.block_size, cached_blocks)
            if prefill is not None:
                self._sources[prefill] = prompt, choice
                position = None
                if not is_stream:
                    self._by_events.add(prefill)
                    position = self._prefixes.position(key)
                lead.shown = functools.partial(self._shown, coalescing, prefill, position)
                lead.end = functools.partial(self._end, coalescing, prefill)

    def _hears_of(self, prompt: Prompt, choice: Placement) -> bool:
        """Whether the events of the rank will tell when a prompt is cached there."""
        key = choice.candidate.key
        position, until = self._mute.get(key, (None, 0.0))
        is_mute = self._clock() < until and self._prefixes.position(key) == position
        return not is_mute and self._prefixes.hears_of(prompt, choice)

    def _shown(self, coalescing: Coalescing, prefill: Prefill, position: Position | None) -> None:
        """The first output is here, so that the prompt is; of an answer in one piece events should have told before.

        ``position`` is the one from when that began.
        """
        if prefill.waiting and position is not None:
            self._judge_silence(prefill.key, position)
        prefill.cached_blocks = len(prefill.hashes)
        self._end(coalescing, prefill)

    def _judge_silence(self, key: RankKey, position: Position) -> None:
        """A rank should have told of a prefill; whether it has told anything since that began shows what it is worth.

        A busy rank tells of others meanwhile, and of a short answer an engine may tell after that.
        """
        if self._prefixes.position(key) == position:
            now = self._clock()
            self._mute = {known: mute for known, mute in self._mute.items() if mute[1] > now}
            self._mute[key] = position, now + MUTE_S

    def _hold(
        self,
        coalescing: Coalescing,
        prefill: Prefill,
        blocks: PromptBlocks,
        shares: Callable[[int], Prefill | None],
        begins: Callable[[int], None],
        send: Callable[[], UpstreamCall],
        waited: Callable[[float], None] | None,
    ) -> UpstreamCall:
        begun, position = self._clock(), self._prefixes.position(prefill.key)
        self.held_total += 1

        def count() -> None:
            seconds = self._clock() - begun
            self._waited(seconds)
            if waited is not None:
                waited(seconds)

        def send_now() -> UpstreamCall:
            count()
            return send()

        def left() -> None:
            count()
            held.leave()

        def late() -> None:
            self.late_total += 1
            self._judge_silence(held.prefill.key, position)
            self._ended(coalescing, held.prefill)  # nobody else waits for it any longer

        held = _Held(coalescing, prefill, blocks, shares, begins)
        call = HeldCall(send_now, left)
        held.wait(call.send_now, asyncio.get_running_loop().call_later(LONGEST_HOLD_S, late))
        return call

    def stored(self, worker_id: str) -> None:
        """A worker has announced blocks, or cannot be heard: see, once in a step of the loop, for whom that matters."""
        if self._coalescing is None or worker_id in self._stored or not self._coalescing.on(worker_id):
            return
        self._stored.add(worker_id)
        asyncio.get_running_loop().call_soon(self._look, self._coalescing, worker_id)

    def _look(self, coalescing: Coalescing, worker_id: str) -> None:
        self._stored.discard(worker_id)
        # Those for which nobody waits yet are looked at too, since what was announced may be forgotten before they end.
        for prefill in coalescing.on(worker_id):
            source = self._sources[prefill]
            blocks = self._prefixes.announced_blocks(*source)
            coalescing.progressed(prefill, blocks)
            is_unheard = prefill in self._by_events and not self._prefixes.hears_of(*source)
            if is_unheard or blocks >= len(prefill.hashes):
                self._ended(coalescing, prefill)

    def _end(self, coalescing: Coalescing, prefill: Prefill) -> None:
        """A prefill is over; those that are stopped in the same step as it, such as all at a drain's end, do not go."""
        if prefill in self._sources:
            asyncio.get_running_loop().call_soon(self._ended, coalescing, prefill)

    def _ended(self, coalescing: Coalescing, prefill: Prefill) -> None:
        self._by_events.discard(prefill)
        if self._sources.pop(prefill, None) is not None:
            coalescing.end(prefill)


class _Held:
    """A request that is held back, for one prefill after another where each has more of its prompt.

    Those that share a system prompt with the first of all wait for that, and then for the first that shares more.
    """

    __slots__ = ("_begins", "_blocks", "_coalescing", "_send", "_shares", "_timer", "_waiting", "prefill")

    def __init__(
        self,
        coalescing: Coalescing,
        prefill: Prefill,
        blocks: PromptBlocks,
        shares: Callable[[int], Prefill | None],
        begins: Callable[[int], None],
    ) -> None:
        self._coalescing = coalescing
        self.prefill = prefill
        self._blocks = blocks
        self._shares = shares
        self._begins = begins

    def wait(self, send: Callable[[], None], timer: asyncio.TimerHandle) -> None:
        """Wait, and send it then; ``timer`` is the one that ends all waiting."""
        self._send = send
        self._timer = timer
        self._wait()

    def leave(self) -> None:
        """It is given up."""
        self._timer.cancel()
        self._waiting.leave()

    def _wait(self) -> None:
        blocks = self._blocks
        self._waiting = self._coalescing.wait(self.prefill, blocks.sequence_hashes, blocks.block_size, self._go)

    def _go(self) -> None:
        there = min(self.prefill.cached_blocks, self.prefill.shared_blocks(self._blocks.sequence_hashes))
        if there >= self._waiting.blocks:  # else the prefill failed or took too long, and nothing is waited for again
            another = self._shares(there)
            if another is not None:
                self.prefill = another
                self._wait()
                return
            self._begins(there)
        self._timer.cancel()
        self._send()


def _nothing() -> None:
    """Nobody waits."""


class _Prefilling:
    """The booking of a request for which others may wait, from when ``shown`` and ``end`` are set."""

    __slots__ = ("_booking", "end", "shown")

    def __init__(self, booking: Booking) -> None:
        self._booking = booking
        self.shown: Callable[[], None] = _nothing
        self.end: Callable[[], None] = _nothing

    def first_token(self) -> None:
        """The prefill is over."""
        self._booking.first_token()
        self.shown()

    def release(self) -> None:
        """Everything is."""
        self._booking.release()
        self.end()

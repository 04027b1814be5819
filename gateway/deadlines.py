"""The time limits of one request: all of it, up to its first output, and silence inside its answer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.errors import TIMED_OUT, ErrorReport


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Limits in seconds, 0 for none.

    Attributes:
        request_s: From the request's last byte to the end of its answer.
        first_token_s: From the request's last byte to the first output of a stream, retries included. An engine that
            is asked for one document shows none before its end, so there it does not count.
        stall_s: Of the engine's silence inside an answer that has begun; the time in which the client does not read
            does not count.
    """

    request_s: float = 0.0
    first_token_s: float = 0.0
    stall_s: float = 0.0

    @property
    def are_off(self) -> bool:
        """There is none."""
        return not (self.request_s or self.first_token_s or self.stall_s)


NO_LIMITS = TimeLimits()


class Watched(Protocol):
    """What the limits are about."""

    @property
    def awaits_output(self) -> bool:
        """A stream whose first output has not come, or a request that is not on its way yet."""

    @property
    def silent_since(self) -> float | None:
        """Monotonic time since which more of an answer is awaited from the engine; ``None`` if none is."""


class Deadlines:
    """The timers of one request.

    Args:
        limits: Which there are.
        watched: The request.
        clock: Monotonic seconds.
        expire: Told which limit passed; perhaps more than once.
    """

    __slots__ = ("_clock", "_expire", "_limits", "_timers", "_watched")

    def __init__(
        self,
        limits: TimeLimits,
        watched: Watched,
        clock: Callable[[], float],
        expire: Callable[[ErrorReport], None],
    ) -> None:
        self._limits = limits
        self._watched = watched
        self._clock = clock
        self._expire = expire
        loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        if limits.request_s:
            report = _timed_out(f"the request took longer than {limits.request_s:g} s")
            self._timers["request"] = loop.call_later(limits.request_s, expire, report)
        if limits.first_token_s:
            self._timers["first token"] = loop.call_later(limits.first_token_s, self._check_output)
        if limits.stall_s:
            self._check_silence_in(limits.stall_s)

    def cancel(self) -> None:
        """End the watch."""
        for timer in self._timers.values():
            timer.cancel()

    def _check_output(self) -> None:
        if self._watched.awaits_output:
            self._expire(_timed_out(f"no output within {self._limits.first_token_s:g} s"))

    def _check_silence_in(self, wait_s: float) -> None:
        self._timers["stall"] = asyncio.get_running_loop().call_later(wait_s, self._check_silence)

    def _check_silence(self) -> None:
        limit_s, since = self._limits.stall_s, self._watched.silent_since
        silence_s = 0.0 if since is None else self._clock() - since
        if silence_s >= limit_s:
            self._expire(_timed_out(f"the engine sent nothing for {limit_s:g} s"))
        else:
            self._check_silence_in(limit_s - silence_s)


def _timed_out(message: str) -> ErrorReport:
    return replace(TIMED_OUT, message=message)

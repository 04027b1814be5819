"""A request that is stopped before its end: why, what its client is told, and how long it gets to read that."""

import asyncio
from collections.abc import Callable

from backends.leg_events import Cause
from gateway.errors import ABORTED, SHUTTING_DOWN, WORKER_REMOVED, ErrorReport

# How a request that was stopped from this side ends; one whose client is gone has nobody to tell.
_REPORTS = {
    Cause.SHUTDOWN: SHUTTING_DOWN,
    Cause.WORKER_REMOVED: WORKER_REMOVED,
    Cause.CLIENT_ABORT: ABORTED,
}
# A client that is to be told that its request was stopped, and does not read that, has its connection ended.
TELL_CLIENT_S = 1.0
# The time has to pass in so many parts: a loop that was not run for longer has its turns before the client is cut off.
_TELL_PARTS = 4


class Stop:
    """The one stop of a request.

    Args:
        cause: Why.
        report: What the client is told, if the cause does not say it.

    Attributes:
        cause: See above.
        report: What the client is told; ``None`` if there is nobody to tell.
        is_cut: The client did not read it in time, and has no connection any more.
    """

    __slots__ = ("_timer", "cause", "is_cut", "report")

    def __init__(self, cause: Cause, report: ErrorReport | None = None) -> None:
        self.cause = cause
        self.report = report or _REPORTS.get(cause)
        self.is_cut = False
        self._timer: asyncio.TimerHandle | None = None

    def cut_later(self, abort: Callable[[], None], parts: int = _TELL_PARTS) -> None:
        """End the client's connection with ``abort`` if it takes too long; it would hold the request for ever."""
        if parts:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TELL_CLIENT_S / _TELL_PARTS, self.cut_later, abort, parts - 1)
        else:
            self.is_cut = True
            abort()

    def over(self) -> None:
        """The request has ended."""
        if self._timer is not None:
            self._timer.cancel()

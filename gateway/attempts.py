"""Whether a request that failed before its first byte is tried on another worker. Pure."""

import enum

from backends.quick_enum import quick


@quick
class Failure(enum.Enum):
    """What became of an attempt."""

    UNREACHABLE = "no connection, so nothing was sent"
    BUSY = "the engine refused it for want of room"
    STALE = "a kept connection ended as the request went out, and the worker lives"
    DROPPED = "the connection ended before any byte of an answer, and the worker lives"
    DIED = "the connection ended before any byte of an answer, and the worker is gone"
    UNFIT = "the worker lacks something that was taken for granted, as is known from now on"
    FINAL = "anything else"


# What a worker can lack is little, so that with more of them something else is wrong.
MAX_UNFIT = 8


class Attempts:
    """The attempts at one request.

    A request under which a worker died may be what killed it: one more worker may be risked for it, never a third.

    Args:
        most: Attempts in all, ``>= 1``.

    Attributes:
        count: Attempts begun.
        failed: Workers that it must not be sent to again.
        deaths: Workers that died under it.
        queue_s: How long the request has waited for a worker, ``None`` if it never had to.
    """

    __slots__ = ("_most", "_unfit", "_was_stale", "count", "deaths", "failed", "queue_s")

    def __init__(self, most: int) -> None:
        self._most = most
        self._unfit = 0
        self._was_stale = False
        self.count = 0
        self.deaths = 0
        self.failed: set[str] = set()
        self.queue_s: float | None = None

    def begin(self) -> None:
        """An attempt begins."""
        self.count += 1

    def waited(self, seconds: float) -> None:
        """A wait for a worker has ended."""
        self.queue_s = (self.queue_s or 0.0) + seconds

    def may_retry(self, worker_id: str, failure: Failure) -> bool:
        """Take a failure into account; whether another worker may be tried, or after ``STALE`` and ``UNFIT`` any."""
        if failure is Failure.STALE and not self._was_stale:
            self._was_stale = (
                True  # the race with an idle limit says nothing of the worker, so the limit does not apply
            )
            return self.deaths == 0
        if failure is Failure.UNFIT:  # where it can go now is known, and nothing was done yet
            self._unfit += 1
            return self.deaths == 0 and self._unfit <= MAX_UNFIT
        self.failed.add(worker_id)
        if failure is Failure.FINAL or self.count >= self._most:
            if failure is Failure.DIED:
                self.deaths += 1
            return False
        if failure is Failure.DIED:
            self.deaths += 1
            return self.deaths == 1
        return self.deaths == 0  # the one retry that follows a death is the last attempt, however it ends

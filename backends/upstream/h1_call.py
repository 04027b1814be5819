"""One request on HTTP/1.1 and the answer that comes back: buffering, waiting, interruption, resending."""

import asyncio
from collections.abc import Callable
from copy import copy
from typing import Protocol

from backends.errors import CallClosed, CallInterrupted, ConnectFailed, ConnectionDropped, UpstreamError
from backends.upstream.base import AnswerHead, Origin, UpstreamRequest

# Above this many unread bytes the connection is paused. Two of the largest reads that uvloop makes.
PAUSE_READING_BYTES = 512 * 1024
# Pieces of this size are handed out one by one: joining them would copy more than their handling costs.
JOIN_BELOW_BYTES = 64 * 1024


class Carrier(Protocol):
    """A connection, as far as a call knows it."""

    def start(self, call: "H1Call") -> None:
        """Write the call's request and report its answer to it."""

    def abandon(self) -> None:
        """Close without waiting."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Read on."""


class H1Call:
    """One request and its answer; see ``UpstreamCall``.

    Args:
        loop: The running loop.
        origin: Where it goes.
        request: What goes there.
        wire_head: Its request line and headers as they are written.
        reconnect: Connects anew and sends this call, if that is wanted when a pooled connection turned out to be stale.
    """

    __slots__ = (
        "_buffered_bytes",
        "_connection",
        "_error",
        "_finished",
        "_head",
        "_interrupted",
        "_loop",
        "_parts",
        "_reader",
        "_ready",
        "_reconnect",
        "_resent",
        "_taker",
        "_task",
        "_waiter",
        "origin",
        "request",
        "wire_head",
        "written_at",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: Origin,
        request: UpstreamRequest,
        wire_head: bytes,
        reconnect: "Callable[[H1Call], bool]",
    ) -> None:
        self._loop = loop
        self.origin = origin
        self.request = request
        self.wire_head = wire_head
        self._reconnect = reconnect
        self._connection: Carrier | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._head: AnswerHead | None = None
        self._parts: list[bytes] = []
        self._buffered_bytes = 0
        self._finished = False
        # Who waited last, and who is to be told of an interruption: a task, or (True) whoever comes.
        self._reader: asyncio.Task[object] | None = None
        self._interrupted: asyncio.Task[object] | bool = False
        self._taker: Callable[[bytes], bool] | None = None
        self._ready: Callable[[], None] | None = None
        self._resent = False
        self._error: Exception | None = None
        self.written_at: float | None = None

    @property
    def is_complete(self) -> bool:
        """True once the whole answer has arrived and been read."""
        return self._finished and not self._parts and self._error is None

    @property
    def is_over(self) -> bool:
        """True once nothing more can arrive; see ``UpstreamCall.is_over``."""
        return self._finished or self._error is not None

    async def head(self) -> AnswerHead:
        """Wait for the answer's head; see ``UpstreamCall.head``."""
        if self._interrupted:
            self._tell_interrupted()
        while self._head is None:
            if self._error is not None:
                raise copy(self._error)  # itself it would hold the readers' frames, which hold this call
            await self._next_read()
            if self._interrupted:
                self._tell_interrupted()
        return self._head

    async def read(self) -> bytes:
        """Return what has arrived since the last read, or the first large piece of it; see ``UpstreamCall.read``."""
        if self._interrupted:
            self._tell_interrupted()
        while not self._parts:
            if self._error is not None:
                raise copy(self._error)  # itself it would hold the readers' frames, which hold this call
            if self._finished:
                return b""
            await self._next_read()
            if self._interrupted:
                self._tell_interrupted()
        return self._taken()

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Hand over what arrives as it does, in the same step of the loop; see ``UpstreamCall.pass_on``."""
        if self._interrupted:
            self._tell_interrupted()
        while not self._finished and self._error is None:
            if self._parts:
                if not take(self._taken()):
                    return
                continue
            self._taker = take
            try:
                await self._next_read()
                has_refused = self._taker is not take
            finally:
                if self._taker is take:  # else another one reads on
                    self._taker = None
            if self._interrupted:
                self._tell_interrupted()
            if has_refused:
                return

    def call_when_ready(self, ready: Callable[[], None]) -> bool:
        """Tell one who does not wait in a task; see ``UpstreamCall.call_when_ready``."""
        if self._head is not None or self._error is not None or self._interrupted:
            return False
        self._ready = ready
        return True

    def whole(self) -> tuple[AnswerHead, bytes] | None:
        """The answer, if it is whole; see ``UpstreamCall.whole``."""
        if not self._finished or self._head is None or self._error is not None or self._interrupted:
            return None
        parts = self._parts
        return self._head, parts[0] if len(parts) == 1 else b"".join(parts)

    def drop_whole(self) -> None:
        """It was taken; see ``UpstreamCall.drop_whole``."""
        self._parts = []
        self._buffered_bytes = 0

    def _hand_over(self, take: Callable[[bytes], bool], waiter: asyncio.Future[None]) -> None:
        """Something has arrived that ``pass_on`` is to give away."""
        try:
            if not take(self._taken()):
                self._taker = None
                self._wake()
        except Exception as exc:  # noqa: BLE001 -- it is the reader's, who waits
            self._taker = None
            if not waiter.done():
                waiter.set_exception(exc)

    def _taken(self) -> bytes:
        """What has arrived, or the first large piece of it."""
        parts = self._parts
        if len(parts) == 1:
            data = parts.pop()
        elif len(parts[0]) >= JOIN_BELOW_BYTES:
            data = parts.pop(0)
        else:
            data = b"".join(parts)
            parts.clear()
        before = self._buffered_bytes
        self._buffered_bytes = left = before - len(data)
        if before >= PAUSE_READING_BYTES and left < PAUSE_READING_BYTES and self._connection is not None:
            self._connection.resume_reading()
        return data

    def _next_read(self) -> asyncio.Future[None]:
        """What ends when anything has happened. A method that awaited it would cost every event a coroutine."""
        self._reader = asyncio.current_task(self._loop)
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def _tell_interrupted(self) -> None:
        if self._interrupted is True or self._interrupted is asyncio.current_task():
            self._interrupted = False
            raise CallInterrupted

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        elif self._ready is not None:
            ready, self._ready = self._ready, None
            ready()

    def interrupt(self) -> None:
        """Interrupt the present or next reader; see ``UpstreamCall.interrupt``."""
        self._interrupted = self._reader or True
        self._wake()

    def close(self) -> None:
        """Give the call up; see ``UpstreamCall.close``."""
        if self._finished and not self._parts:  # the end of most calls
            self._reader = None
            self._interrupted = False
            return
        if self._error is None and not self.is_complete:  # unread parts are dropped, which must not look like an end
            self._error = CallClosed("closed by this side")
        self._parts = []
        self._reader = None
        self._interrupted = False
        self._buffered_bytes = 0
        if self._task is not None:
            self._task.cancel()
            self._task = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        self._wake()

    # What the connection reports.

    def on_head(self, head: AnswerHead) -> None:
        """The final answer's head has arrived."""
        self._head = head

    def on_data(self, data: bytes) -> None:
        """A piece of the body has arrived."""
        self._parts.append(data)
        self._buffered_bytes += len(data)

    def on_read_done(self) -> None:
        """One read from the socket has been taken apart: wake the waiter, or pause the worker."""
        waiter = self._waiter
        if waiter is None:
            self._wake()
        elif not waiter.done():
            if self._taker is None or self._finished or self._error is not None or self._interrupted:
                waiter.set_result(None)
            elif self._parts:
                self._hand_over(self._taker, waiter)
        if self._buffered_bytes >= PAUSE_READING_BYTES and self._connection is not None:
            self._connection.pause_reading()

    def on_complete(self) -> None:
        """The answer is complete and the connection no longer belongs to this call; ``on_read_done`` follows."""
        self._finished = True
        self._connection = None

    def on_lost(self, error: UpstreamError, *, may_resend: bool) -> None:
        """The connection ended early; a stale pooled one is replaced once, since the worker has read nothing."""
        self._connection = None
        if may_resend and not self._resent:
            self._resent = True
            if self._reconnect(self):
                return
            if isinstance(error, ConnectionDropped):
                error.was_reused = True
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the call with ``error``; the first error stays."""
        self._task = None
        if self._resent and isinstance(error, ConnectFailed):
            # The request has been on the wire once, so this is no proof that the worker has seen nothing.
            error = ConnectionDropped(f"the connection ended before any byte of an answer, and then: {error}")
        if self._error is None:
            self._error = error
        self._wake()

    def attach(self, connection: "Carrier") -> None:
        """Write the request on ``connection``, which belongs to this call until the answer is complete."""
        self._task = None
        self._connection = connection
        self.written_at = self._loop.time()
        connection.start(self)

    @property
    def is_closed(self) -> bool:
        """True once the call has an error, ``close`` included."""
        return self._error is not None

    def set_connecting(self, task: asyncio.Task[None]) -> None:
        """Remember the connection attempt, which ``close`` cancels."""
        self._task = task

"""One request through httpx and the answer that comes back: buffering, waiting, interruption."""

import asyncio
from collections.abc import Callable

from backends.errors import (
    AnswerBroken,
    CallClosed,
    CallInterrupted,
    ConnectFailed,
    ConnectionDropped,
    ConnectTimeout,
    UpstreamError,
)
from backends.upstream.base import AnswerHead, Origin, UpstreamRequest
from backends.upstream.httpx_network import Attempt

# Nothing is read from the worker while more than this is unread: one of httpx' reads fits on top of it.
MAX_BUFFERED_BYTES = 512 * 1024
READ_BYTES = 64 * 1024
PAUSE_READING_BYTES = MAX_BUFFERED_BYTES - READ_BYTES


class HttpxCall:
    """One request and its answer; see ``UpstreamCall``. The client's task feeds it.

    Args:
        loop: The running loop.
        origin: Where it goes.
        request: What goes there.
        connect_timeout_s: Limit of one connection attempt, name resolution and TLS included.
    """

    __slots__ = (
        "_buffered_bytes",
        "_connect_timeout_s",
        "_connect_timer",
        "_error",
        "_has_ended",
        "_head",
        "_interrupted",
        "_is_released",
        "_loop",
        "_parts",
        "_reader",
        "_room",
        "_waiter",
        "attempt",
        "has_resent",
        "origin",
        "request",
        "written_at",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, origin: Origin, request: UpstreamRequest, connect_timeout_s: float
    ) -> None:
        self._loop = loop
        self.origin = origin
        self.request = request
        self._connect_timeout_s = connect_timeout_s
        self._connect_timer: asyncio.TimerHandle | None = None
        self._head: AnswerHead | None = None
        self._parts: list[bytes] = []
        self._buffered_bytes = 0
        # The body has ended; and its connection is back in the pool, or closed, which takes httpx some loop turns.
        self._has_ended = False
        self._is_released = False
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        # Who waited last, and who is to be told of an interruption: a task, or (True) whoever comes.
        self._reader: asyncio.Task[object] | None = None
        self._interrupted: asyncio.Task[object] | bool = False
        self._error: Exception | None = None
        self.attempt = Attempt(self._on_written)
        self.has_resent = False
        self.written_at: float | None = None

    @property
    def is_complete(self) -> bool:
        """True once the whole answer has arrived and been read."""
        return self._has_ended and not self._parts and self._error is None

    @property
    def is_over(self) -> bool:
        """True once nothing more can arrive; see ``UpstreamCall.is_over``."""
        return self._has_ended or self._error is not None

    @property
    def has_head(self) -> bool:
        """True once the answer's head has arrived."""
        return self._head is not None

    async def head(self) -> AnswerHead:
        """Wait for the answer's head; see ``UpstreamCall.head``."""
        if self._interrupted:
            self._tell_interrupted()
        while self._head is None:
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._head

    async def read(self) -> bytes:
        """Return what has arrived since the last read; see ``UpstreamCall.read``."""
        if self._interrupted:
            self._tell_interrupted()
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._is_released:
                return b""
            await self._wait()
        data = b"".join(self._parts)
        self._drop_parts()
        return data

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Hand over what arrives; see ``UpstreamCall.pass_on``."""
        if self._interrupted:
            self._tell_interrupted()
        while not self.is_over:
            if not self._parts:
                await self._wait()
            elif not take(await self.read()):
                return

    def call_when_ready(self, ready: Callable[[], None]) -> bool:
        """Not to be had here; see ``UpstreamCall.call_when_ready``."""
        del ready
        return False

    def whole(self) -> tuple[AnswerHead, bytes] | None:
        """Not to be had here either; see ``UpstreamCall.whole``."""
        return None

    def drop_whole(self) -> None:
        """See ``UpstreamCall.drop_whole``."""

    def _drop_parts(self) -> None:
        self._parts.clear()
        self._buffered_bytes = 0
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _wait(self) -> None:
        self._reader = asyncio.current_task()
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            if self._waiter is waiter:
                self._waiter = None
        if self._interrupted:
            self._tell_interrupted()

    def _tell_interrupted(self) -> None:
        if self._interrupted is True or self._interrupted is asyncio.current_task():
            self._interrupted = False
            raise CallInterrupted

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def interrupt(self) -> None:
        """Interrupt the present or next reader; see ``UpstreamCall.interrupt``."""
        self._interrupted = self._reader or True
        self._wake()

    def close(self) -> None:
        """Give the call up; see ``UpstreamCall.close``."""
        if not self.is_complete:  # unread parts are dropped, which must not look like an end
            self._fail(CallClosed("closed by this side"))
        self._reader = None
        self._interrupted = False
        self._drop_parts()

    def shut_down(self) -> None:
        """The client is being closed: a call that is still running ends with an error."""
        if not self.attempt.has_written:
            self.fail(ConnectFailed("this client is closed"))
        elif self.attempt.has_received:
            self.fail(AnswerBroken("this side was shut down inside the answer"))
        else:
            self.fail(ConnectionDropped("this side was shut down before any byte of an answer"))

    # What the client's task reports.

    def begin_attempt(self) -> Attempt:
        """Start anew on the wire, in the current task."""
        self.attempt = attempt = Attempt(self._on_written)
        attempt.begin()
        self._stop_connect_timer()
        self._connect_timer = self._loop.call_later(self._connect_timeout_s, self._connect_expired)
        return attempt

    def _connect_expired(self) -> None:
        self.fail(ConnectTimeout(f"no connection to {self.origin.authority} within {self._connect_timeout_s} s"))

    def _stop_connect_timer(self) -> None:
        if self._connect_timer is not None:
            self._connect_timer.cancel()
            self._connect_timer = None

    def _on_written(self) -> None:
        self.written_at = self._loop.time()
        self._stop_connect_timer()

    def on_head(self, head: AnswerHead) -> None:
        """The final answer's head has arrived."""
        if self.written_at is None:
            self._on_written()  # by a transport without a network
        self._head = head
        self._wake()

    async def put(self, data: bytes) -> None:
        """A piece of the body has arrived; returns when there is room for another."""
        if self._error is not None:
            return
        self._parts.append(data)
        self._buffered_bytes += len(data)
        self._wake()
        if self._buffered_bytes > PAUSE_READING_BYTES:
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    def on_end(self) -> None:
        """The body has ended."""
        self._has_ended = True
        self._wake()

    def on_task_end(self) -> None:
        """The client's task ends, whatever the reason: nobody may wait any longer."""
        self._stop_connect_timer()
        self._is_released = True
        if self._has_ended:
            self._wake()
        else:
            self.shut_down()

    def fail(self, error: UpstreamError) -> None:
        """End the call with ``error``, the attempt included; the first error stays."""
        if self.has_resent and isinstance(error, ConnectFailed):
            # The request has been on the wire once, so this is no proof that the worker has seen nothing.
            error = ConnectionDropped(f"the connection ended before any byte of an answer, and then: {error}")
        if not self._has_ended:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        if not self._has_ended:
            self.attempt.give_up()
        self._wake()

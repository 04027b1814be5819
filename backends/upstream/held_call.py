"""A request that is sent later: a call like any other, of which nothing is written before its time has come."""

import asyncio
from collections.abc import Callable

from backends.errors import CallClosed, CallEnded, CallInterrupted
from backends.upstream.base import AnswerHead, UpstreamCall


class HeldCall:
    """One request that waits in the gateway; ``send_now`` ends that, ``close`` as well.

    Args:
        send: Sends it; called at most once.
        on_left: Told once when it is closed before it was sent.
    """

    __slots__ = ("_call", "_error", "_on_left", "_send", "_waiter")

    def __init__(self, send: Callable[[], UpstreamCall], on_left: Callable[[], None]) -> None:
        self._send = send
        self._on_left: Callable[[], None] | None = on_left
        self._call: UpstreamCall | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: CallEnded | None = None

    def send_now(self) -> None:
        """Its time has come; nothing happens if it was closed, or sent before."""
        if self._on_left is not None:
            self._on_left = None
            self._call = self._send()
            self._wake()

    @property
    def written_at(self) -> float | None:
        """Loop time at which it was written, ``None`` before."""
        return None if self._call is None else self._call.written_at

    @property
    def is_complete(self) -> bool:
        """The whole answer has been read."""
        return self._call is not None and self._call.is_complete

    @property
    def is_over(self) -> bool:
        """Nothing more can arrive."""
        return self._on_left is None if self._call is None else self._call.is_over

    async def head(self) -> AnswerHead:
        """Wait until it is sent, and for the answer's head; see ``UpstreamCall.head``."""
        return await (await self._sent()).head()

    async def read(self) -> bytes:
        """See ``UpstreamCall.read``."""
        return await (await self._sent()).read()

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """See ``UpstreamCall.pass_on``."""
        await (await self._sent()).pass_on(take)

    def call_when_ready(self, ready: Callable[[], None]) -> bool:
        """See ``UpstreamCall.call_when_ready``; not while it waits."""
        return self._call is not None and self._call.call_when_ready(ready)

    def whole(self) -> tuple[AnswerHead, bytes] | None:
        """See ``UpstreamCall.whole``."""
        return None if self._call is None else self._call.whole()

    def drop_whole(self) -> None:
        """See ``UpstreamCall.drop_whole``."""
        if self._call is not None:
            self._call.drop_whole()

    def interrupt(self) -> None:
        """See ``UpstreamCall.interrupt``."""
        if self._call is not None:
            self._call.interrupt()
        elif self._error is None:
            self._error = CallInterrupted()
            self._wake()

    def close(self) -> None:
        """Give it up; it is not sent if it was not yet."""
        if self._call is not None:
            self._call.close()
        elif self._on_left is not None:
            on_left, self._on_left = self._on_left, None
            on_left()
            self._error = CallClosed("closed by this side")
            self._wake()

    async def _sent(self) -> UpstreamCall:
        while True:
            error = self._error
            if error is not None:  # an interruption also where it was sent before its waiter could run
                if isinstance(error, CallInterrupted):
                    self._error = None
                raise type(error)(*error.args)
            if self._call is not None:
                return self._call
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None

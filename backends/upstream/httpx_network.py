"""What httpx does not tell about its connections: how far a request got, and a way to leave one at any moment.

httpx reports an end before the head and an end inside the head with the same words, and cancelling it between two of
its steps can leave a connection open for ever. So its network layer is wrapped: every connect, write and read goes
through here, is noted on the attempt that it serves, and is the only place at which an attempt is cancelled.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpcore

# Each attempt runs in a task of its own, whose context carries it through the library.
_ATTEMPT: ContextVar["Attempt"] = ContextVar("attempt")

# Of every answer that is HTTP.
BEGINNING = b"HTTP/"

SocketOption = tuple[int, int, int] | tuple[int, int, bytes | bytearray] | tuple[int, int, None, int]


class GivenUp(Exception):
    """The attempt was given up; ends whatever the library is doing for it."""


class Attempt:
    """One attempt at a request, as the network sees it.

    Attributes:
        has_connected: It opened a connection of its own; one that did not runs on a pooled connection.
        is_connecting: It is between the start of its connection and its first write.
        has_written: Bytes of the request were handed to the socket.
        has_received: Bytes of an answer came, 1xx included.
        has_seen_end: The worker has closed its side.
    """

    __slots__ = (
        "_is_given_up",
        "_is_waiting",
        "_on_written",
        "_task",
        "has_connected",
        "has_received",
        "has_seen_end",
        "has_written",
        "is_connecting",
    )

    def __init__(self, on_written: Callable[[], None]) -> None:
        self._on_written = on_written
        self._task: asyncio.Task[Any] | None = None
        self._is_waiting = False
        self._is_given_up = False
        self.has_connected = False
        self.is_connecting = False
        self.has_written = False
        self.has_received = False
        self.has_seen_end = False

    def begin(self) -> None:
        """Make the current task the one that serves this attempt."""
        self._task = asyncio.current_task()
        _ATTEMPT.set(self)

    def give_up(self) -> None:
        """End the attempt: a wait for the network at once, anything else when it next turns to the network.

        Between its waits the library opens and puts away connections, and must not be interrupted while it does.
        """
        if self._is_given_up:
            return
        self._is_given_up = True
        if self._is_waiting and self._task is not None:
            self._task.cancel()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the one kind of place where the attempt may be cancelled.

        Raises:
            GivenUp: It has been given up before.
        """
        if self._is_given_up:
            raise GivenUp
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def connects(self) -> None:
        """Note that a connection is being made."""
        self.has_connected = self.is_connecting = True

    def writes(self) -> None:
        """Note that bytes of the request go out."""
        self.is_connecting = False
        if not self.has_written and not self._is_given_up:
            self.has_written = True
            self._on_written()


class ObservedStream(httpcore.AsyncNetworkStream):
    """A connection that reports to the attempt in whose task it is used."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read some bytes, ``b""`` at the end."""
        attempt = _ATTEMPT.get()
        with attempt.waiting():
            data = await self._stream.read(max_bytes, timeout)
        if not data:
            attempt.has_seen_end = True
        elif not attempt.has_received:
            attempt.has_received = True
            if not BEGINNING.startswith(data[: len(BEGINNING)]):
                # The library would wait for an empty line, which a server of some other protocol never sends.
                raise httpcore.RemoteProtocolError(f"an answer that begins with {data[:16]!r}")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all of ``buffer``."""
        attempt = _ATTEMPT.get()
        attempt.writes()
        with attempt.waiting():
            await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """Close at once, without TLS farewells."""
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Shake hands; whatever ends that early also ends the connection, which nobody else knows yet."""
        try:
            with _ATTEMPT.get().waiting():
                return ObservedStream(await self._stream.start_tls(ssl_context, server_hostname, timeout))
        except BaseException:
            await self._stream.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        """Tell what the connection underneath tells."""
        return self._stream.get_extra_info(info)


class ObservedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections that report to their attempts."""

    def __init__(self) -> None:
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SocketOption] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve ``host`` and connect."""
        attempt = _ATTEMPT.get()
        attempt.connects()
        with attempt.waiting():
            stream = await self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return ObservedStream(stream)

    async def sleep(self, seconds: float) -> None:
        """Wait (between the library's connection retries, which are off)."""
        await self._backend.sleep(seconds)

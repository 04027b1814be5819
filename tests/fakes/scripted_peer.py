"""A server of bare bytes without a script: the test itself accepts, reads, writes and leaves, in one line of events."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from backends.upstream.base import Origin
from tests.fakes.raw_server import Connection
from tests.fakes.running import PATIENCE_S

READ_LIMIT_BYTES = 1024 * 1024


class Peer(Connection):
    """One accepted connection."""

    async def head(self) -> bytes:
        """Read a request up to the end of its head."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def is_left(self) -> bool:
        """Wait for the client to close; whether it said nothing more before."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True


class PeerServer:
    """Accepts connections for the test.

    Attributes:
        origin: Its address.
        accepted: Connections so far.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.peers: list[Peer] = []
        self._waiting: asyncio.Queue[Peer] = asyncio.Queue()

    @property
    def accepted(self) -> int:
        """Number of connections so far."""
        return len(self.peers)

    def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One more (asyncio callback)."""
        peer = Peer(len(self.peers), reader, writer)
        self.peers.append(peer)
        self._waiting.put_nowait(peer)

    async def accept(self) -> Peer:
        """Wait for the next connection, over TLS for one whose handshake succeeded."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._waiting.get()


def expect_failed_handshakes() -> None:
    """Have the loop say nothing of them: in debug mode it does, and it is the client's part to tell."""
    loop = asyncio.get_running_loop()
    tell = loop.get_exception_handler() or asyncio.AbstractEventLoop.default_exception_handler

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not (isinstance(context.get("exception"), OSError) and "incoming connection" in context["message"]):
            tell(loop, context)

    loop.set_exception_handler(handle)  # for the rest of the test, since they may end after their server


@asynccontextmanager
async def peer_server(
    host: str = "127.0.0.1",
    *,
    tls: ssl.SSLContext | None = None,
    scheme: str | None = None,
    name: str | None = None,
    prefix: str = "",
) -> AsyncIterator[PeerServer]:
    """Listen for the length of the block.

    Args:
        host: Address to listen on.
        tls: Context of a TLS server.
        scheme: What the origin says; by default what is true.
        name: Host that the origin says; by default the address.
        prefix: Path prefix of the origin.
    """
    if tls is not None:
        expect_failed_handshakes()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    served = PeerServer(Origin(scheme or ("https" if tls else "http"), name or host, port, prefix))
    server = await asyncio.start_server(served.on_connection, sock=listener, ssl=tls, limit=READ_LIMIT_BYTES)
    try:
        yield served
    finally:
        server.close()
        for peer in served.peers:
            peer.writer.transport.abort()
        async with asyncio.timeout(PATIENCE_S):
            await server.wait_closed()

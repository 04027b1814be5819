"""A server that does exactly what a script says: bytes, silences, resets. Nothing in it knows HTTP but the reader."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from backends.tasks import OwnedTasks
from backends.upstream.base import Origin
from tests.fakes.running import PATIENCE_S


@dataclass(frozen=True)
class RawRequest:
    """One request as it came off the wire.

    Attributes:
        head: Request line and headers, blank line included.
        body: As many bytes as ``content-length`` said.
    """

    head: bytes
    body: bytes

    @property
    def line(self) -> bytes:
        """The request line."""
        return self.head.split(b"\r\n", 1)[0]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers, in order."""
        lines = self.head.split(b"\r\n")[1:-2]
        return [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]


@dataclass
class Connection:
    """One accepted connection, as its script sees it.

    Attributes:
        number: 0 for the first one that the server took.
        requests: What it has read so far.
    """

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: list[RawRequest] = field(default_factory=list)

    async def request(self) -> RawRequest:
        """Read one request."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    size = int(line.partition(b":")[2])
            request = RawRequest(head, await self.reader.readexactly(size))
        self.requests.append(request)
        return request

    async def send(self, data: bytes) -> None:
        """Write ``data``; waits while the client does not read."""
        self.writer.write(data)
        await self.writer.drain()

    async def dribble(self, data: bytes) -> None:
        """Write ``data`` byte by byte, each in a segment of its own as far as the kernel lets it."""
        for index in range(len(data)):
            self.writer.write(data[index : index + 1])
            await asyncio.sleep(0)

    async def hang(self) -> None:
        """Do nothing until the client closes."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionResetError:
                pass

    def reset(self) -> None:
        """End with a RST."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """End with a FIN."""
        self.writer.close()


Script = Callable[[Connection], Awaitable[None]]


@dataclass
class RawServer:
    """A listening server.

    Attributes:
        origin: Its address.
        connections: All that it took, in order.
    """

    origin: Origin
    connections: list[Connection] = field(default_factory=list)
    taken: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def requests(self) -> list[RawRequest]:
        """All requests, connection by connection."""
        return [request for connection in self.connections for request in connection.requests]

    async def connection(self, number: int) -> Connection:
        """The connection with that number, once it is there."""
        async with asyncio.timeout(PATIENCE_S), self.taken:
            await self.taken.wait_for(lambda: len(self.connections) > number)
        return self.connections[number]


@asynccontextmanager
async def raw_server(*scripts: Script, host: str = "127.0.0.1", prefix: str = "") -> AsyncIterator[RawServer]:
    """Serve one script per connection, the last one for all that follow; each connection closes with its script.

    An exception in a script fails the test, except for the client's leaving.
    """
    failures: list[Exception] = []
    tasks = OwnedTasks("raw server")
    server: RawServer

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(len(server.connections), reader, writer)
        server.connections.append(connection)
        tasks.spawn(serve(connection), str(connection.number))

    async def serve(connection: Connection) -> None:
        async with server.taken:
            server.taken.notify_all()
        try:
            await scripts[min(connection.number, len(scripts) - 1)](connection)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as exc:  # noqa: BLE001 -- raised again at the end of the block
            failures.append(exc)
        finally:
            connection.writer.close()

    listener = await asyncio.start_server(accepted, host, 0, limit=1024 * 1024)
    server = RawServer(Origin("http", host, listener.sockets[0].getsockname()[1], prefix))
    try:
        yield server
    finally:
        for _ in range(3):  # asyncio stumbles over a connection that it is just accepting when the listener closes
            await asyncio.sleep(0)
        listener.close()
        for connection in server.connections:
            connection.writer.transport.abort()
        await tasks.aclose()
    if failures:
        raise failures[0]


def answer(body: bytes = b"{}", *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """One HTTP answer with a ``content-length``."""
    given = headers or (b"content-type: application/json",)
    return b"HTTP/1.1 %b\r\n%b\r\ncontent-length: %d\r\n\r\n%b" % (status, b"\r\n".join(given), len(body), body)


def chunked(chunks: Sequence[bytes], *headers: bytes) -> bytes:
    """One chunked HTTP answer."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n%b\r\n%b0\r\n\r\n" % (
        b"".join(header + b"\r\n" for header in headers),
        framed,
    )


def answers(*replies: bytes) -> Script:
    """A script that answers one request after the other, then stays open until the client closes."""

    async def script(connection: Connection) -> None:
        for reply in replies:
            await connection.request()
            await connection.send(reply)
        await connection.hang()

    return script

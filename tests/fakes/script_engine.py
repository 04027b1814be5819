"""An engine whose answers a test writes byte by byte."""

import asyncio
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.running import until

JSON_TYPE = "application/json"
EVENT_STREAM = "text/event-stream"
METADATA: dict[str, Any] = {
    "/model_info": {"model_path": "model", "served_model_name": "model", "weight_version": "default"},
    "/server_info": {"version": "0.5.23", "dp_size": 1, "page_size": 16, "random_seed": 7, "context_length": 1 << 20},
    "/v1/models": {"data": [{"id": "model"}]},
    "/ready": {},
    "/ping": {},
}


def _head(status: int, headers: Sequence[str]) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Scripted", *headers]).encode() + b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as the engine saw it."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def rid(self) -> str:
        """The id that the gateway gave, empty on routes that take none."""
        body = json.loads(self.body)
        rid = body.get("request_id") or body.get("rid", "")
        assert isinstance(rid, str)
        return rid

    @property
    def rids(self) -> list[str]:
        """The ids that the gateway gave to a batch."""
        rids = json.loads(self.body)["rid"]
        assert isinstance(rids, list)
        return rids


class Reply:
    """Writes one answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def raw(self, data: bytes) -> None:
        """Write bytes, and let the gateway read them before the next ones."""
        try:
            self.writer.write(data)
        except RuntimeError as exc:  # uvloop's, where the gateway has closed the connection
            raise ConnectionResetError from exc
        await self.writer.drain()
        for _ in range(3):
            await asyncio.sleep(0)

    async def head(self, *headers: str, status: int = 200) -> None:
        """Write a head."""
        await self.raw(_head(status, headers))

    async def whole(self, body: bytes, *headers: str, content_type: str = JSON_TYPE, status: int = 200) -> None:
        """Write a whole answer with its length in one piece, as engines do that run on uvloop."""
        lines = (f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *headers)
        await self.raw(_head(status, lines) + body)

    async def start_chunked(self, *headers: str, content_type: str = EVENT_STREAM) -> None:
        """Write the head of a chunked answer."""
        await self.head(f"Content-Type: {content_type}", "Transfer-Encoding: chunked", *headers)

    async def chunk(self, data: bytes) -> None:
        """Write one chunk."""
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, payload: bytes) -> None:
        """Write one event as one chunk."""
        await self.chunk(b"data: " + payload + b"\n\n")

    async def end_chunked(self) -> None:
        """Write the last chunk."""
        await self.raw(b"0\r\n\r\n")

    def close(self) -> None:
        """End the connection with a FIN."""
        self.writer.close()

    def reset(self) -> None:
        """End the connection with a RST."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    @property
    def is_gone(self) -> bool:
        """Whether the gateway has closed the connection."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def is_read(self, within_s: float) -> bool:
        """Whether what was written is taken within that time."""
        try:
            async with asyncio.timeout(within_s):
                await self.writer.drain()
        except TimeoutError:
            return False
        return True

    async def gone(self) -> None:
        """Wait for the gateway to close the connection."""
        try:
            assert await self._reader.read(1) == b""
        except ConnectionError:
            pass


Script = Callable[[SeenRequest, Reply], Awaitable[None]]


@dataclass
class ScriptEngine:
    """Serves metadata by itself and generation requests by ``script``.

    Attributes:
        script: Answers the next generation requests.
        metadata: Bodies by path, as bytes or as what becomes JSON; any other path is 404.
        requests: Generation requests, in order.
        aborted: Ids given to the abort route, in order.
        server: What listens.
        writers: Connections that are open.
    """

    script: Script
    metadata: dict[str, Any] = field(default_factory=lambda: dict(METADATA))
    url: str = ""
    requests: list[SeenRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def stop(self) -> None:
        """Take no more connections, and end those that are open."""
        assert self.server is not None
        self.server.close()
        for writer in list(self.writers):
            writer.close()
        await until(lambda: not self.writers, "connections closed")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.writers.add(writer)
        try:
            while True:
                request = await _read_request(reader)
                reply = Reply(reader, writer)
                if request.method == "GET":
                    known = self.metadata.get(request.path)
                    body = known if isinstance(known, bytes) else json.dumps(known).encode()
                    await reply.whole(body, status=404 if known is None else 200)
                elif request.path == "/abort_request":
                    self.aborted.append(request.rid)
                    await reply.whole(b"")
                else:
                    self.requests.append(request)
                    await self.script(request, reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> SeenRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ")
    length = re.search(r"(?i)\r\ncontent-length: (\d+)", head)
    body = await reader.readexactly(int(length[1])) if length else b""
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return SeenRequest(method, path, headers, body)


async def echo(request: SeenRequest, reply: Reply) -> None:
    """Answer with the request's body."""
    await reply.whole(b'{"meta_info":{"id":"%b"},"echo":%b}' % (request.rid.encode(), request.body))


@asynccontextmanager
async def script_engine(script: Script = echo) -> AsyncIterator[ScriptEngine]:
    """Run one for the length of the block; at first it answers with the request's body."""
    engine = ScriptEngine(script)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 20)
    engine.server = server
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
        await until(lambda: not engine.writers, "connections to the engine closed")
    finally:
        server.close()
        await server.wait_closed()

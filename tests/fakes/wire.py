"""A client of bare bytes: sees framing, leaves when it likes, reads as slowly as it likes."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.fakes.running import PATIENCE_S


def request_bytes(
    path: str,
    body: bytes | dict[str, Any] | None = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> bytes:
    """One HTTP/1.1 request with a JSON body."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway"]
    given = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **(headers or {})}
    lines += [f"{name}: {value}" for name, value in given.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


@dataclass
class Answer:
    """One HTTP answer.

    Attributes:
        status: Status.
        headers: By lower-case name.
        body: Unchunked body.
        chunks: The chunks as they were framed; the whole body where it was not chunked.
        is_whole: The body ended as its framing says.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes]
    is_whole: bool = True

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def events(self) -> list[bytes]:
        """Payloads of the events in the body."""
        return [part[6:] for part in self.body.split(b"\n\n") if part.startswith(b"data: ")]


class Wire:
    """One connection; ``patience_s`` is for each step of it, ``None`` where somebody else sets limits."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience_s: float | None = PATIENCE_S
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._patience_s = patience_s

    async def send(self, data: bytes) -> None:
        """Write bytes."""
        self.writer.write(data)
        async with asyncio.timeout(self._patience_s):
            await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read one final head (100 Continue is skipped)."""
        while True:
            async with asyncio.timeout(self._patience_s):
                raw = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
            status = int(first.split(" ")[1])
            if status >= 200:
                return status, {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body, ``b""`` for the last."""
        async with asyncio.timeout(self._patience_s):
            size = int((await self.reader.readline()).split(b";")[0], 16)
            data = await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        return data

    async def event(self) -> bytes:
        """Read one chunk that holds events; the payload of its first."""
        return (await self.chunk()).split(b"\n\n")[0].removeprefix(b"data: ")

    async def answer(self) -> Answer:
        """Read one whole answer."""
        return await self.body(*await self.head())

    async def body(self, status: int, headers: dict[str, str]) -> Answer:
        """Read the body that follows a head."""
        chunks: list[bytes] = []
        try:
            if headers.get("transfer-encoding") == "chunked":
                while data := await self.chunk():
                    chunks.append(data)
            else:
                async with asyncio.timeout(self._patience_s):
                    chunks.append(await self.reader.readexactly(int(headers.get("content-length", "0"))))
        except asyncio.IncompleteReadError as exc:
            return Answer(status, headers, b"".join([*chunks, exc.partial]), chunks, is_whole=False)
        except (ConnectionResetError, ValueError):
            return Answer(status, headers, b"".join(chunks), chunks, is_whole=False)
        return Answer(status, headers, b"".join(chunks), chunks)

    async def is_closed(self) -> bool:
        """Wait for the gateway to close the connection; whether nothing else came before."""
        async with asyncio.timeout(self._patience_s):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    def close(self) -> None:
        """Leave with a FIN."""
        self.writer.close()

    def reset(self) -> None:
        """Leave with a RST, if the other side has not closed yet."""
        sock: socket.socket = self.writer.get_extra_info("socket")
        if sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def wire(
    address: tuple[str, int], *, receive_buffer_bytes: int | None = None, patience_s: float | None = PATIENCE_S
) -> AsyncIterator[Wire]:
    """Connect for the length of the block."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
    except OSError:
        sock.close()
        raise
    reader, writer = await asyncio.open_connection(sock=sock, limit=256 * 1024)
    try:
        yield Wire(reader, writer, patience_s)
    finally:
        writer.close()


async def call(
    address: tuple[str, int],
    path: str,
    body: bytes | dict[str, Any] | None = None,
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    patience_s: float | None = PATIENCE_S,
) -> Answer:
    """One request on its own connection."""
    async with wire(address, patience_s=patience_s) as connection:
        await connection.send(request_bytes(path, body, method=method, headers=headers))
        return await connection.answer()

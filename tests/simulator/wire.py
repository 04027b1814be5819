"""Raw HTTP over real sockets: captures as they are on disk, and a client that sends bytes."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# How the captures mark long bodies whose middle was left out.
CUT = re.compile(rb"\.\.\.\[cut \d+|\(cut here\)|\.\.\.\(cut[:)]")
CAPTURES = Path(__file__).parent.parent / "data" / "captures" / "sglang"
VLLM_CAPTURES = CAPTURES.parent / "vllm"


@dataclass(slots=True)
class Answer:
    """One parsed response; ``chunks`` are the HTTP chunks of a chunked body."""

    status_line: str
    headers: list[tuple[str, str]]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Return the status code."""
        return int(self.status_line.split()[1])

    @property
    def is_stream(self) -> bool:
        """Whether the body is an event stream."""
        return any(value.startswith("text/event-stream") for _, value in self.headers)

    def json(self) -> Any:
        """Return the parsed body."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Return the data of all events, parsed where they are JSON and complete."""
        found: list[Any] = []
        for chunk in self.chunks:
            lines = [line[6:] for line in chunk.decode("utf-8", "replace").split("\n") if line.startswith("data: ")]
            found += [line if line == "[DONE]" else json.loads(line) for line in lines]
        return found


@dataclass(frozen=True, slots=True)
class Capture:
    """One capture: the request as sent, the response as received, ``None`` if there was none."""

    name: str
    request: bytes
    response: bytes
    remark: str

    @property
    def body(self) -> bytes:
        """Body of the request."""
        return self.request.partition(b"\r\n\r\n")[2]

    def with_json(self, **changes: Any) -> bytes:
        """Return the request with top-level fields of its JSON body changed."""
        body = json.dumps({**json.loads(self.body), **changes}).encode()
        head = self.request.partition(b"\r\n\r\n")[0]
        head = re.sub(rb"(?i)content-length: \d+", b"Content-Length: %d" % len(body), head)
        return head + b"\r\n\r\n" + body


def load_capture(name: str) -> Capture:
    """Read the capture ``name``, for instance ``http/gen_rid``."""
    raw = (CAPTURES / f"{name}.http").read_bytes()
    request, _, rest = raw.removeprefix(b"### REQUEST\n").partition(b"\n### RESPONSE (raw bytes as received)\n")
    response, _, remark = rest.rpartition(b"\n### END")
    return Capture(name, request, response, remark.decode())


def load_vllm_capture(name: str) -> Capture:
    """Read the vLLM capture ``name``, for instance ``chat/unary``; without a request it has only an answer."""
    request = VLLM_CAPTURES / f"{name}.req"
    response = (VLLM_CAPTURES / f"{name}.resp").read_bytes()
    return Capture(name, request.read_bytes() if request.exists() else b"", response, "")


def parse_answer(raw: bytes) -> Answer | None:
    """Parse one response; a body cut off in the middle gives the chunks that are whole."""
    if not raw:
        return None
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    answer = Answer(status_line, headers, body)
    if any(name.lower() == "transfer-encoding" for name, _ in headers):
        answer.chunks = _dechunk(body)
        answer.body = b"".join(answer.chunks)
    return answer


def _dechunk(body: bytes) -> list[bytes]:
    chunks = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16) if re.fullmatch(rb"[0-9a-f]+", size) else 0
        if not length or len(rest) < length + 2 or CUT.search(rest[:length]):
            break
        chunks.append(rest[:length])
        body = rest[length + 2 :]
    return chunks


async def send(port: int, request: bytes, *, timeout_s: float = 30.0) -> bytes:
    """Send ``request`` on a new connection and return everything until its end.

    A reset counts as an end.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        received = []
        try:
            writer.write(request)
            while data := await reader.read(1 << 20):
                received.append(data)
        except ConnectionError:
            return b"".join(received)
        finally:
            writer.close()
        return b"".join(received)


async def send_one(port: int, request: bytes, *, timeout_s: float = 30.0) -> bytes:
    """Send ``request`` and return its answer alone, from a connection that would stay open."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            if length is not None:
                return head + await reader.readexactly(int(length[1]))
            received = bytearray(head)
            while not received.endswith(b"\r\n0\r\n\r\n"):
                received += await reader.readuntil(b"\r\n")
            return bytes(received)
        finally:
            writer.close()


def request_bytes(path: str, body: Any = None, *, method: str = "POST", close: bool = True, **headers: str) -> bytes:
    """Return a request with a JSON body."""
    raw = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if close:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


async def ask(port: int, path: str, body: Any = None, *, method: str = "POST", **headers: str) -> Answer:
    """Send one request on a connection of its own and parse the answer."""
    answer = parse_answer(await send(port, request_bytes(path, body, method=method, close=True, **headers)))
    assert answer is not None
    return answer

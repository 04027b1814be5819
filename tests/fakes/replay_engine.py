"""An engine that answers with bytes of a real one, under the ids that it was given.

What the real engine did with an id it was told, this one does too: captured ids are replaced by the request's; on
SGLang samples of ``n > 1`` keep ids of the engine's own, on vLLM the id stands behind a prefix. The framing is not the
captured one: a stream is cut anew, anywhere.
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.simulator.wire import CUT, VLLM_CAPTURES, Capture, load_capture, load_vllm_capture

_SIZE_LINE = re.compile(rb"(?:^|\r\n)([0-9a-f]+)\r\n")
_VLLM_PREFIX = re.compile(rb"\A(?:chatcmpl-|cmpl-)")
_ID = re.compile(rb'(?:"meta_info":\{"id":|(?:^|data: )\{"id":)"((?:[^"\\]|\\.)*)"')
Cut = Callable[[bytes], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class CapturedAnswer:
    """A response of a capture, unframed.

    Attributes:
        status: Status.
        headers: End-to-end headers, framing left out.
        body: Unchunked body; where the capture left out a middle part, what is left on both sides.
        is_stream: It was an event stream.
    """

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    is_stream: bool

    @property
    def ids(self) -> list[bytes]:
        """The ids in it, as JSON text between the quotes, in the order of the items that they belong to."""
        found = dict.fromkeys(_ID.findall(self.body))
        if self.is_stream and len(found) > 1:
            first = {one: next(event for event in self.events if one in event) for one in found}
            return sorted(found, key=lambda one: index_of(json.loads(first[one])))
        return list(found)

    @property
    def events(self) -> list[bytes]:
        """Payloads of the events."""
        return [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n") if event]

    def with_ids(self, new: dict[bytes, bytes]) -> bytes:
        """The body with ids replaced where an answer holds them."""
        return _ID.sub(lambda match: match[0].replace(b'"%b"' % match[1], b'"%b"' % new[match[1]]), self.body)


def captured_answer(capture: Capture) -> CapturedAnswer | None:
    """The capture's response, ``None`` where the engine closed the connection without a byte."""
    if not capture.response:
        return None
    head, _, body = capture.response.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    headers = [(name, value) for name, value in pairs if name not in ("connection", "transfer-encoding")]
    if len(headers) < len(pairs) and any(name == "transfer-encoding" for name, _ in pairs):
        marker = CUT.search(body)
        body = _dechunked(body) if marker is None else _dechunked(body) + _dechunked(_after(body, marker.end()))
    is_stream = any(value.startswith("text/event-stream") for _, value in headers)
    kept = [(name, value) for name, value in headers if name != "content-length"]
    return CapturedAnswer(int(first.split()[1]), kept, body, is_stream)


def _after(body: bytes, position: int) -> bytes:
    """The whole chunks behind a place in the middle of one."""
    found = _SIZE_LINE.search(body, position)
    return b"" if found is None else body[found.start(1) :]


def _dechunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16) if size else 0
        if not length or rest[length : length + 2] != b"\r\n" or CUT.search(rest[:length]):
            break
        whole += rest[:length]
        body = rest[length + 2 :]
    return whole


def pieces_of(size: int) -> Cut:
    """Cut into pieces of one size."""
    return lambda body: (body[start : start + size] for start in range(0, len(body), size))


def random_pieces(seed: str) -> Cut:
    """Cut anywhere, the same way for one seed."""

    def cut(body: bytes) -> Iterator[bytes]:
        chance = random.Random(seed)
        while body:
            size = chance.choice((1, 2, 7, 60, 400, 3000))
            yield body[:size]
            body = body[size:]

    return cut


@dataclass
class ReplayEngine:
    """Serves metadata, and for each generation request the answer that was set last.

    Attributes:
        metadata: Answers of the metadata routes, by path.
        is_vllm: Ids are taken and given in the way of vLLM.
        answer: What the next generation requests get; ``None`` closes the connection without a byte.
        cut: How the answer's body is cut into chunks and writes.
        bodies: Bodies of the generation requests, in order.
        heads: Their headers, by lower-case name.
    """

    metadata: dict[str, CapturedAnswer]
    is_vllm: bool = False
    answer: CapturedAnswer | None = None
    cut: Cut = field(default_factory=lambda: pieces_of(1 << 20))
    bodies: list[Any] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                path = head.split(b" ", 2)[1].decode()
                if path in self.metadata:
                    known = self.metadata[path]
                    await self._write_whole(writer, known.status, known.headers, known.body)
                elif path in ("/ready", "/ping"):
                    await self._write_whole(writer, 200, [("content-type", "application/json")], b"{}")
                elif head.startswith(b"GET "):
                    await self._write_whole(writer, 404, [("content-type", "application/json")], b"{}")
                else:
                    await self._generate(writer, head, body)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _write_whole(
        self, writer: asyncio.StreamWriter, status: int, headers: list[tuple[str, str]], body: bytes
    ) -> None:
        writer.write(_head(status, [*headers, ("content-length", str(len(body)))]) + body)
        await writer.drain()

    async def _generate(self, writer: asyncio.StreamWriter, head: bytes, raw: bytes) -> None:
        request = json.loads(raw)
        lines = head.decode("latin-1").split("\r\n")[1:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.bodies.append(request)
        self.heads.append(headers)
        if self.answer is None:
            raise ConnectionError
        given = headers["x-request-id"] if self.is_vllm else None
        body = self.answer.with_ids(vllm_ids(self.answer, given) if given else self._new_ids(self.answer, request))
        if not self.answer.is_stream:
            writer.write(_head(self.answer.status, [*self.answer.headers, ("content-length", str(len(body)))]))
        else:
            writer.write(_head(self.answer.status, [*self.answer.headers, ("transfer-encoding", "chunked")]))
        for piece in self.cut(body):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.answer.is_stream else piece)
            await writer.drain()
            await asyncio.sleep(0)
        if self.answer.is_stream:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _new_ids(self, answer: CapturedAnswer, request: dict[str, Any]) -> dict[bytes, bytes]:
        """What the engine would have called the items of ``request``, by their captured ids."""
        if samples_of(request) > 1:
            return {old: old for old in answer.ids}
        if "rid" not in request:  # a route that takes no id, or takes it in another field
            return {old: old for old in answer.ids}
        rid = request["rid"]
        given = rid if isinstance(rid, list) else [f"{rid}_0", f"{rid}_1"] if is_batch(request) else [rid]
        return dict(zip(answer.ids, [json.dumps(one)[1:-1].encode() for one in given], strict=False))


def vllm_ids(answer: CapturedAnswer, given: str) -> dict[bytes, bytes]:
    """What vLLM calls a request that is ``given``, by the captured names."""
    ids = {}
    for old in answer.ids:
        prefix = _VLLM_PREFIX.match(old)
        assert prefix is not None
        ids[old] = prefix[0] + json.dumps(given, ensure_ascii=False)[1:-1].encode()
    return ids


def index_of(event: dict[str, Any]) -> int:
    """The item that an event belongs to."""
    choices = event.get("choices")
    return int((choices[0] if choices else event).get("index", 0))


def samples_of(request: dict[str, Any]) -> int:
    """The request's ``n``."""
    params = request.get("sampling_params")
    return int(request.get("n") or (params.get("n") if isinstance(params, dict) else None) or 1)


def is_batch(request: dict[str, Any]) -> bool:
    """Whether the request holds a list of prompts."""
    prompt = request.get("text") or request.get("input_ids") or request.get("prompt")
    return isinstance(prompt, list) and isinstance(prompt[0], list | str)


def _head(status: int, headers: list[tuple[str, str]]) -> bytes:
    lines = [f"HTTP/1.1 {status} Captured", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def _known(capture: Capture) -> CapturedAnswer:
    found = captured_answer(capture)
    assert found is not None
    return found


@asynccontextmanager
async def replay_engine(*, has_two_ranks: bool = False) -> AsyncIterator[ReplayEngine]:
    """Run an SGLang for the length of the block."""
    names = {
        "/model_info": "http/get_model_info",
        "/server_info": "http_dp2/server_info" if has_two_ranks else "http/get_server_info",
        "/v1/models": "http/get_v1_models",
    }
    metadata = {path: _known(load_capture(name)) for path, name in names.items()}
    async with _served(ReplayEngine(metadata)) as engine:
        yield engine


@asynccontextmanager
async def vllm_replay_engine(*, has_two_ranks: bool = False) -> AsyncIterator[ReplayEngine]:
    """Run a vLLM for the length of the block; the one with two ranks has an adapter, the other an alias."""
    names = {
        "/version": "misc/version",
        "/v1/models": "dp2/models-with-lora" if has_two_ranks else "misc/models",
        "/health": "misc/health",
    }
    metadata = {path: _known(load_vllm_capture(name)) for path, name in names.items()}
    metrics = "dp2/metrics-running-kv.txt" if has_two_ranks else "misc/metrics-vllm-samples.txt"
    text = (VLLM_CAPTURES / metrics).read_bytes()
    metadata["/metrics"] = CapturedAnswer(200, [("content-type", "text/plain; version=1.0.0")], text, False)
    async with _served(ReplayEngine(metadata, is_vllm=True)) as engine:
        yield engine


@asynccontextmanager
async def _served(engine: ReplayEngine) -> AsyncIterator[ReplayEngine]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
    finally:
        server.close()
        await server.wait_closed()

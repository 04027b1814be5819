"""What the checks against real engines share: a client of bare sockets, and the engines' own counts of requests."""

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

PATIENCE_S: Final = 120.0
_CHUNK = re.compile(rb"\A([0-9a-fA-F]+)[^\r\n]*\r\n")
_VLLM_KV = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_VLLM_COUNT = re.compile(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer.

    Attributes:
        headers: By lower-case name.
        body: Without its framing.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body of a unary answer."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The events of a streamed answer, ``[DONE]`` excluded."""
        parts = (part[6:] for part in self.body.split(b"\n\n") if part.startswith(b"data: "))
        return [json.loads(part) for part in parts if part != b"[DONE]"]


class Call:
    """One request on a connection of its own, which can be closed at any moment.

    Attributes:
        sent_at: When its bytes were written, monotonic seconds.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._held = b""
        self.sent_at = time.monotonic()

    @classmethod
    async def send(
        cls, url: str, path: str, body: object = None, headers: Mapping[str, str] | None = None, method: str = ""
    ) -> Self:
        """Connect and write one request; POST where there is a body, else GET."""
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        raw = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
        await writer.drain()
        return cls(reader, writer)

    async def wait_for(self, mark: bytes, times: int) -> None:
        """Read on until ``mark`` has come so many times.

        Raises:
            EOFError: The answer ended before.
        """
        async with asyncio.timeout(PATIENCE_S):
            while self._held.count(mark) < times:
                data = await self._reader.read(65536)
                if not data:
                    raise EOFError(f"the answer ended with {self._held[-300:]!r}")
                self._held += data

    async def answer(self) -> Answer:
        """Read to the end, and close."""
        async with asyncio.timeout(PATIENCE_S):
            raw = self._held + await self._reader.read()
        self.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body = _unchunked(body)
        return Answer(int(first.split(" ")[1]), headers, body)

    def close(self) -> None:
        """Close the connection now, as a client does that leaves."""
        self._writer.close()


def _unchunked(data: bytes) -> bytes:
    body = b""
    while found := _CHUNK.match(data):
        size = int(found[1], 16)
        if not size:
            return body
        body += data[found.end() : found.end() + size]
        data = data[found.end() + size + 2 :]
    raise EOFError("a chunked body without an end")


async def fetch(
    url: str, path: str, body: object = None, headers: Mapping[str, str] | None = None, method: str = ""
) -> Answer:
    """One request and its whole answer."""
    return await (await Call.send(url, path, body, headers, method)).answer()


async def is_sglang(engine_url: str) -> bool:
    """Whether an engine is SGLang, else vLLM."""
    return (await fetch(engine_url, "/v1/loads?include=core")).status == 200


async def count(engine_url: str, *, sglang: bool) -> int:
    """Requests that an engine runs or lets wait, as it says itself."""
    if sglang:
        loads = (await fetch(engine_url, "/v1/loads?include=core")).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
    text = (await fetch(engine_url, "/metrics")).body.decode()
    return int(sum(map(float, _VLLM_COUNT.findall(text))))


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine has of requests.

    Attributes:
        requests: Running, waiting, or in a queue of a pair's.
        kv: Tokens in use on SGLang, the pool's share in use on vLLM; what is only cached is not in use.
    """

    requests: int = 0
    kv: float = 0.0


async def held(engine_url: str, *, sglang: bool) -> Held:
    """What one half of a pair holds, as it says itself."""
    if not sglang:
        text = (await fetch(engine_url, "/metrics")).body.decode()
        requests, kv = (sum(map(float, pattern.findall(text))) for pattern in (_VLLM_COUNT, _VLLM_KV))
        return Held(int(requests), kv)
    requests, tokens = 0, 0
    for load in (await fetch(engine_url, "/v1/loads?include=all")).json()["loads"]:
        queues = load.get("disaggregation") or {}
        requests += load["num_running_reqs"] + load["num_waiting_reqs"]
        requests += sum(value for name, value in queues.items() if name.endswith("_queue_reqs"))
        tokens += load["num_used_tokens"]
    return Held(requests, tokens)


async def state_of(gateway_url: str, within_s: float = 6.0) -> dict[str, int]:
    """What the gateway still holds, after at most ``within_s`` of waiting for nothing; empty if nothing."""
    end = time.monotonic() + within_s
    while True:
        found = (await fetch(gateway_url, "/internal/state")).json()
        left = {name: value for name, value in found.items() if value}
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.05)

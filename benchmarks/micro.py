"""Microseconds a call of the pure parts that run for every request or every event."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Final

from backends.json_body import JsonBody
from backends.sse import EventCutter
from backends.upstream.base import AnswerHead, Headers
from benchmarks.cases import large_body, unary_body
from gateway.access_log import AccessRecord, format_json, format_text
from gateway.answer import StreamAnswer, passed_headers, unary_verdict
from gateway.envelope import parse_envelope, read_headers
from gateway.ids import SingleId
from gateway.routes import ROUTES
from routers.least_loaded import LeastLoaded
from routers.load import RankLoad
from routers.types import Candidate, RankKey, RouteRequest

_REPEATS: Final = 7
_REPEAT_S: Final = 0.04
_ENGINE_ID: Final = "0123456789abcdef" * 2
_PUBLIC_ID: Final = "fedcba9876543210" * 2
_EVENT: Final = (
    b'data: {"id":"' + _ENGINE_ID.encode() + b'","object":"chat.completion.chunk","created":1795963786,'
    b'"model":"model","choices":[{"index":0,"delta":{"reasoning_content":null,"content":" river"},"logprobs":null,'
    b'"finish_reason":null,"matched_stop":null}]}\n\n'
)
_ANSWER: Final = (
    b'{"text":"' + b"x" * 500 + b'","meta_info":{"id":"' + _ENGINE_ID.encode() + b'","finish_reason":{"type":"length",'
    b'"length":4},"prompt_tokens":100,"weight_version":"default","completion_tokens":1,"cached_tokens":0}}'
)
_REQUEST_HEADERS: Final[Headers] = [
    (b"host", b"127.0.0.1:8000"),
    (b"content-type", b"application/json"),
    (b"content-length", b"1024"),
    (b"accept", b"*/*"),
]
_ANSWER_HEADERS: Final[Headers] = [
    (b"date", b"Sun, 29 Nov 2026 14:45:44 GMT"),
    (b"server", b"uvicorn"),
    (b"content-type", b"application/json"),
    (b"content-length", b"700"),
]


def us_per_call(call: Callable[[], object]) -> float:
    """Least time of a call, over several repeats of many calls, in microseconds."""
    count = 1
    while _time(call, count) < _REPEAT_S / 4:
        count *= 2
    count *= 4
    return min(_time(call, count) for _ in range(_REPEATS)) / count * 1e6


def _time(call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - started


def _record() -> AccessRecord:
    return AccessRecord(
        time=1795963786.123,
        method="POST",
        route="/generate",
        path="/generate",
        status=200,
        outcome="complete",
        request_id=_PUBLIC_ID,
        engine_ids=(_ENGINE_ID,),
        worker="127.0.0.1:30000",
        attempts=1,
        model="model",
        prompt_tokens=100,
        completion_tokens=1,
        cached_tokens=0,
        bytes_in=1024,
        bytes_out=800,
        duration_s=0.0123,
        first_byte_s=0.0121,
    )


def _choices(count: int) -> list[Candidate]:
    rng = random.Random(1)
    candidates = []
    for index in range(count):
        load = RankLoad()
        load.book(requests=rng.randrange(1, 9), blocks=0, prefill_tokens=rng.randrange(1000))
        candidates.append(Candidate(RankKey(f"worker-{index}", 0), load))
    return candidates


def _envelope(raw: bytes) -> Callable[[], object]:
    route = ROUTES["/generate"]

    def parse() -> object:
        by_name = read_headers(_REQUEST_HEADERS)
        return parse_envelope(
            route, raw, _REQUEST_HEADERS, by_name, fallback_id=_PUBLIC_ID, max_response_bytes=64 * 1024 * 1024
        )

    return parse


def calls() -> Mapping[str, Callable[[], object]]:
    """What is timed, by name."""
    cutter = EventCutter(1 << 20)
    ids = SingleId(_ENGINE_ID, _PUBLIC_ID)
    stream = StreamAnswer(ids, 1 << 20)
    half, other_half = _EVENT[:100], _EVENT[100:]
    record = _record()
    policy = LeastLoaded(random.Random(1))
    candidates = _choices(64)
    small, large = unary_body(), large_body()
    parsed_small, parsed_large = JsonBody.parse(small), JsonBody.parse(large)
    rid = {"rid": b'"%b"' % _ENGINE_ID.encode()}
    head = AnswerHead(200, _ANSWER_HEADERS, 700, "application/json")
    request = RouteRequest()
    return {
        "envelope, 1 KB": _envelope(small),
        "envelope, 600 KB of token ids": _envelope(large),
        "engine's body, 1 KB": lambda: parsed_small.with_fields(rid),
        "engine's body, 600 KB of token ids": lambda: parsed_large.with_fields(rid),
        "EventCutter, one whole event": lambda: cutter.feed(_EVENT),
        "EventCutter, one event in two reads": lambda: (cutter.feed(half), cutter.feed(other_half)),
        "id rewriting, one event": lambda: ids.apply(_EVENT),
        "id rewriting, 32 events": lambda block=_EVENT * 32: ids.apply(block),  # type: ignore[misc]
        "StreamAnswer, one whole event": lambda: stream.feed(_EVENT),
        "answer headers": lambda: passed_headers(head),
        "verdict on a unary answer": lambda: unary_verdict(_ANSWER),
        "access line, text": lambda: format_text(record),
        "access line, JSON": lambda: format_json(record),
        "policy least-loaded, 64 candidates": lambda: policy.select(request, candidates),
    }


def run(say: Callable[[str], None]) -> dict[str, float]:
    """Time all of them, in this process."""
    found = {}
    for name, call in calls().items():
        found[name] = us_per_call(call)
        say(f"  {name}: {found[name]:.2f} us")
    return found

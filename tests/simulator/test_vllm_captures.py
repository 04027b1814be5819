"""The simulated engine against bytes of a real vLLM 0.32.0 server.

Compared are status, header names and order, content type, event framing, key order and JSON types,
and error bodies whole; other values and the lengths of generated arrays are not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import TIME_SCALE
from tests.simulator.shapes import event_problems, problems
from tests.simulator.wire import (
    CUT,
    VLLM_CAPTURES,
    Answer,
    Capture,
    ask,
    load_vllm_capture,
    parse_answer,
    request_bytes,
    send_one,
)

SINGLE = EngineOptions(
    engine="vllm",
    model="tiny",
    model_aliases="tiny-alias",
    page_size=32,
    num_blocks=320,
    context_length=2048,
    dev_mode=True,
)
TWO_RANKS = replace(SINGLE, num_blocks=80, dp_size=2, model_aliases="", lora_names="my-lora")
# Slow enough that a request is still running when the test acts on it.
SLOW = replace(SINGLE, inter_token_ms=2)

NOT_SIMULATED = {
    "misc/kv_event_sources": "no KV events are published",
    "dp2/kv_event_sources": "no KV events are published",
    "misc/render-chat": "rendering is not simulated",
    "misc/render-completions": "rendering is not simulated",
}
# Aborted before their first token, with the name that the abort went by.
EARLY_ABORTS = {
    f"abort/{kind}-{how}-before-first-token": f"{name}-early-{kind}-{how}{item}"
    for kind, name, item in (
        ("chat", "chatcmpl", ""),
        ("completions", "cmpl", "-0"),
        ("generate", "generate-tokens", ""),
    )
    for how in ("stream", "stream-usage", "unary")
}
EARLY_ABORTS["pd/abort-before-first-token-stream"] = "cmpl-stall-cap-0"
# Captures that a scenario below replays together.
IN_SCENARIOS = {
    *EARLY_ABORTS,
    "abort/chat-stream-by-response-id",
    "abort/completions-stream-by-engine-id",
    "abort/completions-stream-by-response-id",
    "abort/completions-unary-by-engine-id",
    "abort/generate-stream-by-response-id",
    "abort/generate-unary-by-response-id",
    "engine-death/health-after",
    "engine-death/stream-chat",
    "engine-death/stream-completions",
    "engine-death/stream-generate",
    "engine-death/unary-completions",
    "headers/duplicate-x-request-id-concurrent-1",
    "headers/duplicate-x-request-id-concurrent-2",
    "completions/stream-sse-keepalive",
    "completions/stop-string",
}
# Error bodies of which only the shape is compared.
OTHER_WORDS = {
    "errors/bad-json": "the position of the error is the parser's own",
    "errors/bad-role": "one finding instead of eleven",
    "errors/token-id-negative": "one finding instead of six",
    "errors/prompt-too-long-stream-chat": "another tokenizer counts differently",
}

ALL = sorted(str(path.relative_to(VLLM_CAPTURES).with_suffix("")) for path in VLLM_CAPTURES.rglob("*.resp"))
# test_pd_captures replays these; one of the captures is about something else.
IN_PAIRS = {name for name in ALL if name.startswith("pd/")} - IN_SCENARIOS
PLAIN = [name for name in ALL if name not in NOT_SIMULATED and name not in IN_SCENARIOS and name not in IN_PAIRS]


@asynccontextmanager
async def running(options: EngineOptions) -> AsyncIterator[SimulatedEngine]:
    """Run an engine."""
    engine = SimulatedEngine(options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def assert_same_shape(capture: Capture, raw: bytes) -> None:
    """Fail with a list of differences."""
    expected, actual = parse_answer(capture.response), parse_answer(raw)
    assert expected is not None
    assert actual is not None
    assert actual.status_line == expected.status_line
    assert _header_shape(capture, actual) == _header_shape(capture, expected)
    if expected.is_stream:
        _assert_same_stream(capture, expected, actual)
    elif expected.status >= 400 and capture.name not in OTHER_WORDS:
        assert actual.body == expected.body
    elif expected.body[:1] in (b"{", b"["):
        assert problems(expected.json(), actual.json()) == []
    else:
        assert actual.body == expected.body


def _header_shape(capture: Capture, answer: Answer) -> list[tuple[str, str]]:
    is_named = b"X-Request-Id" in capture.request
    varying = ("date", "content-length") if is_named else ("date", "content-length", "x-request-id")
    return [(name, "" if name in varying else value) for name, value in answer.headers]


def _assert_same_stream(capture: Capture, expected: Answer, actual: Answer) -> None:
    for chunk in actual.chunks:
        assert chunk.endswith(b"\n\n")
        assert chunk.count(b"\n\n") == 1, "more than one event in a chunk"
        assert chunk.startswith((b"data: ", b": keep-alive"))
    got = actual.events()
    assert got[-1] == "[DONE]"
    if CUT.search(capture.response) is None:
        assert expected.events()[-1] == "[DONE]"
        assert event_problems(expected.events(), got) == []
    else:
        # Known are the beginning and the last two events: of a death they are the same bytes.
        assert event_problems(expected.events(), got[:-2]) == []
        last = capture.response.removesuffix(b"0\r\n\r\n").split(b"\n\n\r\n")[-3:-1]
        ends = [piece.partition(b"\r\n")[2] for piece in last]
        assert problems(json.loads(ends[0][6:]), got[-2]) == []
        if capture.name.startswith("engine-death/"):
            assert ends == [chunk.removesuffix(b"\n\n") for chunk in actual.chunks[-2:]]


def engine_options(name: str) -> EngineOptions:
    """Return the options of the server that the capture came from."""
    return TWO_RANKS if name.startswith("dp2/") else SINGLE


@pytest.mark.parametrize("name", PLAIN)
async def test_capture(name: str) -> None:
    capture = load_vllm_capture(name)
    async with running(engine_options(name)) as engine:
        raw = await send_one(engine.port, capture.request)
        assert_same_shape(capture, raw)
        expected, actual = parse_answer(capture.response), parse_answer(raw)
        assert expected is not None
        assert actual is not None
        if b"X-Request-Id" in capture.request and actual.status == 200 and not actual.is_stream:
            key = "request_id" if "generate" in name else "id"
            assert actual.json()[key] == expected.json()[key]


def test_every_capture_is_accounted_for() -> None:
    listed = {*NOT_SIMULATED, *IN_SCENARIOS, *IN_PAIRS}
    assert listed <= set(ALL)
    assert set(PLAIN) >= set(OTHER_WORDS)
    assert len(PLAIN) + len(listed) == len(ALL)


# -- more than one request -------------------------------------------------------------------------


def decoding(count: int, tokens: int) -> Callable[[SimulatedEngine], bool]:
    """Return a predicate: ``count`` sequences run, and some tokens exist; time then stands still."""

    def is_decoding(engine: SimulatedEngine) -> bool:
        produced = sum(s.totals.generated_tokens for s in engine.core.schedulers)
        if engine.running != count or produced < tokens:
            return False
        engine.freeze()
        return True

    return is_decoding


@pytest.mark.parametrize(
    ("name", "abort", "is_hit"),
    [
        ("chat-stream-by-response-id", "chatcmpl-ab-4", True),
        ("completions-stream-by-engine-id", "cmpl-ab-2-0", True),
        ("completions-stream-by-response-id", "cmpl-ab-1", False),
        ("completions-unary-by-engine-id", "cmpl-ab-7-0", True),
        ("generate-stream-by-response-id", "generate-tokens-ab-5", True),
        ("generate-unary-by-response-id", "generate-tokens-ab-6", True),
    ],
)
async def test_abort(name: str, abort: str, is_hit: bool) -> None:
    capture = load_vllm_capture(f"abort/{name}")
    async with running(SLOW) as engine, asyncio.TaskGroup() as group:
        task = group.create_task(send_one(engine.port, capture.request))
        await engine.wait_for(decoding(1, 6))
        answer = await ask(engine.port, "/inference/v1/abort_requests", {"request_ids": [abort]})
        assert (answer.status, answer.body) == (200, b"")
        assert engine.log.aborts[-1].hit == ((abort,) if is_hit else ())
        assert engine.running == (0 if is_hit else 1)
        engine.thaw()
        assert_same_shape(capture, await task)


@pytest.mark.parametrize(("name", "abort"), EARLY_ABORTS.items())
async def test_abort_before_the_first_token(name: str, abort: str) -> None:
    capture = load_vllm_capture(name)
    async with running(SINGLE) as engine, asyncio.TaskGroup() as group:
        engine.freeze()
        task = group.create_task(send_one(engine.port, capture.request))
        await engine.wait_for(lambda e: e.running == 1)
        await ask(engine.port, "/inference/v1/abort_requests", {"request_ids": [abort]})
        raw = await task
    assert_same_shape(capture, raw)
    assert raw.count(b'"weight_versions":[]') == capture.response.count(b'"weight_versions":[]')


async def test_two_requests_with_one_id() -> None:
    captures = [load_vllm_capture(f"headers/duplicate-x-request-id-concurrent-{number}") for number in (1, 2)]
    async with running(SLOW) as engine, asyncio.TaskGroup() as group:
        engine.freeze()
        tasks = [group.create_task(send_one(engine.port, capture.request)) for capture in captures]
        await engine.wait_for(lambda e: e.running == 2)
        engine.thaw()
        for capture, task in zip(captures, tasks, strict=True):
            assert_same_shape(capture, await task)


async def test_engine_death() -> None:
    names = ("stream-chat", "stream-completions", "stream-generate", "unary-completions")
    captures = [load_vllm_capture(f"engine-death/{name}") for name in names]
    health = load_vllm_capture("engine-death/health-after")
    async with running(replace(SLOW, death_grace_s=1.5 * TIME_SCALE)) as engine, asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_one(engine.port, capture.request)) for capture in captures]
        await engine.wait_for(decoding(4, 40))
        engine.die()
        assert_same_shape(health, await send_one(engine.port, request_bytes("/health", method="GET", close=False)))
        late = await ask(engine.port, "/v1/completions", {"prompt": "x"})
        assert late.status == 500
        for capture, task in zip(captures, tasks, strict=True):
            assert_same_shape(capture, await task)
        await engine.wait_for(lambda e: e.is_dead)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await send_one(engine.port, request_bytes("/health", method="GET", close=False))
        engine.restart()
        assert (await ask(engine.port, "/health", method="GET")).status == 200


async def test_keep_alive_comments() -> None:
    capture = load_vllm_capture("completions/stream-sse-keepalive")
    async with running(replace(SINGLE, sse_keepalive_interval_s=0.02)) as engine, asyncio.TaskGroup() as group:
        engine.freeze()
        task = group.create_task(send_one(engine.port, capture.request))
        await engine.wait_for(lambda e: e.running == 1)
        await engine.wait_for(lambda e: e.log.requests[0].written_bytes > 250 + 2 * len(b"e\r\n: keep-alive\n\n\r\n"))
        engine.thaw()
        raw = await task
        assert_same_shape(capture, raw)
        answer = parse_answer(raw)
        assert answer is not None
        assert answer.chunks[:2] == [b": keep-alive\n\n"] * 2


async def test_stop_string() -> None:
    capture = load_vllm_capture("completions/stop-string")
    async with running(SINGLE) as engine:
        body = {**json.loads(capture.body), "stop": None}
        text = (await ask(engine.port, "/v1/completions", body)).json()["choices"][0]["text"]
        raw = await send_one(engine.port, capture.with_json(stop=[text[3:5]]))
        assert_same_shape(capture, raw)
        answer = parse_answer(raw)
        assert answer is not None
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (text[: text.index(text[3:5])], text[3:5])

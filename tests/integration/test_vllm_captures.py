"""Every captured answer of a real vLLM 0.32.0 on its way through the gateway.

Status and body are the engine's own, byte for byte, but for the ids. What differs on purpose is in one table.
"""

import json
import re
from collections.abc import AsyncIterator
from urllib.parse import unquote

import pytest

from gateway.routes import ROUTES
from tests.fakes.replay_engine import (
    CapturedAnswer,
    ReplayEngine,
    captured_answer,
    pieces_of,
    random_pieces,
    vllm_ids,
    vllm_replay_engine,
)
from tests.fakes.replaying import Differs, Setup
from tests.fakes.running import running_gateway
from tests.fakes.wire import Answer
from tests.simulator.wire import VLLM_CAPTURES, Capture, load_vllm_capture

UNREADABLE = Differs(400, "invalid_request", "a body that is no JSON object reaches no engine")
INTERNAL_FIELD = Differs(400, "invalid_request", "a client's own kv_transfer_params kill a decode server")
NO_RANK = Differs(400, "invalid_request", "ranks are the gateway's to choose, so it says which there are")
NO_MODEL = Differs(404, "model_not_found", "the name chooses the pool, and none has it")
ENGINE_ERROR = Differs(502, "engine_error", "an engine's 500 is a 502 here, with the engine's words", is_sent=True)
ERROR_FIRST = Differs(502, "engine_error", "an error event that comes first becomes a status", is_sent=True)
NO_BYTES = Differs(503, "unavailable", "no byte came", is_sent=True)


def _line(name: str) -> list[str]:
    return load_vllm_capture(name).request.split(b"\r\n", 1)[0].decode().split(" ")


def _path(name: str) -> str:
    return ([*_line(name), ""])[1]


EVERY = sorted(str(path.relative_to(VLLM_CAPTURES).with_suffix("")) for path in VLLM_CAPTURES.rglob("*.resp"))
ALL = [name for name in EVERY if _path(name) in ROUTES]
WITH_HANDOFF = [name for name in ALL if b'"kv_transfer_params"' in load_vllm_capture(name).request]

EXCEPTIONS: dict[str, Differs] = {
    **dict.fromkeys(WITH_HANDOFF, INTERNAL_FIELD),
    "errors/bad-json": UNREADABLE,
    "errors/empty-body": UNREADABLE,
    "errors/token-id-negative": Differs(400, "invalid_request", "it kills SGLang, so it is refused for every engine"),
    "errors/unknown-model": NO_MODEL,
    "errors/unknown-model-chat-stream": NO_MODEL,
    "headers/x-request-id-on-error": NO_MODEL,
    "headers/dp-rank-5": NO_RANK,
    "headers/dp-rank-junk": NO_RANK,
    "dp2/rank2-out-of-range": NO_RANK,
    "errors/method-not-allowed": Differs(405, "method_not_allowed", "the gateway's own refusal"),
    "engine-death/unary-completions": ENGINE_ERROR,
}
# The same requests without the field that clients may not send: what is left different.
WITHOUT_HANDOFF: dict[str, Differs | None] = {
    **dict.fromkeys(WITH_HANDOFF),
    "pd/fail-d-side-404": NO_MODEL,
    "pd/fail-flat-block-ids": ENGINE_ERROR,
    "pd/fail-missing-block-ids": ENGINE_ERROR,
    "pd/fail-missing-remote-request-id": NO_BYTES,
    "pd/fail-only-flag": ENGINE_ERROR,
    "pd/fail-prefill-node-dead": ENGINE_ERROR,
    "pd/fail-prefill-node-dead-stream": ERROR_FIRST,
}
# Not forwarded: what the gateway answers by itself, asks engines itself, or does not serve.
NOT_FORWARDED = {
    "/inference/v1/generate": 30,
    "/inference/v1/abort_requests": 2,
    "/v1/models": 2,
    "/kv_event_sources": 2,
    "/health": 1,
    "/ping": 1,
    "/load": 1,
    "/version": 1,
    "/is_sleeping": 1,
    "/reset_prefix_cache": 1,
    "/v1/chat/completions/render": 1,
    "/v1/completions/render": 1,
    "/v1/nope": 1,
    "": 1,  # /health of a dead engine, captured without its request
}
# How a stream ended that did not end well; the bytes are the engine's all the same.
OUTCOMES = {
    "abort/chat-stream-before-first-token": "aborted",
    "abort/chat-stream-by-response-id": "aborted",
    "abort/chat-stream-usage-before-first-token": "aborted",
    "abort/chat-unary-before-first-token": "aborted",
    "abort/completions-stream-before-first-token": "aborted",
    "abort/completions-stream-by-engine-id": "aborted",
    "abort/completions-stream-usage-before-first-token": "aborted",
    "abort/completions-unary-before-first-token": "aborted",
    "abort/completions-unary-by-engine-id": "aborted",
    "engine-death/stream-chat": "engine_error",
    "engine-death/stream-completions": "engine_error",
}


@pytest.fixture(scope="module")
async def single(anyio_backend: object) -> AsyncIterator[Setup]:
    """An engine with one rank and an alias."""
    async with vllm_replay_engine() as engine, running_gateway(engine.url) as gateway:
        yield Setup(engine, gateway)


@pytest.fixture(scope="module")
async def two_ranks(anyio_backend: object) -> AsyncIterator[Setup]:
    """An engine with two ranks and an adapter."""
    async with vllm_replay_engine(has_two_ranks=True) as engine, running_gateway(engine.url) as gateway:
        yield Setup(engine, gateway)


@pytest.fixture
def setup(name: str, single: Setup, two_ranks: Setup) -> Setup:
    """The pair that stands for the server that the capture came from."""
    return two_ranks if name.startswith("dp2/") else single


def assert_engines_answer(got: Answer, answer: CapturedAnswer) -> None:
    """The client has the engine's bytes, under the id that it knows."""
    assert got.status == answer.status
    assert got.body == answer.with_ids(vllm_ids(answer, unquote(got.headers["x-request-id"])))
    assert got.is_whole
    kept = {name: value for name, value in answer.headers if name not in ("date", "server", "x-request-id")}
    assert {name: got.headers[name] for name in kept} == kept


def assert_differs(got: Answer, differs: Differs, answer: CapturedAnswer | None) -> None:
    """The client has the answer that the table says."""
    assert got.status == differs.status
    assert got.headers["content-type"] == "application/json"
    assert got.is_whole
    error = got.json()["error"]
    assert (error["type"], error["code"]) == (differs.type, differs.status)
    assert error["request_id"] == got.headers["x-request-id"]
    if differs in (ENGINE_ERROR, ERROR_FIRST):
        assert answer is not None
        assert error["message"] == json.loads(answer.events[0])["error"]["message"]


def assert_sent(engine: ReplayEngine, setup: Setup, capture: Capture) -> None:
    """The engine got the client's body, an id of the gateway's, the rank that was asked for, and no client's key."""
    assert engine.bodies == [json.loads(capture.body)]
    (head,) = engine.heads
    assert re.fullmatch("[0-9a-f]{32}", head["x-request-id"])
    assert "authorization" not in head
    asked = re.search(rb"(?i)\r\nx-data-parallel-rank: (\d)", capture.request)
    has_ranks = capture.name.startswith("dp2/")
    assert ("x-data-parallel-rank" in head) is has_ranks
    if asked is not None and has_ranks:
        assert head["x-data-parallel-rank"] == asked[1].decode()


@pytest.mark.parametrize("name", ALL)
async def test_captured_request(name: str, setup: Setup) -> None:
    capture = load_vllm_capture(name)
    answer = captured_answer(capture)
    got = await setup.replay(capture, answer, random_pieces(name))
    differs = EXCEPTIONS.get(name)
    if differs is not None:
        assert_differs(got, differs, answer)
        assert len(setup.engine.bodies) == int(differs.is_sent)
        return
    assert answer is not None
    assert_engines_answer(got, answer)
    assert_sent(setup.engine, setup, capture)
    assert setup.outcome == OUTCOMES.get(name, "complete" if answer.status == 200 else "rejected")


@pytest.mark.parametrize(
    "name", [name for name in ALL if name.startswith("headers/x-request-id") and "on-error" not in name]
)
async def test_a_client_that_named_its_request_reads_the_captured_bytes(name: str, setup: Setup) -> None:
    capture = load_vllm_capture(name)
    answer = captured_answer(capture)
    assert answer is not None
    got = await setup.replay(capture, answer, random_pieces(name))
    assert got.body == answer.body


@pytest.mark.parametrize("name", WITH_HANDOFF)
async def test_captured_request_without_a_handoff(name: str, setup: Setup) -> None:
    capture = load_vllm_capture(name)
    request = {key: value for key, value in json.loads(capture.body).items() if key != "kv_transfer_params"}
    answer = captured_answer(capture)
    got = await setup.replay(capture, answer, random_pieces(name), json.dumps(request).encode())
    differs = WITHOUT_HANDOFF[name]
    if differs is not None:
        assert_differs(got, differs, answer)
        # One that gets no byte on a kept connection is sent once more on a new one.
        assert len(setup.engine.bodies) in ((1, 2) if differs is NO_BYTES else (int(differs.is_sent),))
    else:
        assert answer is not None
        assert_engines_answer(got, answer)


@pytest.mark.parametrize("name", ["completions/n2-stream", "chat/stream-usage", "completions/stream-sse-keepalive"])
@pytest.mark.parametrize("size", [1, 5, 33, 511, 100_000])
async def test_framing_makes_no_difference(name: str, size: int, setup: Setup) -> None:
    capture = load_vllm_capture(name)
    answer = captured_answer(capture)
    assert answer is not None
    got = await setup.replay(capture, answer, pieces_of(size))
    assert_engines_answer(got, answer)


@pytest.mark.parametrize("name", ["chat/stream", "completions/unary"])
async def test_an_engine_that_closes_without_a_byte_is_told_as_unavailable(name: str, setup: Setup) -> None:
    got = await setup.replay(load_vllm_capture(name), None, pieces_of(1))
    assert_differs(got, NO_BYTES, None)
    assert got.headers["retry-after"] == "1"


def test_every_capture_is_accounted_for() -> None:
    left: dict[str, int] = {}
    for name in EVERY:
        if name not in ALL:
            left[_path(name)] = left.get(_path(name), 0) + 1
    assert left == NOT_FORWARDED
    assert set(EXCEPTIONS) | set(OUTCOMES) <= set(ALL)
    assert set(WITHOUT_HANDOFF) == set(WITH_HANDOFF)
    assert len(ALL) > 130

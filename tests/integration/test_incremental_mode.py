"""``--upstream-mode incremental``: engines stream, unary clients get the document that the engine would have given."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.document import BUFFER_BYTES
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, Script, ScriptEngine, SeenRequest
from tests.fakes.wire import call, request_bytes, wire

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello there"}]
SAMPLING = {"max_new_tokens": 12, "temperature": 0}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True}
# Different in every run of the same request; and ``metadata``, the weights' versions, which SGLang's chunks leave out.
VARYING = {"id", "created", "metadata"}
VARYING_ENDS = ("_ts", "_time", "latency", "throughput")

NATIVE: dict[str, dict[str, Any]] = {
    "text": {"text": "hello"},
    "ids": {"input_ids": [5, 6, 7]},
    "no length": {"text": "hello", "sampling_params": {"max_new_tokens": 0}},
    "batch of texts": {"text": ["hello", "good", "day"]},
    "batch of ids": {"input_ids": [[5, 6, 7], [8, 9]]},
    "batch of one": {"input_ids": [[5, 6, 7]]},
    "samples": {"text": "hello", "sampling_params": {**SAMPLING, "n": 3}},
    "samples of a batch": {"text": ["hello", "good"], "sampling_params": {**SAMPLING, "n": 2}},
    "log-probabilities": {"text": "hello", **LOGPROBS},
    "log-probabilities of a batch": {"text": ["hello", "good"], **LOGPROBS},
    "stream false": {"text": "hello", "stream": False},
}
OPENAI: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": USER, "max_tokens": 9}),
    "chat with samples": (CHAT, {"messages": USER, "max_tokens": 9, "n": 3}),
    "completion": (COMPLETIONS, {"prompt": "hello", "max_tokens": 9}),
    "completion of ids": (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 9}),
    "batch of completions": (COMPLETIONS, {"prompt": ["hello", "good", "day"], "max_tokens": 9}),
    "batch of id lists": (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 9}),
    "samples of a batch": (COMPLETIONS, {"prompt": ["hello", "good"], "max_tokens": 9, "n": 2}),
    "log-probabilities": (COMPLETIONS, {"prompt": "hello", "max_tokens": 9, "logprobs": 2}),
    "a stream that is false": (COMPLETIONS, {"prompt": "hello", "max_tokens": 9, "stream": False}),
}


def lasting(value: Any) -> Any:
    """What is the same in every run of a request: all but ids and times."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key not in VARYING}
        return {key: lasting(one) for key, one in kept.items() if not key.endswith(VARYING_ENDS)}
    return [lasting(one) for one in value] if isinstance(value, list) else value


KINDS = {
    "cumulative": EngineOptions(inter_token_ms=0.2),
    "incremental": EngineOptions(inter_token_ms=0.2, incremental_streaming_output=True),
    "vllm": EngineOptions(inter_token_ms=0.2, engine="vllm"),
}


@pytest.fixture(scope="module", params=list(KINDS))
async def simulated(request: pytest.FixtureRequest, anyio_backend: object) -> AsyncIterator[SimulatedEngine]:
    """An engine whose streams are of one kind."""
    engine = SimulatedEngine(KINDS[request.param])
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(scope="module")
async def folding(simulated: SimulatedEngine) -> AsyncIterator[RunningGateway]:
    """A gateway that folds, in front of ``simulated``."""
    async with running_gateway(simulated.url, upstream_mode="incremental") as running:
        yield running


@pytest.fixture(scope="module")
async def folding_scripts(shared_engine: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """A gateway that folds, in front of the scripted engine."""
    async with running_gateway(shared_engine.url, upstream_mode="incremental") as running:
        yield running


@pytest.fixture
async def folds(folding_scripts: RunningGateway, scripted: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """The same, with no records; at the end nothing may be left of any request."""
    folding_scripts.records.clear()
    yield folding_scripts
    await folding_scripts.settle()


async def assert_same(front: RunningGateway, engine: SimulatedEngine, path: str, body: dict[str, Any]) -> None:
    """The gateway's answer is the engine's own unary one, although the engine was asked for a stream."""
    direct = ("127.0.0.1", engine.port)
    await call(direct, path, body)  # from here on the prompt is cached for both
    expected = await call(direct, path, body)
    assert expected.status == 200
    engine.log.clear()
    front.records.clear()
    answer = await call(front.address, path, {**body, "rid": "mine"})
    (seen,) = engine.log.requests_to(path)
    assert json.loads(seen.body or b"")["stream"] is True
    assert seen.header("accept") == "text/event-stream"
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["content-length"] == str(len(answer.body))
    assert lasting(answer.json()) == lasting(expected.json())
    record = await front.record()
    assert (record.outcome, record.stream) == ("complete", False)
    assert record.completion_tokens is not None


@pytest.mark.parametrize("name", list(NATIVE))
async def test_a2_3_native_answers_are_the_engines_own(
    folding: RunningGateway, simulated: SimulatedEngine, name: str
) -> None:
    body = {"sampling_params": SAMPLING, **NATIVE[name]}
    if simulated.options.engine == "vllm":
        pytest.skip("translated, and asked for as their client asks: test_native_on_vllm.py")
    await assert_same(folding, simulated, "/generate", body)
    await folding.settle()


@pytest.mark.parametrize("name", list(OPENAI))
async def test_a2_3_openai_answers_are_the_engines_own(
    folding: RunningGateway, simulated: SimulatedEngine, name: str
) -> None:
    path, body = OPENAI[name]
    await assert_same(folding, simulated, path, {"model": "model", "seed": 1, **body})
    await folding.settle()


async def test_ids_are_the_clients(folding: RunningGateway, simulated: SimulatedEngine) -> None:
    if simulated.options.engine == "vllm":
        return
    one = await call(folding.address, "/generate", {"text": "a", "rid": "mine", "sampling_params": SAMPLING})
    assert one.json()["meta_info"]["id"] == "mine"
    batch = {"text": ["a", "b"], "rid": "mine", "sampling_params": SAMPLING}
    many = (await call(folding.address, "/generate", batch)).json()
    assert [item["meta_info"]["id"] for item in many] == ["mine_0", "mine_1"]


async def test_streams_stay_streams(folding: RunningGateway, simulated: SimulatedEngine) -> None:
    body = {"model": "model", "prompt": "hello", "max_tokens": 5, "stream": True}
    answer = await call(folding.address, COMPLETIONS, body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.events()[-1] == b"[DONE]"


# What stays unary.


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "a", "return_flat_raw_output_top_logprobs": True}),
        (CHAT, {"messages": USER, "logprobs": True}),
        (CHAT, {"messages": USER, "return_meta_info": True}),
        (CHAT, {"messages": USER, "return_token_ids": True}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": USER}),
        ("/v1/score", {"query": "a", "items": ["b"]}),
        ("/tokenize", {"prompt": "a"}),
    ],
)
async def test_what_no_stream_tells_stays_unary(
    folds: RunningGateway, scripted: ScriptEngine, path: str, body: dict[str, Any]
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b'{"as":"it is"}')

    scripted.script = script
    answer = await call(folds.address, path, body)
    assert (answer.status, answer.body) == (200, b'{"as":"it is"}')
    (seen,) = scripted.requests
    assert json.loads(seen.body).get("stream") is not True
    assert seen.header("accept") == "application/json"


# Errors, breaks and leaving.


def native_event(request: SeenRequest, text: str, **meta: Any) -> bytes:
    """One cumulative event."""
    return json.dumps({"text": text, "output_ids": [1], "meta_info": {"id": request.rid, **meta}}).encode()


def failing(event: bytes | None, how: str) -> Script:
    """A stream that fails behind its first event, with an event of its own or without."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(native_event(request, "a"))
        if event is not None:
            await reply.event(event)
        if how == "done":
            await reply.event(b"[DONE]")
        if how in ("done", "end"):
            await reply.end_chunked()
        else:
            getattr(reply, how)()

    return script


ABORTED_400 = b'{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"no","status_code":400}}}'


@pytest.mark.parametrize(
    ("event", "status", "outcome"),
    [
        (b'{"error":{"message":"no","code":400}}', 400, "rejected"),
        (b'{"error":{"message":"no","code":429}}', 429, "overloaded"),
        (b'{"error":{"message":"no","code":503}}', 503, "engine_error"),
        (b'{"error":{"message":"no","code":500}}', 502, "engine_error"),
        (ABORTED_400, 400, "rejected"),
        (ABORTED_400.replace(b"400", b"500"), 502, "engine_error"),
    ],
)
async def test_an_engines_error_has_its_true_status_however_late(
    folds: RunningGateway, scripted: ScriptEngine, event: bytes, status: int, outcome: str
) -> None:
    scripted.script = failing(event, "done")
    answer = await call(folds.address, "/generate", {"text": "a"})
    assert (answer.status, answer.json()["error"]["message"]) == (status, "no")
    record = await folds.record()
    assert (record.outcome, record.status) == (outcome, status)


async def test_an_engines_refusal_passes(folding: RunningGateway, simulated: SimulatedEngine) -> None:
    body = {"model": "model", "prompt": "a", "max_tokens": 5, "temperature": -1}
    direct = await call(("127.0.0.1", simulated.port), COMPLETIONS, body)
    answer = await call(folding.address, COMPLETIONS, body)
    assert answer.status == direct.status == 400
    assert b"temperature" in answer.body


@pytest.mark.parametrize("how", ["end", "close", "reset"])
async def test_a_cut_stream_is_a_502(folds: RunningGateway, scripted: ScriptEngine, how: str) -> None:
    scripted.script = failing(None, how)
    answer = await call(folds.address, "/generate", {"text": "a"})
    assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")
    assert (await folds.record()).outcome in ("truncated", "engine_error")


@pytest.mark.parametrize("payload", [b"nonsense", b"[1]", b'{"text":', b'{"index":7,"meta_info":{}}'])
async def test_events_of_another_shape_are_a_502(folds: RunningGateway, scripted: ScriptEngine, payload: bytes) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(payload)
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    answer = await call(folds.address, "/generate", {"text": ["a", "b"]})
    assert answer.status == 502
    assert (await folds.record()).outcome == "engine_error"


async def test_a_client_that_leaves_closes_the_stream_without_an_abort(
    folds: RunningGateway, scripted: ScriptEngine
) -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(native_event(request, "a"))
        begun.set()
        await reply.gone()
        closed.set()

    scripted.script = script
    async with wire(folds.address) as connection, asyncio.timeout(5):
        await connection.send(request_bytes("/generate", {"text": "a"}))
        await begun.wait()
        connection.close()
        await closed.wait()
    record = await folds.record()
    assert (record.outcome, record.status) == ("client_closed", 499)
    await folds.settle()
    assert scripted.aborted == []


async def test_an_abort_gives_the_partial_answer() -> None:
    engine = SimulatedEngine(EngineOptions(inter_token_ms=5))
    await engine.start()
    try:
        async with running_gateway(engine.url, upstream_mode="incremental") as front, asyncio.TaskGroup() as group:
            body = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 10_000, "ignore_eos": True}}
            asked = group.create_task(call(front.address, "/generate", body))
            await until(lambda: engine.running == 1, "the request runs")
            answer = await call(front.address, "/abort_request", {"rid": "mine"})
            assert answer.json()["aborted"] == ["mine"]
            partial = (await asked).json()
            assert partial["meta_info"]["finish_reason"]["type"] == "abort"
            assert (await front.record()).outcome == "aborted"
    finally:
        await engine.stop()


# In match mode: what the engine sends decides.


async def test_a2_15_a_stream_for_a_unary_request_is_folded(front: RunningGateway, scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for text in ("a", "ab", "abc"):
            await reply.event(native_event(request, text))
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", {"text": "hi", "rid": "mine"})
    assert json.loads(scripted.requests[0].body).get("stream") is None
    assert scripted.requests[0].header("accept") == "application/json"
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == {"text": "abc", "output_ids": [1], "meta_info": {"id": "mine"}}


async def test_a2_15_chunks_for_a_unary_chat_are_folded(front: RunningGateway, scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for text in ("a", "bc"):
            await reply.event(b'{"id":"x","choices":[{"index":0,"delta":{"content":"%b"}}]}' % text.encode())
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, CHAT, {"messages": USER})
    assert answer.status == 200
    assert answer.json()["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"])
async def test_a2_15_a_stream_where_none_can_be_folded_is_a_502(
    front: RunningGateway, scripted: ScriptEngine, path: str
) -> None:
    scripted.script = failing(None, "done")
    answer = await call(front.address, path, {"input": "a", "messages": USER, "rid": "r"})
    assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_protocol")


@pytest.mark.parametrize("stream", [False, True])
async def test_a2_15_html_is_a_502(front: RunningGateway, scripted: ScriptEngine, stream: bool) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b"<html>hi</html>", content_type="text/html")

    scripted.script = script
    answer = await call(front.address, "/generate", {"text": "hi", "stream": stream})
    assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_protocol")
    assert b"html>" not in answer.body


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a2_15_a_reset_inside_a_short_answer_is_a_502(
    front: RunningGateway, scripted: ScriptEngine, how: str
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.head("Content-Type: application/json", "Content-Length: 1000")
        await reply.raw(b'{"text":"half')
        getattr(reply, how)()

    scripted.script = script
    answer = await call(front.address, "/generate", {"text": "hi"})
    assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")


async def test_a2_15_and_case_37_a_reset_inside_a_long_answer_cuts_the_connection(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    begun = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.head("Content-Type: application/json", f"Content-Length: {3 * BUFFER_BYTES}")
        await reply.raw(b'{"text":"' + b"x" * 2 * BUFFER_BYTES)
        await begun.wait()
        reply.reset()

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", {"text": "hi"}))
        status, headers = await connection.head()
        begun.set()
        answer = await connection.body(status, headers)
    assert status == 200
    assert not answer.is_whole
    assert (await front.record()).outcome == "truncated"

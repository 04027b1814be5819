"""How answers end on the routes whose streams have end events of their own, and what the log says of it."""

import json
from typing import Any

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.replay_engine import captured_answer
from tests.fakes.running import PATIENCE_S, RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, Script, ScriptEngine, SeenRequest
from tests.fakes.wire import Answer, call, request_bytes, wire
from tests.simulator.wire import load_capture

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hi"},
    CHAT: {"messages": USER},
    COMPLETIONS: {"prompt": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 5},
    RESPONSES: {"input": "hi"},
}
STREAMED = list(BODIES)
NAMED = [MESSAGES, RESPONSES]


def named(name: str, **fields: Any) -> bytes:
    """One event with a name."""
    payload = json.dumps({"type": name, **fields}, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (name.encode(), payload)


def response(status: str, **fields: Any) -> dict[str, Any]:
    """A response object."""
    usage = {"input_tokens": 18, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 7, "total_tokens": 25}
    return {"id": "resp_1", "status": status, "output": [], "usage": usage, **fields}


BEGIN: dict[str, list[bytes]] = {
    "/generate": [b'data: {"text":"a","meta_info":{"id":"x"}}\n\n'],
    CHAT: [b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'],
    COMPLETIONS: [b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'],
    MESSAGES: [
        named("message_start", message={"id": "msg_1", "usage": {"input_tokens": 18, "output_tokens": 0}}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": '"usage":{"input_tokens":99'}),
    ],
    RESPONSES: [
        named("response.created", response=response("in_progress", usage=None)),
        named("response.output_text.delta", delta="a", sequence_number=1),
    ],
}
END: dict[str, list[bytes]] = {
    MESSAGES: [named("message_delta", delta={}, usage={"output_tokens": 7}), named("message_stop")],
    RESPONSES: [named("response.completed", response=response("completed"))],
}
FAILED = named("response.failed", response=response("failed", error={"code": "server_error", "message": "it broke"}))
INCOMPLETE = named("response.incomplete", response=response("incomplete"))
MESSAGES_ERROR = named("error", error={"type": "api_error", "message": "it broke"})
RESPONSES_ERROR = named("error", code="server_error", message="it broke", param=None, sequence_number=2)


def streamed(events: list[bytes], how: str = "end", *, at_once: bool = False) -> Script:
    """A stream of these events, which then ends in that way."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for event in [b"".join(events)] if at_once and events else events:
            await reply.chunk(event)
        if how == "end":
            await reply.end_chunked()
        else:
            getattr(reply, how)()

    return script


def whole(body: dict[str, Any] | bytes) -> Script:
    """A unary answer."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode())

    return script


async def asked(front: RunningGateway, path: str, *, stream: bool = True) -> Answer:
    """Ask with the usual body of a route."""
    return await call(front.address, path, {**BODIES[path], "stream": stream}, headers={"X-Request-Id": "mine"})


# Ends as they should be.


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("path", NAMED)
async def test_streams_end_by_their_own_events_with_usage_in_the_log(
    front: RunningGateway, scripted: ScriptEngine, path: str, at_once: bool
) -> None:
    events = BEGIN[path] + END[path]
    scripted.script = streamed(events, at_once=at_once)
    answer = await asked(front, path)
    assert answer.body == b"".join(events)
    assert answer.is_whole
    record = await front.record()
    assert (record.outcome, record.status) == ("complete", 200)
    cached = 16 if path == RESPONSES else None
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (18, 7, cached)


@pytest.mark.parametrize("stream", [False, True])
async def test_case_35_incomplete_responses_pass_unchanged(
    front: RunningGateway, scripted: ScriptEngine, stream: bool
) -> None:
    body = json.dumps(response("incomplete", incomplete_details={"reason": "max_output_tokens"})).encode()
    scripted.script = streamed([*BEGIN[RESPONSES], INCOMPLETE]) if stream else whole(body)
    answer = await asked(front, RESPONSES, stream=stream)
    assert answer.body == (b"".join([*BEGIN[RESPONSES], INCOMPLETE]) if stream else body)
    assert (await front.record()).outcome == "complete"


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_responses_pass_and_count_as_the_engines_error(
    front: RunningGateway, scripted: ScriptEngine, stream: bool
) -> None:
    body = response("failed", error={"code": "server_error", "message": "it broke"})
    scripted.script = streamed([*BEGIN[RESPONSES], FAILED]) if stream else whole(body)
    answer = await asked(front, RESPONSES, stream=stream)
    assert answer.status == 200
    assert answer.body == b"".join([*BEGIN[RESPONSES], FAILED]) if stream else answer.json() == body
    record = await front.record()
    assert record.outcome == "engine_error"
    assert (record.prompt_tokens, record.completion_tokens) == (18, 7)


async def test_a_failed_item_of_a_response_is_no_failed_response(front: RunningGateway, scripted: ScriptEngine) -> None:
    scripted.script = whole(response("completed", output=[{"type": "mcp_call", "status": "failed"}]))
    assert (await asked(front, RESPONSES, stream=False)).status == 200
    assert (await front.record()).outcome == "complete"


@pytest.mark.parametrize(("path", "error"), [(MESSAGES, MESSAGES_ERROR), (RESPONSES, RESPONSES_ERROR)])
@pytest.mark.parametrize("how", ["end", "close"])
async def test_case_31_an_engines_own_error_event_is_the_end(
    front: RunningGateway, scripted: ScriptEngine, path: str, error: bytes, how: str
) -> None:
    scripted.script = streamed([*BEGIN[path], error], how)
    answer = await asked(front, path)
    assert answer.body == b"".join([*BEGIN[path], error])
    assert answer.is_whole
    record = await front.record()
    assert (record.outcome, record.status, record.error) == ("engine_error", 200, "it broke")


@pytest.mark.parametrize("name", ["responses", "responses_stream", "messages", "messages_stream"])
async def test_case_121_a_real_engines_answers_are_byte_equal(
    front: RunningGateway, scripted: ScriptEngine, name: str
) -> None:
    captured = captured_answer(load_capture(f"http/{name}"))
    assert captured is not None
    path = MESSAGES if name.startswith("messages") else RESPONSES
    scripted.script = streamed([captured.body]) if captured.is_stream else whole(captured.body)
    answer = await asked(front, path, stream=captured.is_stream)
    assert answer.body == captured.body
    record = await front.record()
    assert (record.outcome, record.prompt_tokens) == ("complete", 18)
    assert (
        record.completion_tokens == {"responses": 2, "responses_stream": 1, "messages": 4, "messages_stream": 3}[name]
    )


# Ends that are none.


def error_event_of(answer: Answer, path: str) -> dict[str, Any]:
    """The error in the last event, whose shape is the route's own, behind the events that came before."""
    before = b"".join(BEGIN[path])
    assert answer.body.startswith(before)
    tail = answer.body[len(before) :]
    if path not in NAMED:
        error, done = tail.removesuffix(b"\n\n").split(b"\n\n")
        assert done == b"data: [DONE]"
        inner = json.loads(error.removeprefix(b"data: "))["error"]
        assert set(inner) == {"message", "type", "code", "param", "request_id"}
        return dict(inner)
    assert b"[DONE]" not in tail
    name, payload = tail.removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: error"
    event = json.loads(payload.removeprefix(b"data: "))
    assert event["type"] == "error"
    if path == RESPONSES:
        assert set(event) == {"type", "code", "message", "param"}
        return {"message": event["message"], "type": event["code"]}
    assert set(event["error"]) == {"type", "message"}
    assert event["request_id"] == "mine"
    return dict(event["error"])


@pytest.mark.parametrize("how", ["close", "end"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("path", STREAMED)
async def test_case_28_a_cut_stream_ends_with_the_routes_own_error_event(
    front: RunningGateway, scripted: ScriptEngine, path: str, inside: bool, how: str
) -> None:
    scripted.script = streamed([*BEGIN[path], *([b'event: x\ndata: {"a'] if inside else [])], how)
    answer = await asked(front, path)
    assert (answer.status, answer.is_whole) == (200, True)
    assert error_event_of(answer, path)["type"] == "engine_error"
    record = await front.record()
    assert (record.outcome, record.status) == ("truncated", 200)
    if path == MESSAGES:
        assert record.prompt_tokens == 18


@pytest.mark.parametrize("path", NAMED)
async def test_an_end_marker_is_no_end_event(front: RunningGateway, scripted: ScriptEngine, path: str) -> None:
    scripted.script = streamed([*BEGIN[path], b"data: [DONE]\n\n"])
    answer = await asked(front, path)
    assert error_event_of(answer, path)
    assert (await front.record()).outcome == "truncated"


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("path", NAMED)
async def test_an_end_marker_behind_the_end_event_is_left_out(
    front: RunningGateway, scripted: ScriptEngine, path: str, at_once: bool
) -> None:
    events = BEGIN[path] + END[path]
    scripted.script = streamed([*events, b"data: [DONE]\n\n"], at_once=at_once)
    assert (await asked(front, path)).body == b"".join(events)
    assert (await front.record()).outcome == "complete"


@pytest.mark.parametrize("path", NAMED)
async def test_the_switch_for_the_end_marker_changes_nothing_here(scripted: ScriptEngine, path: str) -> None:
    scripted.script = streamed(BEGIN[path])
    async with running_gateway(scripted.url, sse_done_after_error=False) as front:
        assert error_event_of(await asked(front, path), path)


@pytest.mark.parametrize("how", ["close", "end", "reset"])
@pytest.mark.parametrize("path", STREAMED)
async def test_case_29_a_stream_without_an_event_has_a_true_status(
    front: RunningGateway, scripted: ScriptEngine, path: str, how: str
) -> None:
    scripted.script = streamed([], how)
    answer = await asked(front, path)
    assert answer.status == 502
    assert answer.json()["error"]["type"] == "engine_error"
    assert (await front.record()).outcome == "engine_error"


@pytest.mark.parametrize("path", STREAMED)
async def test_case_29_a_unary_answer_that_is_cut_is_a_502(
    front: RunningGateway, scripted: ScriptEngine, path: str
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.head("Content-Type: application/json", "Content-Length: 100")
        await reply.raw(b'{"id":"x","usa')
        reply.close()

    scripted.script = script
    answer = await asked(front, path, stream=False)
    assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")
    assert (await front.record()).outcome == "engine_error"


# Usage and words of unary answers.


@pytest.mark.parametrize(
    ("path", "body", "usage"),
    [
        (MESSAGES, {"id": "msg_1", "usage": {"input_tokens": 3, "output_tokens": 4}}, (3, 4, None)),
        (RESPONSES, response("completed"), (18, 7, 16)),
        (CHAT, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, (3, 4, None)),
        (COMPLETIONS, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}}, (5, 6, None)),
        ("/generate", {"meta_info": {"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 2}}, (5, 6, 2)),
    ],
)
async def test_usage_of_unary_answers(
    front: RunningGateway, scripted: ScriptEngine, path: str, body: dict[str, Any], usage: tuple[int | None, ...]
) -> None:
    scripted.script = whole(body)
    assert (await asked(front, path, stream=False)).json() == body
    record = await front.record()
    assert record.outcome == "complete"
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == usage


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_case_41_usage_of_streams(front: RunningGateway, scripted: ScriptEngine, path: str) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"total_tokens":11,"completion_tokens":6}}\n\n'
    scripted.script = streamed([*BEGIN[path], usage, b"data: [DONE]\n\n"])
    answer = await call(
        front.address, path, {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
    )
    assert answer.body == b"".join([*BEGIN[path], usage, b"data: [DONE]\n\n"])
    assert json.loads(scripted.requests[0].body)["stream_options"] == {"include_usage": True}
    record = await front.record()
    assert (record.outcome, record.prompt_tokens, record.completion_tokens) == ("complete", 5, 6)


@pytest.mark.parametrize("reason", ["error", "abort", "never heard of", {"type": "odd"}, None, "length"])
@pytest.mark.parametrize("stream", [False, True])
async def test_cases_109_and_119_any_finish_reason_passes(
    front: RunningGateway, scripted: ScriptEngine, reason: Any, stream: bool
) -> None:
    calls = [{"index": 1, "id": "c", "function": {"name": "f", "arguments": '{"a": "tru'}}]
    key = "delta" if stream else "message"
    payload = json.dumps({"choices": [{"index": 0, key: {"tool_calls": calls}, "finish_reason": reason}]}).encode()
    scripted.script = streamed([b"data: " + payload + b"\n\n", b"data: [DONE]\n\n"]) if stream else whole(payload)
    answer = await asked(front, CHAT, stream=stream)
    assert answer.body == (b"data: " + payload + b"\n\ndata: [DONE]\n\n" if stream else payload)


async def test_an_aborted_response_ends_at_once_under_its_public_id() -> None:
    # SGLang takes the id of a response in request_id, and aborts by it.
    engine = SimulatedEngine(EngineOptions(inter_token_ms=20))
    await engine.start()
    try:
        async with running_gateway(engine.url) as gateway, wire(gateway.address) as connection:
            body = {"model": "model", "input": "a", "max_output_tokens": 5000, "ignore_eos": True}
            await connection.send(request_bytes("/v1/responses", body, headers={"X-Request-Id": "mine"}))
            await engine.wait_for(lambda e: e.running == 1, PATIENCE_S)
            told = await call(gateway.address, "/abort_request", {"rid": "mine"})
            assert told.json()["aborted"] == ["mine"]
            answer = await connection.answer()
            assert (answer.status, answer.json()["id"]) == (200, "resp_mine")
            assert len([entry for entry in engine.log.aborts if entry.source == "request"]) == 1
    finally:
        await engine.stop()

"""vLLM's ids, aborts, disconnects, ranks and keys, as measured on a real server."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.simulator.conftest import StartEngine
from tests.simulator.vllm_requests import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    abort,
    body,
    finishes,
    frozen,
    open_request,
    started,
)
from tests.simulator.wire import ask

# -- ids and aborts --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_the_header_beats_the_body_and_both_beat_a_new_id(start_engine: StartEngine, path: str) -> None:
    engine = await started(start_engine)
    key = "request_id" if path == GENERATE else "id"
    named = await ask(engine.port, path, body(path, 1, request_id="B"), X_Request_Id="H")
    inside = await ask(engine.port, path, body(path, 1, request_id="B"))
    fresh = await ask(engine.port, path, body(path, 1))
    assert named.json()[key].endswith("-H")
    assert inside.json()[key].endswith("-B")
    assert re.fullmatch(r"[a-z-]+-[0-9a-f]{16}", fresh.json()[key])
    assert dict(named.headers)["x-request-id"] == "H"
    assert re.fullmatch(r"[0-9a-f]{32}", dict(fresh.headers)["x-request-id"])


async def test_no_id_header_without_the_option(start_engine: StartEngine) -> None:
    engine = await started(start_engine, enable_request_id_headers=False)
    answer = await ask(engine.port, CHAT, body(CHAT, 1), X_Request_Id="H")
    assert "x-request-id" not in dict(answer.headers)


@pytest.mark.parametrize("name", ["X", "cmpl-X", "cmpl-X-", "cmpl-X-00", "", "cmpl"])
async def test_an_abort_matches_exactly(start_engine: StartEngine, name: str) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    _, writer = await open_request(engine, COMPLETIONS, body(COMPLETIONS), X_Request_Id="X")
    await engine.wait_for(frozen(1))
    await abort(engine, name)
    assert not engine.log.aborts[-1].is_accepted
    assert engine.running == 1
    await abort(engine, "cmpl-X-0")
    assert engine.running == 0
    writer.close()


async def test_one_prompt_of_a_batch(start_engine: StartEngine) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        fields = body(COMPLETIONS, 30, prompt=["a", "b", "c"])
        task = group.create_task(ask(engine.port, COMPLETIONS, fields, X_Request_Id="X"))
        await engine.wait_for(frozen(3, tokens=6))
        assert engine.log.requests[0].rids == ["cmpl-X-0", "cmpl-X-1", "cmpl-X-2"]
        await abort(engine, "cmpl-X-1", "nobody")
        engine.thaw()
    assert finishes(task.result()) == ["length", "abort", "length"]
    assert [entry.hit for entry in engine.log.aborts] == [("cmpl-X-1",), ()]


async def test_samples_go_with_their_prompt_and_namesakes_with_each_other(start_engine: StartEngine) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        two = group.create_task(ask(engine.port, CHAT, body(CHAT, 30, n=2), X_Request_Id="X"))
        one = group.create_task(ask(engine.port, CHAT, body(CHAT, 30), X_Request_Id="X"))
        await engine.wait_for(frozen(3))
        await abort(engine, "chatcmpl-X")
        assert engine.running == 0
    assert finishes(two.result()) == ["abort", "abort"]
    assert finishes(one.result()) == ["abort"]


@pytest.mark.parametrize(("path", "events"), [(COMPLETIONS, 0), (GENERATE, 1), (CHAT, 1)])
async def test_abort_before_the_first_token(start_engine: StartEngine, path: str, events: int) -> None:
    engine = await started(start_engine, max_running=1)
    engine.freeze()
    name = {COMPLETIONS: "cmpl-X-0", GENERATE: "generate-tokens-X", CHAT: "chatcmpl-X"}[path]
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(ask(engine.port, path, body(path, stream=True), X_Request_Id="X"))
        await engine.wait_for(lambda e: e.running == 1)
        unary = group.create_task(ask(engine.port, path, body(path), X_Request_Id="X"))
        await engine.wait_for(lambda e: e.waiting == 1)
        await abort(engine, name)
    found = stream.result().events()
    assert found[-1] == "[DONE]"
    assert len(found) == events + 1
    reason = "abort" if path == GENERATE else None
    assert all(event["choices"][0]["finish_reason"] == reason for event in found[:-1])
    assert unary.result().status == 200
    assert finishes(unary.result()) == ["abort"]
    assert unary.result().json()["usage"]["completion_tokens"] == 0


async def test_an_abort_adds_no_token(start_engine: StartEngine) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        fields = body(GENERATE, stream=True, stream_options={"include_usage": True})
        task = group.create_task(ask(engine.port, GENERATE, fields, X_Request_Id="X"))
        await engine.wait_for(frozen(1, tokens=5))
        await abort(engine, "generate-tokens-X")
    *tokens, last, usage, done = task.result().events()
    assert len(tokens) == engine.core.schedulers[0].totals.generated_tokens == usage["usage"]["completion_tokens"]
    assert (last["choices"][0]["token_ids"], last["choices"][0]["finish_reason"], done) == ([], "abort", "[DONE]")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True], ids=["close", "half-close"])
async def test_a_client_that_leaves(start_engine: StartEngine, path: str, stream: bool, half: bool) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    reader, writer = await open_request(engine, path, body(path, stream=stream))
    await engine.wait_for(frozen(1, tokens=2))
    if half:
        writer.write_eof()
    else:
        writer.close()
    await engine.wait_for(lambda e: not e.running)
    assert [(entry.source, bool(entry.hit)) for entry in engine.log.aborts] == [("disconnect", True)]
    assert engine.log.requests[0].ended == "client_closed"
    if half:
        await reader.read()
        writer.close()


async def test_a_client_that_leaves_takes_its_own_request_only(start_engine: StartEngine) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        _, writer = await open_request(engine, CHAT, body(CHAT, n=2), X_Request_Id="X")
        await engine.wait_for(lambda e: e.running == 2)
        task = group.create_task(ask(engine.port, CHAT, body(CHAT, 10), X_Request_Id="X"))
        await engine.wait_for(frozen(3))
        writer.close()
        await engine.wait_for(lambda e: e.running == 1)
        engine.thaw()
    assert finishes(task.result()) == ["length"]


async def test_inference_routes_need_their_option(start_engine: StartEngine) -> None:
    engine = await started(start_engine, enable_scale_out=False)
    for path in (GENERATE, "/inference/v1/abort_requests"):
        answer = await ask(engine.port, path, {})
        assert (answer.status, answer.json()["error"]["type"]) == (403, "PermissionDeniedError")


# -- ranks and keys --------------------------------------------------------------------------------


async def test_ranks(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=3)
    for rank in ("2", "2", "0"):
        assert (await ask(engine.port, CHAT, body(CHAT, 1), X_data_parallel_rank=rank)).status == 200
    for _ in range(4):
        await ask(engine.port, CHAT, body(CHAT, 1), X_data_parallel_rank="x")
    assert [entry.dp_rank for entry in engine.log.requests] == [2, 2, 0, 0, 1, 2, 0]
    for rank in ("3", "-1"):
        answer = await ask(engine.port, CHAT, body(CHAT, 1), X_data_parallel_rank=rank)
        assert (answer.status, answer.json()["error"]["message"]) == (
            400,
            f"data_parallel_rank {rank} is out of range [0, 3).",
        )


@pytest.mark.parametrize(
    ("path", "method", "is_guarded"),
    [
        ("/v1/models", "GET", True),
        (CHAT, "POST", True),
        (GENERATE, "POST", True),
        ("/inference/v1/abort_requests", "POST", True),
        ("/health", "GET", False),
        ("/metrics", "GET", False),
        ("/tokenize", "POST", False),
        ("/pause", "POST", False),
        ("/v1/models", "OPTIONS", False),
    ],
)
async def test_the_key_guards_few_routes(start_engine: StartEngine, path: str, method: str, is_guarded: bool) -> None:
    engine = await started(start_engine, api_key="k", dev_mode=True)
    without = await ask(engine.port, path, {}, method=method)
    wrong = await ask(engine.port, path, {}, method=method, Authorization="Bearer other")
    right = await ask(engine.port, path, {}, method=method, Authorization="Bearer k")
    assert (without.status == 401) is (wrong.status == 401) is is_guarded
    assert right.status != 401
    if is_guarded:
        assert without.json() == {"error": "Unauthorized"}

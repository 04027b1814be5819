"""Unary requests for several samples, taken apart so that each can be aborted, and put together again."""

import asyncio
import json
from typing import Any

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import call, request_bytes, wire
from tests.integration.test_cancellation import AT_ONCE_S, aborts_of, running, simulated

LONG = {"max_new_tokens": 5000, "ignore_eos": True}


def bodies(engine: SimulatedEngine, path: str) -> list[dict[str, Any]]:
    """What the engine was sent on one route, in order of arrival."""
    return [json.loads(entry.body or b"") for entry in engine.log.requests_to(path)]


async def test_each_sample_is_a_request_with_its_own_id_and_seed(
    gateway: RunningGateway, engine: SimulatedEngine
) -> None:
    body = {"text": "hi", "rid": "R", "sampling_params": {"n": 3, "sampling_seed": 7, "max_new_tokens": 4}}
    answer = await call(gateway.address, "/generate", body)
    assert answer.status == 200
    assert [item["meta_info"]["id"] for item in answer.json()] == ["R_0", "R_1", "R_2"]
    seen = bodies(engine, "/generate")
    assert sorted(one["sampling_params"]["sampling_seed"] for one in seen) == [7, 8, 9]
    assert [one["sampling_params"]["n"] for one in seen] == [1, 1, 1]
    assert {one["text"] for one in seen} == {"hi"}
    rids = [one["rid"] for one in seen]
    assert len(set(rids)) == 3
    assert not any(rid.encode() in answer.body for rid in rids)
    record = await gateway.record()
    assert (record.outcome, record.attempts, sorted(record.engine_ids)) == ("complete", 1, sorted(rids))
    assert record.completion_tokens == 12


async def test_a_batch_stays_one_request_for_each_sample(gateway: RunningGateway, engine: SimulatedEngine) -> None:
    body = {"text": ["a", "b b"], "rid": "R", "sampling_params": {"n": 2, "max_new_tokens": 2}}
    answer = await call(gateway.address, "/generate", body)
    seen = bodies(engine, "/generate")
    assert [len(one["rid"]) for one in seen] == [2, 2]
    items = answer.json()
    assert [item["meta_info"]["id"] for item in items] == ["R_0", "R_1", "R_2", "R_3"]
    assert items[0]["meta_info"]["prompt_tokens"] == items[1]["meta_info"]["prompt_tokens"]
    assert items[1]["meta_info"]["prompt_tokens"] != items[2]["meta_info"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
    ],
)
async def test_openai_answers_are_one_object(
    gateway: RunningGateway, engine: SimulatedEngine, path: str, prompt: dict[str, Any]
) -> None:
    body = {**prompt, "n": 2, "max_tokens": 3, "seed": 1}
    answer = (await call(gateway.address, path, body, headers={"x-request-id": "R"})).json()
    assert (answer["id"], [choice["index"] for choice in answer["choices"]]) == ("R", [0, 1])
    one = (await call(gateway.address, path, {**body, "n": 1})).json()
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 2 * one["usage"]["completion_tokens"]
    assert list(answer) == list(one)
    assert len(engine.log.requests_to(path)) == 3


async def test_a3_13_all_samples_are_aborted_when_the_client_leaves() -> None:
    """Mutation tried: ``stop`` cancels the first leg only."""
    async with simulated() as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", {"text": "hi", "sampling_params": {"n": 3, **LONG}}))
            await running(engine, 3)
            connection.close()
            assert (await gateway.record()).outcome == "client_closed"
            await engine.wait_for(lambda e: e.running == 0, AT_ONCE_S)
            await gateway.settle()
        rids = [rid for entry in engine.log.requests_to("/generate") for rid in entry.rids]
        assert sorted(abort.rid for abort in aborts_of(engine)) == sorted(rids)


async def test_all_samples_or_one_of_them_can_be_aborted() -> None:
    async with simulated() as (engine, gateway), wire(gateway.address) as connection:
        body = {"text": "hi", "rid": "R", "sampling_params": {"n": 3, **LONG}}
        await connection.send(request_bytes("/generate", body))
        await running(engine, 3)
        report = (await call(gateway.address, "/abort_request", {"rid": "R_1"})).json()
        assert (report["aborted"], report["not_found"]) == (["R_1"], [])
        await running(engine, 2)
        assert (await call(gateway.address, "/abort_request", {"rid": "R"})).json()["aborted"] == ["R"]
        items = (await connection.answer()).json()
        assert [item["meta_info"]["finish_reason"]["type"] for item in items] == ["abort"] * 3
        assert (await gateway.record()).outcome == "aborted"
        assert (await call(gateway.address, "/abort_request", {"rid": "R_1"})).json()["not_found"] == ["R_1"]


async def test_one_item_of_all_samples_can_be_aborted() -> None:
    async with simulated() as (engine, gateway), wire(gateway.address) as connection:
        body = {"text": ["a", "b"], "rid": "R", "sampling_params": {"n": 2, **LONG}}
        await connection.send(request_bytes("/generate", body))
        await running(engine, 4)
        await call(gateway.address, "/abort_request", {"rid": "R_1"})
        await running(engine, 2)
        rids = [entry.rids[1] for entry in engine.log.requests_to("/generate")]
        assert {abort.rid for abort in aborts_of(engine)} == set(rids)
        await call(gateway.address, "/abort_request", {"rid": "R"})
        assert len((await connection.answer()).json()) == 4


async def test_one_busy_sample_takes_all_of_them_to_another_worker() -> None:
    first, second = SimulatedEngine(EngineOptions(inter_token_ms=5)), SimulatedEngine(EngineOptions())
    await first.start()
    await second.start()
    try:
        async with running_gateway(first.url, second.url, policy="round-robin") as gateway:
            await call(gateway.address, "/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 1}})
            busy, other = (second, first) if first.log.requests_to("/generate") else (first, second)
            busy.add_fault(at="headers", do="status:503", times=1)
            body = {"text": "hi", "sampling_params": {"n": 3, "max_new_tokens": 100, "ignore_eos": True}}
            answer = await call(gateway.address, "/generate", body)
            assert (answer.status, len(answer.json())) == (200, 3)
            await gateway.record(2)
            assert (gateway.records[1].attempts, len(set(gateway.records[1].engine_ids))) == (2, 6)
            assert len(busy.log.requests_to("/generate")) == 3
            assert len(other.log.requests_to("/generate")) == 1 + 3
            await busy.wait_for(lambda e: e.running == 0, AT_ONCE_S)
            await gateway.settle()
    finally:
        await first.stop()
        await second.stop()


async def _others_wait(scripted: ScriptEngine, front: RunningGateway, odd: bytes, *, status: int = 200) -> Any:
    """One of three samples gets an odd answer; the others are running until they are aborted."""
    first = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        if not first.is_set():
            first.set()
            await until(lambda: len(scripted.requests) == 3, "all samples")
            await reply.whole(odd, status=status)
            return
        await until(lambda: request.rid in scripted.aborted, "the abort")
        await reply.whole(b'{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}')

    scripted.script = script
    answer = await call(front.address, "/generate", {"text": "hi", "sampling_params": {"n": 3}})
    await front.settle()
    assert len(scripted.requests) == 3
    assert len(set(scripted.aborted)) == 2
    return answer


async def test_a_refusal_of_one_sample_is_the_requests(front: RunningGateway, scripted: ScriptEngine) -> None:
    answer = await _others_wait(scripted, front, b'{"error":{"message":"too long"}}', status=400)
    assert (answer.status, answer.json()["error"]["message"]) == (400, "too long")
    assert (await front.record()).outcome == "rejected"


async def test_a_malformed_answer_to_one_sample_fails_the_request(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b"[1")

    scripted.script = script
    body = {"messages": [], "n": 2}
    answer = await call(front.address, "/v1/chat/completions", body)
    assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_protocol")


async def test_the_answers_together_are_bounded() -> None:
    async with simulated(inter_token_ms=0.0) as (engine, _):
        engine.add_fault(at="headers", do="huge:3000", times=3)
        async with running_gateway(engine.url, max_response_bytes=8000) as gateway:
            answer = await call(gateway.address, "/generate", {"text": "hi", "sampling_params": {"n": 3}})
            assert (answer.status, answer.json()["error"]["type"]) == (502, "response_too_large")
            await gateway.settle()


@pytest.mark.parametrize(
    ("more", "options"),
    [
        pytest.param({}, {"native_n": True}, id="native n"),
        pytest.param({"stream": True}, {}, id="stream"),
        pytest.param({"session_params": None, "background": True}, {}, id="background"),
        pytest.param({}, {"upstream_mode": "incremental"}, id="streamed upstream"),
    ],
)
async def test_what_stays_one_request(more: dict[str, Any], options: dict[str, Any]) -> None:
    engine = SimulatedEngine(EngineOptions())
    await engine.start()
    try:
        async with running_gateway(engine.url, **options) as gateway:
            body = {"text": "hi", "rid": "R", "sampling_params": {"n": 2, "max_new_tokens": 3}, **more}
            answer = await call(gateway.address, "/generate", body)
            assert answer.status == 200
            assert [one["sampling_params"]["n"] for one in bodies(engine, "/generate")] == [2]
            assert b"R_0" in answer.body
            assert b"R_1" in answer.body
    finally:
        await engine.stop()


async def test_a3_13_children_of_a_stream_are_aborted_as_they_appear(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    """Mutation tried: only the ids that were known at the call are aborted; the second sample then runs on."""
    ids = ["a" * 32, "b" * 32]
    shown, other = asyncio.Event(), asyncio.Event()

    def event(index: int, finish: bytes = b"null") -> bytes:
        return b'{"text":"x","meta_info":{"id":"%b","finish_reason":%b},"index":%d}' % (
            ids[index].encode(),
            finish,
            index,
        )

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="text/event-stream")
        await reply.event(event(0))
        shown.set()
        await until(lambda: ids[0] in scripted.aborted, "the abort of the first")
        assert ids[1] not in scripted.aborted
        await reply.event(event(1))
        other.set()
        await until(lambda: ids[1] in scripted.aborted, "the abort of the second")
        for index in range(2):
            await reply.event(event(index, b'{"type":"abort","message":"Aborted"}'))
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    async with wire(front.address) as connection, asyncio.timeout(PATIENCE_S):
        body = {"text": "hi", "rid": "R", "stream": True, "sampling_params": {"n": 2}}
        await connection.send(request_bytes("/generate", body))
        await shown.wait()
        report = await call(front.address, "/abort_request", {"rid": "R"})
        assert report.json()["aborted"] == ["R"]
        answer = await connection.answer()
    assert [json.loads(one)["meta_info"]["id"] for one in answer.events()[:-1]] == ["R_0", "R_1", "R_0", "R_1"]
    assert (await front.record()).outcome == "aborted"
    assert set(scripted.aborted) == set(ids)

"""Reported faults that trainers and readers of tokens would meet, each as the experiment that would show it here.

Named by the number of the case, like those of ``test_field_cases``.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.api import fan_out
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call, request_bytes, wire

LONG: dict[str, Any] = {"text": "a", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}


@asynccontextmanager
async def simulated(
    count: int, *, gateway: Any = None, **options: Any
) -> AsyncIterator[tuple[RunningGateway, list[SimulatedEngine]]]:
    """A gateway with settings ``gateway`` in front of simulated engines that take their time."""
    async with AsyncExitStack() as stack:
        engines = [SimulatedEngine(EngineOptions(**{"inter_token_ms": 20, **options})) for _ in range(count)]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        urls = [engine.url for engine in engines]
        yield await stack.enter_async_context(running_gateway(*urls, **(gateway or {}))), engines


async def stream_events(reply: Reply, *payloads: bytes) -> None:
    """Write a whole stream."""
    await reply.start_chunked()
    for payload in payloads:
        await reply.event(payload)
    await reply.event(b"[DONE]")
    await reply.end_chunked()


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_field_case_34_an_abort_stays_an_abort(
    front: RunningGateway, scripted: ScriptEngine, is_stream: bool
) -> None:
    ending = (
        b'{"text":"par", "output_ids":[7,8],"meta_info":{"id":"%b","finish_reason":'
        b'{"type":"abort","message":"Abort all","status_code":null},"completion_tokens":2}}'
    )

    async def script(request: SeenRequest, reply: Reply) -> None:
        last = ending % request.rid.encode()
        if is_stream:
            await reply.start_chunked()
            await reply.event(b'{"text":"pa","output_ids":[7],"meta_info":{"id":"%b"}}' % request.rid.encode())
        await until(lambda: bool(scripted.aborted), "the abort")
        if is_stream:
            await reply.event(last)
            await reply.event(b"[DONE]")
            await reply.end_chunked()
        else:
            await reply.whole(last)

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", {"text": "a", "rid": "mine", "stream": is_stream}))
        await until(lambda: bool(scripted.requests), "the request")
        report = await call(front.address, "/abort_request", {"abort_all": True})
        assert (report.status, report.json()["aborted"]) == (200, ["mine"])
        answer = await connection.answer()
    assert answer.status == 200
    assert (answer.events()[-2] if is_stream else answer.body) == ending % b"mine"
    assert (await front.record()).outcome == "aborted"


async def test_field_case_44_log_probabilities_keep_every_byte(front: RunningGateway, scripted: ScriptEngine) -> None:
    item = (
        b'{"output_ids": [5],"text":"a","meta_info":{"zz":{"b":1,"a":null},"id":"%b","input_token_logprobs":'
        b"[[null,1,null],[-1e-07,2,null],[-0.0,3,null],[-0.10000000000000000555,4,null]],"
        b'"input_top_logprobs":[null,[[-1.50,2,null]]],"output_top_logprobs":[],"unknown":18446744073709551617}}'
    )

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b"[%b, %b]" % tuple(item % rid.encode() for rid in request.rids))

    scripted.script = script
    body = {
        **{"input_ids": [[1, 2], [3]], "rid": "mine", "return_logprob": True},
        **{"logprob_start_len": 0, "top_logprobs_num": 1},
    }
    answer = await call(front.address, "/generate", body)
    assert answer.body == b"[%b, %b]" % (item % b"mine_0", item % b"mine_1")
    assert json.loads(scripted.requests[0].body)["logprob_start_len"] == 0


@pytest.mark.parametrize("ids", [([7], [8], [9]), ([7], [7, 8], [7, 8, 9])], ids=["disjoint", "cumulative"])
async def test_field_case_46_ids_and_log_probabilities_are_not_joined(
    front: RunningGateway, scripted: ScriptEngine, ids: tuple[list[int], ...]
) -> None:
    """Log-probabilities are cumulative in both."""
    all_logprobs = [[-0.5, 7, None], [-0.25, 8, None], [-0.125, 9, None]]

    def events(rid: str) -> list[bytes]:
        metas = [{"id": rid, "output_token_logprobs": all_logprobs[: at + 1]} for at in range(3)]
        return [
            json.dumps({"output_ids": one, "meta_info": meta}).encode() for one, meta in zip(ids, metas, strict=True)
        ]

    async def script(request: SeenRequest, reply: Reply) -> None:
        await stream_events(reply, *events(request.rid))

    scripted.script = script
    body = {"input_ids": [1], "rid": "mine", "return_logprob": True, "stream": True}
    assert (await call(front.address, "/generate", body)).events() == [*events("mine"), b"[DONE]"]


async def test_field_case_47_large_arrays_are_not_written_anew(front: RunningGateway, scripted: ScriptEngine) -> None:
    """Neither as objects nor flat, with many at once; an encoder would spell them in another way."""
    flat = b'{"meta_info":{"id":"x"} ,"flat" : [' + b", ".join([b"-1.50e+00"] * 30_000) + b"]}"
    objects = b'{"id":"x","choices":[{"logprobs":{"content":[' + b", ".join([b'{"logprob" :-0.50}'] * 15_000) + b"]}}]}"

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(flat if request.path == "/generate" else objects)

    scripted.script = script
    async with asyncio.TaskGroup() as group:
        native = [group.create_task(call(front.address, "/generate", {"text": "a"})) for _ in range(16)]
        chats = [group.create_task(call(front.address, "/v1/chat/completions", {"messages": []})) for _ in range(16)]
    assert {task.result().body for task in native} == {flat}
    assert {task.result().body for task in chats} == {objects}


async def test_field_case_100_a_request_that_timed_out_can_be_sent_again_under_its_id() -> None:
    live: set[str] = set()

    async def script(request: SeenRequest, reply: Reply) -> None:
        if request.rid in live:
            await reply.whole(b'{"error":{"message":"already running"}}', status=400)
            return
        live.add(request.rid)
        if len(live) == 1:
            await until(lambda: request.rid in engine.aborted, "the abort")
            await reply.gone()  # it never ends by itself
        else:
            await reply.whole(b'{"meta_info":{"id":"%b"}}' % request.rid.encode())

    async with (
        script_engine(script) as engine,
        running_gateway(engine.url, request_timeout_s=0.5 * TIME_SCALE) as front,
    ):
        body = {"text": "a", "rid": "mine"}
        assert (await call(front.address, "/generate", body)).status == 504
        again = await call(front.address, "/generate", body)
        assert (again.status, again.json()["meta_info"]["id"]) == (200, "mine")
        first, second = (request.rid for request in engine.requests)
        assert engine.aborted[0] == first != second


async def test_field_case_118_calls_of_tools_keep_their_numbers(front: RunningGateway, scripted: ScriptEngine) -> None:
    pieces = [(0, "a", '{"at":'), (0, None, '"Ulm"}'), (1, "b", '{"at": '), (1, None, '"Bonn"}')]
    deltas: list[Any] = [{"role": "assistant", "content": "I look"}]
    for index, name, arguments in pieces:
        function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
        deltas.append({"tool_calls": [{"index": index, "type": "function", "function": function}]})

    def events(rid: str) -> list[bytes]:
        chunks = [{"id": rid, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        end = {"id": rid, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        return [json.dumps(chunk).encode() for chunk in [*chunks, end]]

    async def script(request: SeenRequest, reply: Reply) -> None:
        await stream_events(reply, *events(request.rid))

    scripted.script = script
    body = {"messages": [], "rid": "mine", "stream": True}
    answer = await call(front.address, "/v1/chat/completions", body)
    assert answer.events() == [*events("mine"), b"[DONE]"]
    written = {0: "", 1: ""}
    for event in answer.events()[1:5]:
        (one,) = json.loads(event)["choices"][0]["delta"]["tool_calls"]
        written[one["index"]] += one["function"]["arguments"]
    assert [json.loads(text) for text in written.values()] == [{"at": "Ulm"}, {"at": "Bonn"}]


@pytest.mark.parametrize("sent", [{"abort_all_requests": False}, {}], ids=["told not to abort", "the engines' default"])
async def test_field_case_134_a_new_version_aborts_what_the_trainer_wants(sent: dict[str, bool]) -> None:
    async with simulated(2) as (gateway, engines), AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(wire(gateway.address)) for _ in range(2)]
        body = {**LONG, "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}, "stream": True}
        for stream in streams:
            await stream.send(request_bytes("/generate", body))
            await stream.head()
        raw = json.dumps({"new_version": "7", **sent}, indent=1).encode()
        answer = await call(gateway.address, "/update_weight_version", raw)
        assert (answer.status, [one["status"] for one in answer.json()["results"]]) == (200, [200, 200])
        for engine in engines:
            (seen,) = engine.log.requests_to("/update_weight_version")
            assert seen.body == raw
        for stream in streams:
            *_, last, done = (await stream.body(200, {"transfer-encoding": "chunked"})).events()
            kind = json.loads(last)["meta_info"]["finish_reason"]["type"]
            assert (kind, done) == ("length" if sent else "abort", b"[DONE]")


async def test_field_case_136_ids_are_free_again_after_an_abort_of_all() -> None:
    """Those that have waited in the engine too."""
    settings = {"max_in_flight_per_worker": 3}
    async with simulated(1, gateway=settings, max_running=1) as (gateway, (engine,)):

        async def run(rid: str, tokens: int) -> Answer:
            parameters = {"max_new_tokens": tokens, "ignore_eos": True}
            return await call(gateway.address, "/generate", {"text": rid, "rid": rid, "sampling_params": parameters})

        for tokens, kind in ((5000, "abort"), (2, "length")):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run(f"r{at}", tokens)) for at in range(3)]
                if kind == "abort":
                    await engine.wait_for(lambda e: (e.running, e.waiting) == (1, 2))
                    assert (await call(gateway.address, "/abort_request", {"abort_all": True})).status == 200
            metas = [task.result().json()["meta_info"] for task in tasks]
            assert [(meta["id"], meta["finish_reason"]["type"]) for meta in metas] == [
                (f"r{at}", kind) for at in range(3)
            ]


async def test_field_case_137_each_worker_of_a_fan_out_has_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fan_out.LIMITS_S, "/flush_cache", 0.3 * TIME_SCALE)
    async with simulated(3) as (gateway, engines):
        engines[1].add_fault(at="headers", do="status:400", match={"path": "/flush_cache"})
        engines[2].add_fault(at="headers", do="hang", match={"path": "/flush_cache"})
        answer = await call(gateway.address, "/flush_cache", {})
        results = {one["worker_id"]: one["status"] for one in answer.json()["results"]}
        ids = [engine.url.removeprefix("http://") for engine in engines]
        assert (answer.status, results) == (207, dict(zip(ids, (200, 400, 504), strict=True)))
        assert [len(engine.log.requests_to("/flush_cache")) for engine in engines] == [1, 1, 1]

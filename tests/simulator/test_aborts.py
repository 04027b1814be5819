"""The traps of cancelling on SGLang 0.5.23, as measured on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.wire import ask, parse_answer, request_bytes, send


def body(rid: Any = None, tokens: int = 400, **more: Any) -> dict[str, Any]:
    return {"text": "abc", "rid": rid, "sampling_params": {"max_new_tokens": tokens, **more.pop("params", {})}, **more}


async def abort(engine: SimulatedEngine, **fields: Any) -> None:
    answer = await ask(engine.port, "/abort_request", fields)
    assert (answer.status, answer.body) == (200, b"")


async def open_request(engine: SimulatedEngine, fields: dict[str, Any]) -> asyncio.StreamWriter:
    """Send a request and leave its answer unread; the caller closes the writer."""
    _, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(request_bytes("/generate", fields))
    before = len(engine.log.requests)
    await engine.wait_for(lambda e: len(e.log.requests) > before)
    return writer


def frozen(running: int, tokens: int = 0) -> Callable[[SimulatedEngine], bool]:
    """Return a predicate: so many sequences run and tokens exist; time then stands still."""

    def is_reached(engine: SimulatedEngine) -> bool:
        if engine.running != running or engine.core.schedulers[0].totals.generated_tokens < tokens:
            return False
        engine.freeze()
        return True

    return is_reached


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("fields", [{}, {"rid": ""}, {"rid": "never"}, {"rid": "x", "prefix": True}])
async def test_an_abort_is_always_200_and_may_do_nothing(start_engine: StartEngine, fields: dict[str, Any]) -> None:
    engine = await start_engine(inter_token_ms=1)
    writer = await open_request(engine, body("x-1"))
    await abort(engine, **fields)
    assert not engine.log.aborts[-1].is_accepted
    assert engine.running == 1
    await close(writer)


async def test_an_abort_before_the_request_is_lost(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await abort(engine, rid="late")
    answer = await ask(engine.port, "/generate", body("late", 3))
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_live_id_takes_its_extensions_with_it(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(engine.port, "/generate", body(rid))) for rid in ("req-1", "req-10", "other")]
        await engine.wait_for(frozen(3))
        await abort(engine, rid="req-1")
        await abort(engine, rid="oth")
        engine.thaw()
        await engine.wait_for(lambda e: e.running == 1)
        assert set(engine.log.aborts[0].hit) == {"req-1", "req-10"}
        await abort(engine, abort_all=True)
    kinds = [task.result().json()["meta_info"]["finish_reason"]["message"] for task in tasks]
    assert kinds == ["Aborted"] * 3


async def test_partial_output_of_an_aborted_unary_call(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", body("u")))
        await engine.wait_for(frozen(1, tokens=5))
        await abort(engine, rid="u")
        engine.thaw()
    found = task.result().json()
    assert task.result().status == 200
    assert found["meta_info"]["finish_reason"]["status_code"] is None
    assert len(found["output_ids"]) == found["meta_info"]["completion_tokens"] >= 5


async def test_one_shot_flag_while_paused(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await ask(engine.port, "/pause_generation", {"mode": "in_place"})
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", body("p", 20)))
        await engine.wait_for(lambda e: e.held == 1)
        await abort(engine, rid="p")
        assert (engine.log.aborts[-1].is_accepted, engine.log.aborts[-1].hit) == (True, ())
        await ask(engine.port, "/continue_generation", {})
        await abort(engine, rid="p")
    assert task.result().json()["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


async def test_a_spent_flag_swallows_the_disconnect_too(start_engine: StartEngine) -> None:
    engine = await start_engine(dynamic_batch_tokenizer_ms=200, inter_token_ms=1)
    writer = await open_request(engine, body("s", 50, stream=True))
    await abort(engine, rid="s")
    await engine.wait_for(frozen(1))
    await close(writer)
    await engine.wait_for(lambda e: e.log.disconnects)
    engine.thaw()
    await engine.wait_for(lambda e: not e.running)
    assert engine.core.schedulers[0].totals.generated_tokens == 50
    assert [entry.is_accepted for entry in engine.log.aborts] == [True, False]


async def test_a_stream_closed_before_its_dispatch_never_runs(start_engine: StartEngine) -> None:
    engine = await start_engine()
    await ask(engine.port, "/pause_generation", {"mode": "in_place"})
    writer = await open_request(engine, body("c", stream=True))
    await close(writer)
    await engine.wait_for(lambda e: not e.held)
    await ask(engine.port, "/continue_generation", {})
    assert engine.core.schedulers[0].totals.generated_tokens == 0
    assert not engine.log.aborts


@pytest.mark.parametrize("params", [{}, {"n": 2}])
async def test_closing_a_stream_cancels_at_once(start_engine: StartEngine, params: dict[str, Any]) -> None:
    engine = await start_engine(inter_token_ms=1)
    writer = await open_request(engine, body("d", stream=True, params=params))
    await engine.wait_for(frozen(params.get("n", 1)))
    await close(writer)
    await engine.wait_for(lambda e: e.log.aborts)
    engine.thaw()
    await engine.wait_for(lambda e: not e.running)
    assert engine.core.schedulers[0].totals.generated_tokens < 400
    assert engine.log.requests[0].ended == "client_closed"
    assert {entry.source for entry in engine.log.aborts} == {"disconnect"}


async def test_closing_a_unary_call_is_noticed_late(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1, unary_disconnect_poll_s=0.05)
    writer = await open_request(engine, body("u"))
    await engine.wait_for(lambda e: e.running == 1)
    await close(writer)
    await engine.wait_for(lambda e: e.log.disconnects)
    assert not engine.log.aborts
    await engine.wait_for(lambda e: not e.running)
    entry = engine.log.aborts[0]
    assert entry.source == "disconnect"
    assert entry.at_s - engine.log.requests[0].received_s >= 0.045


async def test_the_late_abort_hits_a_reused_id(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1, late_abort_s=0.5)
    await ask(engine.port, "/generate", body("same", 2, stream=True))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", body("same")))
        await engine.wait_for(frozen(1))
        await engine.wait_for(lambda e: e.log.aborts)
        engine.thaw()
    assert task.result().json()["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert engine.log.aborts[-1].source == "late"


async def test_several_samples_have_ids_of_their_own(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", body("n2", 30, params={"n": 2})))
        await engine.wait_for(frozen(2))
        await abort(engine, rid="n2")
        ids = list(engine.log.requests[0].rids)
        await abort(engine, rid=ids[1])
        engine.thaw()
    ends = [item["meta_info"]["finish_reason"]["type"] for item in task.result().json()]
    assert ends == ["length", "abort"]
    assert "n2" not in ids


async def test_batch_ids(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    fields = {"text": ["a", "b"], "rid": "R", "sampling_params": {"max_new_tokens": 30}}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", fields))
        await engine.wait_for(frozen(2))
        await abort(engine, rid="R")
        assert not engine.log.aborts[-1].is_accepted
        await abort(engine, rid="R_0")
        engine.thaw()
    found = task.result().json()
    assert [item["meta_info"]["id"] for item in found] == ["R_0", "R_1"]
    assert [item["meta_info"]["finish_reason"]["type"] for item in found] == ["abort", "length"]


async def test_a_live_id_is_refused_in_both_forms(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    writer = await open_request(engine, body("dup"))
    unary = await ask(engine.port, "/generate", body("dup", 2))
    assert unary.json() == {"error": {"message": "Duplicate request ID detected: dup"}}
    stream = parse_answer(await send(engine.port, request_bytes("/generate", body("dup", 2, stream=True))))
    assert stream is not None
    assert (stream.status, stream.events()[0]["error"]["code"], stream.events()[1]) == (200, 400, "[DONE]")
    await close(writer)


async def test_pause_by_abort_ends_everything_first(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", body("a")))
        await engine.wait_for(lambda e: e.running == 1)
        assert (await ask(engine.port, "/pause_generation", {})).status == 200
        assert engine.running == 0
    assert task.result().json()["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert (await ask(engine.port, "/ready", method="GET")).status == 503
    assert (await ask(engine.port, "/ping", method="GET")).status == 200
    await ask(engine.port, "/continue_generation", {})
    assert (await ask(engine.port, "/ready", method="GET")).status == 200


@pytest.mark.parametrize(("mode", "message"), [("in_place", "Aborted"), ("retract", "Abort in waiting queue")])
async def test_abort_of_a_running_call_while_paused(start_engine: StartEngine, mode: str, message: str) -> None:
    engine = await start_engine(inter_token_ms=1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", body("r")))
        await engine.wait_for(frozen(1, tokens=3))
        engine.thaw()
        await ask(engine.port, "/pause_generation", {"mode": mode})
        await abort(engine, rid="r")
        if mode == "in_place":
            assert not task.done()
            await ask(engine.port, "/continue_generation", {})
    found = task.result().json()
    assert found["meta_info"]["finish_reason"]["message"] == message
    assert (found["output_ids"] == []) is (mode == "retract")

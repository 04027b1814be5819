"""Faults of other gateways in cancelling that users have reported, each as the experiment that would show it here.

Named by the number of the case. Case 4, every route in both modes, is ``test_cancel_matrix.py``.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import running
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import call, request_bytes, wire

# What the cases allow, for a loaded machine.
SECOND_S = 1.0 * TIME_SCALE
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def answer_of(rid: str, reason: str) -> bytes:
    """A native answer."""
    return b'{"text":"a","meta_info":{"id":"%b","finish_reason":{"type":"%b"}}}' % (rid.encode(), reason.encode())


async def leave_while_it_waits(gateway: RunningGateway, engine: ScriptEngine, **headers: str) -> None:
    """A unary chat whose client closes; the engine is told within a second, and nothing is left."""
    told_at: list[float] = []

    async def script(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: request.rid in engine.aborted or reply.is_gone, "the abort")
        told_at.append(time.monotonic())
        await reply.whole(b'{"choices":[]}')

    engine.script = script
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes("/v1/chat/completions", CHAT, headers=headers))
        await until(lambda: engine.requests != [], "the request")
        assert gateway.state()["in_flight_requests"] == 1
        left_at = time.monotonic()
        connection.close()
        record = await gateway.record()
        await gateway.settle()
    assert (str(record.outcome), record.status) == ("client_closed", 499)
    assert told_at[0] - left_at < SECOND_S


async def test_field_case_1_a_stopped_unary_call_stops_the_engine(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    await leave_while_it_waits(front, scripted)


async def test_field_case_2_an_engine_that_fills_every_buffer_is_closed(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    gone_at: list[float] = []
    event = b'{"text":"' + b"z" * 65_536 + b'"}'

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        try:
            while not reply.is_gone:
                await reply.event(event)
        finally:
            gone_at.append(time.monotonic())
        raise ConnectionError("it is closed")

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", {"text": "a", "stream": True}))
        await connection.head()
        for _ in range(3):
            await connection.chunk()
        left_at = time.monotonic()
        connection.reset()
        await until(lambda: gone_at != [], "the close")
    assert gone_at[0] - left_at < SECOND_S
    await until(lambda: front.gateway.services.client.active_connections == 0, "no connection is left", 2 * SECOND_S)


async def test_field_case_5_keys_and_logs_in_between_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("client\n")
    (tmp_path / "admin").write_text("admin\n")
    files: dict[str, Any] = {"api_key_file": tmp_path / "keys", "admin_api_key_file": tmp_path / "admin"}
    async with script_engine() as engine, running_gateway(engine.url, log_level="debug", **files) as gateway:
        await leave_while_it_waits(
            gateway, engine, Authorization="Bearer client", traceparent=f"00-{1:032x}-{1:016x}-01"
        )


async def test_field_case_7_an_abort_reaches_the_one_worker_that_runs_the_request() -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: any(request.rid in engine.aborted for engine in engines), "the abort")
        await reply.whole(answer_of(request.rid, "abort"))

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(script_engine(script)) for _ in range(3)]
        gateway = await stack.enter_async_context(running_gateway(*(engine.url for engine in engines)))
        connection = await stack.enter_async_context(wire(gateway.address))
        second = engines[1].url.removeprefix("http://")
        pinned = {"x-forebay-worker": second}
        await connection.send(request_bytes("/generate", {"text": "a", "rid": "X"}, headers=pinned))
        await until(lambda: engines[1].requests != [], "the request")
        unknown = await call(gateway.address, "/abort_request", {"rid": "Y"})
        report = await call(gateway.address, "/abort_request", {"rid": "X"})
        assert (await connection.answer()).status == 200
        assert unknown.json() == {"aborted": [], "not_found": ["Y"], "workers": []}
        workers = [{"id": second, "status": "told"}]
        assert (report.status, report.json()) == (200, {"aborted": ["X"], "not_found": [], "workers": workers})
        assert [len(engine.aborted) for engine in engines] == [0, 1, 0]


async def test_field_case_8_no_id_is_a_prefix_of_another(front: RunningGateway, scripted: ScriptEngine) -> None:
    release = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        def is_aborted() -> bool:
            return any(request.rid.startswith(rid) for rid in scripted.aborted)

        await until(lambda: release.is_set() or is_aborted(), "an end")
        await reply.whole(answer_of(request.rid, "abort" if is_aborted() else "stop"))

    scripted.script = script
    async with wire(front.address) as leaves, wire(front.address) as stays:
        await leaves.send(request_bytes("/generate", {"text": "a", "rid": "job-1"}))
        await stays.send(request_bytes("/generate", {"text": "a", "rid": "job-10"}))
        await until(lambda: len(scripted.requests) == 2, "both")
        leaves.close()
        await front.record()
        await until(lambda: front.state()["abort_tasks"] == 0, "the abort's end")
        release.set()
        meta = (await stays.answer()).json()["meta_info"]
    assert (meta["id"], meta["finish_reason"]["type"]) == ("job-10", "stop")
    assert len(set(scripted.aborted)) == 1


async def test_field_case_10_requests_may_share_their_ids(front: RunningGateway, scripted: ScriptEngine) -> None:
    live: set[str] = set()
    all_here = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        if request.rid in live:
            await reply.whole(b'{"error":{"message":"duplicate"}}', status=400)
            return
        live.add(request.rid)
        if len(live) == 5:
            all_here.set()
        await all_here.wait()
        await reply.whole(answer_of(request.rid, "stop"))

    scripted.script = script
    headers = {"x-request-id": "shared", "traceparent": f"00-{7:032x}-{7:016x}-01"}
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        tasks = [group.create_task(call(front.address, "/generate", {"text": "a"}, headers=headers)) for _ in range(5)]
    for task in tasks:
        answer = task.result()
        assert (answer.status, answer.json()["meta_info"]["id"]) == (200, "shared")
        assert answer.headers["x-request-id"] == "shared"
    assert {request.header("traceparent") for request in scripted.requests} == {headers["traceparent"]}
    assert [record.request_id for record in front.records] == ["shared"] * 5


async def test_field_case_11_a_late_abort_does_not_end_the_request_that_is_sent_again(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        if json.loads(request.body)["is_resent"]:
            await asyncio.sleep(0.06)  # until after the abort has had its effect
            reason = "abort" if request.rid in scripted.aborted else "stop"
        else:
            await until(lambda: request.rid in scripted.aborted, "the abort")
            await asyncio.sleep(0.05)  # aborts have their effect late
            reason = "abort"
        await reply.whole(answer_of(request.rid, reason))

    async def once(number: int) -> None:
        body = {"text": "a", "rid": f"X{number}"}
        async with wire(front.address) as first:
            await first.send(request_bytes("/generate", {**body, "is_resent": False}))
            await until(lambda: f"X{number}" in front.gateway.services.live.ids, "the request")
            await call(front.address, "/abort_request", {"rid": f"X{number}"})
            again = await call(front.address, "/generate", {**body, "is_resent": True})
            assert again.json()["meta_info"]["finish_reason"]["type"] == "stop"
            assert (await first.answer()).status in (200, 499)  # 499: aborted before it was written

    scripted.script = script
    for wave in range(10):
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(once(20 * wave + number))
    assert len({request.rid for request in scripted.requests}) == len(scripted.requests) >= 200


async def test_field_case_13_sessions_are_refused_where_the_next_turn_may_go_elsewhere() -> None:
    async with script_engine() as first, script_engine() as second, running_gateway(first.url, second.url) as gateway:
        answer = await call(gateway.address, "/generate", {"text": "a", "session_params": {"id": "s"}})
        assert (answer.status, answer.json()["error"]["type"]) == (400, "unsupported")
        assert first.requests + second.requests == []


async def test_field_case_14_a_client_that_leaves_is_no_error(
    front: RunningGateway, scripted: ScriptEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def errors() -> list[str]:
        text = (await front.client.get("/metrics")).text
        names = (
            'outcome="engine_error"',
            'outcome="truncated"',
            'outcome="timeout"',
            "forebay_abort_unconfirmed_total",
        )
        return [line for line in text.splitlines() if any(name in line for name in names)]

    before = await errors()
    with caplog.at_level(logging.DEBUG):
        await leave_while_it_waits(front, scripted)
    assert await errors() == before
    assert len(front.records) == 1
    assert [record for record in caplog.records if record.levelno > logging.INFO and "forebay" in record.name] == []


async def test_field_case_16_a_log_that_nobody_reads_keeps_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETFL, os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(write_fd, b"x" * 65_536):  # until it is full
            pass
    monkeypatch.setattr(running, "_null_fd", lambda: write_fd)
    try:
        async with script_engine() as engine, running_gateway(engine.url) as gateway:
            for _ in range(2):
                started = time.monotonic()
                assert (await call(gateway.address, "/generate", {"text": "a"})).status == 200
                assert time.monotonic() - started < SECOND_S
            await gateway.settle(SECOND_S)
    finally:
        os.close(read_fd)


async def test_field_case_17_many_cancelled_calls_leave_no_connection(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    count = 500

    async def hold(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: reply.is_gone or request.rid in scripted.aborted, "the end", 3 * PATIENCE_S)
        if reply.is_gone:
            raise ConnectionError("it is closed")
        await reply.whole(answer_of(request.rid, "abort"))

    async def leave(number: int) -> None:
        async with wire(front.address) as connection:
            await connection.send(request_bytes("/generate", {"text": "a", "stream": number % 2 == 0}))
            await asyncio.sleep(0.05)

    scripted.script = hold
    for wave in range(5):
        async with asyncio.timeout(3 * PATIENCE_S), asyncio.TaskGroup() as group:
            for number in range(count // 5):
                group.create_task(leave(number + wave))
    client = front.gateway.services.client
    await until(lambda: client.active_connections == 0, "no connection is busy", 3 * SECOND_S + PATIENCE_S)
    await front.settle()
    assert {str(record.outcome) for record in front.records} == {"client_closed"}
    started = time.monotonic()

    async def answer(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(answer_of(request.rid, "stop"))

    scripted.script = answer
    assert (await call(front.address, "/generate", {"text": "a"})).status == 200
    assert time.monotonic() - started < SECOND_S

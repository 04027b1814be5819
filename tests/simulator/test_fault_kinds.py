"""Every fault over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.wire import ask, parse_answer, request_bytes, send

UNARY = {"text": "abc", "sampling_params": {"max_new_tokens": 4}}
STREAM = {**UNARY, "stream": True}


async def raw(engine: SimulatedEngine, body: dict[str, Any]) -> bytes:
    return await send(engine.port, request_bytes("/generate", body))


async def hangs(engine: SimulatedEngine, body: dict[str, Any]) -> bytes:
    """Return what arrives before the answer stops."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(request_bytes("/generate", body))
    received = b""
    try:
        while True:
            async with asyncio.timeout(0.1):
                data = await reader.read(65536)
            assert data, "the connection was closed"
            received += data
    except TimeoutError:
        pass
    writer.close()
    await writer.wait_closed()
    return received


@pytest.mark.parametrize("body", [UNARY, STREAM], ids=["unary", "stream"])
class TestAtTheHead:
    async def test_reset(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="reset")
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(request_bytes("/generate", body))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        entry = engine.log.requests[0]
        assert (entry.ended, entry.connection_state, entry.faults) == ("fault", "reset", ["reset"])
        assert (await ask(engine.port, "/generate", body)).status == 200

    async def test_close(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="close")
        assert await raw(engine, body) == b""

    async def test_hang(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="hang")
        assert await hangs(engine, body) == b""
        assert engine.core.requests_total == 0

    async def test_status(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="status:429", body='{"slow":"down"}')
        answer = await ask(engine.port, "/generate", body)
        assert (answer.status, answer.json()) == (429, {"slow": "down"})

    async def test_garbage(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="garbage")
        received = await raw(engine, body)
        assert received
        assert not received.startswith(b"HTTP/")

    async def test_delay(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="delay:30")
        assert (await ask(engine.port, "/generate", body)).status == 200
        entry = engine.log.requests[0]
        assert entry.first_byte_s is not None
        assert entry.first_byte_s - entry.received_s >= 0.029

    async def test_abort_finish(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="abort_finish")
        answer = await ask(engine.port, "/generate", body)
        last = answer.events()[-2] if answer.is_stream else answer.json()
        assert last["meta_info"]["finish_reason"]["message"] == "Aborted"

    async def test_huge(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        engine.add_fault(at="headers", do="huge:3000000")
        answer = await ask(engine.port, "/generate", body)
        assert len(answer.body) == 3_000_000
        assert len(answer.json()["text"]) > 2_900_000

    async def test_restart(self, start_engine: StartEngine, body: dict[str, Any]) -> None:
        engine = await start_engine()
        before = engine.boot_id
        engine.add_fault(at="headers", do="restart")
        assert await raw(engine, body) == b""
        assert engine.boot_id != before
        assert (await ask(engine.port, "/generate", body)).status == 200


@pytest.mark.parametrize(("at", "events"), [("first_event", 0), ("event:2", 2), ("end", 4)])
class TestInAStream:
    async def test_reset(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="reset")
        answer = parse_answer(await raw(engine, STREAM))
        # A reset may overtake bytes that were sent before it.
        assert answer is None or len(answer.chunks) <= events
        assert engine.log.requests[0].events == events

    async def test_close(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="close")
        received = await raw(engine, STREAM)
        answer = parse_answer(received)
        assert answer is not None
        assert len(answer.chunks) == events
        assert not received.endswith(b"0\r\n\r\n")

    async def test_hang(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="hang")
        answer = parse_answer(await hangs(engine, STREAM))
        assert answer is not None
        assert len(answer.chunks) == events

    async def test_delay(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="delay:20")
        answer = await ask(engine.port, "/generate", STREAM)
        assert len(answer.events()) == 5
        assert answer.events()[-1] == "[DONE]"

    async def test_status(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="status:503")
        found = (await ask(engine.port, "/generate", STREAM)).events()
        assert (found[events]["error"]["code"], found[events + 1 :]) == (503, ["[DONE]"])

    async def test_garbage(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="garbage")
        answer = await ask(engine.port, "/generate", STREAM)
        assert len(answer.chunks) == 6
        with pytest.raises(json.JSONDecodeError):
            answer.events()

    async def test_huge(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="huge:2000000")
        answer = await ask(engine.port, "/generate", STREAM)
        assert [len(chunk) for chunk in answer.chunks].index(2_000_000) == events
        assert len(answer.events()) == 6

    async def test_restart(self, start_engine: StartEngine, at: str, events: int) -> None:
        engine = await start_engine()
        engine.add_fault(at=at, do="restart")
        await raw(engine, STREAM)
        assert engine.log.requests[0].ended == "restart"
        assert engine.open_exchanges == 0


async def test_abort_finish_in_a_stream(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    engine.add_fault(at="event:2", do="abort_finish")
    found = (await ask(engine.port, "/generate", {**STREAM, "sampling_params": {"max_new_tokens": 100}})).events()
    assert found[-2]["meta_info"]["finish_reason"]["message"] == "Aborted"
    assert len(found) == 5


@pytest.mark.parametrize(("at", "missing"), [("first_event", 0.4), ("end", 0.0)])
async def test_unary_bodies_are_cut(start_engine: StartEngine, at: str, missing: float) -> None:
    engine = await start_engine()
    engine.add_fault(at=at, do="close")
    answer = parse_answer(await raw(engine, UNARY))
    assert answer is not None
    promised = int(dict(answer.headers)["content-length"])
    assert 0 < len(answer.body) < promised * (1 - missing) + (missing == 0.0)
    engine.add_fault(at=at, do="delay:10")
    assert (await ask(engine.port, "/generate", UNARY)).json()["output_ids"]
    engine.add_fault(at=at, do="hang")
    assert b"content-length" in await hangs(engine, UNARY)
    engine.add_fault(at=at, do="status:500")
    assert (await ask(engine.port, "/generate", UNARY)).status == 500


@pytest.mark.parametrize("do", ["reset", "close", "garbage", "restart", "hang"])
async def test_at_connect(start_engine: StartEngine, do: str) -> None:
    engine = await start_engine()
    engine.add_fault(at="connect", do=do)
    if do == "hang":
        assert await hangs(engine, UNARY) == b""
    else:
        assert not (await raw(engine, UNARY)).startswith(b"HTTP/")
    assert not engine.log.requests
    assert (await ask(engine.port, "/generate", UNARY)).status == 200


async def test_delay_at_connect(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.add_fault(at="connect", do="delay:20")
    assert (await ask(engine.port, "/generate", UNARY)).status == 200


async def test_an_ignored_abort(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    engine.add_fault(at="abort", do="ignore", match={"rid": "x"})
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", {**UNARY, "rid": "x"}))
        await engine.wait_for(lambda e: e.running == 1)
        assert (await ask(engine.port, "/abort_request", {"rid": "x"})).status == 200
    assert task.result().json()["meta_info"]["finish_reason"]["type"] == "length"
    assert not engine.log.aborts
    assert len(engine.log.requests_to("/abort_request")) == 1


async def test_control_routes(start_engine: StartEngine) -> None:
    engine = await start_engine(api_key="secret")
    answer = await ask(engine.port, "/_fault", {"at": "headers", "do": "status:418", "times": 2})
    listed = [{"at": "headers", "do": "status:418", "times": 2, "match": {}}]
    assert (answer.status, answer.json()) == (200, {"faults": listed})
    assert (await ask(engine.port, "/_fault", method="GET")).json() == {"faults": listed}
    assert (await ask(engine.port, "/_fault", {"at": "x", "do": "y"})).status == 400
    assert (await ask(engine.port, "/_nothing", method="GET")).status == 404
    await ask(engine.port, "/generate", UNARY)
    log = (await ask(engine.port, "/_log", method="GET")).json()
    assert [(entry["path"], entry["status"]) for entry in log["requests"]] == [("/generate", 418)]
    assert log["requests"][0]["body_length"] == len(engine.log.requests[0].body or b"")
    await ask(engine.port, "/_reset", {})
    assert not engine.fault_list
    assert not engine.log.requests
    before = engine.boot_id
    assert (await ask(engine.port, "/_restart", {})).json()["random_seed"] == engine.boot_id != before


async def test_the_end_of_a_stream_without_done_is_its_last_event(start_engine: StartEngine) -> None:
    engine = await start_engine()
    engine.add_fault(at="end", do="close")
    body = {"model": "model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}
    received = await send(engine.port, request_bytes("/v1/messages", body))
    assert b"message_delta" in received
    assert b"message_stop" not in received

"""Requests past ASGI: bodies in pieces, clients that leave inside them, idle connections, and what is left behind."""

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator

import pytest

from backends.leg_events import Cause
from gateway.direct import DirectCycle
from gateway.exchange import Exchange
from gateway.relay import AnswerRelay
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import request_bytes, wire

BODY = {"text": "a", "rid": "mine"}
IDLE_S = 0.2 * TIME_SCALE


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_a_request_may_come_in_pieces(front: RunningGateway, size: int) -> None:
    raw = request_bytes("/generate", BODY)
    async with wire(front.address) as connection:
        for at in range(0, len(raw), size):
            await connection.send(raw[at : at + size])
            await asyncio.sleep(0)
        assert (await connection.answer()).status == 200
    assert (await front.record()).outcome == "complete"


@pytest.mark.parametrize("ends", ["close", "reset", "half-close"])
async def test_a_client_that_leaves_inside_its_body(front: RunningGateway, scripted: ScriptEngine, ends: str) -> None:
    raw = request_bytes("/generate", BODY)
    async with wire(front.address) as connection:
        await connection.send(raw[:-5])
        await until(lambda: len(front.gateway.services.live) == 1, "a request under way")
        if ends == "half-close":
            connection.writer.write_eof()
        else:
            connection.reset() if ends == "reset" else connection.close()
        record = await front.record()
    head_bytes = raw.index(b"\r\n\r\n") + 4
    assert (record.outcome, record.status, record.bytes_in) == ("client_closed", 499, len(raw) - 5 - head_bytes)
    assert not scripted.requests


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(scripted: ScriptEngine) -> None:
    async def slow(request: SeenRequest, reply: Reply) -> None:
        await asyncio.sleep(3 * IDLE_S)
        await reply.whole(b'{"text":"late"}')

    async with running_gateway(scripted.url) as front:
        front.server.config.timeout_keep_alive = IDLE_S  # type: ignore[assignment]
        scripted.script = slow
        async with wire(front.address) as connection:
            for _ in range(2):
                await connection.send(request_bytes("/generate", BODY))
                assert (await connection.answer()).status == 200
            answered_at = asyncio.get_running_loop().time()
            async with asyncio.timeout(PATIENCE_S):
                assert await connection.reader.read() == b""
            assert asyncio.get_running_loop().time() - answered_at > IDLE_S / 2


async def test_a_request_leaves_nothing_to_the_garbage_collector(front: RunningGateway) -> None:
    gc.collect()
    gc.disable()
    before = {id(one): one for one in gc.get_objects() if isinstance(one, Exchange | DirectCycle)}
    try:
        async with wire(front.address) as connection:
            for number in range(5):
                await connection.send(request_bytes("/generate", BODY))
                assert (await connection.answer()).status == 200
                await front.record(number + 1)
        await until(lambda: not front.server.server_state.connections, "no connection")
        await asyncio.sleep(0)
        after = [one for one in gc.get_objects() if isinstance(one, Exchange | DirectCycle)]
        assert not [one for one in after if id(one) not in before]
    finally:
        gc.enable()


# Answers in one piece, which no task waits for.


class Held:
    """A script whose answer waits for the test, and goes out in pieces that the gateway reads one by one."""

    def __init__(self, body: bytes = b'{"text":"b"}') -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.head_bytes = len(head)
        self.raw = head + body
        self.cuts: tuple[int, ...] = ()
        self.asked = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def __call__(self, request: SeenRequest, reply: Reply) -> None:
        self.asked.set()
        await self.may_go_on.wait()
        for begin, end in zip((0, *self.cuts), (*self.cuts, len(self.raw)), strict=True):
            await reply.raw(self.raw[begin:end])


@pytest.fixture
async def quick(scripted: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """A gateway with the client that can do it, whatever the other tests run with."""
    async with running_gateway(scripted.url, upstream_client="httptools") as front:
        yield front


async def test_no_task_waits_for_an_answer_in_one_piece(quick: RunningGateway, scripted: ScriptEngine) -> None:
    scripted.script = held = Held()
    async with wire(quick.address) as connection:
        for number in range(2):
            held.asked.clear()
            held.may_go_on.clear()
            await connection.send(request_bytes("/generate", BODY))
            await held.asked.wait()
            assert not quick.server.server_state.tasks
            held.may_go_on.set()
            answer = await connection.answer()
            assert (answer.status, answer.body) == (200, b'{"text":"b"}')
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["x-forebay-attempts"] == "1"
            record = await quick.record(number + 1)
            assert (record.outcome, record.attempts, record.bytes_out) == ("complete", 1, 12)


@pytest.mark.parametrize("cuts", [(5,), (-12,), (-5,), (20, -12, -3)], ids=["head", "between", "body", "all over"])
async def test_an_answer_in_pieces_is_the_same(
    quick: RunningGateway, scripted: ScriptEngine, cuts: tuple[int, ...]
) -> None:
    scripted.script = held = Held()
    held.cuts = tuple(at % len(held.raw) for at in cuts)
    held.may_go_on.set()
    async with wire(quick.address) as connection:
        for number in range(2):
            await connection.send(request_bytes("/generate", BODY))
            assert (await connection.answer()).body == b'{"text":"b"}'
            assert (await quick.record(number + 1)).outcome == "complete"


@pytest.mark.parametrize("cause", [Cause.SHUTDOWN, Cause.CLIENT_ABORT, Cause.WORKER_REMOVED])
async def test_a_request_without_a_task_can_be_stopped(
    quick: RunningGateway, scripted: ScriptEngine, cause: Cause
) -> None:
    scripted.script = held = Held()
    async with wire(quick.address) as connection:
        await connection.send(request_bytes("/generate", BODY))
        await held.asked.wait()
        for request in quick.gateway.services.live:
            request.stop(cause)
        answer = await connection.answer()
        assert (answer.status, "error" in json.loads(answer.body)) == (
            503 if cause is not Cause.CLIENT_ABORT else 499,
            True,
        )
        held.may_go_on.set()
        await connection.send(request_bytes("/generate", BODY))
        assert (await connection.answer()).status == 200
    assert [(await quick.record(number)).status for number in (1, 2)] == [answer.status, 200]


@pytest.mark.parametrize("ends", ["close", "reset", "half-close"])
async def test_a_client_may_leave_a_request_without_a_task(
    quick: RunningGateway, scripted: ScriptEngine, ends: str
) -> None:
    scripted.script = held = Held()
    async with wire(quick.address) as connection:
        await connection.send(request_bytes("/generate", BODY))
        await held.asked.wait()
        if ends == "half-close":
            connection.writer.write_eof()
        else:
            connection.reset() if ends == "reset" else connection.close()
        record = await quick.record()
        held.may_go_on.set()
    assert (record.outcome, record.status) == ("client_closed", 499)


async def test_requests_behind_one_without_a_task_have_their_turns(
    quick: RunningGateway, scripted: ScriptEngine
) -> None:
    scripted.script = held = Held()
    async with wire(quick.address) as connection:
        await connection.send(b"".join(request_bytes("/generate", {"text": "a", "rid": f"r{n}"}) for n in range(3)))
        await held.asked.wait()
        held.may_go_on.set()
        assert [(await connection.answer()).headers["x-request-id"] for _ in range(3)] == ["r0", "r1", "r2"]


async def test_a_fault_while_answering_is_told(
    quick: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "forebay.exchange"):
        patch.setattr(AnswerRelay, "answer_now", fails)
        async with wire(quick.address) as connection:
            await connection.send(request_bytes("/generate", BODY))
            assert (await connection.answer()).status == 500
    assert "a mistake of ours" in caplog.text
    assert (await quick.record()).outcome == "engine_error"

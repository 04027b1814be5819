"""Requests past ASGI: bodies in pieces, clients that leave inside them, idle connections, and what is left behind."""

import asyncio
import gc

import pytest

from gateway.direct import DirectCycle
from gateway.exchange import Exchange
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

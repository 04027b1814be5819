"""Requests that take too long: what the client is told, what the engine is told, and what is left."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import call, request_bytes, wire

LIMIT_S = 0.2 * TIME_SCALE
EVENT = b'{"text":"a","meta_info":{"id":"x"}}'


@asynccontextmanager
async def limited(engine_script: Any, **options: Any) -> AsyncIterator[tuple[ScriptEngine, RunningGateway]]:
    """An engine, and a gateway with time limits in front of it."""
    async with script_engine(engine_script) as engine, running_gateway(engine.url, **options) as gateway:
        yield engine, gateway
        await gateway.settle()


async def silent(request: SeenRequest, reply: Reply) -> None:
    """An engine that takes a request and never answers."""
    await reply.gone()


async def dribbling(request: SeenRequest, reply: Reply) -> None:
    """An engine that streams for ever."""
    await reply.start_chunked(content_type="text/event-stream")
    while not reply.is_gone:
        await reply.event(EVENT)
        await asyncio.sleep(LIMIT_S / 10)


async def stalling(request: SeenRequest, reply: Reply) -> None:
    """An engine that falls silent after its first event."""
    await reply.start_chunked(content_type="text/event-stream")
    await reply.event(EVENT)
    await reply.gone()


@pytest.mark.parametrize("limit", ["request_timeout_s", "first_token_timeout_s"])
async def test_field_case_107_a_stream_that_does_not_begin_is_a_504(limit: str) -> None:
    async with limited(silent, **{limit: LIMIT_S}) as (engine, gateway):
        answer = await call(gateway.address, "/generate", {"text": "a", "stream": True})
        assert (answer.status, answer.json()["error"]["type"]) == (504, "timeout")
        record = await gateway.record()
        assert (record.outcome, record.status, record.attempts) == ("timeout", 504, 1)
        assert engine.aborted == []  # a stream is told by closing


async def test_field_case_107_a_unary_request_is_aborted_at_its_limit() -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: request.rid in engine.aborted, "the abort")
        await reply.whole(b"{}")

    # Long enough for a loaded machine to have written the request by then; what is not written is not aborted.
    limit_s = 5 * LIMIT_S
    async with script_engine(script) as engine, running_gateway(engine.url, request_timeout_s=limit_s) as gateway:
        answer = await call(gateway.address, "/generate", {"text": "a"})
        assert (answer.status, answer.json()["error"]["type"]) == (504, "timeout")
        assert (await gateway.record()).outcome == "timeout"
        await gateway.settle()
        assert len(engine.aborted) == 1


@pytest.mark.parametrize(
    ("script", "options"),
    [
        pytest.param(dribbling, {"request_timeout_s": LIMIT_S}, id="request"),
        pytest.param(stalling, {"stall_timeout_s": LIMIT_S}, id="stall"),
    ],
)
async def test_a_stream_that_has_begun_ends_with_an_error_event(script: Any, options: dict[str, float]) -> None:
    async with limited(script, **options) as (_, gateway):
        answer = await call(gateway.address, "/generate", {"text": "a", "stream": True})
        assert answer.status == 200
        *events, error, done = answer.events()
        assert len(events) >= 1
        assert (json.loads(error)["error"]["type"], json.loads(error)["error"]["code"]) == ("timeout", 504)
        assert done == b"[DONE]"
        assert (await gateway.record()).outcome == "timeout"


async def test_a_stream_that_goes_on_is_not_stalled() -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="text/event-stream")
        for _ in range(20):
            await reply.event(EVENT)
            await asyncio.sleep(LIMIT_S / 5)
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    options: dict[str, Any] = {"stall_timeout_s": LIMIT_S, "first_token_timeout_s": 2 * LIMIT_S}
    async with limited(script, **options) as (_, gateway):
        answer = await call(gateway.address, "/generate", {"text": "a", "stream": True})
        assert len(answer.events()) == 21
        assert (await gateway.record()).outcome == "complete"


async def test_a_unary_answer_has_no_first_token_to_wait_for() -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await asyncio.sleep(2 * LIMIT_S)
        await reply.whole(b'{"text":"a","meta_info":{}}')

    async with limited(script, first_token_timeout_s=LIMIT_S, stall_timeout_s=LIMIT_S) as (_, gateway):
        assert (await call(gateway.address, "/generate", {"text": "a"})).status == 200


async def test_a_client_that_reads_slowly_is_no_stall_of_the_engine() -> None:
    """Mutation tried: the silence counts on while the client is written to."""
    count = 120

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="text/event-stream")
        piece = b'data: {"text":"' + b"z" * 100_000 + b'"}\n\n'
        for _ in range(count):
            reply.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    async with limited(script, stall_timeout_s=LIMIT_S) as (_, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", {"text": "a", "stream": True}))
        head = await connection.head()
        await asyncio.sleep(4 * LIMIT_S)
        assert len((await connection.body(*head)).events()) == count + 1
        assert (await gateway.record()).outcome == "complete"


async def test_a_client_that_does_not_read_does_not_hold_a_request_that_is_over() -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="text/event-stream")
        piece = b'data: {"text":"' + b"z" * 60_000 + b'"}\n\n'
        while not reply.is_gone:
            reply.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0.001)

    async with limited(script, request_timeout_s=2 * LIMIT_S) as (_, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", {"text": "a", "stream": True}))
        await connection.head()
        async with asyncio.timeout(PATIENCE_S):
            record = await gateway.record()
        assert record.outcome == "timeout"

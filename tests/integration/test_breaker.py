"""The breaker end to end: what opens it, what never does, the trial, and what is told meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from routers.breaker import BreakerState
from routers.fleet import Member, WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, Script, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, Wire, call, request_bytes, wire

UNARY: dict[str, Any] = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
STREAM: dict[str, Any] = {**UNARY, "stream": True}
OPTIONS: dict[str, Any] = {"breaker_failures": 3, "breaker_open_s": 3600, "health_interval_s": 3600}


def status(code: int, message: str = "scripted") -> Script:
    """Answers with an error."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(json.dumps({"error": {"message": message}}).encode(), status=code)

    return script


async def good(request: SeenRequest, reply: Reply) -> None:
    """Answers."""
    await reply.whole(b'{"text":"a","meta_info":{"id":"%b"}}' % request.rid.encode())


async def broken_stream(request: SeenRequest, reply: Reply) -> None:
    """Breaks off after an event."""
    await reply.start_chunked()
    await reply.event(b'{"text":"a","meta_info":{"id":"%b"}}' % request.rid.encode())
    reply.reset()


async def dropped(request: SeenRequest, reply: Reply) -> None:
    """Never answers."""
    reply.reset()


@asynccontextmanager
async def alone(script: Script, **options: Any) -> AsyncIterator[tuple[RunningGateway, ScriptEngine, Member]]:
    """A gateway in front of one worker."""
    async with script_engine(script) as engine, running_gateway(engine.url, **options) as gateway:
        yield gateway, engine, next(iter(gateway.gateway.services.fleet))


async def ask(gateway: RunningGateway, body: dict[str, Any] = UNARY, times: int = 1) -> Answer:
    """Some requests, one after the other; the last answer."""
    for _ in range(times):
        answer = await call(gateway.address, "/generate", body)
    return answer


async def shown(gateway: RunningGateway) -> str:
    """The breaker's state as administrators see it."""
    listed = (await call(gateway.address, "/workers", method="GET")).json()["workers"]
    state = listed[0]["breaker"]
    assert isinstance(state, str)
    return state


def an_hour_later(gateway: RunningGateway) -> None:
    """Let the time pass for which a breaker stays open."""
    services = gateway.gateway.services
    before = services.clock
    services.clock = lambda: before() + 3600


@pytest.mark.parametrize(
    ("script", "body"),
    [
        pytest.param(status(500), UNARY, id="500"),
        pytest.param(status(503), UNARY, id="503"),
        pytest.param(dropped, UNARY, id="dropped"),
        pytest.param(broken_stream, STREAM, id="a stream that breaks off"),
    ],
)
async def test_failures_in_a_row_open_it(script: Script, body: dict[str, Any]) -> None:
    async with alone(script, **OPTIONS) as (gateway, engine, _):
        await ask(gateway, body, times=2)
        engine.script = good
        await ask(gateway)  # the row is broken
        engine.script = script
        await ask(gateway, body, times=2)
        assert await shown(gateway) == BreakerState.CLOSED
        assert (await ask(gateway, body)).headers["x-forebay-attempts"] == "1"
        assert await shown(gateway) == BreakerState.OPEN
        # Alone it is missed: a clear answer at once, and no request reaches it.
        seen = len(engine.requests)
        answer = await ask(gateway, body)
        assert (answer.status, answer.json()["error"]["type"], answer.headers["retry-after"]) == (
            503,
            "unavailable",
            "1",
        )
        assert "failed" in answer.json()["error"]["message"]
        assert (gateway.records[-1].outcome, gateway.records[-1].attempts) == ("overloaded", 0)
        assert len(engine.requests) == seen


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(status(400), id="400"),
        pytest.param(status(404), id="404"),
        pytest.param(status(429), id="429"),
        pytest.param(status(503, "The request queue is full."), id="queue full"),
    ],
)
async def test_field_case_103_what_the_client_did_wrong_never_counts(script: Script) -> None:
    async with alone(script, **OPTIONS) as (gateway, engine, _):
        await ask(gateway, times=50)
        assert await shown(gateway) == BreakerState.CLOSED
        engine.script = good
        assert (await ask(gateway)).status == 200


async def test_answers_that_are_too_large_never_count() -> None:
    async def huge(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b'{"text":"' + b"a" * 5000 + b'"}')

    async with alone(huge, max_response_bytes=4096, **OPTIONS) as (gateway, _, _):
        assert (await ask(gateway, times=5)).json()["error"]["type"] == "response_too_large"
        assert await shown(gateway) == BreakerState.CLOSED


async def test_streams_that_somebody_else_aborts_on_the_engine_never_count() -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="text/event-stream")
        await reply.event(b'{"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}')
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    async with alone(script, **OPTIONS) as (gateway, _, member):
        await ask(gateway, STREAM, 5)
        await gateway.record(5)
        assert {record.outcome for record in gateway.records} == {"aborted"}
        assert member.breaker.state is BreakerState.CLOSED


async def test_clients_that_leave_never_count() -> None:
    arrived = asyncio.Queue[None]()

    async def silent(request: SeenRequest, reply: Reply) -> None:
        arrived.put_nowait(None)
        await reply.gone()

    async with alone(silent, abort_delay_s=0, **OPTIONS) as (gateway, _, member):
        for number in range(5):
            async with wire(gateway.address) as client:
                await client.send(request_bytes("/generate", STREAM))
                await arrived.get()
                client.reset()
                assert (await gateway.record(number + 1)).outcome == "client_closed"
        assert member.breaker.state is BreakerState.CLOSED


async def test_a_trial_closes_it() -> None:
    async with alone(status(500), **OPTIONS) as (gateway, engine, _):
        await ask(gateway, times=3)
        assert (await ask(gateway)).status == 503
        an_hour_later(gateway)
        # Still ill: one failure is enough this time.
        assert (await ask(gateway)).status == 502
        assert await shown(gateway) == BreakerState.OPEN
        assert (await ask(gateway)).status == 503
        engine.script = good
        an_hour_later(gateway)
        assert (await ask(gateway)).status == 200
        assert await shown(gateway) == BreakerState.CLOSED
        assert (await ask(gateway, times=5)).status == 200


async def begin(connection: Wire) -> None:
    """Send a stream's request."""
    await connection.send(request_bytes("/generate", STREAM))


async def test_only_one_request_is_the_trial_and_its_first_event_is_enough() -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow_stream(request: SeenRequest, reply: Reply) -> None:
        if arrived.is_set():
            await good(request, reply)
            return
        arrived.set()
        await go_on.wait()
        go_on.clear()
        await reply.start_chunked()
        await reply.event(b'{"text":"a","meta_info":{"id":"%b"}}' % request.rid.encode())
        await go_on.wait()
        reply.reset()

    async with alone(status(500), **OPTIONS) as (gateway, engine, _):
        await ask(gateway, times=3)
        engine.script = slow_stream
        an_hour_later(gateway)
        async with wire(gateway.address) as trial:
            await begin(trial)
            await arrived.wait()
            assert await shown(gateway) == BreakerState.HALF_OPEN
            assert (await ask(gateway)).status == 503
            go_on.set()
            head = await trial.head()
            assert await shown(gateway) == BreakerState.CLOSED
            assert (await ask(gateway)).status == 200
            go_on.set()
            assert b"error" in (await trial.body(*head)).body
        # That a trial begins well does not make up for its end, but others have ended well since.
        assert await shown(gateway) == BreakerState.CLOSED


async def test_a_trial_that_breaks_off_opens_it_again() -> None:
    async with alone(broken_stream, **OPTIONS) as (gateway, _, _):
        await ask(gateway, STREAM, times=3)
        an_hour_later(gateway)
        assert (await ask(gateway, STREAM)).status == 200
        assert await shown(gateway) == BreakerState.OPEN


async def test_a_trial_whose_client_leaves_is_followed_by_another() -> None:
    arrived = asyncio.Event()

    async def silent(request: SeenRequest, reply: Reply) -> None:
        arrived.set()
        await reply.gone()

    async with alone(status(500), **OPTIONS) as (gateway, engine, _):
        await ask(gateway, times=3)
        engine.script = silent
        an_hour_later(gateway)
        async with wire(gateway.address) as trial:
            await begin(trial)
            await arrived.wait()
            trial.reset()
            await gateway.record(4)
        engine.script = good
        assert (await ask(gateway)).status == 200
        assert await shown(gateway) == BreakerState.CLOSED


async def test_field_case_106_a_worker_that_accepts_and_fails_is_left_alone() -> None:
    async with (
        script_engine(status(500)) as bad,
        script_engine(good) as well,
        running_gateway(bad.url, well.url, **{**OPTIONS, "breaker_failures": 5}) as gateway,
        wire(gateway.address) as connection,
    ):
        statuses: list[int] = []
        for _ in range(1000):
            await connection.send(request_bytes("/generate", UNARY))
            statuses.append((await connection.answer()).status)
        assert statuses.count(502) == 5
        assert statuses.count(200) == 995
        assert len(bad.requests) == 5


async def test_with_another_worker_a_busy_one_costs_nobody_an_error() -> None:
    async with (
        script_engine(status(503)) as bad,
        script_engine(good) as well,
        running_gateway(bad.url, well.url, policy="round-robin", **OPTIONS) as gateway,
    ):
        for _ in range(20):
            assert (await ask(gateway)).status == 200
        assert len(bad.requests) == 3
        assert sum(record.attempts for record in gateway.records) == 23


async def test_a_restart_closes_it() -> None:
    engine = SimulatedEngine(EngineOptions())
    await engine.start()
    try:
        async with running_gateway(engine.url, breaker_failures=2, breaker_open_s=3600) as gateway:
            member = next(iter(gateway.gateway.services.fleet))
            engine.add_fault(at="headers", do="status:500", times=2)
            await ask(gateway, times=2)
            assert await shown(gateway) == BreakerState.OPEN
            await engine.stop()
            await until(lambda: member.state is WorkerState.UNHEALTHY, "the end noticed")
            engine = SimulatedEngine(
                EngineOptions(port=int(gateway.gateway.settings.workers[0].url.rpartition(":")[2]))
            )
            await engine.start()
            await gateway.ready(1)
            assert await shown(gateway) == BreakerState.CLOSED
            assert (await ask(gateway)).status == 200
    finally:
        await engine.stop()

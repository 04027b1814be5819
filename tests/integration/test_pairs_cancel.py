"""Requests over simulated pairs that are ended from outside, in every phase: nothing stays, and no prompt is pinned."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from backends.leg_events import Cause
from simulator.server import SimulatedEngine
from tests.fakes.pair_fleet import IDS, PairFleet, is_idle, pair_fleet
from tests.fakes.running import PATIENCE_S, TIME_SCALE, until
from tests.fakes.wire import Answer, Wire, request_bytes, wire

# One phase lasts as long as the test lets it, at most so long.
LONG_S = 1.5 * TIME_SCALE
COMPUTING, MOVING, STREAMING = "computing", "moving", "streaming"
PHASES = [COMPUTING, MOVING, STREAMING]
# So slow that the prompt's 40 tokens take ``LONG_S``, or that many tokens take far longer.
SLOW: dict[str, dict[str, Any]] = {
    COMPUTING: {"prefill": {"prefill_tokens_per_s": len(IDS) / LONG_S}},
    MOVING: {"transfer_tokens_per_s": len(IDS) / LONG_S, "inter_token_ms": 30},
    STREAMING: {"decode": {"inter_token_ms": 30 * TIME_SCALE}},
}
ROUTES = [
    pytest.param("sglang", "/generate", id="sglang-native"),
    pytest.param("sglang", "/v1/completions", id="sglang-completions"),
    pytest.param("vllm", "/v1/completions", id="vllm-completions"),
]


def body_of(f: PairFleet, path: str, *, is_stream: bool, number: int = 0) -> dict[str, Any]:
    """A request that goes on for long; no two have a prompt in common."""
    ids = [number * 50 + token for token in IDS]
    if path == "/generate":
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": 500}, "stream": is_stream}
    return {"model": f.alone.options.model, "prompt": ids, "max_tokens": 500, "stream": is_stream, "ignore_eos": True}


def is_in(f: PairFleet, phase: str, count: int) -> bool:
    """Whether so many requests are in the phase."""
    prefill, decode = f.prefills[0], f.decodes[0]
    if phase == COMPUTING:
        return prefill.running >= count
    if phase == STREAMING:
        live: list[Any] = list(f.gateway.gateway.services.live)
        return decode.running >= count and not any(one.awaits_output for one in live)
    if prefill.options.engine == "vllm":
        return kept(prefill) >= count and decode.core.is_busy and len(seen(decode)) >= count
    return len(decode.live_rooms) >= count and prefill.core.handoff is not None and moving(prefill) >= count


def kept(engine: SimulatedEngine) -> int:
    """Prompts whose blocks a vLLM prefill keeps."""
    return -(-engine.pinned_blocks // -(-len(IDS) // engine.options.page_size))


def moving(engine: SimulatedEngine) -> int:
    """Prompts that an SGLang prefill sends."""
    assert engine.core.handoff is not None
    return dict(engine.core.handoff.queues(0)).get("prefill_inflight", 0)


def seen(engine: SimulatedEngine) -> list[Any]:
    """Generation requests that an engine has seen."""
    return [one for one in engine.log.requests if "generate" in one.path or "completions" in one.path]


def losses(f: PairFleet) -> int:
    """What the gateway counts as handoffs that nobody took over."""
    text = f.gateway.gateway.services.metrics.render().decode()
    line = next(one for one in text.splitlines() if one.startswith("forebay_handoff_abandoned_total"))
    return int(float(line.rsplit(" ", 1)[1]))


class Client:
    """One request under its public id."""

    def __init__(self, connection: Wire, public_id: str) -> None:
        self.connection = connection
        self.public_id = public_id

    async def answer(self) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            return await self.connection.answer()


@contextlib.asynccontextmanager
async def in_phase(f: PairFleet, path: str, phase: str) -> AsyncIterator[list[Client]]:
    """A streamed and a unary request, both in the phase."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number, is_stream in enumerate((True, False)):
            connection = await stack.enter_async_context(wire(f.gateway.address))
            body = body_of(f, path, is_stream=is_stream, number=number)
            public_id = f"public-{number}-{len(f.gateway.records)}"
            await connection.send(request_bytes(path, body, headers={"x-request-id": public_id}))
            clients.append(Client(connection, public_id))
        await until(lambda: is_in(f, phase, 2), f"both are {phase}")
        yield clients


async def leave(f: PairFleet, clients: list[Client]) -> None:
    for client in clients:
        client.connection.close()


async def ask_for_abort(f: PairFleet, clients: list[Client]) -> None:
    for client in clients:
        answer = await f.call("/abort_request", {"rid": client.public_id})
        assert answer.json()["aborted"] == [client.public_id]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("engine", "path"), ROUTES)
async def test_a_client_that_leaves_or_asks_for_an_abort_leaves_nothing_behind(
    engine: str, path: str, phase: str
) -> None:
    """Mutation: vLLM's decode is dropped with its client; then its prompt's blocks stay pinned while it moves."""
    async with pair_fleet(engine=engine, **SLOW[phase]) as f:
        async with in_phase(f, path, phase) as clients:
            await leave(f, clients)
            await f.settle()
        assert [one.outcome for one in f.gateway.records] == ["client_closed", "client_closed"]
        async with in_phase(f, path, phase) as clients:
            await ask_for_abort(f, clients)
            answers = [await client.answer() for client in clients]
            await f.settle()
        assert {one.outcome for one in f.gateway.records[2:]} == {"aborted"}, f.gateway.records[2:]
        assert all(one.is_whole for one in answers)
        assert losses(f) == 0


async def remove(f: PairFleet, engine: SimulatedEngine) -> None:
    worker_id = engine.url.removeprefix("http://")
    answer = await f.call(f"/workers/{worker_id}?drain_timeout_s=0.05", None, method="DELETE")
    assert answer.status in (200, 202), answer


async def expire(f: PairFleet) -> None:
    """The deadline passes by itself."""


ENDS: list[Any] = [
    pytest.param(expire, "timeout", id="deadline"),
    pytest.param(lambda f: remove(f, f.prefills[0]), "shutdown", id="prefill removed"),
    pytest.param(lambda f: remove(f, f.decodes[0]), "shutdown", id="decode removed"),
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("engine", "path"), [ROUTES[0], ROUTES[2]])
@pytest.mark.parametrize(("end", "outcome"), ENDS)
async def test_a_request_that_is_stopped_leaves_nothing_behind(
    end: Callable[[PairFleet], Awaitable[None]], outcome: str, engine: str, path: str, phase: str
) -> None:
    """Mutation: only decode's worker counts as the request's; then prefill's removal waits for its end."""
    options: dict[str, Any] = {"request_timeout_s": 0.5 * LONG_S} if end is expire else {}
    async with pair_fleet(engine=engine, gateway=options, **SLOW[phase]) as f:
        async with in_phase(f, path, phase) as clients:
            await end(f)
            is_done = phase == STREAMING or (engine == "vllm" and phase == MOVING)
            if end is ENDS[1].values[0] and is_done:
                await until(lambda: len(list(f.gateway.gateway.services.fleet)) == 1, "prefill's removal")
                await leave(f, clients)  # prefill has done its part, and nobody's end is its removal
            else:
                answers = [await client.answer() for client in clients]
                assert all(one.is_whole for one in answers)
                assert {one.outcome for one in f.gateway.records} == {outcome}, f.gateway.records
            await f.settle()
        assert losses(f) == 0


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("engine", "path"), [ROUTES[0], ROUTES[2]])
async def test_a4_8_a_shutdown_waits_for_nothing_and_counts_what_it_leaves_pinned(
    engine: str, path: str, phase: str
) -> None:
    """Mutation tried: a decode leg that a shutdown closes is dropped like any other; then its loss is not counted."""
    async with pair_fleet(engine=engine, gateway={"drain_timeout_s": 0.05}, checks_idle=False, **SLOW[phase]) as f:
        async with in_phase(f, path, phase) as clients:
            f.gateway.gateway.begin_drain()
            answers = [await client.answer() for client in clients]
            await f.gateway.settle()
            assert {one.outcome for one in f.gateway.records} == {"shutdown"}
            assert [one.status for one in answers] == [200 if phase == STREAMING else 503, 503]
            async with asyncio.timeout(PATIENCE_S):
                await f.gateway.gateway.drained.wait()
        if engine == "vllm" and phase == MOVING:
            assert losses(f) == 2
            return
        assert losses(f) == 0
        await until(lambda: all(map(is_idle, f.engines)), "idle engines")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_a_request_that_waits_for_a_worker_leaves_the_queue(engine: str) -> None:
    """Mutation: a pair is placed though its client has left the queue; then the engines see a request."""
    path = "/generate" if engine == "sglang" else "/v1/completions"
    options = {"max_in_flight_per_worker": 2}
    async with (
        pair_fleet(engine=engine, gateway=options, **SLOW[STREAMING]) as f,
        in_phase(f, path, STREAMING) as clients,
    ):
        before = len(seen(f.prefills[0]))
        for end in (leave, ask_for_abort):
            async with wire(f.gateway.address) as connection:
                body = body_of(f, path, is_stream=True, number=7)
                await connection.send(request_bytes(path, body, headers={"x-request-id": "waits"}))
                await until(lambda: f.gateway.state()["queued_requests"] == 1, "it waits")
                await end(f, [Client(connection, "waits")])
                await until(lambda: f.gateway.state()["queued_requests"] == 0, "it has left")
        await leave(f, clients)
        await f.settle()
        assert len(seen(f.prefills[0])) == before


def test_causes_are_those_that_a_request_can_end_by() -> None:
    """The ends of these tests are all there are; a new one belongs here."""
    ends = {Cause.CLIENT_GONE, Cause.CLIENT_ABORT, Cause.DEADLINE, Cause.WORKER_REMOVED, Cause.SHUTDOWN}
    assert ends == set(Cause) - {Cause.FINISHED, Cause.ENGINE_ERROR, Cause.SIBLING_FAILED}

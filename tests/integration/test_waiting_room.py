"""Requests that wait for a worker: in order and in turn, for as long as they may, and without a trace if they leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from routers.fleet import Member, WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, SeenRequest, script_engine
from tests.fakes.wire import Answer, Wire, call, request_bytes, wire

# What is not to pass in a test, and what is.
NEVER_S = 10 * PATIENCE_S
SOON_S = 0.2 * TIME_SCALE


class Gate:
    """Engines that hold every request until it may be answered.

    Attributes:
        seen: Names of the requests, in the order in which they came to any engine.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._free = asyncio.Semaphore(0)

    async def serve(self, request: SeenRequest, reply: Reply) -> None:
        """Hold one request, then answer with its name."""
        name = json.loads(request.body)["text"]
        self.seen.append(name)
        await self._free.acquire()
        await reply.whole(json.dumps({"text": name, "meta_info": {"id": request.rid}}).encode())

    def answer(self, count: int = 1) -> None:
        """Answer so many, the first ones first."""
        for _ in range(count):
            self._free.release()

    async def saw(self, *names: str) -> None:
        """Wait until exactly these have come, in that order."""
        await until(lambda: len(self.seen) >= len(names), f"{names} at the engine, so far {self.seen}")
        assert self.seen == list(names)


class Crowd:
    """Requests under way, each on its own connection.

    Args:
        gateway: Where they go.
    """

    def __init__(self, gateway: RunningGateway, stack: AsyncExitStack) -> None:
        self.gateway = gateway
        self.wires: dict[str, Wire] = {}
        self._stack = stack

    async def send(self, name: str, *, headers: dict[str, str] | None = None, **fields: Any) -> None:
        """Send a request and wait until the gateway has it: placed, or among those that wait."""
        before = len(self.gateway.gateway.services.live)
        connection = await self._stack.enter_async_context(wire(self.gateway.address))
        self.wires[name] = connection
        await connection.send(request_bytes("/generate", {"text": name, **fields}, headers=headers))
        await until(lambda: len(self.gateway.gateway.services.live) > before, f"the gateway takes {name}")

    async def answer(self, name: str) -> Answer:
        """The answer to a request."""
        return await self.wires[name].answer()

    async def queued(self, count: int) -> None:
        """Wait until so many wait."""
        await until(lambda: self.gateway.state()["queued_requests"] == count, f"{count} waiting")


@asynccontextmanager
async def crowd(gate: Gate, *, engines: int = 1, **options: Any) -> AsyncIterator[Crowd]:
    """A gateway that gives each of its gated engines one request at once."""
    options = {"max_in_flight_per_worker": 1, "queue_max_age_s": NEVER_S, **options}
    async with AsyncExitStack() as outer:
        urls = [(await outer.enter_async_context(script_engine(gate.serve))).url for _ in range(engines)]
        async with running_gateway(*urls, **options) as gateway, AsyncExitStack() as stack:
            yield Crowd(gateway, stack)


def error_of(answer: Answer) -> tuple[int, str, str | None]:
    """Status, type and ``Retry-After``."""
    return answer.status, answer.json()["error"]["type"], answer.headers.get("retry-after")


OVERLOADED, UNAVAILABLE = (429, "overloaded", "1"), (503, "unavailable", "1")

# --- for room


async def test_they_go_one_after_the_other() -> None:
    gate = Gate()
    async with crowd(gate) as waiting:
        for name in ("a", "b", "c"):
            await waiting.send(name)
        await waiting.queued(2)
        await gate.saw("a")
        for number, name in enumerate(("a", "b", "c")):
            gate.answer()
            answer = await waiting.answer(name)
            assert (answer.status, answer.json()["text"]) == (200, name)
            record = await waiting.gateway.record(number + 1)
            assert (record.outcome, record.attempts, record.queue_s is None) == ("complete", 1, name == "a")
        await gate.saw("a", "b", "c")
        page = (await waiting.gateway.client.get("/metrics")).text
        assert "\nforebay_queued_requests 0.0\n" in page
        assert "\nforebay_queue_seconds_count 2.0\n" in page


async def test_any_worker_with_room_takes_the_next() -> None:
    gate = Gate()
    async with crowd(gate, engines=2) as waiting:
        for name in ("a", "b", "c", "d", "e"):
            await waiting.send(name)
        await waiting.queued(3)
        gate.answer(5)
        answers = [await waiting.answer(name) for name in waiting.wires]
        assert [answer.json()["text"] for answer in answers] == ["a", "b", "c", "d", "e"]
        assert len({answer.headers["x-forebay-worker"] for answer in answers}) == 2
        assert gate.seen[2:] == ["c", "d", "e"]


async def test_tenants_take_turns_and_priorities_go_first() -> None:
    gate = Gate()
    async with crowd(gate) as waiting:
        await waiting.send("first")
        for name in ("a1", "a2", "a3"):
            await waiting.send(name, headers={"Authorization": "Bearer a"})
        await waiting.send("b1", headers={"X-API-Key": "b"})
        await waiting.send("c1", headers={"X-SMG-Routing-Key": "c"})
        await waiting.send("low", priority=-1)
        await waiting.send("high", priority=7)
        await waiting.send("odd", priority="x")
        await waiting.queued(8)
        gate.answer(9)
        for name in waiting.wires:
            assert (await waiting.answer(name)).status == 200
        await gate.saw("first", "high", "a1", "b1", "c1", "odd", "a2", "a3", "low")


async def test_who_waits_too_long_is_told() -> None:
    gate = Gate()
    async with crowd(gate, queue_max_age_s=SOON_S) as waiting:
        for name in ("a", "late"):
            await waiting.send(name)
        assert error_of(await waiting.answer("late")) == OVERLOADED
        record = await waiting.gateway.record()
        assert (record.outcome, record.status, record.attempts) == ("overloaded", 429, 0)
        assert record.queue_s is not None
        assert record.queue_s >= 0.9 * SOON_S
        gate.answer()
        assert (await waiting.answer("a")).status == 200
        await gate.saw("a")


async def test_more_than_may_wait_are_refused_at_once() -> None:
    gate = Gate()
    async with crowd(gate, queue_max_requests=1) as waiting:
        for name in ("a", "b"):
            await waiting.send(name)
        assert error_of(await call(waiting.gateway.address, "/generate", {"text": "c"})) == OVERLOADED
        assert (await waiting.gateway.record()).queue_s is None
        gate.answer(2)
        for name in ("a", "b"):
            assert (await waiting.answer(name)).status == 200
        await gate.saw("a", "b")


async def test_the_engines_own_limit_counts() -> None:
    gate = Gate()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(script_engine(gate.serve))
        engine.metadata["/server_info"] = {**METADATA["/server_info"], "max_running_requests": 2}
        async with running_gateway(engine.url) as gateway, AsyncExitStack() as wires:
            waiting = Crowd(gateway, wires)
            (worker,) = (await gateway.client.get("/workers")).json()["workers"]
            assert (worker["max_running_requests"], worker["max_in_flight"]) == (2, 3)
            for name in ("a", "b", "c", "d"):
                await waiting.send(name)
            await waiting.queued(1)
            gate.answer(4)
            for name in waiting.wires:
                assert (await waiting.answer(name)).status == 200


# --- ends of waits


async def test_who_leaves_is_forgotten_at_once() -> None:
    gate = Gate()
    async with crowd(gate) as waiting:
        await waiting.send("a")
        await asyncio.wait_for(_send_all(waiting, 500), NEVER_S)
        await waiting.queued(500)
        for name, connection in waiting.wires.items():
            if name != "a":
                connection.reset()
        await waiting.queued(0)
        await until(lambda: len(waiting.gateway.records) == 500, "500 records")
        assert {record.outcome for record in waiting.gateway.records} == {"client_closed"}
        gate.answer()
        assert (await waiting.answer("a")).status == 200
        await gate.saw("a")


async def _send_all(waiting: Crowd, count: int) -> None:
    for number in range(count):
        await waiting.send(str(number))


async def test_an_abort_ends_a_wait() -> None:
    gate = Gate()
    async with crowd(gate) as waiting:
        await waiting.send("a")
        await waiting.send("b", rid="mine")
        await waiting.queued(1)
        report = (await call(waiting.gateway.address, "/abort_request", {"rid": "mine"})).json()
        assert report == {"aborted": ["mine"], "not_found": [], "workers": []}
        assert (await waiting.answer("b")).status == 499
        assert (await waiting.gateway.record()).outcome == "aborted"
        gate.answer()
        assert (await waiting.answer("a")).status == 200
        await gate.saw("a")


@pytest.mark.parametrize("limit", ["request_timeout_s", "first_token_timeout_s"])
async def test_deadlines_include_the_wait(limit: str) -> None:
    gate = Gate()
    options: dict[str, Any] = {limit: SOON_S}
    async with crowd(gate, **options) as waiting:
        await waiting.send("a")
        await waiting.send("b", stream=True)
        answer = await waiting.answer("b")
        assert (answer.status, answer.json()["error"]["type"]) == (504, "timeout")
        await waiting.queued(0)
        gate.answer()
        await waiting.answer("a")
        await gate.saw("a")


async def test_a_drain_sends_those_away_who_wait() -> None:
    gate = Gate()
    async with crowd(gate, engines=1, drain_timeout_s=NEVER_S) as waiting:
        for name in ("a", "b", "c"):
            await waiting.send(name)
        await waiting.queued(2)
        waiting.gateway.gateway.begin_drain()
        for name in ("b", "c"):
            assert error_of(await waiting.answer(name)) == (503, "engine_shutdown", "1")
        assert [record.outcome for record in waiting.gateway.records] == ["shutdown", "shutdown"]
        gate.answer()
        assert (await waiting.answer("a")).status == 200
        await until(waiting.gateway.gateway.drained.is_set, "the drain's end")
        await gate.saw("a")


@pytest.mark.parametrize("is_pinned", [False, True])
async def test_the_last_workers_removal_ends_a_wait(is_pinned: bool) -> None:
    gate = Gate()
    async with crowd(gate) as waiting:
        (member,) = waiting.gateway.gateway.services.fleet
        pin = {"X-Forebay-Worker": member.worker.id} if is_pinned else {}
        await waiting.send("a")
        await waiting.send("b", headers=pin)
        await waiting.queued(1)
        assert (await waiting.gateway.client.delete(f"/workers/{member.worker.id}")).status_code < 300
        assert error_of(await waiting.answer("b")) == UNAVAILABLE
        gate.answer()
        assert (await waiting.answer("a")).status == 200
        await gate.saw("a")


async def test_a_new_worker_takes_those_who_wait() -> None:
    gate = Gate()
    async with crowd(gate) as waiting, script_engine(gate.serve) as other:
        for name in ("a", "b"):
            await waiting.send(name)
        await waiting.queued(1)
        assert (await waiting.gateway.client.post("/workers", json={"url": other.url})).status_code == 202
        await gate.saw("a", "b")
        gate.answer(2)
        for name in ("a", "b"):
            assert (await waiting.answer(name)).status == 200
        for member in tuple(waiting.gateway.gateway.services.fleet):
            waiting.gateway.gateway.workers.remove(member, 0)  # so that the engine's connections end
        await until(lambda: not len(waiting.gateway.gateway.services.fleet), "the removals")


# --- for paused workers


@asynccontextmanager
async def simulated(**options: Any) -> AsyncIterator[SimulatedEngine]:
    """One simulated engine."""
    engine = SimulatedEngine(EngineOptions(**options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def tell(engine: SimulatedEngine, member: Member, path: str, state: WorkerState) -> None:
    """Pause an engine or let it go on, and wait until the gateway has noticed."""
    await call(("127.0.0.1", engine.port), path, {"mode": "in_place"} if "pause" in path else {})
    await until(lambda: member.state is state, f"{path} noticed")


async def test_after_a_pause_all_go_through_in_order() -> None:
    async with simulated() as engine, AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(running_gateway(engine.url, max_in_flight_per_worker=1))
        (member,) = gateway.gateway.services.fleet
        wires = await stack.enter_async_context(AsyncExitStack())
        waiting = Crowd(gateway, wires)
        await tell(engine, member, "/pause_generation", WorkerState.PAUSED)
        for number in range(20):
            await waiting.send(str(number), sampling_params={"max_new_tokens": 1})
        await waiting.queued(20)
        assert engine.log.requests_to("/generate") == []
        await tell(engine, member, "/continue_generation", WorkerState.READY)
        for name in waiting.wires:
            assert (await waiting.answer(name)).status == 200
        seen = [json.loads(entry.body or b"")["text"] for entry in engine.log.requests_to("/generate")]
        assert seen == [str(number) for number in range(20)]


async def test_a_paused_worker_is_passed_over_and_another_one_waits_for_room() -> None:
    async with (
        simulated() as one,
        simulated() as two,
        running_gateway(one.url, two.url, queue_max_age_s=SOON_S) as gateway,
    ):
        first, second = gateway.gateway.services.fleet
        await tell(one, first, "/pause_generation", WorkerState.PAUSED)
        for _ in range(3):
            answer = await call(gateway.address, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}})
            assert answer.headers["x-forebay-worker"] == second.worker.id
        assert {record.queue_s for record in gateway.records} == {None}
        await tell(two, second, "/pause_generation", WorkerState.PAUSED)
        async with AsyncExitStack() as wires:
            waiting = Crowd(gateway, wires)
            await waiting.send("a", sampling_params={"max_new_tokens": 1})
            await waiting.queued(1)
            await tell(one, first, "/continue_generation", WorkerState.READY)
            assert (await waiting.answer("a")).headers["x-forebay-worker"] == first.worker.id
        await tell(two, second, "/continue_generation", WorkerState.READY)


@pytest.mark.parametrize("hold_s", [0.0, SOON_S], ids=["at once", "after a while"])
async def test_a_pause_that_lasts_too_long_is_told(hold_s: float) -> None:
    async with simulated() as engine, running_gateway(engine.url, pause_hold_s=hold_s) as gateway:
        (member,) = gateway.gateway.services.fleet
        await tell(engine, member, "/pause_generation", WorkerState.PAUSED)
        assert error_of(await call(gateway.address, "/generate", {"text": "a"})) == UNAVAILABLE
        record = await gateway.record()
        assert (record.outcome, record.queue_s is None) == ("overloaded", hold_s == 0)
        await tell(engine, member, "/continue_generation", WorkerState.READY)
        assert engine.log.requests_to("/generate") == []


async def test_who_waits_for_a_worker_that_dies_is_told() -> None:
    async with simulated() as engine, running_gateway(engine.url) as gateway, AsyncExitStack() as wires:
        (member,) = gateway.gateway.services.fleet
        await tell(engine, member, "/pause_generation", WorkerState.PAUSED)
        waiting = Crowd(gateway, wires)
        await waiting.send("a")
        await waiting.queued(1)
        await engine.stop()
        assert error_of(await waiting.answer("a")) == UNAVAILABLE


# --- with retries


async def test_a_failed_request_waits_for_the_other_worker() -> None:
    gate = Gate()

    async def refuse(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b'{"error":{"message":"The request queue is full."}}', status=503)

    async with script_engine(refuse) as full, crowd(gate) as waiting:
        await waiting.send("a")
        await gate.saw("a")
        assert (await waiting.gateway.client.post("/workers", json={"url": full.url})).status_code == 202
        await waiting.gateway.ready(2)
        await waiting.send("b")
        await waiting.queued(1)
        gate.answer(2)
        for name in ("a", "b"):
            assert (await waiting.answer(name)).json()["text"] == name
        record = await waiting.gateway.record(2)
        assert (record.attempts, record.outcome, record.queue_s is None) == (2, "complete", False)
        waiting.gateway.gateway.workers.remove(list(waiting.gateway.gateway.services.fleet)[1], 0)
        await until(lambda: len(waiting.gateway.gateway.services.fleet) == 1, "the removal")

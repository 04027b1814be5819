"""Versions of weights: what is known of each worker's, how soon, and who may take a request that wants new ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from backends.types import EngineKind, Worker
from routers.fleet import Member, WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.kv_fleet import PROMPT, fleet
from tests.fakes.pair_fleet import pair_fleet
from tests.fakes.running import TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call, request_bytes, wire

MINIMUM = "x-forebay-min-weight-version"
VERSION = "x-forebay-weight-version"
CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
# No probe comes between: what the gateway knows it knows from the call itself.
NO_PROBES: dict[str, Any] = {"health_interval_s": 3600.0}
MANY_PROBES: dict[str, Any] = {"health_interval_s": 0.02 * TIME_SCALE}


def id_of(engine: SimulatedEngine | ScriptEngine) -> str:
    """The worker id of an engine."""
    return engine.url.removeprefix("http://")


@asynccontextmanager
async def scene(*versions: str, engine: str = "sglang", **gateway: Any) -> AsyncIterator[
    tuple[RunningGateway, list[SimulatedEngine]]
]:  # fmt: skip
    """One engine with each of ``versions`` of the weights, and the gateway in front of them."""
    async with AsyncExitStack() as stack:
        engines = []
        for version in versions:
            options = EngineOptions(
                engine=engine, model="model", dev_mode=True, weight_version=version
            )  # fmt: skip
            one = SimulatedEngine(options)
            await one.start()
            stack.push_async_callback(one.stop)
            engines.append(one)
        running = await stack.enter_async_context(
            running_gateway(*(one.url for one in engines), **{**NO_PROBES, **gateway})
        )
        yield running, engines


async def ask(gateway: RunningGateway, at_least: object = None, **headers: str) -> Answer:
    """One small request."""
    if at_least is not None:
        headers[MINIMUM] = str(at_least)
    return await call(gateway.address, "/v1/chat/completions", CHAT, headers=headers)


def members(gateway: RunningGateway) -> list[Member]:
    """The gateway's view of the workers."""
    return list(gateway.gateway.services.fleet)


async def shown(gateway: RunningGateway) -> list[str | None]:
    """Versions in ``GET /workers``."""
    listed = (await call(gateway.address, "/workers", method="GET")).json()["workers"]
    return [worker["weight_version"] for worker in listed]


async def test_versions_are_shown_everywhere() -> None:
    async with scene("7", "step-7", "0012") as (gateway, engines):
        assert await shown(gateway) == ["7", "step-7", "0012"]
        seen = {}
        for _ in range(30):
            answer = await ask(gateway)
            seen[answer.headers["x-forebay-worker"]] = answer.headers[VERSION]
        assert seen == dict(zip(map(id_of, engines), ("7", "step-7", "0012"), strict=True))
        page = gateway.gateway.services.metrics.render().decode()
        series = sorted(line for line in page.splitlines() if line.startswith("forebay_worker_weight_version{"))
        assert series == sorted(
            f'forebay_worker_weight_version{{worker="{id_of(engine)}"}} {number}'
            for engine, number in ((engines[0], "7.0"), (engines[2], "12.0"))
        )
        await call(gateway.address, f"/workers/{id_of(engines[0])}", method="DELETE")
        await until(lambda: len(members(gateway)) == 2, "its removal")
        page = gateway.gateway.services.metrics.render().decode()
        assert f'forebay_worker_weight_version{{worker="{id_of(engines[0])}"}}' not in page


@pytest.mark.parametrize(
    ("at_least", "expected"),
    [("0", "0 2 4"), ("7", "0 2 4"), ("8", "2 4"), ("0009", "2 4"), ("10", "4"), ("10000000000000000000", "4")],
)
async def test_only_new_weights_serve_who_wants_them(at_least: str, expected: str) -> None:
    """Versions compare as numbers; what is none, or unknown, never is new enough."""
    async with scene("7", "default", "09", "-20", "10000000000000000000") as (gateway, engines):
        found = {(await ask(gateway, at_least)).headers["x-forebay-worker"] for _ in range(40)}
        assert found == {id_of(engines[int(index)]) for index in expected.split()}


async def test_where_nobody_has_them_that_is_told() -> None:
    async with scene("7", "default") as (gateway, engines):
        answer = await ask(gateway, 8)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "weights of version 8 or later" in answer.json()["error"]["message"]
        pinned = await ask(gateway, 7, **{"x-forebay-worker": id_of(engines[1])})
        assert pinned.status == 503
        assert not engines[0].log.requests_to("/v1/chat/completions")
        explained = (await call(gateway.address, "/route/explain", CHAT, headers={MINIMUM: "7"})).json()
        assert explained["chosen"]["worker_id"] == id_of(engines[0])
        assert {one["worker_id"]: one["excluded"] for one in explained["candidates"]} == {
            id_of(engines[0]): None,
            id_of(engines[1]): "has no weights of version 7 or later",
        }


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "0x7", "7 8", "9" * 65])
async def test_what_is_no_version_is_refused(value: str) -> None:
    async with scene("7") as (gateway, _):
        answer = await ask(gateway, value)
        assert (answer.status, answer.json()["error"]["param"]) == (400, MINIMUM)


ON_SGLANG = [
    ("/update_weights_from_disk", {"model_path": "x", "weight_version": "8"}),
    ("/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
    ("/workers/{id}/call/update_weights_from_distributed", {"names": [], "weight_version": "8"}),
    ("/workers/{id}/call/update_weights_from_tensor", {"weight_version": "8"}),
]
ON_VLLM = [
    ("/update_weight_version", {"new_version": "8"}),
    ("/workers/{id}/call/finish_weight_update", {"weight_version": "8"}),
]


@pytest.mark.parametrize(
    ("engine", "path", "body"),
    [("sglang", *one) for one in ON_SGLANG] + [("vllm", *one) for one in ON_VLLM],
)
async def test_an_update_through_the_gateway_is_known_with_its_answer(engine: str, path: str, body: Any) -> None:
    async with scene("7", engine=engine) as (gateway, (one,)):
        assert (await ask(gateway, 8)).status == 503
        assert (await call(gateway.address, path.replace("{id}", id_of(one)), body)).status == 200
        answer = await ask(gateway, 8)
        assert (answer.status, answer.headers[VERSION]) == (200, "8")
        assert await shown(gateway) == ["8"]


async def test_an_update_that_one_worker_refuses_leaves_that_one_old() -> None:
    async with scene("7", "7") as (gateway, engines):
        engines[0].add_fault(at="headers", do="status:400", match={"path": "/update_weights_from_disk"})
        answer = await call(gateway.address, "/update_weights_from_disk", {"model_path": "x", "weight_version": "8"})
        assert answer.status == 207
        assert await shown(gateway) == ["7", "8"]
        assert {(await ask(gateway, 8)).headers["x-forebay-worker"] for _ in range(10)} == {id_of(engines[1])}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_an_update_past_the_gateway_is_known_with_the_next_probe(engine: str) -> None:
    async with scene("7", engine=engine, **MANY_PROBES) as (gateway, (one,)):
        body = {"new_version": "8", "abort_all_requests": False}
        assert (await call(("127.0.0.1", one.port), "/update_weight_version", body)).status == 200
        await until(lambda: members(gateway)[0].weight_number == 8, "the new version")
        assert (await ask(gateway, 8)).headers[VERSION] == "8"


async def test_what_was_asked_before_an_update_does_not_undo_it() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def ok(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b"{}")

    async with script_engine(ok) as engine, running_gateway(engine.url, **MANY_PROBES) as gateway:
        (member,) = members(gateway)
        backend = gateway.gateway.services.backends[EngineKind.SGLANG]
        read = backend.weight_version

        async def held(worker: Worker, timeout_s: float) -> str | None:
            version = await read(worker, timeout_s)
            if not asked.is_set():
                asked.set()
                await go_on.wait()
            return version

        backend.weight_version = held  # type: ignore[method-assign]
        await asyncio.wait_for(asked.wait(), 10 * TIME_SCALE)
        engine.metadata = {**METADATA, "/model_info": {**METADATA["/model_info"], "weight_version": "8"}}
        assert (await call(gateway.address, "/update_weight_version", {"new_version": "8"})).status == 200
        assert member.weight_number == 8
        changes: list[int | None] = []
        told = member.on_change

        def note(one: Member) -> None:
            changes.append(one.weight_number)
            told(one)

        member.on_change = note
        go_on.set()
        engine.metadata = {**METADATA, "/model_info": {**METADATA["/model_info"], "weight_version": "9"}}
        await until(lambda: member.weight_number == 9, "later probes")
        assert set(changes) == {9}


async def test_requests_wait_for_a_paused_worker_that_has_them_and_for_no_other() -> None:
    async with scene("7", "8") as (gateway, engines), wire(gateway.address) as waiting:
        assert (await call(gateway.address, "/pause_generation", {"mode": "in_place"})).status == 200
        assert (await ask(gateway, 9)).status == 503
        await waiting.send(request_bytes("/v1/chat/completions", CHAT, headers={MINIMUM: "8"}))
        await until(lambda: gateway.state()["queued_requests"] == 1, "it waits")
        # The other one can be used again, which helps nobody here.
        assert (await call(gateway.address, f"/workers/{id_of(engines[0])}/call/continue_generation", {})).status == 200
        assert (await ask(gateway)).headers[VERSION] == "7"
        assert gateway.state()["queued_requests"] == 1
        assert (await call(gateway.address, "/continue_generation", {})).status == 200
        answer = await waiting.answer()
        assert (answer.status, answer.headers[VERSION]) == (200, "8")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_both_workers_of_a_pair_have_them(engine: str) -> None:
    async with pair_fleet(2, 2, engine=engine, dev_mode=True) as f:
        path, body = "/v1/completions", {"model": f.alone.options.model, "prompt": "a b c", "max_tokens": 2}

        async def update(one: SimulatedEngine, version: str) -> None:
            update = {"new_version": version, "abort_all_requests": False}
            target = f"/workers/{id_of(one)}/call/update_weight_version"
            assert (await f.call(target, update)).status == 200

        for one in f.engines:
            await update(one, "1")
        await update(f.prefills[1], "2")
        assert (await f.call(path, body, headers={MINIMUM: "1"})).status == 200
        refused = await f.call(path, body, headers={MINIMUM: "2"})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "weights of version 2 or later" in refused.json()["error"]["message"]
        await update(f.decodes[0], "2")
        for _ in range(6):
            answer = await f.call(path, body, headers={MINIMUM: "2"})
            assert answer.status == 200
            assert answer.headers["x-forebay-worker"] == id_of(f.decodes[0])
            assert answer.headers["x-forebay-prefill-worker"] == id_of(f.prefills[1])
            assert answer.headers[VERSION] == "2"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_the_decode_worker_that_takes_over_a_handoff_has_them_too(engine: str) -> None:
    async with pair_fleet(decodes=3, engine=engine, dev_mode=True, checks_idle=False) as f:
        gone, old, new = f.decodes
        path, body = "/v1/completions", {"model": f.alone.options.model, "prompt": "a b c", "max_tokens": 2}
        for one, version in zip(f.engines, ("2", "2", "1", "2"), strict=True):
            update = {"new_version": version, "abort_all_requests": False}
            assert (await f.call(f"/workers/{id_of(one)}/call/update_weight_version", update)).status == 200
        busy = f.gateway.gateway.services.fleet.get(id_of(new))
        assert busy is not None
        booking = busy.loads[0].book(requests=1, blocks=500, prefill_tokens=0)  # so that it is chosen last
        await gone.stop()
        answer = await f.call(path, body, headers={MINIMUM: "2"})
        booking.release()
        assert (answer.status, answer.headers[VERSION]) == (200, "2")
        assert answer.headers["x-forebay-worker"] == id_of(new)
        assert old.log.requests_to(path) == []
        assert (await f.gateway.record()).attempts == 1


async def test_what_was_assumed_under_old_weights_is_forgotten() -> None:
    """Without KV events nothing else tells that the cache was emptied past the gateway."""
    async with fleet(1, has_events=False, gateway={"policy": "prefix-approximate", **MANY_PROBES}) as f:
        (engine,) = f.engines
        await f.generate(PROMPT)
        assert (await f.generate(PROMPT)).headers["x-forebay-overlap-blocks"] != "0"
        update = {"model_path": "x", "weight_version": "8"}
        assert (await call(("127.0.0.1", engine.port), "/update_weights_from_disk", update)).status == 200
        (member,) = members(f.gateway)
        await until(lambda: member.weight_number == 8, "the new version")
        assert member.state is WorkerState.READY
        answer = await f.generate(PROMPT)
        assert answer.headers["x-forebay-overlap-blocks"] == "0"
        assert answer.json()["meta_info"]["cached_tokens"] == 0

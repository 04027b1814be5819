"""Workers that are late, down, back, behind a prefix or of another model."""

from typing import Any

import pytest

from gateway.api.health import why_not_ready
from routers.fleet import WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, TIME_SCALE, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, SeenRequest, script_engine
from tests.fakes.wire import call
from tests.integration.test_dynamic_workers import UNARY, get, id_of, only, simulated

DEAD = "http://127.0.0.1:9"  # nothing listens on the discard port


async def test_field_case_74_a_worker_whose_metadata_comes_late_is_used_when_it_is_there() -> None:
    async with script_engine() as engine:
        engine.metadata = {"/ready": {}, "/ping": {}, "/health": {}}  # alive, and does not say what it is
        async with running_gateway(engine.url, wait_ready=0) as gateway:
            await until(lambda: "status 404" in only(gateway).detail, "the reason told")
            entry = (await get(gateway, "/workers"))["workers"][0]
            assert (entry["is_ready"], entry["is_healthy"], entry["model_id"]) == (False, False, None)
            assert "model_info" in entry["detail"]
            ready = await call(gateway.address, "/ready", method="GET")
            assert (ready.status, "model_info" in ready.json()["reason"]) == (503, True)
            answer = await call(gateway.address, "/generate", UNARY)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert not engine.requests
            engine.metadata = dict(METADATA)
            await until(lambda: only(gateway).state is WorkerState.READY, "it joins", 2 * TIME_SCALE)
            assert (await call(gateway.address, "/generate", UNARY)).status == 200


async def test_field_case_76_a_worker_that_comes_back_joins_again_as_what_it_is_then() -> None:
    engine = SimulatedEngine(EngineOptions(model="one"))
    await engine.start()
    port = engine.port
    try:
        async with running_gateway(engine.url, breaker_failures=1, breaker_open_s=3600) as gateway:
            member = only(gateway)
            for turn in range(2):
                engine.add_fault(at="headers", do="status:500")
                assert (await call(gateway.address, "/generate", UNARY)).status == 502
                await engine.stop()
                await until(lambda: member.state is WorkerState.UNHEALTHY, "the end noticed")
                assert (await call(gateway.address, "/generate", UNARY)).status == 503
                # Far more failed probes than make it unhealthy do not end the probing.
                engine = SimulatedEngine(EngineOptions(model=f"next-{turn}", port=port, dp_size=turn + 1))
                await engine.start()
                await gateway.ready(1)
                entry = await get(gateway, f"/workers/{id_of(engine)}")
                assert (entry["model_id"], entry["dp_size"], entry["breaker"]) == (f"next-{turn}", turn + 1, "closed")
                assert (await call(gateway.address, "/generate", UNARY)).status == 200
    finally:
        await engine.stop()


async def test_field_case_77_a_worker_that_is_down_at_start_keeps_nobody_waiting() -> None:
    async with simulated() as one, simulated() as two, running_gateway(DEAD, one.url, two.url, wait_ready=2) as gateway:
        for _ in range(4):
            assert (await call(gateway.address, "/generate", UNARY)).headers["x-forebay-attempts"] == "1"
        assert why_not_ready(gateway.gateway.services) is None
        await until(lambda: "connect" in only(gateway).detail, "the reason told")
        entry = (await get(gateway, "/workers"))["workers"][0]
        assert (entry["url"], entry["is_ready"], entry["state"]) == (DEAD, False, "unidentified")


async def test_field_case_79_prefix_and_host_reach_the_worker_as_given() -> None:
    hosts: list[str | None] = []

    async def script(request: SeenRequest, reply: Reply) -> None:
        hosts.append(request.header("host"))
        assert request.path == "/models/a/generate"
        await reply.whole(b'{"meta_info":{"id":"%b"}}' % request.rid.encode())

    async with script_engine(script) as engine:
        engine.metadata = {f"/models/a{path}": body for path, body in METADATA.items()}
        url = engine.url.replace("127.0.0.1", "localhost") + "/models/a"
        async with running_gateway(url) as gateway:
            answer = await call(gateway.address, "/generate", UNARY)
            assert (answer.status, answer.headers["x-forebay-worker"]) == (200, only(gateway).worker.id)
            assert hosts == [engine.url.removeprefix("http://").replace("127.0.0.1", "localhost")]


async def test_field_case_104_a_worker_that_generates_is_not_removed_for_a_slow_health_check() -> None:
    """What is asked generates nothing, so that a long prefill cannot delay it."""
    async with simulated(prefill_tokens_per_s=2000 / TIME_SCALE) as engine:
        engine.add_fault(at="headers", do="status:503", times=None, match={"path": "/health_generate"})
        async with running_gateway(engine.url, unhealthy_after=1) as gateway:
            member = only(gateway)
            states: set[WorkerState] = set()
            member.on_change = lambda one: states.add(one.state)
            body = {"input_ids": list(range(1000)), "sampling_params": {"max_new_tokens": 2}}
            assert (await call(gateway.address, "/generate", body)).status == 200
            assert states <= {WorkerState.READY}


async def test_field_case_113_a_key_of_the_configuration_opens_a_protected_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_WORKER_KEY", "right")
    monkeypatch.setenv("TEST_WRONG_KEY", "wrong")
    async with simulated(api_key="right") as one, simulated(api_key="right") as two:
        good, bad = f"{one.url},api_key_env=TEST_WORKER_KEY", f"{two.url},api_key_env=TEST_WRONG_KEY"
        async with running_gateway(good, bad, wait_ready=1) as gateway:
            assert (await call(gateway.address, "/generate", UNARY)).headers["x-forebay-worker"] == id_of(one)
            refused = gateway.gateway.services.fleet.get(id_of(two))
            assert refused is not None
            await until(lambda: "api_key_env" in refused.detail, "the wrong key told")
            assert refused.state is WorkerState.UNIDENTIFIED


async def test_field_case_124_each_model_has_its_own_workers_also_when_they_come_later() -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

    async with simulated(model="a") as one, simulated(model="b") as two, running_gateway(one.url) as gateway:
        path = "/v1/chat/completions"
        assert (await call(gateway.address, path, chat)).status == 200  # a single model needs no name
        assert (await call(gateway.address, path, {**chat, "model": "b"})).status == 404
        await call(gateway.address, f"/add_worker?url={two.url}")
        await gateway.ready(2)
        for model, engine in (("a", one), ("b", two)):
            answer = await call(gateway.address, path, {**chat, "model": model})
            assert answer.headers["x-forebay-worker"] == id_of(engine)
        assert (await call(gateway.address, path, chat)).status == 400
        unknown = await call(gateway.address, path, {**chat, "model": "c"})
        assert (unknown.status, unknown.json()["error"]["type"]) == (404, "model_not_found")
        assert "127.0.0.1" not in unknown.body.decode()
        await call(gateway.address, f"/remove_worker?url={two.url}")
        await until(lambda: len(gateway.gateway.services.fleet) == 1, "b removed", PATIENCE_S)
        assert (await call(gateway.address, path, {**chat, "model": "b"})).status == 404
        assert (await call(gateway.address, path, chat)).status == 200


async def test_field_case_125_an_adapter_is_asked_of_the_worker_that_has_loaded_it() -> None:
    async with script_engine() as one, script_engine() as two, running_gateway(one.url, two.url) as gateway:
        path, body = "/v1/completions", {"prompt": "hi", "model": "adapter"}
        assert (await call(gateway.address, path, body)).status == 404
        one.metadata["/v1/models"] = {"data": [{"id": "model"}, {"id": "adapter", "parent": "model"}]}
        await until(lambda: "adapter" in gateway.gateway.services.fleet.models, "the adapter seen")
        for _ in range(5):
            assert (await call(gateway.address, path, body)).headers["x-forebay-worker"] == id_of(one)
        listed = [entry["id"] for entry in (await get(gateway, "/v1/models"))["data"]]
        assert listed == ["model", "adapter"]

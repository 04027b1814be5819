"""Workers that are added, removed and called while the gateway runs, and workers that come late or back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from routers.fleet import Member, WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call, request_bytes, wire

UNARY: dict[str, Any] = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
ENDLESS: dict[str, Any] = {
    "text": "hi", "rid": "mine", "stream": True, "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True},
}  # fmt: skip


def id_of(engine: SimulatedEngine | ScriptEngine) -> str:
    """The worker id of an engine."""
    return engine.url.removeprefix("http://")


@asynccontextmanager
async def simulated(**options: Any) -> AsyncIterator[SimulatedEngine]:
    """A simulated engine."""
    engine = SimulatedEngine(EngineOptions(**options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def get(gateway: RunningGateway, path: str) -> Any:
    """The JSON of one GET."""
    answer = await call(gateway.address, path, method="GET")
    assert answer.status == 200
    return answer.json()


async def delete(gateway: RunningGateway, worker: str, query: str = "") -> Answer:
    """Ask for a removal."""
    return await call(gateway.address, f"/workers/{worker}{query}", method="DELETE")


async def gone(gateway: RunningGateway, worker: str) -> None:
    """Wait until a worker is forgotten, in every place."""
    await until(lambda: gateway.gateway.services.fleet.get(worker) is None, f"{worker} removed")
    assert worker not in [entry["id"] for entry in (await get(gateway, "/workers"))["workers"]]
    assert (await call(gateway.address, f"/workers/{worker}", method="GET")).status == 404
    assert worker not in gateway.gateway.services.metrics.render().decode()


def only(gateway: RunningGateway) -> Member:
    """The first member."""
    return next(iter(gateway.gateway.services.fleet))


# Adding.


async def test_a_worker_is_added_by_its_url_and_used_once_it_is_known(engine: SimulatedEngine) -> None:
    async with running_gateway() as gateway:
        assert (await call(gateway.address, "/generate", UNARY)).status == 503
        answer = await call(gateway.address, "/workers", {"url": engine.url + "/", "worker_type": "regular"})
        worker = id_of(engine)
        assert (answer.status, answer.headers["location"]) == (202, f"/workers/{worker}")
        body = answer.json()
        assert {key: body[key] for key in ("status", "worker_id", "url", "location")} == {
            "status": "accepted", "worker_id": worker, "url": engine.url, "location": f"/workers/{worker}",
        }  # fmt: skip
        again = await call(gateway.address, "/workers", {"url": engine.url})
        assert (again.status, again.json()["worker_id"]) == (202, worker)
        await gateway.ready(1)
        entry = await get(gateway, f"/workers/{worker}")
        assert (entry["worker_type"], entry["is_ready"], entry["breaker"]) == ("regular", True, "closed")
        listed = await get(gateway, "/workers")
        assert listed["total"] == 1
        assert listed["stats"] == {"regular_count": 1, "prefill_count": 0, "decode_count": 0}
        assert await get(gateway, "/list_workers") == {"urls": [engine.url]}
        assert (await call(gateway.address, "/generate", UNARY)).headers["x-forebay-worker"] == worker


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({}, id="no url"),
        pytest.param({"url": ""}, id="empty"),
        pytest.param({"url": "127.0.0.1:1"}, id="no scheme"),
        pytest.param({"url": "grpc://127.0.0.1:1"}, id="another scheme"),
        pytest.param({"url": "http://127.0.0.1:99999"}, id="no port"),
        pytest.param({"url": "http://user:secret@127.0.0.1:1"}, id="password"),
        pytest.param({"url": "http://127.0.0.1:1/a b"}, id="space"),
        pytest.param({"url": "http://127.0.0.1:1/?x=1"}, id="query"),
        pytest.param({"url": ["http://127.0.0.1:1"]}, id="list"),
        pytest.param({"url": "http://127.0.0.1:1", "worker_type": "other"}, id="no such type"),
        pytest.param({"url": "http://127.0.0.1:1", "engine": "other"}, id="no such engine"),
        pytest.param({"url": "http://127.0.0.1:1", "bootstrap_port": 99999}, id="bootstrap port"),
        pytest.param({"url": "http://127.0.0.1:1", "kv_events": "nowhere"}, id="kv events"),
        pytest.param({"url": "http://127.0.0.1:1", "api_key": "a\r\nb: c"}, id="key with a line break"),
        pytest.param(b"{", id="no JSON"),
    ],
)
async def test_what_is_no_worker_is_refused(front: RunningGateway, body: Any) -> None:
    answer = await call(front.address, "/workers", body)
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request")
    assert "secret" not in answer.body.decode()
    assert (await get(front, "/workers"))["total"] == 1


async def test_what_is_said_of_a_worker_is_taken(engine: SimulatedEngine) -> None:
    async with running_gateway() as gateway:
        said = {"url": engine.url, "worker_type": "decode", "model_id": "mine", "engine": "sglang", "priority": 5}
        await call(gateway.address, "/workers", said)
        await until(lambda: only(gateway).state is WorkerState.READY, "the worker known")
        entry = await get(gateway, f"/workers/{id_of(engine)}")
        assert (entry["worker_type"], entry["role"], entry["model_id"]) == ("decode", "decode", "mine")
        assert (await get(gateway, "/workers"))["stats"]["decode_count"] == 1


async def test_a_role_that_the_engine_contradicts_is_shown_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with simulated(role="prefill") as engine, running_gateway() as gateway:
        await call(gateway.address, "/workers", {"url": engine.url, "worker_type": "decode"})
        await until(lambda: only(gateway).state is WorkerState.READY, "the worker known")
        told = "given as decode, but its engine says prefill"
        assert (await get(gateway, f"/workers/{id_of(engine)}"))["detail"] == told
        assert [one.levelname for one in caplog.records if told in one.getMessage()] == ["WARNING"]


async def test_field_case_113_a_key_given_with_the_worker_opens_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with simulated(api_key="worker-key-1") as engine, running_gateway() as gateway:
        await call(gateway.address, "/workers", {"url": engine.url})
        await until(lambda: "api key" in only(gateway).detail, "the missing key told")
        assert "401" in (await get(gateway, "/workers"))["workers"][0]["detail"]
        await delete(gateway, id_of(engine))
        await gone(gateway, id_of(engine))
        await call(gateway.address, "/workers", {"url": engine.url, "api_key": "worker-key-1"})
        await gateway.ready(1)
        assert (await call(gateway.address, "/generate", UNARY)).status == 200
        shown = json.dumps(await get(gateway, "/workers")) + caplog.text
        assert "worker-key-1" not in shown


# The interface of older routers.


async def test_older_routers_interface(engine: SimulatedEngine) -> None:
    worker = id_of(engine)
    ways: list[tuple[str, dict[str, Any] | None]] = [
        (f"?url={engine.url}", None),
        (f"?url={engine.url}@3", None),
        ("", {"url": engine.url}),
        ("", {"worker_url": engine.url}),
    ]
    async with running_gateway() as gateway:
        for query, body in ways:
            added = await call(gateway.address, f"/add_worker{query}", body)
            assert (added.status, added.json()["worker_id"]) == (202, worker)
            assert await get(gateway, "/list_workers") == {"urls": [engine.url]}
            await gateway.ready(1)
            assert (await call(gateway.address, "/generate", UNARY)).status == 200
            removed = await call(gateway.address, f"/remove_worker{query}", body)
            assert removed.status == 202
            await gone(gateway, worker)
            assert await get(gateway, "/list_workers") == {"urls": []}


async def test_workers_go_by_many_names(engine: SimulatedEngine) -> None:
    """Their id, with a rank behind it, or the URL where older trainers put that."""
    worker = id_of(engine)
    async with running_gateway() as gateway:
        for name in (worker, f"{worker}@3", quote(engine.url, safe=""), quote(f"{engine.url}@0", safe="")):
            nulls = {"worker_type": None, "bootstrap_port": None, "engine": None, "model_id": None, "kv_events": None}
            added = await call(gateway.address, "/workers", {"url": f"{engine.url}@0", "api_key": None, **nulls})
            assert (added.status, added.headers["location"]) == (202, f"/workers/{worker}")
            await gateway.ready(1)
            assert (await get(gateway, f"/workers/{worker}@1"))["url"] == engine.url
            assert (await call(gateway.address, f"/workers/{worker}@0/call/model_info", method="GET")).status == 200
            assert (await delete(gateway, name)).status == 202
            await gone(gateway, worker)


async def test_workers_are_listed_by_model(engine: SimulatedEngine) -> None:
    async with simulated(model="another") as other, running_gateway(engine.url, other.url) as gateway:
        for query, expected in (("", 2), ("?model=", 2), (f"?model={other.options.model}", 1), ("?model=nobody", 0)):
            listed = await get(gateway, f"/workers{query}")
            assert (len(listed["workers"]), listed["total"], listed["stats"]["regular_count"]) == (expected,) * 3


@pytest.mark.parametrize("route", ["/add_worker", "/remove_worker"])
async def test_older_routers_interface_refuses_what_is_no_worker(front: RunningGateway, route: str) -> None:
    for query, body in (("", None), ("?url=nowhere", None), ("", {"url": 5}), ("", {"other": "x"}), ("", b"[]")):
        answer = await call(front.address, route + query, body)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "url"), (query, body)
    unknown = await call(front.address, "/remove_worker?url=http://127.0.0.1:1")
    assert (unknown.status, unknown.json()["error"]["type"]) == (404, "not_found")


# Removing.


async def test_a_removed_worker_ends_its_requests_and_gets_no_new_ones() -> None:
    async with simulated(inter_token_ms=10) as one, simulated() as two, running_gateway(one.url) as gateway:
        async with wire(gateway.address) as connection:
            body = {**ENDLESS, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
            await connection.send(request_bytes("/generate", body))
            head = await connection.head()
            await call(gateway.address, "/workers", {"url": two.url})
            await gateway.ready(2)
            answer = await delete(gateway, id_of(one), "?drain_timeout_s=60")
            assert (answer.status, answer.json()["worker_id"]) == (202, id_of(one))
            entry = await get(gateway, f"/workers/{id_of(one)}")
            assert (entry["is_draining"], entry["is_ready"], entry["state"]) == (True, False, "draining")
            assert gateway.busy()["drain_tasks"] == 1
            for _ in range(5):
                assert (await call(gateway.address, "/generate", UNARY)).headers["x-forebay-worker"] == id_of(two)
            events = (await connection.body(*head)).events()
            assert (len(events) > 30, events[-1]) == (True, b"[DONE]")
        await gone(gateway, id_of(one))
        assert gateway.records[-1].outcome == "complete"


@pytest.mark.parametrize("first", ["?drain_timeout_s=0", "?drain_timeout_s=0.05", "?drain_timeout_s=3600"])
async def test_at_the_deadline_of_a_removal_clients_and_engine_are_told(first: str) -> None:
    async with simulated(inter_token_ms=10) as engine, running_gateway(engine.url) as gateway:
        async with wire(gateway.address) as stream, wire(gateway.address) as unary:
            await stream.send(request_bytes("/generate", ENDLESS))
            head = await stream.head()
            await unary.send(request_bytes("/generate", {**ENDLESS, "stream": False, "rid": "other"}))
            await engine.wait_for(lambda e: e.running == 2)
            await delete(gateway, id_of(engine), first)
            if "3600" in first:  # a second request may be in more of a hurry
                await delete(gateway, id_of(engine), "?drain_timeout_s=0")
            *_, event, done = (await stream.body(*head)).events()
            error = json.loads(event)["error"]
            assert (error["type"], error["code"], done) == ("unavailable", 503, b"[DONE]")
            answer = await unary.answer()
            assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
            await engine.wait_for(lambda e: e.running == 0)
            await gone(gateway, id_of(engine))
        await gateway.settle()
        assert {record.outcome for record in gateway.records} == {"shutdown"}
        assert id_of(engine) not in gateway.gateway.services.metrics.render().decode()


async def test_a_removal_ends_though_the_engine_does_not_answer() -> None:
    arrived = asyncio.Event()

    async def silent(request: SeenRequest, reply: Reply) -> None:
        arrived.set()
        await reply.gone()

    # The schedule of its abort takes five seconds, which nothing waits for here.
    async with script_engine(silent) as engine, running_gateway(engine.url, expect_idle=False) as gateway:
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", UNARY))
            await arrived.wait()
            await delete(gateway, id_of(engine), "?drain_timeout_s=0")
            assert (await connection.answer()).status == 503
            await gone(gateway, id_of(engine))
        # What is still done for its last request leaves no trace.
        told = len(engine.aborted)
        await until(lambda: len(engine.aborted) > told, "one more abort")
        assert id_of(engine) not in gateway.gateway.services.metrics.render().decode()


async def test_a_paused_worker_can_be_removed_with_an_abort_that_waits_for_it() -> None:
    async with simulated(inter_token_ms=10) as engine, running_gateway(engine.url) as gateway:
        member = only(gateway)
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", {**ENDLESS, "stream": False}))
            await engine.wait_for(lambda e: e.running == 1)
            await call(("127.0.0.1", engine.port), "/pause_generation", {"mode": "in_place"})
            await until(lambda: member.state is WorkerState.PAUSED, "the pause noticed")
        await gateway.record()
        await delete(gateway, id_of(engine), "?drain_timeout_s=0")
        await gone(gateway, id_of(engine))
        await gateway.settle()


async def test_adding_again_during_the_drain_calls_the_removal_off() -> None:
    async with simulated(inter_token_ms=10) as engine, running_gateway(engine.url) as gateway:
        member = only(gateway)
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", ENDLESS))
            await connection.head()
            await delete(gateway, id_of(engine), "?drain_timeout_s=60")
            assert (await call(gateway.address, "/generate", UNARY)).status == 503
            await call(gateway.address, f"/add_worker?url={engine.url}")
            assert (member.state, gateway.busy().get("drain_tasks")) == (WorkerState.READY, None)
            assert (await call(gateway.address, "/generate", UNARY)).status == 200
        await gateway.settle()
        assert only(gateway) is member


@pytest.mark.parametrize("limit", ["-1", "nan", "inf", "soon", "1e9"])
async def test_limits_of_a_removal_that_are_none_are_refused(front: RunningGateway, limit: str) -> None:
    answer = await delete(front, only(front).worker.id, f"?drain_timeout_s={limit}")
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request")
    assert not only(front).is_draining


async def test_field_case_80_a_worker_is_removed_under_load_and_nobody_notices() -> None:
    pace = {"inter_token_ms": 2}
    async with simulated(**pace) as one, simulated(**pace) as two:
        urls = one.url, two.url
        async with running_gateway(*urls) as gateway:
            body = {**UNARY, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
            statuses: list[int] = []

            async def client(number: int) -> None:
                async with wire(gateway.address) as connection:
                    for turn in range(6):
                        await connection.send(request_bytes("/generate", {**body, "rid": f"r-{number}-{turn}"}))
                        statuses.append((await connection.answer()).status)

            async with asyncio.TaskGroup() as clients:
                for number in range(16):
                    clients.create_task(client(number))
                await until(lambda: len(statuses) > 10, "some answers")
                await delete(gateway, id_of(one), "?drain_timeout_s=60")
            assert statuses == [200] * 96
            await gone(gateway, id_of(one))


# Calls to one worker.


async def test_a_call_is_handed_on_to_one_worker_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SeenRequest] = []

    async def script(request: SeenRequest, reply: Reply) -> None:
        seen.append(request)
        await reply.whole(b"<p>no</p>", content_type="text/html; charset=utf-8", status=418)

    monkeypatch.setenv("TEST_ADMIN_KEY", "worker-admin")
    async with script_engine(script) as engine, script_engine() as other:
        spec = f"{engine.url},admin_api_key_env=TEST_ADMIN_KEY"
        async with running_gateway(spec, other.url) as gateway:
            path = f"/workers/{id_of(engine)}/call/set_internal_state/a%2Fb%20c?x=1&y=%20"
            headers = {"Authorization": "Bearer client", "X-Other": "1"}
            answer = await call(gateway.address, path, {"a": 1}, headers=headers)
            assert (answer.status, answer.body) == (418, b"<p>no</p>")
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            assert answer.headers["x-forebay-worker"] == id_of(engine)
            (request,) = seen
            assert (request.method, request.path) == ("POST", "/set_internal_state/a%2Fb%20c?x=1&y=%20")
            assert (request.header("authorization"), request.header("x-other")) == ("Bearer worker-admin", None)
            assert (json.loads(request.body), request.header("content-type")) == ({"a": 1}, "application/json")
            assert not other.requests
            # Other methods too.
            answer = await call(gateway.address, f"/workers/{id_of(engine)}/call/model_info", method="GET")
            assert answer.json()["served_model_name"] == "model"


async def test_calls_to_workers_that_are_not_there(front: RunningGateway, scripted: ScriptEngine) -> None:
    unknown = await call(front.address, "/workers/nobody/call/model_info", method="GET")
    assert (unknown.status, unknown.json()["error"]["type"]) == (404, "not_found")
    async with script_engine() as dead, running_gateway(dead.url, health_interval_s=3600) as gateway:
        await dead.stop()
        answer = await call(gateway.address, f"/workers/{id_of(dead)}/call/model_info", method="GET")
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")


# Who may.

ADMIN_ROUTES = [
    ("GET", "/workers"), ("POST", "/workers"), ("GET", "/workers/x"), ("DELETE", "/workers/x"),
    ("POST", "/add_worker?url=http://127.0.0.1:1"), ("POST", "/remove_worker?url=http://127.0.0.1:1"),
    ("GET", "/list_workers"), ("POST", "/workers/x/call/flush_cache"), ("GET", "/internal/state"),
]  # fmt: skip


async def test_only_administrators_change_the_fleet(scripted: ScriptEngine, tmp_path: Path) -> None:
    keys = tmp_path / "admin"
    keys.write_text("secret\n")
    async with running_gateway(scripted.url, admin_allow=("10.0.0.0/8",)) as gateway:
        for method, path in ADMIN_ROUTES:
            answer = await call(gateway.address, path, {"url": "http://127.0.0.1:1"}, method=method)
            assert (answer.status, answer.json()["error"]["type"]) == (403, "forbidden"), path
        assert len(gateway.gateway.services.fleet) == 1
    async with running_gateway(scripted.url, admin_api_key_file=keys, admin_allow=("127.0.0.0/8",)) as gateway:
        for method, path in ADMIN_ROUTES:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer None"}):
                answer = await call(
                    gateway.address, path, {"url": "http://127.0.0.1:1"}, method=method, headers=headers
                )
                assert (answer.status, answer.json()["error"]["type"]) == (401, "unauthorized"), path
        assert len(gateway.gateway.services.fleet) == 1
        headers = {"Authorization": "Bearer secret"}
        assert (await call(gateway.address, "/workers", method="GET", headers=headers)).status == 200


async def test_an_addressed_call_uses_the_key_that_the_route_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang with both keys refuses the admin key on its ordinary routes, and the ordinary one on its admin routes.
    monkeypatch.setenv("ENGINE_KEY", "ordinary")
    monkeypatch.setenv("ENGINE_ADMIN_KEY", "admin")
    engine = SimulatedEngine(EngineOptions(api_key="ordinary", admin_api_key="admin"))
    await engine.start()
    try:
        spec = f"{engine.url},api_key_env=ENGINE_KEY,admin_api_key_env=ENGINE_ADMIN_KEY"
        async with running_gateway(spec) as gateway:
            worker = engine.url.removeprefix("http://")
            for path, method in (("flush_cache", "POST"), ("model_info", "GET"), ("v1/loads?include=core", "GET")):
                answer = await call(gateway.address, f"/workers/{worker}/call/{path}", method=method)
                assert answer.status == 200, path
    finally:
        await engine.stop()

"""Control routes that go to every worker: who gets them, what comes back, and what the gateway knows afterwards."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.types import EngineKind, ProbeResult, Worker
from gateway.api import fan_out
from gateway.api.fan_out import ADDRESSED_ONLY, LIMITS_S, MAX_ANSWER_BYTES
from routers.fleet import Member, WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.kv_fleet import PROMPT, fleet
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call, request_bytes, wire

ONE_TOKEN: dict[str, Any] = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
# No probe comes between: what the gateway knows it knows from the call itself.
NO_PROBES: dict[str, Any] = {"health_interval_s": 3600.0}


class Scene:
    """Simulated engines and the gateway in front of them."""

    def __init__(self, gateway: RunningGateway, engines: list[SimulatedEngine]) -> None:
        self.gateway = gateway
        self.engines = engines

    @property
    def members(self) -> list[Member]:
        """The gateway's view of the engines, in the same order."""
        return list(self.gateway.gateway.services.fleet)

    async def send(self, path: str, body: Any = None, **more: Any) -> Answer:
        """One control call of all workers."""
        return await call(self.gateway.address, path, {} if body is None else body, **more)


async def ok(request: SeenRequest, reply: Reply) -> None:
    """Do what is asked."""
    await reply.whole(b"{}")


def results(answer: Answer) -> list[tuple[int, Any]]:
    """Status and body of each worker, in the fleet's order."""
    (name, listed), *rest = answer.json().items()
    assert (name, rest) == ("results", [])
    assert all(list(result) == ["worker_id", "status", "body"] for result in listed)
    return [(result["status"], result["body"]) for result in listed]


def error_of(answer: Answer) -> dict[str, Any]:
    """The error that is the whole answer."""
    error = answer.json()["error"]
    assert error["code"] == answer.status
    assert isinstance(error, dict)
    return error


@asynccontextmanager
async def scene(*kinds: str, specs: str = "", gateway: Any = None, **options: Any) -> AsyncIterator[Scene]:
    """One simulated engine of each of ``kinds``."""
    async with AsyncExitStack() as stack:
        engines: list[SimulatedEngine] = []
        for kind in kinds:
            engine = SimulatedEngine(
                EngineOptions(**{"engine": kind, "model": "model", "dev_mode": kind == "vllm", **options})
            )
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        urls = [engine.url + specs for engine in engines]
        running = await stack.enter_async_context(running_gateway(*urls, **{**NO_PROBES, **(gateway or {})}))
        yield Scene(running, engines)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of which a test can wait for the end."""
    for path in LIMITS_S:
        monkeypatch.setitem(fan_out.LIMITS_S, path, 0.3 * TIME_SCALE)


def test_the_limits_are_those_of_the_documents() -> None:
    text = (
        (Path(__file__).parents[2] / "docs/operating.md")
        .read_text("utf-8")
        .partition("## Control routes for all workers")[2]
    )
    rows = re.findall(r"^\| `.*?(/\w+)` \| (\d+) s \|", text, re.M)
    assert {path: float(limit) for path, limit in rows} == LIMITS_S


# --- both kinds


@pytest.mark.parametrize(
    ("path", "on_vllm"),
    [
        ("/pause_generation", "/pause"),
        ("/continue_generation", "/resume"),
        ("/flush_cache", "/reset_prefix_cache"),
        ("/release_memory_occupation", "/sleep"),
        ("/resume_memory_occupation", "/wake_up"),
    ],
)
async def test_every_worker_does_it_in_its_own_words(path: str, on_vllm: str) -> None:
    async with scene("sglang", "vllm", "sglang") as s:
        answer = await s.send(path)
        assert (answer.status, [status for status, _ in results(answer)]) == (200, [200, 200, 200])
        listed = [result["worker_id"] for result in answer.json()["results"]]
        assert listed == [member.worker.id for member in s.members]
        for engine, engines_path in zip(s.engines, (path, on_vllm, path), strict=True):
            (seen,) = engine.log.requests_to(engines_path)
            assert (seen.method, seen.body) == ("POST", b"{}")


async def test_bodies_come_back_as_they_are() -> None:
    async with scene("sglang", "vllm") as s:
        assert results(await s.send("/pause_generation")) == [
            (200, {"message": "Generation paused successfully.", "status": "ok"}),
            (200, {"status": "paused"}),
        ]
        (_, text), (_, reset) = results(await s.send("/flush_cache", method="GET"))
        assert text.startswith("Cache flushed.\n")
        assert reset == {"success": True}
        assert s.engines[0].log.requests_to("/flush_cache")[0].method == "GET"
        assert s.engines[1].log.requests_to("/reset_prefix_cache")[0].method == "POST"


async def test_what_vllm_does_not_have_is_told_as_its_result() -> None:
    async with scene("sglang", "vllm") as s:
        answer = await s.send("/update_weights_from_disk", {"model_path": "x", "weight_version": "7"})
        (on_sglang, _), (on_vllm, body) = results(answer)
        assert (answer.status, on_sglang, on_vllm) == (207, 200, 501)
        assert (body["error"]["type"], "/update_weights_from_disk" in body["error"]["message"]) == (
            "not_implemented",
            True,
        )
        answer = await s.send("/pause_generation", b"[", headers={"Content-Type": "application/json"})
        assert (answer.status, [status for status, _ in results(answer)]) == (207, [400, 400])
        assert {member.state for member in s.members} == {WorkerState.READY}


async def test_query_body_and_type_go_on_and_credentials_do_not() -> None:
    seen: list[SeenRequest] = []

    async def script(request: SeenRequest, reply: Reply) -> None:
        seen.append(request)
        await reply.whole(b'{"a":1.50,"b":18446744073709551616}', status=202)

    async with script_engine(script) as engine, running_gateway(engine.url) as gateway:
        headers = {"Content-Type": "application/x-odd", "Authorization": "Bearer client", "X-Other": "1"}
        answer = await call(gateway.address, "/load_lora_adapter?x=%20&y", b'{ "lora_name": "a"}', headers=headers)
        (request,) = seen
        assert (request.method, request.path) == ("POST", "/load_lora_adapter?x=%20&y")
        assert request.body == b'{ "lora_name": "a"}'
        assert request.header("content-type") == "application/x-odd"
        assert (request.header("authorization"), request.header("x-other")) == (None, None)
        # A worker's JSON keeps its spelling.
        assert b'"status":202,"body":{"a":1.50,"b":18446744073709551616}' in answer.body
        assert answer.status == 200


# --- what goes wrong


async def test_one_that_fails_does_not_hide_the_others() -> None:
    async with scene("sglang", "sglang", "vllm") as s:
        s.engines[1].add_fault(at="headers", do="status:500", match={"path": "/flush_cache"})
        answer = await s.send("/flush_cache")
        assert (answer.status, [status for status, _ in results(answer)]) == (207, [200, 500, 200])


async def test_a_flush_that_vllm_did_not_do_is_no_success() -> None:
    async with scene("vllm", inter_token_ms=50) as s, wire(s.gateway.address) as running:
        await running.send(request_bytes("/v1/chat/completions", {**CHAT, "max_tokens": 1000, "ignore_eos": True}))
        await s.engines[0].wait_for(lambda e: e.running == 1)
        answer = await s.send("/flush_cache")
        assert (answer.status, results(answer)) == (207, [(200, {"success": False})])


async def test_one_that_hangs_costs_its_time_limit_only(short_limits: None) -> None:
    async with scene("sglang", "sglang") as s:
        s.engines[0].add_fault(at="headers", do="hang", match={"path": "/pause_generation"})
        answer = await s.send("/pause_generation")
        (late, body), (done, _) = results(answer)
        assert (answer.status, late, done) == (207, 504, 200)
        assert "no answer within" in body["error"]["message"]
        # What did not answer is not taken for paused.
        assert [member.state for member in s.members] == [WorkerState.READY, WorkerState.PAUSED]


@pytest.mark.parametrize("do", ["reset", "close"])
async def test_nothing_is_sent_twice(do: str) -> None:
    async with scene("sglang", "sglang") as s:
        # On a connection that has carried a call before, a client that resends would take the end for an idle limit.
        assert (await s.send("/continue_generation")).status == 200
        s.engines[0].add_fault(at="headers", do=do, times=None, match={"path": "/update_weights_from_disk"})
        answer = await s.send("/update_weights_from_disk", {"model_path": "x"})
        assert (answer.status, [status for status, _ in results(answer)]) == (207, [503, 200])
        assert len(s.engines[0].log.requests_to("/update_weights_from_disk")) == 1
        worker = s.members[0].worker.id
        assert (await s.send(f"/workers/{worker}/call/update_weights_from_disk")).status == 503
        assert len(s.engines[0].log.requests_to("/update_weights_from_disk")) == 2


async def test_a_huge_answer_is_bounded() -> None:
    async with scene("sglang", "sglang") as s:
        s.engines[0].add_fault(at="headers", do=f"huge:{MAX_ANSWER_BYTES + 1}", match={"path": "/flush_cache"})
        s.engines[1].add_fault(at="headers", do=f"huge:{MAX_ANSWER_BYTES}", match={"path": "/flush_cache"})
        answer = await s.send("/flush_cache")
        (refused, body), (passed, whole) = results(answer)
        assert (answer.status, refused, body["error"]["type"]) == (207, 502, "response_too_large")
        assert (passed, len(json.dumps(whole, separators=(",", ":")))) == (200, MAX_ANSWER_BYTES)


async def test_workers_get_their_admin_keys_and_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "ordinary")
    monkeypatch.setenv("ENGINE_ADMIN_KEY", "admin")
    async with AsyncExitStack() as stack:
        urls = []
        for admin_key in ("admin", "another", None):
            engine = SimulatedEngine(EngineOptions(api_key="ordinary", admin_api_key=admin_key))
            await engine.start()
            stack.push_async_callback(engine.stop)
            urls.append(f"{engine.url},api_key_env=ENGINE_KEY,admin_api_key_env=ENGINE_ADMIN_KEY")
        gateway = await stack.enter_async_context(running_gateway(*urls))
        answer = await call(gateway.address, "/flush_cache", {})
        assert (answer.status, [status for status, _ in results(answer)]) == (207, [200, 401, 200])


async def test_only_administrators_may(scripted: ScriptEngine, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("admin-key\n")
    async with running_gateway(scripted.url, admin_api_key_file=tmp_path / "admin") as gateway:
        for path in (*LIMITS_S, *ADDRESSED_ONLY):
            assert (await call(gateway.address, path, {})).status == 401
        assert not scripted.requests
        headers = {"Authorization": "Bearer admin-key"}
        assert error_of(await call(gateway.address, ADDRESSED_ONLY[0], {}, headers=headers))["code"] == 400


async def test_too_many_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "MAX_FAN_OUTS", 1)
    async with scene("sglang") as s, wire(s.gateway.address) as first:
        s.engines[0].add_fault(at="headers", do="hang", match={"path": "/update_weight_version"})
        await first.send(request_bytes("/update_weight_version", {}))
        await s.engines[0].wait_for(lambda e: e.log.requests_to("/update_weight_version"))
        answer = await s.send("/continue_generation")
        assert (answer.status, error_of(answer)["type"]) == (429, "overloaded")
        assert answer.headers["retry-after"] == "1"


# --- who gets it


@pytest.mark.parametrize("path", LIMITS_S)
async def test_without_a_worker_the_reason_is_told(path: str) -> None:
    async with running_gateway() as gateway:
        answer = await call(gateway.address, path, {})
        error = error_of(answer)
        assert (answer.status, error["type"], answer.headers["retry-after"]) == (503, "unavailable", "1")
        assert "no workers are configured" in error["message"]


async def test_workers_that_are_not_well_get_nothing() -> None:
    async with scene("sglang", "sglang") as s:
        s.members[0].lost_contact("for this test")
        assert [status for status, _ in results(await s.send("/flush_cache"))] == [200]
        s.members[1].lost_contact("for this test")
        answer = await s.send("/flush_cache")
        assert (answer.status, "for this test" in error_of(answer)["message"]) == (503, True)
        assert len(s.engines[0].log.requests_to("/flush_cache")) == 0


async def test_workers_that_are_removed_are_only_let_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene("sglang", "sglang") as s:
        s.members[0].is_draining = True
        for path in LIMITS_S:
            (first, *_) = (await s.send(path)).json()["results"]
            is_let_go_on = path in ("/continue_generation", "/resume_memory_occupation")
            assert first["worker_id"] == s.members[0 if is_let_go_on else 1].worker.id, path


async def test_engines_of_disaggregated_roles_are_engines_too() -> None:
    async with script_engine() as prefill:
        prefill.metadata["/server_info"] = {**METADATA["/server_info"], "disaggregation_mode": "prefill"}
        async with running_gateway(prefill.url) as gateway:
            assert (await call(gateway.address, "/pause_generation", {})).status == 200
        assert [request.path for request in prefill.requests] == ["/pause_generation"]


@pytest.mark.parametrize("path", ADDRESSED_ONLY)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_differs_from_worker_to_worker_is_refused(
    front: RunningGateway, scripted: ScriptEngine, method: str, path: str
) -> None:
    answer = await call(front.address, path, {}, method=method)
    error = error_of(answer)
    assert (answer.status, error["type"]) == (400, "unsupported")
    assert f"{method} /workers/{{id}}/call{path}" in error["message"]
    assert not scripted.requests
    # What the message says to do is there.
    worker = scripted.url.removeprefix("http://")
    assert (await call(front.address, f"/workers/{worker}/call{path}", {})).status == 200
    assert [request.path for request in scripted.requests] == [path]


@pytest.mark.parametrize(("method", "path"), [("POST", "/warm_up"), ("GET", "/get_weight_version")])
async def test_an_unknown_route_is_told_which_ones_there_are(front: RunningGateway, method: str, path: str) -> None:
    answer = await call(front.address, path, {}, method=method)
    error = error_of(answer)
    assert (answer.status, error["type"]) == (404, "not_found")
    assert all(known in error["message"] for known in (path, *LIMITS_S, "/workers/{id}/call/"))


async def test_cache_storage_is_addressed_too(front: RunningGateway, scripted: ScriptEngine) -> None:
    for method in ("PUT", "DELETE"):
        answer = await call(front.address, "/hicache/storage-backend", {}, method=method)
        assert f"{method} /workers/{{id}}/call/hicache/storage-backend" in error_of(answer)["message"]
    assert not scripted.requests


# --- what the gateway knows afterwards


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("probes", [NO_PROBES, {"health_interval_s": 0.02 * TIME_SCALE}], ids=["unprobed", "probed"])
async def test_requests_wait_from_the_pause_to_the_continue(kind: str, probes: dict[str, Any]) -> None:
    route, body = ("/generate", ONE_TOKEN) if kind == "sglang" else ("/v1/chat/completions", CHAT)
    async with scene(kind, kind, gateway=probes) as s, AsyncExitStack() as stack:
        assert (await s.send("/pause_generation", {"mode": "in_place"})).status == 200
        assert {member.state for member in s.members} == {WorkerState.PAUSED}
        waiting = [await stack.enter_async_context(wire(s.gateway.address)) for _ in range(5)]
        for connection in waiting:
            await connection.send(request_bytes(route, body))
        await until(lambda: s.gateway.state()["queued_requests"] == 5, "five wait")
        if probes is not NO_PROBES:
            await asyncio.sleep(0.2 * TIME_SCALE)  # many probes later they still do
            assert s.gateway.state()["queued_requests"] == 5
        assert not any(engine.log.requests_to(route) for engine in s.engines)
        # Also what is done to paused workers is done.
        assert (await s.send("/flush_cache")).status == 200
        assert (await s.send("/continue_generation")).status == 200
        for connection in waiting:
            assert (await connection.answer()).status == 200


@pytest.mark.parametrize("is_addressed", [False, True], ids=["all", "one"])
@pytest.mark.parametrize("status", [200, 500])
async def test_nothing_is_sent_while_a_pause_is_under_way(is_addressed: bool, status: int) -> None:
    """An engine answers once nothing runs any more, and keeps what comes meanwhile until it is continued."""
    go_on = asyncio.Event()

    async def slow(request: SeenRequest, reply: Reply) -> None:
        if request.path == "/pause_generation":
            await go_on.wait()
        await reply.whole(b'{"text":"a"}', status=status if request.path == "/pause_generation" else 200)

    async with (
        script_engine(slow) as engine,
        running_gateway(engine.url) as gateway,
        wire(gateway.address) as trainer,
        wire(gateway.address) as waiting,
    ):
        (member,) = gateway.gateway.services.fleet
        path = f"/workers/{member.worker.id}/call/pause_generation" if is_addressed else "/pause_generation"
        await trainer.send(request_bytes(path, {}))
        await until(lambda: bool(engine.requests), "the engine is asked")
        assert member.state is WorkerState.PAUSED
        await waiting.send(request_bytes("/generate", ONE_TOKEN))
        await until(lambda: gateway.state()["queued_requests"] == 1, "it waits")
        assert [request.path for request in engine.requests] == ["/pause_generation"]
        if status == 200:
            await asyncio.sleep(0.2 * TIME_SCALE)  # the engine is ready to every probe, and still asked to pause
            assert gateway.state()["queued_requests"] == 1
        go_on.set()
        assert (await trainer.answer()).status == (status if is_addressed else 200 if status == 200 else 207)
        # What failed has paused nothing; what did not is undone by the next probe, as this engine says it is ready.
        assert (await waiting.answer()).status == 200


async def test_a_probe_from_before_the_pause_does_not_end_it() -> None:
    is_asked, go_on = asyncio.Event(), asyncio.Event()

    async with script_engine(ok) as engine, running_gateway(engine.url) as gateway:
        (member,) = gateway.gateway.services.fleet
        backend = gateway.gateway.services.backends[EngineKind.SGLANG]
        probe = backend.probe

        async def held(worker: Worker, timeout_s: float) -> ProbeResult:
            result = await probe(worker, timeout_s)
            if not is_asked.is_set():
                is_asked.set()
                await go_on.wait()
            else:
                seen.append(member.state)
            return result

        seen: list[WorkerState] = []
        backend.probe = held  # type: ignore[method-assign]
        async with asyncio.timeout(PATIENCE_S):
            await is_asked.wait()
        assert (await call(gateway.address, "/pause_generation", {})).status == 200
        go_on.set()
        await until(lambda: len(seen) > 1, "two more probes")
        # The first of them, asked afterwards, is believed.
        assert seen[:2] == [WorkerState.PAUSED, WorkerState.READY]


async def test_an_addressed_pause_counts_at_once_too() -> None:
    async with scene("sglang", "vllm") as s:
        for member, pause, go_on in zip(
            s.members, ("pause_generation", "pause"), ("continue_generation", "resume"), strict=True
        ):
            path = f"/workers/{member.worker.id}/call/"
            for route, state in ((pause, WorkerState.PAUSED), (go_on, WorkerState.READY)):
                assert (await s.send(path + route)).status == 200
                assert member.state is state


@pytest.mark.parametrize("path", ["/flush_cache", "/update_weights_from_disk", "/release_memory_occupation"])
async def test_the_view_of_caches_is_cleared_at_once(path: str) -> None:
    async with fleet(2) as f:
        kv = f.gateway.gateway.kv
        for number in range(4):
            await f.generate([1000 * number + token for token in PROMPT])
        await f.settled()
        workers = [engine.url.removeprefix("http://") for engine in f.engines]
        before = [kv.blocks(worker, 0) for worker in workers]
        assert all(before)
        f.engines[1].add_fault(at="headers", do="status:400", match={"path": path})
        answer = await call(f.gateway.address, path, {"model_path": "x"})
        assert (answer.status, [status for status, _ in results(answer)]) == (207, [200, 400])
        assert [kv.blocks(worker, 0) for worker in workers] == [0, before[1]]


async def test_a_flush_that_was_not_done_clears_nothing() -> None:
    async with fleet(1, engine="vllm", dev_mode=True, inter_token_ms=50) as f, wire(f.gateway.address) as running:
        body = {"model": f.engines[0].options.model, "prompt": PROMPT, "max_tokens": 1, "ignore_eos": True}
        assert (await call(f.gateway.address, "/v1/completions", body)).status == 200
        await running.send(request_bytes("/v1/completions", {**body, "max_tokens": 1000, "stream": True}))
        await f.engines[0].wait_for(lambda e: e.running == 1)
        await f.settled()
        worker = f.engines[0].url.removeprefix("http://")
        known = f.gateway.gateway.kv.blocks(worker, 0)
        assert known
        for path in ("/flush_cache", f"/workers/{worker}/call/reset_prefix_cache"):
            assert b'"success":false' in (await call(f.gateway.address, path)).body
            assert f.gateway.gateway.kv.blocks(worker, 0) >= known
        running.reset()


# --- who owns it


async def test_a_client_that_leaves_stops_nothing() -> None:
    go_on = asyncio.Event()

    async def slow(request: SeenRequest, reply: Reply) -> None:
        await go_on.wait()
        await reply.whole(b'{"success":true}')

    async with (
        script_engine(slow) as one,
        script_engine(slow) as two,
        running_gateway(one.url, two.url, **NO_PROBES) as gateway,
    ):
        async with wire(gateway.address) as client:
            await client.send(request_bytes("/pause_generation", {}))
            await until(lambda: bool(one.requests and two.requests), "both are asked")
            client.reset()
        fan_outs = gateway.gateway.fan_outs
        assert len(fan_outs) == 1
        go_on.set()
        await until(lambda: not len(fan_outs), "the end")
        assert {member.state for member in gateway.gateway.services.fleet} == {WorkerState.PAUSED}
        assert (len(one.requests), len(two.requests)) == (1, 1)


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "too late"])
async def test_a_drain_waits_for_workers_up_to_its_limit(is_late: bool) -> None:
    go_on = asyncio.Event()

    async def slow(request: SeenRequest, reply: Reply) -> None:
        if request.path == "/update_weights_from_disk" and not go_on.is_set():
            await (reply.gone() if is_late else go_on.wait())
        if not reply.is_gone:
            await reply.whole(b'{"success":true}')

    drain_s = 0.2 * TIME_SCALE if is_late else PATIENCE_S
    async with (
        script_engine(slow) as engine,
        running_gateway(engine.url, drain_timeout_s=drain_s) as gateway,
        wire(gateway.address) as client,
    ):
        await client.send(request_bytes("/update_weights_from_disk", {}))
        await until(lambda: bool(engine.requests), "the worker is asked")
        gateway.gateway.begin_drain()
        refused = await call(gateway.address, "/flush_cache", {})
        assert (refused.status, error_of(refused)["type"]) == (503, "engine_shutdown")
        if not is_late:
            go_on.set()
        answer = await client.answer()
        ((status, body),) = results(answer)
        if is_late:
            assert (answer.status, status, body["error"]["type"]) == (207, 503, "engine_shutdown")
        else:
            assert (answer.status, status, body) == (200, 200, {"success": True})
        async with asyncio.timeout(PATIENCE_S):
            await gateway.gateway.drained.wait()

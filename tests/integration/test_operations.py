"""Running a gateway: probes, keys, limits, models, ranks, and workers that come and go."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.api.health import why_not_ready
from gateway.routes import ROUTES
from routers.fleet import WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call, request_bytes, wire

UNARY: dict[str, Any] = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
ZEROES = (
    "in_flight_requests", "live_legs", "booked_blocks", "booked_prefill_tokens", "live_rooms", "abort_tasks",
    "prefill_background_tasks", "drain_tasks", "queued_requests", "upstream_connections_active", "open_tasks",
)  # fmt: skip


def error_of(answer: Answer) -> dict[str, Any]:
    """The error in an answer, whose shape is the same everywhere."""
    assert answer.headers["content-type"] == "application/json"
    (name, error), *rest = answer.json().items()
    assert (name, rest) == ("error", [])
    assert list(error) == ["message", "type", "code", "param", "request_id"]
    assert error["code"] == answer.status
    assert isinstance(error, dict)
    return error


@asynccontextmanager
async def simulated(**options: Any) -> AsyncIterator[SimulatedEngine]:
    """A simulated engine."""
    engine = SimulatedEngine(EngineOptions(**options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def get(gateway: RunningGateway, path: str, **headers: str) -> Answer:
    """One GET."""
    return await call(gateway.address, path, method="GET", headers=headers)


# Probes.


async def test_an_idle_gateway_is_alive_ready_and_empty(gateway: RunningGateway) -> None:
    for path in ("/health", "/health_generate", "/liveness", "/ready", "/readiness"):
        assert (await get(gateway, path)).status == 200, path
    state = (await get(gateway, "/internal/state")).json()
    assert {name: state[name] for name in ZEROES} == dict.fromkeys(ZEROES, 0)
    assert (await call(gateway.address, "/generate", UNARY)).status == 200
    metrics = await get(gateway, "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    counted = 'forebay_requests_total{model="model",outcome="complete",route="/generate",status="200"} 1.0'
    assert counted in metrics.body.decode()


async def test_the_time_between_events_is_counted(front: RunningGateway, scripted: ScriptEngine) -> None:
    go_on = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(b'{"n":0}')
        await go_on.wait()
        await reply.chunk(b'data: {"n":1}\n\ndata: {"n":2}\n\n')
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    async def counted() -> int:
        page = (await get(front, "/metrics")).body.decode()
        return int(float(page.partition("\nforebay_inter_event_seconds_count ")[2].splitlines()[0]))

    assert (await call(front.address, "/generate", UNARY)).status == 200
    before = await counted()
    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", {**UNARY, "stream": True}))
        await connection.head()
        await connection.event()
        assert await counted() == before
        go_on.set()
        while await connection.chunk():
            pass
    # Events that come together are one piece; whether the end comes with them is the network's choice.
    assert await counted() - before in (1, 2)


async def test_a_running_request_is_counted_and_then_gone(front: RunningGateway, scripted: ScriptEngine) -> None:
    async with simulated(inter_token_ms=1000) as engine, running_gateway(engine.url) as gateway:
        async with wire(gateway.address) as connection:
            body = {"input_ids": list(range(100)), "sampling_params": {"max_new_tokens": 100}, "stream": True}
            await connection.send(request_bytes("/generate", body))
            await engine.wait_for(lambda e: e.running == 1)
            state = (await get(gateway, "/internal/state")).json()
            assert (state["in_flight_requests"], state["live_legs"], state["upstream_connections_active"]) == (1, 1, 1)
            assert state["booked_blocks"] == 7
        await gateway.settle()


async def test_without_workers_nothing_is_ready() -> None:
    async with running_gateway() as gateway:
        ready = await get(gateway, "/ready")
        assert (ready.status, ready.json()["reason"]) == (503, "no workers are configured")
        assert (await get(gateway, "/health")).status == 200
        answer = await call(gateway.address, "/generate", UNARY)
        assert (answer.status, error_of(answer)["type"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"
        assert (await gateway.record()).outcome == "overloaded"


# Shapes of refusals.


@pytest.mark.parametrize(
    ("method", "path", "status", "type"),
    [
        ("GET", "/generate", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/abort_request", 405, "method_not_allowed"),
        ("POST", "/generate/", 404, "not_found"),
        ("POST", "/nope", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/workers/nobody", 404, "not_found"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
    ],
)
async def test_unknown_routes_and_methods(
    front: RunningGateway, method: str, path: str, status: int, type: str
) -> None:
    answer = await call(front.address, path, {}, method=method, headers={"X-Request-Id": "mine"})
    assert (answer.status, error_of(answer)["type"]) == (status, type)
    assert error_of(answer)["request_id"] == "mine"
    if status == 405:
        assert answer.headers["allow"]


async def test_what_is_no_http_is_refused_in_the_same_shape(front: RunningGateway) -> None:
    async with wire(front.address) as connection:
        await connection.send(b"POST /generate HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n")
        answer = await connection.answer()
        assert (answer.status, error_of(answer)["type"]) == (400, "invalid_request")
        assert await connection.is_closed()


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "/abort_request", b'{"rid":5}', "rid"),
        ("POST", "/workers", b'{"worker_type":"prefill"}', "url"),
        ("POST", "/workers", b'{"url":', None),
        ("DELETE", "/workers/nobody?drain_timeout_s=never", b"", "drain_timeout_s"),
    ],
)
async def test_the_field_at_fault_is_named_as_the_client_wrote_it(
    front: RunningGateway, method: str, path: str, body: bytes, param: str | None
) -> None:
    answer = await call(front.address, path, body, method=method)
    assert (answer.status, error_of(answer)["param"]) == (400, param)


# Large bodies.

LIMIT = 100_000


def padded(size: int) -> bytes:
    """A request body of exactly that size."""
    start, end = b'{"text":"', b'"}'
    return start + b"a" * (size - len(start) - len(end)) + end


def chunked(body: bytes) -> bytes:
    """A chunked request."""
    head = b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [body[start : start + 30_000] for start in range(0, len(body), 30_000)]
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.fixture
async def limited(scripted: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """A gateway with a small limit."""
    async with running_gateway(scripted.url, max_body_bytes=LIMIT) as gateway:
        yield gateway


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_at_the_limit_passes_and_one_above_it_does_not(
    limited: RunningGateway, scripted: ScriptEngine, is_chunked: bool
) -> None:
    async with wire(limited.address) as connection:
        for size, status in ((LIMIT, 200), (LIMIT + 1, 413), (50 * LIMIT, 413), (LIMIT, 200)):
            body = padded(size)
            await connection.send(chunked(body) if is_chunked else request_bytes("/generate", body))
            answer = await connection.answer()
            assert answer.status == status
            if status == 413:
                assert error_of(answer)["type"] == "request_too_large"
                assert str(LIMIT) in error_of(answer)["message"]
    assert len(scripted.requests) == 2
    await limited.record(4)
    assert [record.outcome for record in limited.records] == ["complete", "rejected", "rejected", "complete"]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_client_that_closes_after_one_request_can_read_why_it_was_too_large(
    limited: RunningGateway, is_chunked: bool
) -> None:
    body = padded(100 * LIMIT)
    raw = chunked(body) if is_chunked else request_bytes("/generate", body)
    async with wire(limited.address) as connection:
        # Such clients write to the end and read only then; a connection closed too early would be reset under them.
        await connection.send(raw.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        answer = await connection.answer()
        assert (answer.status, error_of(answer)["type"]) == (413, "request_too_large")
        assert await connection.is_closed()


async def test_a_client_that_asks_first_is_told_without_sending(limited: RunningGateway) -> None:
    async with wire(limited.address) as connection:
        head = request_bytes("/generate", b"", headers={"Content-Length": str(LIMIT + 1), "Expect": "100-continue"})
        await connection.send(head)
        # No 100 Continue first; and since it is open what would follow, nothing may.
        assert (await connection.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        assert b"connection: close\r\n" in await connection.reader.readuntil(b"\r\n\r\n")


async def test_a_client_that_asks_first_is_let_on(limited: RunningGateway) -> None:
    async with wire(limited.address) as connection:
        body = padded(LIMIT)
        head = request_bytes("/generate", b"", headers={"Content-Length": str(LIMIT), "Expect": "100-continue"})
        await connection.send(head)
        assert await connection.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await connection.send(body)
        assert (await connection.answer()).status == 200


async def test_other_routes_have_the_same_limit(limited: RunningGateway) -> None:
    async with wire(limited.address) as connection:
        for body, status in ((padded(10 * LIMIT), 413), (b'{"rid":"nobody"}', 200)):
            await connection.send(request_bytes("/abort_request", body))
            answer = await connection.answer()
            assert answer.status == status
        await connection.send(chunked(padded(10 * LIMIT)).replace(b"/generate", b"/abort_request", 1))
        assert error_of(await connection.answer())["type"] == "request_too_large"


@pytest.mark.parametrize("has_end", [True, False])
async def test_headers_are_bounded(front: RunningGateway, scripted: ScriptEngine, has_end: bool) -> None:
    async with wire(front.address) as connection:
        line = b"X-Long: " + b"a" * 5_000_000 if has_end else b"X-Long: a\r\n" * 400_000
        connection.writer.write(b"POST /generate HTTP/1.1\r\nHost: g\r\n" + line)
        status, _ = await connection.head()
        assert status == 431
    assert scripted.requests == []
    assert front.records == []


@pytest.mark.parametrize("value", ["", "a" * 257, "a" * 30_000])
async def test_ids_that_are_no_ids_are_refused(front: RunningGateway, scripted: ScriptEngine, value: str) -> None:
    answer = await call(front.address, "/generate", {"text": "a"}, headers={"X-Request-Id": value})
    assert (answer.status, error_of(answer)["param"]) == (400, "x-request-id")
    assert len(answer.headers["x-request-id"]) <= 256
    assert scripted.requests == []


# Keys.


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, Any]:
    """Options for one client key and one admin key."""
    (tmp_path / "client").write_text("# clients\nclient-key\n")
    (tmp_path / "admin").write_text("admin-key\n")
    return {"api_key_file": tmp_path / "client", "admin_api_key_file": tmp_path / "admin"}


async def test_keys_open_what_they_are_for(scripted: ScriptEngine, key_files: dict[str, Any]) -> None:
    async with running_gateway(scripted.url, **key_files) as gateway:
        for header, client_status, admin_status in (
            (None, 401, 401),
            ("Bearer wrong", 401, 401),
            ("Bearer None", 401, 401),
            ("Basic client-key", 401, 401),
            ("Bearer client-key", 200, 401),
            ("bearer client-key", 200, 401),
            ("Bearer admin-key", 200, 200),
        ):
            headers = {} if header is None else {"Authorization": header}
            before = len(scripted.requests)
            for path in ROUTES:
                answer = await call(gateway.address, path, {"text": "a", "prompt": "a"}, headers=headers)
                assert answer.status == client_status, (header, path)
                if client_status == 401:
                    assert error_of(answer)["type"] == "unauthorized"
            assert (len(scripted.requests) > before) is (client_status == 200)
            assert (await get(gateway, "/v1/models", **headers)).status == client_status
            assert (await get(gateway, "/workers", **headers)).status == admin_status
            assert (await get(gateway, "/internal/state", **headers)).status == admin_status
            answer = await call(gateway.address, "/abort_request", {"abort_all": True}, headers=headers)
            assert answer.status == admin_status
            for path in ("/health", "/ready", "/metrics"):
                assert (await get(gateway, path, **headers)).status == 200
        assert all(request.header("authorization") is None for request in scripted.requests)


async def test_without_keys_a_client_may_send_any(front: RunningGateway) -> None:
    for value in ("Bearer None", "Bearer whatever", ""):
        assert (await call(front.address, "/generate", UNARY, headers={"Authorization": value})).status == 200


async def test_without_an_admin_key_the_place_counts(scripted: ScriptEngine) -> None:
    async with running_gateway(scripted.url, admin_allow=("10.0.0.0/8",)) as gateway:
        answer = await get(gateway, "/workers")
        assert (answer.status, error_of(answer)["type"]) == (403, "forbidden")
        assert (await call(gateway.address, "/generate", UNARY)).status == 200


@pytest.mark.parametrize(("key", "status"), [("client-key", 403), ("admin-key", 200)])
async def test_only_administrators_choose_the_worker(
    scripted: ScriptEngine, key_files: dict[str, Any], key: str, status: int
) -> None:
    async with running_gateway(scripted.url, **key_files) as gateway:
        worker = scripted.url.removeprefix("http://")
        headers = {"Authorization": f"Bearer {key}", "X-Forebay-Worker": worker}
        answer = await call(gateway.address, "/generate", UNARY, headers=headers)
        assert answer.status == status
        if status == 200:
            assert answer.headers["x-forebay-worker"] == worker


async def test_workers_get_their_own_key_and_never_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_WORKER_KEY", "worker-key")
    async with simulated(api_key="worker-key") as engine:
        async with running_gateway(f"{engine.url},api_key_env=TEST_WORKER_KEY") as gateway:
            answer = await call(gateway.address, "/generate", UNARY, headers={"Authorization": "Bearer client"})
            assert answer.status == 200
        assert engine.log.requests_to("/generate")[0].header("authorization") == "Bearer worker-key"


async def test_a_worker_that_refuses_our_key_is_no_worker_and_says_why() -> None:
    async with simulated(api_key="worker-key") as engine, running_gateway(engine.url, wait_ready=0) as gateway:
        member = next(iter(gateway.gateway.services.fleet))
        await until(lambda: "refuses" in member.detail, "the refusal noticed")
        assert member.state is WorkerState.UNIDENTIFIED
        assert "api_key_env" in (await get(gateway, "/ready")).json()["reason"]


# Models.


async def chat(gateway: RunningGateway, model: Any) -> Answer:
    """One chat request that names a model, or none."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "rid": "mine", "model": model}
    return await call(gateway.address, "/v1/chat/completions", body)


@asynccontextmanager
async def two_models() -> AsyncIterator[tuple[RunningGateway, SimulatedEngine, SimulatedEngine]]:
    """A gateway in front of two models, ``a`` and ``b``."""
    async with simulated(model="a") as one, simulated(model="b") as two, running_gateway(one.url, two.url) as gateway:
        yield gateway, one, two


async def test_the_model_chooses_the_pool() -> None:
    async with two_models() as (gateway, one, two):
        for model, engine in (("a", one), ("b", two), ("b:adapter", two)):
            answer = await chat(gateway, model)
            assert answer.headers["x-forebay-worker"] == engine.url.removeprefix("http://")
        refused = [(None, 400, "invalid_request"), ("c", 404, "model_not_found"), (5, 400, "invalid_request")]
        for wrong, status, type in refused:
            answer = await chat(gateway, wrong)
            assert (answer.status, error_of(answer)["type"], error_of(answer)["param"]) == (status, type, "model")
        listed = (await get(gateway, "/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["a", "b"]


async def test_a_model_without_workers_is_known_and_unavailable() -> None:
    async with two_models() as (gateway, _, two):
        await two.stop()
        await until(lambda: not gateway.gateway.services.fleet.has_ready("b"), "the loss of b noticed")
        answer = await chat(gateway, "b")
        assert (answer.status, error_of(answer)["type"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"
        assert (await chat(gateway, "a")).status == 200
        assert (await chat(gateway, "c")).status == 404
        # One of two pools is enough to be ready.
        assert (await get(gateway, "/ready")).status == 200


# Ranks.


async def test_a_request_can_be_pinned_to_a_rank() -> None:
    async with simulated(dp_size=2) as engine, running_gateway(engine.url) as gateway:
        for path in ("/generate", "/v1/chat/completions"):
            for rank in ("0", "1", "1", "0"):
                body = {**UNARY, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                if path != "/generate":
                    body = {key: value for key, value in body.items() if key not in ("text", "sampling_params")}
                answer = await call(gateway.address, path, body, headers={"X-Data-Parallel-Rank": rank})
                assert (answer.status, answer.headers["x-forebay-dp-rank"]) == (200, rank)
                assert engine.log.requests_to(path)[-1].dp_rank == int(rank)
        for rank in ("2", "-1", "abc", "1.0", "", "99999999999"):
            answer = await call(gateway.address, "/generate", UNARY, headers={"X-Data-Parallel-Rank": rank})
            assert (answer.status, error_of(answer)["param"]) == (400, "x-data-parallel-rank"), rank


async def test_ranks_are_chosen_evenly_and_told() -> None:
    async with simulated(dp_size=2, inter_token_ms=20) as engine, running_gateway(engine.url) as gateway:
        body = {**UNARY, "sampling_params": {"max_new_tokens": 50}}
        async with wire(gateway.address) as one, wire(gateway.address) as two:
            await one.send(request_bytes("/generate", body))
            await engine.wait_for(lambda e: e.running == 1)
            await two.send(request_bytes("/generate", body))
            ranks = {(await connection.answer()).headers["x-forebay-dp-rank"] for connection in (one, two)}
        assert ranks == {"0", "1"}


async def test_one_rank_is_not_named(front: RunningGateway, scripted: ScriptEngine) -> None:
    answer = await call(front.address, "/generate", UNARY, headers={"X-Data-Parallel-Rank": "0"})
    assert answer.status == 200
    assert "x-forebay-dp-rank" not in answer.headers
    assert "routed_dp_rank" not in json.loads(scripted.requests[0].body)


# Workers that come and go.


async def test_when_every_worker_is_gone_each_is_tried_once(scripted: ScriptEngine) -> None:
    async with script_engine() as other, running_gateway(scripted.url, other.url, health_interval_s=60) as gateway:
        await other.stop()
        first = next(iter(gateway.gateway.services.fleet))
        first.lost_contact("for this test")
        answer = await call(gateway.address, "/generate", UNARY)
        assert (answer.status, error_of(answer)["type"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-forebay-attempts"] == "1"
        record = await gateway.record()
        assert (record.attempts, record.outcome) == (1, "engine_error")
        # From then on nobody tries.
        assert (await call(gateway.address, "/generate", UNARY)).status == 503
        assert ((await gateway.record(2)).attempts, gateway.records[1].outcome) == (0, "overloaded")


async def test_a_dead_worker_leaves_and_comes_back_as_what_it_is_then() -> None:
    engine = SimulatedEngine(EngineOptions(model="old"))
    await engine.start()
    port = engine.port
    async with running_gateway(engine.url) as gateway:
        member = next(iter(gateway.gateway.services.fleet))
        first_life = member.facts
        await engine.stop()
        await until(lambda: member.state is WorkerState.UNHEALTHY, "the death noticed")
        ready = await get(gateway, "/ready")
        assert (ready.status, "unhealthy" in ready.json()["reason"]) == (503, True)
        assert (await call(gateway.address, "/generate", UNARY)).status == 503
        async with simulated(model="new", port=port):
            await gateway.ready(1)
            assert member.facts is not None
            assert first_life is not None
            assert (member.facts.model_id, member.facts.boot_id != first_life.boot_id) == ("new", True)
            assert why_not_ready(gateway.gateway.services) is None
            answer = await call(gateway.address, "/generate", UNARY)
            assert answer.status == 200


async def test_a_restart_in_mid_stream_is_told_and_the_worker_is_used_again() -> None:
    async with simulated(inter_token_ms=1) as engine, running_gateway(engine.url) as gateway:
        engine.add_fault(at="event:3", do="restart")
        body = {**UNARY, "stream": True, "sampling_params": {"max_new_tokens": 10, "ignore_eos": True}}
        answer = await call(gateway.address, "/generate", body)
        assert answer.status == 200
        *_, error, done = answer.events()
        assert (json.loads(error)["error"]["code"], done) == (502, b"[DONE]")
        assert (await gateway.record()).outcome == "truncated"
        await gateway.ready(1)
        assert (await call(gateway.address, "/generate", body)).events()[-1] == b"[DONE]"


async def test_a_follower_that_only_looks_alive_is_never_a_worker() -> None:
    async with script_engine() as follower:
        follower.metadata = {"/health": {}, "/ping": {}}
        async with running_gateway(follower.url, wait_ready=0) as gateway:
            member = next(iter(gateway.gateway.services.fleet))
            await until(lambda: "follower" in member.detail, "the follower recognised")
            assert member.state is WorkerState.UNIDENTIFIED
            assert (await call(gateway.address, "/generate", UNARY)).status == 503


async def test_busy_is_not_dead() -> None:
    interval = {"health_timeout_s": 0.05 * TIME_SCALE, "health_interval_s": 0.02 * TIME_SCALE}
    times: dict[str, Any] = {**interval, "unhealthy_after": 2}
    async with simulated(inter_token_ms=5) as engine, running_gateway(engine.url, **times) as gateway:
        member = next(iter(gateway.gateway.services.fleet))
        body = {**UNARY, "stream": True, "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", body))
            await connection.head()
            for path in ("/ready", "/ping"):
                engine.add_fault(at="headers", do="hang", times=None, match={"path": path})
            for _ in range(150):  # far longer than the two probes that would do otherwise
                await connection.event()
                assert member.state is WorkerState.READY
            # Those probes hang where the stream went on; without it they count.
        await until(lambda: member.state is WorkerState.UNHEALTHY, "the silence noticed")


async def test_a_paused_worker_gets_no_new_requests() -> None:
    async with simulated() as one, simulated() as two, running_gateway(one.url, two.url) as gateway:
        member = next(iter(gateway.gateway.services.fleet))
        paused = ("127.0.0.1", one.port)
        await call(paused, "/pause_generation", {"mode": "in_place"})
        await until(lambda: member.state is WorkerState.PAUSED, "the pause noticed")
        for _ in range(10):
            answer = await call(gateway.address, "/generate", UNARY)
            assert answer.headers["x-forebay-worker"] == two.url.removeprefix("http://")
        await call(paused, "/continue_generation", {})
        await gateway.ready(2)


async def test_an_engine_that_refuses_our_credentials_later_is_our_fault(
    gateway: RunningGateway, engine: SimulatedEngine
) -> None:
    for status in (401, 403):
        for path in ROUTES:
            engine.add_fault(at="headers", do=f"status:{status}", match={"path": path})
            answer = await call(gateway.address, path, {"text": "a", "prompt": "a", "messages": [], "input": "a"})
            assert (answer.status, error_of(answer)["type"]) == (502, "backend_auth")

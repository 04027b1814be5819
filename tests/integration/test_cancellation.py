"""Clients that leave, callers that abort: what the engine is told, when, and what is left behind."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.types import EngineFacts, EngineKind
from gateway.routes import ROUTES
from simulator.log import AbortEntry
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import JSON_TYPE, Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import Wire, call, request_bytes, wire

# The engine is told at once; this allows for a loaded machine.
AT_ONCE_S = 1.0 * TIME_SCALE
# Aborts wait for 20 ms after the gateway's write; the engine's clock starts a little later.
ABORT_DELAY_S = 0.01
LONG: dict[str, Any] = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}


def leave(connection: Wire, how: str) -> None:
    """Go, in one of the ways in which clients do."""
    if how == "reset":
        connection.reset()
    elif how == "half-close":
        connection.writer.write_eof()
    else:
        connection.close()


async def left(gateway: RunningGateway) -> None:
    """Nothing of the request is left, and its one record says that the client went."""
    record = await gateway.record()
    assert (record.outcome, record.status) == ("client_closed", 499)
    await gateway.settle()
    assert len(gateway.records) == 1


# Where the engine takes no id, closing is all there is.
WITHOUT_IDS = {"/v1/messages", "/v1/messages/count_tokens", "/v1/score", "/v1/rerank", "/tokenize", "/detokenize"}
HOW = ["close", "reset", "half-close"]
STAGES = ["before the head", "before the first event", "mid-stream", "unread", "in the last event"]


class Scene:
    """What an engine lived through with one request.

    Attributes:
        reached: The stage at which the client is to leave.
        told_at: When it was told to stop: by an abort, or by the end of the connection.
        written_at: When the request was there.
        is_open_at_abort: The connection was still open when the abort came.
    """

    def __init__(self, stage: str, *, is_stream: bool) -> None:
        self._stage = stage
        self._is_stream = is_stream
        self.reached = asyncio.Event()
        self.told_at = 0.0
        self.written_at = 0.0
        self.is_open_at_abort = False

    async def play(self, engine: ScriptEngine, request: SeenRequest, reply: Reply) -> None:
        """Answer up to the stage, wait to be told, and end what an aborted engine ends."""
        self.written_at = time.monotonic()
        await self._answer(request, reply)
        self.reached.set()
        if self._is_stream or request.path in WITHOUT_IDS:
            await reply.gone()
            self.told_at = time.monotonic()
            return
        await until(lambda: set(engine.aborted) == {request.rid}, "the abort")
        self.told_at = time.monotonic()
        self.is_open_at_abort = not reply.is_gone
        if self._stage == "before the head":
            await reply.whole(b'{"meta_info":{"finish_reason":{"type":"abort"}}}')
        else:
            await reply.end_chunked()

    async def _answer(self, request: SeenRequest, reply: Reply) -> None:
        if self._stage == "before the head":
            return
        await reply.start_chunked(content_type="text/event-stream" if self._is_stream else JSON_TYPE)
        if self._stage == "before the first event":
            return
        payload = b'{"text":"%b","meta_info":{"id":"%b"}}' % (b"a" * 100, request.rid.encode())
        if self._stage == "unread":
            await self._until_nobody_reads(reply)
        elif self._is_stream:
            await reply.event(payload)
        else:
            await reply.chunk(payload[:50])
        if self._stage == "in the last event":
            await reply.chunk(b"data: [DO" if self._is_stream else payload[50:-1])

    async def _until_nobody_reads(self, reply: Reply) -> None:
        piece = b'data: {"text":"' + b"z" * 60_000 + b'"}\n\n' if self._is_stream else b"z" * 60_000
        try:
            async with asyncio.timeout(PATIENCE_S):
                while await reply.is_read(within_s=0.1 * TIME_SCALE):
                    reply.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        except TimeoutError:
            raise AssertionError("the gateway reads on without bound") from None


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_the_engine_is_told_when_the_client_leaves(
    front: RunningGateway, scripted: ScriptEngine, how: str, stage: str, is_stream: bool
) -> None:
    scene = Scene(stage, is_stream=is_stream)

    async def script(request: SeenRequest, reply: Reply) -> None:
        await scene.play(scripted, request, reply)

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", {**LONG, "stream": is_stream}))
        async with asyncio.timeout(PATIENCE_S):
            await scene.reached.wait()
        if is_stream and stage in ("mid-stream", "in the last event"):
            await connection.head()
            await connection.event()
        left_at = time.monotonic()
        leave(connection, how)
        await left(front)
    assert scene.told_at - left_at < AT_ONCE_S
    if is_stream:
        assert scripted.aborted == []
    else:
        assert len(set(scripted.aborted)) == 1  # and again, should the engine be slow to end
        assert scene.is_open_at_abort
        assert scene.told_at - scene.written_at >= ABORT_DELAY_S / 2  # the clocks that see the two are late by turns


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_every_route_is_cancelled(
    front: RunningGateway, scripted: ScriptEngine, path: str, is_stream: bool
) -> None:
    scene = Scene("before the head", is_stream=is_stream)

    async def script(request: SeenRequest, reply: Reply) -> None:
        await scene.play(scripted, request, reply)

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes(path, {**LONG, "prompt": "a", "messages": [], "stream": is_stream}))
        await scene.reached.wait()
        connection.close()
        await left(front)


async def test_a_client_that_has_sent_its_next_request_is_still_seen_leaving(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    scene = Scene("before the first event", is_stream=True)

    async def script(request: SeenRequest, reply: Reply) -> None:
        await scene.play(scripted, request, reply)

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", {**LONG, "stream": True}))
        await scene.reached.wait()
        await connection.send(request_bytes("/generate", LONG))
        connections = front.server.server_state.connections
        await until(lambda: any(getattr(one, "pipeline", ()) for one in connections), "the second request")
        connection.close()
        await left(front)
    assert len(scripted.requests) == 1


@pytest.mark.parametrize("how", HOW)
async def test_a_client_that_leaves_inside_its_body_reaches_no_engine(
    front: RunningGateway, scripted: ScriptEngine, how: str
) -> None:
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", LONG, headers={"Content-Length": "5000"}))
        await until(lambda: front.state()["in_flight_requests"] == 1, "the request's begin")
        leave(connection, how)
        await left(front)
    assert scripted.requests == []


# While connecting.


@asynccontextmanager
async def full_backlog() -> AsyncIterator[str]:
    """URL of a listener that takes no connection, so that connecting never ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            yield url
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_client_that_leaves_while_connecting_leaves_nothing(how: str, is_stream: bool) -> None:
    async with full_backlog() as url, running_gateway(url, wait_ready=0, health_timeout_s=60) as gateway:
        member = next(iter(gateway.gateway.services.fleet))
        member.identified(EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", "model"))
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", {**LONG, "stream": is_stream}))
            await until(lambda: gateway.gateway.services.client.connecting == 1, "the connection attempt")
            leave(connection, how)
            await left(gateway)
        assert gateway.gateway.services.client.connecting == 0


# On an engine that generates.


@asynccontextmanager
async def simulated(
    *, abort_delay_s: float = 0.02, native_n: bool = False, **options: Any
) -> AsyncIterator[tuple[SimulatedEngine, RunningGateway]]:
    """A generating engine and a gateway in front of it."""
    engine = SimulatedEngine(EngineOptions(**{"inter_token_ms": 5.0, **options}))
    await engine.start()
    try:
        async with running_gateway(engine.url, abort_delay_s=abort_delay_s, native_n=native_n) as gateway:
            yield engine, gateway
            await engine.wait_for(lambda e: e.running == e.waiting == e.held == e.open_exchanges == 0, AT_ONCE_S)
    finally:
        await engine.stop()


def aborts_of(engine: SimulatedEngine) -> list[AbortEntry]:
    """Calls of the engine's abort route."""
    return [entry for entry in engine.log.aborts if entry.source == "request"]


async def running(engine: SimulatedEngine, count: int = 1) -> None:
    """Wait until that many sequences are being computed."""
    await engine.wait_for(lambda e: e.running == count, PATIENCE_S)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize(("version", "is_aborted"), [("0.5.23", False), ("0.5.20", True), ("unknown", True)])
async def test_engines_are_told_in_the_way_of_their_version(is_stream: bool, version: str, is_aborted: bool) -> None:
    async with simulated(engine_version=version, abort_delay_s=0.1) as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", {**LONG, "stream": is_stream}))
            await running(engine)
            entry = engine.log.requests_to("/generate")[0]
            left_at = time.monotonic()
            connection.close()
            await left(gateway)
        await engine.wait_for(lambda e: e.running == 0, AT_ONCE_S)
        assert time.monotonic() - left_at < AT_ONCE_S
        aborts = aborts_of(engine)
        assert [abort.rid for abort in aborts] == entry.rids * (1 if is_aborted or not is_stream else 0)
        assert all(abort.is_accepted and abort.at_s - entry.received_s >= 0.04 for abort in aborts)
        if aborts:  # closing comes too late for an engine that has ended the answer by then
            await engine.wait_for(lambda e: entry.ended in ("complete", "client_closed"), AT_ONCE_S)
        if version == "0.5.20" and not is_stream:
            assert entry.ended == "complete"
        if not aborts:
            assert [gone.rids for gone in engine.log.disconnects] == [tuple(entry.rids)]


async def test_a_unary_call_is_not_aborted_before_the_engine_knows_it() -> None:
    # Such an abort would be spent for nothing, and with it the one that closing would cause.
    async with simulated(dynamic_batch_tokenizer_ms=10) as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", LONG))
            await engine.wait_for(lambda e: e.log.requests_to("/generate"), PATIENCE_S)
            connection.close()
            await left(gateway)
        assert len(aborts_of(engine)) == 1


async def test_an_ignored_abort_is_repeated_until_it_works() -> None:
    async with simulated() as (engine, gateway):
        engine.add_fault(at="abort", do="ignore")
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", LONG))
            await running(engine)
            connection.close()
            await left(gateway)
        calls = engine.log.requests_to("/abort_request")
        assert len(calls) == 2
        assert calls[1].received_s - calls[0].received_s >= 0.04
        assert len(aborts_of(engine)) == 1


async def test_an_engine_that_ignores_every_abort_is_given_up_in_the_end() -> None:
    async with simulated(inter_token_ms=1000) as (engine, gateway):
        engine.add_fault(at="abort", do="ignore", times=None)
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", LONG))
            await running(engine)
            connection.close()
            record = await gateway.record()
        assert (record.outcome, record.status) == ("client_closed", 499)
        assert gateway.state()["abort_tasks"] == 1
        await gateway.settle(8.0 * TIME_SCALE)
        assert 2 <= len(engine.log.requests_to("/abort_request")) <= 9
        await engine.wait_for(lambda e: len(e.log.disconnects) == 1, AT_ONCE_S)
        text = (await gateway.client.get("/metrics")).text
        assert "forebay_abort_unconfirmed_total 1.0" in text
        engine.core.abort("", abort_all=True)


async def test_s3_18_an_engine_that_refuses_our_aborts_is_closed() -> None:
    # Its abort route wants the admin key, which this gateway was not given.
    async with simulated(admin_api_key="admin", unary_disconnect_poll_s=0.1) as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", LONG))
            await running(engine)
            connection.close()
            await left(gateway)
        assert [entry.status for entry in engine.log.requests_to("/abort_request")] == [401]
        await engine.wait_for(lambda e: e.running == 0, AT_ONCE_S)  # it looks for callers that left every now and then
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", LONG))
            await running(engine)
            await call(gateway.address, "/abort_request", {"rid": "mine"})
            answer = await connection.answer()
        assert (answer.status, answer.json()["error"]["type"]) == (499, "aborted")
        assert (await gateway.record(2)).outcome == "aborted"


async def test_no_abort_follows_an_answer_that_ended_by_itself() -> None:
    async with simulated(inter_token_ms=10) as (engine, gateway):
        engine.add_fault(at="abort", do="ignore", times=None)
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", body))
            await running(engine)
            connection.close()
            await left(gateway)
        entry = engine.log.requests_to("/generate")[0]
        assert entry.ended == "complete"
        assert entry.finished_s is not None
        calls = engine.log.requests_to("/abort_request")
        assert all(abort.received_s <= entry.finished_s + 0.02 * TIME_SCALE for abort in calls)


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_paused_engine_is_not_aborted_before_it_goes_on(is_stream: bool) -> None:
    async with simulated() as (engine, gateway):
        member = next(iter(gateway.gateway.services.fleet))
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", {**LONG, "stream": is_stream}))
            await running(engine)
            assert (await call(_address(engine), "/pause_generation", {"mode": "in_place"})).status == 200
            await until(lambda: member.is_paused, "the pause seen")
            connection.close()
            await engine.wait_for(lambda e: e.log.disconnects, AT_ONCE_S)
            record = await gateway.record()
        assert record.outcome == "client_closed"
        assert aborts_of(engine) == []
        resumed_at = time.monotonic()
        assert (await call(_address(engine), "/continue_generation", {})).status == 200
        await gateway.settle()
        assert len(aborts_of(engine)) == (0 if is_stream else 1)
        assert all(abort.at_s - resumed_at >= 0.1 for abort in aborts_of(engine))
        await gateway.ready(1)


def _address(engine: SimulatedEngine) -> tuple[str, int]:
    return "127.0.0.1", engine.port


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_samples_under_ids_of_the_engines_own_are_closed(is_stream: bool) -> None:
    # Nothing else reaches them while n stays with the engine.
    async with simulated(unary_disconnect_poll_s=0.1, native_n=True) as (engine, gateway):
        params = {**LONG["sampling_params"], "n": 2}
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", {**LONG, "sampling_params": params, "stream": is_stream}))
            await running(engine, 2)
            connection.close()
            await left(gateway)
        assert aborts_of(engine) == []


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_every_item_of_a_batch_is_stopped(is_stream: bool) -> None:
    async with simulated() as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", {**LONG, "text": ["a", "b", "c"], "stream": is_stream}))
            await running(engine, 3)
            connection.close()
            await left(gateway)
        rids = engine.log.requests_to("/generate")[0].rids
        assert sorted(abort.rid for abort in aborts_of(engine)) == ([] if is_stream else sorted(rids))


async def test_a_hundred_mixed_endings_leave_no_load_behind() -> None:
    async with simulated(inter_token_ms=1) as (engine, gateway):
        for do in ("status:500", "reset", "close", "garbage"):
            engine.add_fault(at="headers", do=do, times=10)
        engine.add_fault(at="event:1", do="reset", times=10)
        for number in range(100):
            async with wire(gateway.address) as connection:
                await connection.send(
                    request_bytes("/generate", {**LONG, "stream": number % 2 == 0, "sampling_params": {"n": 1}})
                )
                if number % 3 == 0:
                    leave(connection, HOW[number % 9 // 3])
                else:
                    await connection.answer()
        await gateway.record(100)
        await gateway.settle()
        assert len(gateway.records) == 100
        assert all(member.in_flight == 0 for member in gateway.gateway.services.fleet)


# The abort route.


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_the_caller_of_an_aborted_request_gets_the_partial_answer(is_stream: bool) -> None:
    async with simulated() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", {**LONG, "stream": is_stream}))
        await running(engine)
        await until(lambda: engine.core.schedulers[0].totals.generated_tokens > 3, "tokens")
        report = await call(gateway.address, "/abort_request", {"rid": "mine"})
        worker = engine.url.removeprefix("http://")
        assert report.json() == {"aborted": ["mine"], "not_found": [], "workers": [{"id": worker, "status": "told"}]}
        answer = await connection.answer()
        assert answer.status == 200
        if is_stream:
            assert answer.events()[-1] == b"[DONE]"
        last = json.loads(answer.events()[-2]) if is_stream else answer.json()
        assert last["meta_info"]["id"] == "mine"
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] > 0
        record = await gateway.record()
        assert (record.outcome, record.status) == ("aborted", 200)
        assert [abort.rid for abort in aborts_of(engine)] == engine.log.requests_to("/generate")[0].rids


async def test_an_id_that_nobody_has_is_not_found(gateway: RunningGateway, engine: SimulatedEngine) -> None:
    report = await call(gateway.address, "/abort_request", {"rid": "nobody"})
    assert (report.status, report.json()) == (200, {"aborted": [], "not_found": ["nobody"], "workers": []})
    assert engine.log.requests_to("/abort_request") == []


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": 5}, {"rid": ["a"]}, []])
async def test_an_abort_without_an_id_aborts_nothing(
    gateway: RunningGateway, engine: SimulatedEngine, body: Any
) -> None:
    report = await call(gateway.address, "/abort_request", json.dumps(body).encode())
    assert (report.status, report.json()["error"]["type"]) == (400, "invalid_request")
    assert engine.log.requests_to("/abort_request") == []


async def test_one_item_of_a_batch_can_be_aborted_and_then_all() -> None:
    async with simulated() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", {**LONG, "text": ["a", "b", "c"]}))
        await running(engine, 3)
        rids = engine.log.requests_to("/generate")[0].rids
        assert (await call(gateway.address, "/abort_request", {"rid": "mine_1"})).json()["aborted"] == ["mine_1"]
        await running(engine, 2)
        assert {abort.rid for abort in aborts_of(engine)} == {rids[1]}
        assert (await call(gateway.address, "/abort_request", {"rid": "mine"})).json()["aborted"] == ["mine"]
        items = (await connection.answer()).json()
        assert [item["meta_info"]["id"] for item in items] == ["mine_0", "mine_1", "mine_2"]
        assert [item["meta_info"]["finish_reason"]["type"] for item in items] == ["abort"] * 3
        assert (await gateway.record()).outcome == "aborted"


async def test_one_prompt_of_completions_can_be_aborted() -> None:
    async with simulated() as (engine, gateway), wire(gateway.address) as connection:
        body = {"prompt": ["a", "b"], "rid": "mine", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        await connection.send(request_bytes("/v1/completions", body))
        await running(engine, 2)
        await call(gateway.address, "/abort_request", {"rid": "mine_1"})
        await running(engine, 1)
        await call(gateway.address, "/abort_request", {"rid": "mine"})
        events = [json.loads(event) for event in (await connection.answer()).events()[:-1]]
        assert {event["id"] for event in events} == {"mine_0", "mine_1"}
        assert (await gateway.record()).outcome == "aborted"


async def test_everything_can_be_aborted_at_once() -> None:
    async with simulated() as (engine, gateway), wire(gateway.address) as one, wire(gateway.address) as two:
        await one.send(request_bytes("/generate", {**LONG, "rid": "one"}))
        await two.send(request_bytes("/generate", {**LONG, "rid": "two", "stream": True}))
        await running(engine, 2)
        report = (await call(gateway.address, "/abort_request", {"abort_all": True})).json()
        assert (sorted(report["aborted"]), report["not_found"]) == (["one", "two"], [])
        assert report["workers"] == [{"id": engine.url.removeprefix("http://"), "status": 200}]
        for connection in (one, two):
            assert (await connection.answer()).status == 200
        await gateway.record(2)
        assert {record.outcome for record in gateway.records} == {"aborted"}


async def test_everything_of_one_kind_can_be_aborted() -> None:
    """Ids that begin alike: of an adapter, say."""
    async with simulated() as (engine, gateway), wire(gateway.address) as one, wire(gateway.address) as two:
        await one.send(request_bytes("/generate", {**LONG, "rid": "lora::1"}))
        await two.send(request_bytes("/generate", {**LONG, "rid": "base::1"}))
        await running(engine, 2)
        body = {"rid": "lora::", "prefix": True, "abort_all": None}
        report = (await call(gateway.address, "/abort_request", body)).json()
        assert (report["aborted"], report["not_found"]) == (["lora::1"], [])
        assert (await one.answer()).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert engine.running == 1
        two.reset()


@pytest.mark.parametrize("body", [{"abort_all": True}, {"rid": "a", "prefix": True}], ids=["all", "by prefix"])
async def test_only_administrators_abort_what_is_not_named(body: Any, scripted: ScriptEngine, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("admin-key\n")
    async with running_gateway(scripted.url, admin_api_key_file=tmp_path / "admin") as gateway:
        assert (await call(gateway.address, "/abort_request", body)).status == 401
        headers = {"Authorization": "Bearer admin-key"}
        assert (await call(gateway.address, "/abort_request", body, headers=headers)).status == 200


async def test_aborting_everything_reports_each_worker() -> None:
    async with simulated() as (engine, _):
        silent = SimulatedEngine(EngineOptions())
        await silent.start()
        async with running_gateway(engine.url, silent.url) as gateway:
            silent.add_fault(at="abort", do="reset", times=None)
            report = (await call(gateway.address, "/abort_request", {"abort_all": True})).json()
            by_id = {worker["id"]: worker["status"] for worker in report["workers"]}
            page = gateway.gateway.services.metrics.render().decode()
            assert {f'forebay_aborts_sent_total{{worker="{worker}"}} 1.0' in page for worker in by_id} == {True}
            assert by_id[engine.url.removeprefix("http://")] == 200
            assert isinstance(by_id[silent.url.removeprefix("http://")], str)
        await silent.stop()


async def test_a_prefix_of_an_id_aborts_nothing_else() -> None:
    async with simulated() as (engine, gateway), wire(gateway.address) as one, wire(gateway.address) as two:
        await one.send(request_bytes("/generate", {**LONG, "rid": "p-1"}))
        await two.send(request_bytes("/generate", {**LONG, "rid": "p-10"}))
        await running(engine, 2)
        await call(gateway.address, "/abort_request", {"rid": "p-1"})
        assert (await one.answer()).json()["meta_info"]["finish_reason"]["type"] == "abort"
        await running(engine, 1)
        await call(gateway.address, "/abort_request", {"rid": "p-10"})
        assert (await two.answer()).status == 200

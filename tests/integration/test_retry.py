"""Failed attempts: which ones go to another worker, how often, and what is told and counted."""

import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call, request_bytes, wire

UNARY: dict[str, Any] = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
STREAM: dict[str, Any] = {**UNARY, "stream": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "rid": "mine", "stream": True}
QUEUE_ERRORS = (
    "The request queue is full.",
    "The request is aborted by a higher priority request.",
    "Request waiting timeout reached.",
    "Using priority is disabled for this server.",
)


def finish_of(rid: str, reason: dict[str, Any]) -> bytes:
    """One native event that ends a request."""
    return json.dumps({"text": "a", "output_ids": [1], "meta_info": {"id": rid, "finish_reason": reason}}).encode()


async def stream_of(reply: Reply, *events: bytes) -> None:
    """A whole stream."""
    await reply.start_chunked()
    for event in (*events, b"[DONE]"):
        await reply.event(event)
    await reply.end_chunked()


class Plan:
    """What the engines do, in the order in which requests come to any of them; ``ok`` when nothing is left.

    Attributes:
        engines: The engines that follow it.
        seen: Which engine saw which engine id.
    """

    def __init__(self, *actions: str | Callable[[Reply], None]) -> None:
        self.actions = list(actions)
        self.engines: list[ScriptEngine] = []
        self.seen: list[tuple[ScriptEngine, str]] = []

    async def serve(self, engine: ScriptEngine, request: SeenRequest, reply: Reply) -> None:
        self.seen.append((engine, request.rid))
        action = self.actions.pop(0) if self.actions else "ok"
        if callable(action):
            action(reply)
            return
        name, _, text = action.partition(":")
        message = text or "no room"
        error = {"object": "error", "message": message, "type": "SERVICE_UNAVAILABLE", "param": None, "code": 503}
        match name:
            case "reset":
                reply.reset()
            case "close":
                reply.close()
            case "die":
                die(engine)
                reply.reset()
            case "event, then reset":
                await reply.start_chunked()
                await reply.event(json.dumps({"text": "a", "meta_info": {"id": request.rid}}).encode())
                reply.reset()
            case "head, then reset":
                await reply.start_chunked()
                reply.reset()
            case "status":
                await reply.whole(json.dumps({"error": {"message": "scripted"}}).encode(), status=int(text))
            case "busy":
                await reply.whole(json.dumps(error).encode(), status=503)
            case "abort event":
                reason = {"type": "abort", "message": message, "status_code": 503, "err_type": None}
                await stream_of(reply, finish_of(request.rid, reason))
            case "error event":
                await stream_of(reply, json.dumps({"error": error}).encode())
            case _ if request.path == "/generate" and json.loads(request.body).get("stream"):
                await stream_of(reply, finish_of(request.rid, {"type": "stop", "matched": 2}))
            case _ if json.loads(request.body).get("stream"):
                choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}
                await stream_of(reply, json.dumps({"id": request.rid, "choices": [choice]}).encode())
            case _:
                await reply.whole(b'{"text":"a","meta_info":{"id":"%b"}}' % request.rid.encode())


def die(engine: ScriptEngine) -> None:
    """Take no more connections and drop those that are open."""
    assert engine.server is not None
    engine.server.close()
    for writer in engine.writers:
        writer.close()


@contextmanager
def full_listener(port: int) -> Iterator[None]:
    """A socket that listens and whose queue is full, so that connecting to it never ends."""
    sockets = [socket.socket()]
    try:
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets[0].bind(("127.0.0.1", port))
        sockets[0].listen(0)
        for _ in range(4):
            sockets.append(socket.socket())
            sockets[-1].setblocking(False)
            sockets[-1].connect_ex(("127.0.0.1", port))
        yield
    finally:
        for sock in sockets:
            sock.close()


@asynccontextmanager
async def fleet_of(plan: Plan, count: int = 3, **options: Any) -> AsyncIterator[RunningGateway]:
    """A gateway in front of engines that follow ``plan``; no probe disturbs them once they are known."""
    dp_size = options.pop("dp_size", 1)
    async with script_engine() as one, script_engine() as two, script_engine() as three:
        plan.engines = [one, two, three][:count]
        for engine in plan.engines:
            engine.script = functools.partial(plan.serve, engine)
            engine.metadata["/server_info"] = {**METADATA["/server_info"], "dp_size": dp_size}
        urls = [engine.url for engine in plan.engines]
        async with running_gateway(*urls, **{"health_interval_s": 3600, **options}) as gateway:
            yield gateway


def check_books(gateway: RunningGateway, plan: Plan, results: list[str]) -> None:
    """The access record and the counters say what the engines saw; ``results`` are those of the attempts in order."""
    record = gateway.records[-1]
    assert record.attempts == len(results) == len(plan.seen)
    assert list(record.engine_ids) == [rid for _, rid in plan.seen]
    assert len(set(record.engine_ids)) == len(plan.seen)
    assert len({id(engine) for engine, _ in plan.seen}) == len(plan.seen)
    assert record.worker == plan.seen[-1][0].url.removeprefix("http://")
    text = gateway.gateway.services.metrics.render().decode()
    for (engine, _), result in zip(plan.seen, results, strict=True):
        worker = engine.url.removeprefix("http://")
        assert f'forebay_upstream_attempts_total{{result="{result}",worker="{worker}"}} 1.0' in text


def type_of(answer: Answer) -> str:
    """The type of an error answer."""
    kind = answer.json()["error"]["type"]
    assert isinstance(kind, str)
    return kind


RETRIED = [
    *(pytest.param(path, body, action, id=f"{action}{path}{'-stream' * ('stream' in body)}")
      for action in ("reset", "die", "status:503")
      for path, body in (("/generate", UNARY), ("/generate", STREAM), ("/v1/chat/completions", CHAT))),
    *(pytest.param("/generate", UNARY, action, id=action) for action in ("close", "status:502", "status:504")),
    *(pytest.param("/generate", UNARY, f"busy:{message}", id=f"unary {message}") for message in QUEUE_ERRORS),
    *(pytest.param("/generate", STREAM, f"abort event:{message}", id=f"event {message}") for message in QUEUE_ERRORS),
    *(pytest.param("/v1/chat/completions", CHAT, f"error event:{message}", id=f"chat {message}")
      for message in QUEUE_ERRORS),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "action"), RETRIED)
async def test_another_worker_is_tried(path: str, body: dict[str, Any], action: str) -> None:
    plan = Plan(action)
    async with fleet_of(plan) as gateway:
        answer = await call(gateway.address, path, body)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "2")
        assert answer.headers["x-forebay-worker"] == plan.seen[1][0].url.removeprefix("http://")
        assert answer.headers["x-request-id"] == "mine"
        if "stream" in body:
            assert answer.events()[-1] == b"[DONE]"
        assert (await gateway.record()).outcome == "complete"
        first = "overloaded" if "queue is full" in action else "engine_error"
        check_books(gateway, plan, [first, "complete"])


NOT_RETRIED = [
    pytest.param(UNARY, "status:400", 400, "rejected", "rejected", id="400"),
    pytest.param(UNARY, "status:404", 404, "rejected", "rejected", id="404"),
    pytest.param(UNARY, "status:429", 429, "overloaded", "overloaded", id="429"),
    pytest.param(UNARY, "status:401", 502, "engine_error", "engine_error", id="401"),
    pytest.param(UNARY, "status:500", 502, "engine_error", "engine_error", id="500"),
    pytest.param(STREAM, "event, then reset", 200, "truncated", "truncated", id="after the first byte"),
    pytest.param(STREAM, "head, then reset", 502, "engine_error", "engine_error", id="after the engine's head"),
]


@pytest.mark.parametrize(("body", "action", "status", "outcome", "result"), NOT_RETRIED)
async def test_no_other_worker_is_tried(
    body: dict[str, Any], action: str, status: int, outcome: str, result: str
) -> None:
    plan = Plan(action)
    async with fleet_of(plan) as gateway:
        answer = await call(gateway.address, "/generate", body)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (status, "1")
        assert (await gateway.record()).outcome == outcome
        check_books(gateway, plan, [result])


@pytest.mark.parametrize(("most", "sent"), [(1, 1), (2, 2), (3, 3), (16, 3)])
async def test_no_more_attempts_than_allowed_and_never_the_same_worker_twice(most: int, sent: int) -> None:
    plan = Plan("reset", "reset", "reset", "reset")
    async with fleet_of(plan, max_attempts=most) as gateway:
        answer = await call(gateway.address, "/generate", UNARY)
        assert (answer.status, type_of(answer)) == (503, "unavailable")
        assert answer.headers["x-forebay-attempts"] == str(sent)
        check_books(gateway, plan, ["engine_error"] * sent)


async def test_the_last_error_is_the_workers_own() -> None:
    plan = Plan("busy:The request queue is full.", "busy:The request queue is full.")
    async with fleet_of(plan, 2) as gateway:
        answer = await call(gateway.address, "/generate", UNARY)
        assert (answer.status, type_of(answer), answer.headers["retry-after"]) == (503, "overloaded", "1")
        assert answer.json()["error"]["message"] == "The request queue is full."
        assert (await gateway.record()).outcome == "overloaded"


# Connecting.


async def test_field_case_80_a_refused_connection_goes_elsewhere_and_the_worker_out_of_rotation() -> None:
    plan = Plan()
    async with fleet_of(plan, 2, policy="round-robin") as gateway:
        gone, other = plan.engines
        await gone.stop()
        for _ in range(6):
            answer = await call(gateway.address, "/generate", UNARY)
            assert answer.status == 200
            assert answer.headers["x-forebay-worker"] == other.url.removeprefix("http://")
        # One request found out, the others were not sent there at all.
        attempts = sorted(record.attempts for record in gateway.records)
        assert attempts == [1, 1, 1, 1, 1, 2]


async def test_a_worker_that_takes_no_connection_in_time_is_passed_over() -> None:
    plan = Plan()
    async with fleet_of(plan, 2, connect_timeout_s=0.3 * TIME_SCALE) as gateway:
        gone, other = plan.engines
        port = int(gone.url.rpartition(":")[2])
        await gone.stop()
        with full_listener(port):
            for _ in range(4):
                answer = await call(gateway.address, "/generate", UNARY)
                assert answer.headers["x-forebay-worker"] == other.url.removeprefix("http://")
            # Alone, it is the request's own timeout.
            gone_member, other_member = gateway.gateway.services.fleet
            other_member.lost_contact("for this test")
            assert gone_member.facts is not None
            gone_member.identified(gone_member.facts)
            answer = await call(gateway.address, "/generate", UNARY)
            assert (answer.status, type_of(answer)) == (504, "engine_timeout")


@pytest.mark.parametrize("ending", ["Connection: close", "X-Nothing: said"])
async def test_field_case_95_a_connection_that_ends_after_an_answer_is_not_used_again(ending: str) -> None:
    plan = Plan()

    async def answer_and_close(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b'{"meta_info":{"id":"%b"}}' % request.rid.encode(), ending)
        reply.close()

    async with fleet_of(plan, 1) as gateway:
        plan.engines[0].script = answer_and_close
        for _ in range(5):
            assert (await call(gateway.address, "/generate", UNARY)).status == 200
        assert [record.attempts for record in gateway.records] == [1] * 5


async def test_field_case_94_a_pooled_connection_that_closes_on_receipt_costs_one_more_attempt_at_most() -> None:
    plan = Plan("ok", "ok", "close")
    async with fleet_of(plan, 2, policy="round-robin") as gateway:
        for _ in range(3):
            assert (await call(gateway.address, "/generate", UNARY)).status == 200
        assert len(plan.seen) == 4


# Who may not be retried.


@pytest.mark.parametrize("client_first", [True, False])
@pytest.mark.parametrize("action", ["reset", "die", "close"])
async def test_nothing_is_tried_for_a_client_that_goes_in_the_same_step(action: str, client_first: bool) -> None:
    async with wire_pair(action, client_first) as (gateway, plan):
        record = await gateway.record()
        assert (record.outcome, record.attempts) == ("client_closed", 1)
        await gateway.settle()
        assert len(plan.seen) == 1


@asynccontextmanager
async def wire_pair(action: str, client_first: bool) -> AsyncIterator[tuple[RunningGateway, Plan]]:
    """A request whose client and whose engine leave in the same step of the loop."""

    def both(reply: Reply) -> None:
        if client_first:
            client.reset()
        leave(reply)
        if not client_first:
            client.reset()

    def leave(reply: Reply) -> None:
        if action == "die":
            die(plan.seen[0][0])
        (reply.close if action == "close" else reply.reset)()

    plan = Plan(both)
    async with fleet_of(plan) as gateway, wire(gateway.address) as client:
        await client.send(request_bytes("/generate", UNARY))
        yield gateway, plan


async def test_nothing_is_tried_while_draining() -> None:
    plan = Plan()
    async with fleet_of(plan) as gateway:

        def drain(reply: Reply) -> None:
            gateway.gateway.services.is_draining = True
            reply.reset()

        plan.actions.append(drain)
        answer = await call(gateway.address, "/generate", UNARY)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (503, "1")
        assert len(plan.seen) == 1


async def test_nothing_is_tried_for_a_request_that_is_aborted_between_two_attempts() -> None:
    async with simulated() as one, simulated() as two:
        for engine in (one, two):
            engine.add_fault(at="headers", do="reset", match={"path": "/generate"})
            engine.add_fault(at="headers", do="hang", match={"path": "/ping"})
        options: dict[str, Any] = {"health_interval_s": 3600, "connect_timeout_s": 0.5 * TIME_SCALE}
        async with running_gateway(one.url, two.url, **options) as gateway, wire(gateway.address) as client:
            await client.send(request_bytes("/generate", UNARY))
            await until(lambda: any(e.log.requests_to("/ping") for e in (one, two)), "the worker asked for life")
            aborted = await call(gateway.address, "/abort_request", {"rid": "mine"})
            assert aborted.json()["aborted"] == ["mine"]
            answer = await client.answer()
            assert (answer.status, type_of(answer)) == (499, "aborted")
            assert (await gateway.record()).outcome == "aborted"
            assert len(one.log.requests_to("/generate") + two.log.requests_to("/generate")) == 1


@pytest.mark.parametrize("action", ["reset", "die", "busy:The request queue is full."])
async def test_a_pinned_request_goes_nowhere_else(action: str) -> None:
    plan = Plan(action)
    async with fleet_of(plan) as gateway:
        pinned = plan.engines[1].url.removeprefix("http://")
        answer = await call(gateway.address, "/generate", UNARY, headers={"X-Forebay-Worker": pinned})
        # What is told is the worker's own error, not that there is no other one.
        kind = "overloaded" if "full" in action else "unavailable"
        assert (answer.status, type_of(answer), answer.headers["x-forebay-worker"]) == (503, kind, pinned)
        assert "other" not in answer.json()["error"]["message"]
        check_books(gateway, plan, ["overloaded" if "full" in action else "engine_error"])


async def test_a_pinned_rank_stays_pinned() -> None:
    plan = Plan("reset", "busy")
    async with fleet_of(plan, dp_size=2) as gateway:
        answer = await call(gateway.address, "/generate", UNARY, headers={"X-Data-Parallel-Rank": "1"})
        assert (answer.status, answer.headers["x-forebay-dp-rank"]) == (200, "1")
        ranks = {json.loads(engine.requests[0].body)["routed_dp_rank"] for engine in plan.engines}
        assert ranks == {1}


# Deaths.


@pytest.mark.parametrize(
    ("actions", "status", "kind", "attempts"),
    [
        pytest.param(["die"], 200, None, 2, id="one death, one retry"),
        pytest.param(["die", "die"], 502, "engine_died", 2, id="two deaths end it"),
        pytest.param(["die", "reset"], 503, "unavailable", 2, id="after a death the retry is the last: reset"),
        pytest.param(["die", "busy"], 503, "unavailable", 2, id="after a death the retry is the last: busy"),
        pytest.param(["reset", "die"], 200, None, 3, id="a reset of a living worker, then a death"),
        pytest.param(["reset", "reset"], 200, None, 3, id="two resets of living workers"),
        pytest.param(["busy", "die", "die"], 502, "engine_died", 3, id="two deaths later on"),
    ],
)
async def test_decision_14(actions: list[str], status: int, kind: str | None, attempts: int) -> None:
    plan = Plan(*actions)
    async with fleet_of(plan) as gateway:
        answer = await call(gateway.address, "/generate", UNARY)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (status, str(attempts))
        if kind is not None:
            assert type_of(answer) == kind
        check_books(gateway, plan, ["engine_error"] * len(actions) + ["complete"] * (attempts > len(actions)))
        untouched = [engine for engine in plan.engines if engine not in [seen for seen, _ in plan.seen]]
        assert not any(engine.requests for engine in untouched)
        # The dead are out of rotation at once, the living are not.
        dead = [seen for (seen, _), action in zip(plan.seen, actions, strict=False) if action == "die"]
        states = {member.worker.url: member.is_up for member in gateway.gateway.services.fleet}
        assert states == {engine.url: engine not in dead for engine in plan.engines}


async def test_a_worker_that_resets_the_second_connection_too_is_dead() -> None:
    async with simulated() as one, simulated() as two, simulated() as three:
        for engine in (one, two, three):
            engine.add_fault(at="headers", do="reset", match={"path": "/generate"})
            engine.add_fault(at="headers", do="reset", times=None, match={"path": "/ping"})
        async with running_gateway(one.url, two.url, three.url, health_interval_s=3600) as gateway:
            answer = await call(gateway.address, "/generate", UNARY)
            assert (answer.status, type_of(answer)) == (502, "engine_died")
            seen = [len(engine.log.requests_to("/generate")) for engine in (one, two, three)]
            assert sorted(seen) == [0, 1, 1]


async def test_a_request_that_kills_engines_kills_no_more_than_two() -> None:
    small = {"vocab_size": 512}
    async with simulated(**small) as one, simulated(**small) as two, simulated(**small) as three:
        urls = one.url, two.url, three.url
        async with running_gateway(*urls, health_interval_s=3600) as gateway:
            poison = {**UNARY, "return_logprob": True, "top_logprobs_num": 700}
            answer = await call(gateway.address, "/generate", poison)
            assert (answer.status, type_of(answer)) == (502, "engine_died")
            assert sorted(engine.is_dead for engine in (one, two, three)) == [False, True, True]
            record = await gateway.record()
            assert (record.outcome, record.attempts, len(set(record.engine_ids))) == ("engine_error", 2, 2)
            answer = await call(gateway.address, "/generate", UNARY)
            assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "1")


@asynccontextmanager
async def simulated(**options: Any) -> AsyncIterator[SimulatedEngine]:
    """A simulated engine."""
    engine = SimulatedEngine(EngineOptions(**options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def test_a_kept_connection_that_ends_as_the_request_goes_out_costs_one_counted_attempt(
    scripted: ScriptEngine, front: RunningGateway
) -> None:
    async def closes(request: SeenRequest, reply: Reply) -> None:
        if len(scripted.requests) == 2:
            reply.close()
        else:
            await reply.whole(b'{"meta_info":{"id":"%b"}}' % request.rid.encode())

    scripted.script = closes
    assert (await call(front.address, "/generate", {"text": "a"})).status == 200
    answer = await call(front.address, "/generate", {"text": "a"})
    assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "2")
    _, first, second = (request.rid for request in scripted.requests)
    assert first != second
    record = await front.record(2)
    assert (record.attempts, record.engine_ids, record.outcome) == (2, (first, second), "complete")

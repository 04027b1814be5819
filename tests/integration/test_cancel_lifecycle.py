"""The cancellation lifecycle over real sockets: ids, the schedule of aborts, and what clients are told."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.outcome import Outcome
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Wire, call, request_bytes, wire

# The engine is told at once, or in the schedule's time; this allows for a loaded machine.
MARGIN_S = 1.0 * TIME_SCALE
ABORTED = b'{"text":"par","meta_info":{"id":"%b","finish_reason":{"type":"abort","message":"Abort request"}}}'
SCHEDULE_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0)
UNARY: dict[str, Any] = {"text": "a", "rid": "mine"}
STREAM: dict[str, Any] = {**UNARY, "stream": True}
STOPPED = b'{"text":"a","meta_info":{"id":"%b","finish_reason":{"type":"stop"}}}'


class TimedIds(list[str]):
    """Ids in the order of their aborts, with the loop's times."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def append(self, rid: str) -> None:
        """One more abort."""
        super().append(rid)
        self.times.append(asyncio.get_running_loop().time())


@pytest.fixture
def aborts(scripted: ScriptEngine) -> TimedIds:
    """The aborts that the shared engine gets from now on."""
    scripted.aborted = timed = TimedIds()
    return timed


@asynccontextmanager
async def sent(front: RunningGateway, engine: ScriptEngine, body: dict[str, Any]) -> AsyncIterator[Wire]:
    """A client whose request is at the engine."""
    before = len(engine.requests)
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", body))
        await until(lambda: len(engine.requests) > before, "the request at the engine")
        yield connection


async def ends_when_aborted(request: SeenRequest, reply: Reply, engine: ScriptEngine) -> None:
    """Generate until an abort, then give what there is."""
    await until(lambda: request.rid in engine.aborted, "the abort")
    assert not reply.is_gone
    await reply.whole(ABORTED % request.rid.encode())


# Telling the engine.


async def test_a2_7_a_unary_call_is_aborted_before_its_head_and_stays_open(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds
) -> None:
    """Mutation tried: unary calls are dropped; then the call is closed and no abort comes."""
    is_open = False

    async def script(request: SeenRequest, reply: Reply) -> None:
        nonlocal is_open
        await until(lambda: request.rid in scripted.aborted, "the abort")
        is_open = not reply.is_gone
        await reply.whole(ABORTED % request.rid.encode())

    scripted.script = script
    async with sent(front, scripted, UNARY) as connection:
        await asyncio.sleep(0.03)  # the least age of a request that is aborted
        left_at = asyncio.get_running_loop().time()
        connection.close()
        await front.settle()
    assert aborts.times[0] - left_at < 0.05 + MARGIN_S
    assert is_open


async def test_a2_8_a_first_abort_without_effect_is_followed_by_exactly_one(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds
) -> None:
    """Mutation tried: one abort and no schedule; then the request runs until the caller of the test gives up."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: len(scripted.aborted) == 2, "the second abort")
        await reply.whole(ABORTED % request.rid.encode())

    scripted.script = script
    async with sent(front, scripted, UNARY) as connection:
        connection.close()
        await front.settle()
        await asyncio.sleep(0.15)  # longer than the sleep before a third one
    assert aborts == [scripted.requests[0].rid] * 2
    assert aborts.times[1] - aborts.times[0] >= 0.05 * 0.9


async def test_a2_11_a_stream_is_closed_at_once_whatever_it_has_shown(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds
) -> None:
    """Mutation tried: aggregated streams drain to their first output as decode legs do."""
    told: list[float] = []

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.gone()
        told.append(time.monotonic())
        raise ConnectionError("it is closed")

    scripted.script = script
    async with sent(front, scripted, STREAM) as connection:
        left_at = time.monotonic()
        connection.close()
        await until(lambda: told != [], "the close")
    assert told[0] - left_at < MARGIN_S
    assert aborts == []


# Identity.


async def test_a3_1_one_of_two_requests_with_the_same_id_is_cancelled_alone(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds
) -> None:
    """Mutation tried: the client's own ``rid`` goes to the engine; then one abort ends both."""
    release = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: release.is_set() or any(request.rid.startswith(rid) for rid in aborts), "an end")
        await reply.whole((STOPPED if release.is_set() else ABORTED) % request.rid.encode())

    scripted.script = script
    body = {"text": "a", "rid": "victim"}
    async with sent(front, scripted, body) as leaves, sent(front, scripted, body) as stays:
        leaves.close()
        record = await front.record()
        await until(lambda: front.state()["in_flight_requests"] == 1, "the end of the one")
        await until(lambda: front.state()["abort_tasks"] == 0, "the abort's end")
        release.set()
        answer = (await stays.answer()).json()
    assert (str(record.outcome), record.request_id) == ("client_closed", "victim")
    assert (answer["meta_info"]["id"], answer["meta_info"]["finish_reason"]["type"]) == ("victim", "stop")
    assert aborts == [scripted.requests[0].rid]
    assert scripted.requests[0].rid != scripted.requests[1].rid


SHAPES: list[Any] = [
    pytest.param("/generate", STOPPED, id="native"),
    pytest.param("/v1/chat/completions", b'{"id":"%b","choices":[{"index":0,"finish_reason":"stop"}]}', id="chat"),
    pytest.param("/v1/completions", b'{"id":"%b","choices":[{"index":0,"finish_reason":"stop"}]}', id="completions"),
]


@pytest.mark.parametrize(("path", "payload"), SHAPES)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a3_2_the_engine_sees_its_own_ids_and_the_client_its_own(
    front: RunningGateway, scripted: ScriptEngine, path: str, payload: bytes, is_stream: bool
) -> None:
    """Mutation tried: answers keep the ids that they came with."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        if not is_stream:
            await reply.whole(payload % request.rid.encode())
            return
        await reply.start_chunked()
        for event in (payload % request.rid.encode(), payload % request.rid.encode(), b"[DONE]"):
            await reply.event(event)
        await reply.end_chunked()

    scripted.script = script
    body = {"text": "a", "prompt": "a", "messages": [], "rid": "public", "stream": is_stream}
    answer = await call(front.address, path, body)
    rid = scripted.requests[0].rid
    assert len(rid) == 32
    assert set(rid) <= set("0123456789abcdef")
    assert b"public" not in scripted.requests[0].body
    assert rid.encode() not in answer.body
    expected = payload % b"public"
    assert answer.events() == [expected, expected, b"[DONE]"] if is_stream else answer.body == expected


async def test_a3_2_error_events_and_error_bodies_show_the_public_id(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    """Mutation tried: the engine's id is given to ``fail``."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        if json.loads(request.body).get("stream"):
            await reply.start_chunked()
            await reply.event(b'{"text":"a","meta_info":{"id":"%b"}}' % request.rid.encode())
        reply.reset()

    scripted.script = script
    stream = await call(front.address, "/generate", {"text": "a", "rid": "public", "stream": True})
    unary = await call(front.address, "/generate", {"text": "a", "rid": "public"})
    for error in (json.loads(stream.events()[-2]), unary.json()):
        assert error["error"]["request_id"] == "public"
    for request in scripted.requests:
        assert request.rid.encode() not in stream.body + unary.body


# The schedule.


async def test_a3_4_aborts_that_come_too_early_are_repeated_until_the_engine_knows_the_request(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds
) -> None:
    """Mutation tried: one abort and no schedule; then the generation is never ended."""
    times: list[float] = []

    async def script(request: SeenRequest, reply: Reply) -> None:
        await asyncio.sleep(0.12)
        ignored = len(scripted.aborted)
        times.append(time.monotonic())
        await until(lambda: len(scripted.aborted) > ignored, "an abort that is heeded")
        times.append(time.monotonic())
        await reply.whole(ABORTED % request.rid.encode())

    scripted.script = script
    async with sent(front, scripted, UNARY) as connection:
        connection.close()
        await front.settle()
    registered_at, ended_at = times
    assert ended_at - registered_at <= 0.4 + MARGIN_S
    assert len(aborts) <= 5


async def test_a3_5_an_engine_that_never_ends_is_aborted_nine_times_and_closed(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds
) -> None:
    """Mutations tried: no end of the schedule; every sleep of 50 ms; a caller who waits for the schedule's end."""
    closed: list[float] = []
    loop = asyncio.get_running_loop()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.gone()
        closed.append(loop.time())
        raise ConnectionError("it is closed")

    scripted.script = script
    before = await _unconfirmed(front)
    async with sent(front, scripted, UNARY) as connection:
        called_at = loop.time()
        await call(front.address, "/abort_request", {"rid": "mine"})
        answer = await connection.answer()
        waited_s = loop.time() - called_at
        assert (answer.status, answer.json()["error"]["type"]) == (499, "aborted")
        assert (await front.record()).outcome == "aborted"
        assert waited_s <= 1.2 + MARGIN_S
        assert len(aborts) < 9  # the rest goes on without its caller
        await until(lambda: closed != [], "the close", 8 * TIME_SCALE)
    assert aborts == [scripted.requests[0].rid] * 9
    gaps = [after - one for one, after in zip(aborts.times, aborts.times[1:], strict=False)]
    for gap_s, sleep_s in zip(gaps, SCHEDULE_S, strict=True):
        assert 0.8 * sleep_s <= gap_s <= 1.2 * sleep_s + MARGIN_S / 4
    assert 0.8 <= closed[0] - aborts.times[-1] <= 1.2 + MARGIN_S
    assert await _unconfirmed(front) == before + 1


async def _unconfirmed(front: RunningGateway) -> float:
    text = (await front.client.get("/metrics")).text
    found = [line for line in text.splitlines() if line.startswith("forebay_abort_unconfirmed_total ")]
    return float(found[0].split()[1])


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a3_6_what_the_engine_sends_does_not_extend_the_callers_wait(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds, is_stream: bool
) -> None:
    """Mutation tried: every output starts the wait anew; then the caller never gets an end."""
    item = b'{"text":"a"}' if is_stream else b'"a",'

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="text/event-stream" if is_stream else "application/json")
        while not reply.is_gone:
            await (reply.event(item) if is_stream else reply.chunk(item))
            await asyncio.sleep(0.1)
        raise ConnectionError("it is closed")

    scripted.script = script
    async with sent(front, scripted, STREAM if is_stream else UNARY) as connection:
        called_at = time.monotonic()
        await call(front.address, "/abort_request", {"rid": "mine"})
        answer = await connection.answer()
        waited_s = time.monotonic() - called_at
    assert 0.9 <= waited_s <= 1.2 + MARGIN_S
    assert answer.status == (200 if is_stream else 499)
    told = json.loads(answer.events()[-2]) if is_stream else answer.json()
    assert told["error"]["type"] == "aborted"
    assert (await front.record()).outcome == "aborted"
    await front.settle(8 * TIME_SCALE)
    assert len(aborts) >= 4


@pytest.mark.parametrize("ending", ["busy", "reset"])
async def test_a_request_that_was_called_off_goes_to_no_other_worker(ending: str) -> None:
    """Its engine fails just after the abort; elsewhere all of it would begin anew, and nobody would abort it."""
    aborted = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: any(request.rid in engine.aborted for engine in (first, second)), "the abort")
        aborted.set()
        if ending == "reset":
            reply.reset()
        else:
            await reply.whole(b'{"error":{"message":"no room"}}', status=503)

    async with (
        script_engine(script) as first,
        script_engine(script) as second,
        running_gateway(first.url, second.url) as gateway,
        wire(gateway.address) as connection,
    ):
        await connection.send(request_bytes("/generate", UNARY))
        await until(lambda: len(first.requests + second.requests) == 1, "the request")
        await call(gateway.address, "/abort_request", {"rid": "mine"})
        answer = await connection.answer()
        assert aborted.is_set()
        assert answer.status in (502, 503)
        assert len(first.requests + second.requests) == 1
        assert (await gateway.record()).attempts == 1


# What an aborted request is told.

ERRORS: list[Any] = [
    pytest.param({"status_code": 400, "message": "too long"}, 400, Outcome.REJECTED, id="400"),
    pytest.param({"status_code": 503, "message": "no room"}, 503, Outcome.ENGINE_ERROR, id="503"),
    pytest.param({"status_code": 500, "message": "broken"}, 500, Outcome.ENGINE_ERROR, id="500"),
    pytest.param({}, 200, Outcome.ABORTED, id="none"),
]


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "late"])
@pytest.mark.parametrize(("more", "status", "outcome"), ERRORS)
async def test_a3_14_an_abort_with_a_status_is_an_error_and_without_one_a_cancel(
    front: RunningGateway,
    scripted: ScriptEngine,
    is_first: bool,
    more: dict[str, Any],
    status: int,
    outcome: Outcome,
) -> None:
    """Mutations tried: abort finishes are never looked into; a status of 400 is an engine's error."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        meta = {"id": request.rid, "finish_reason": {"type": "abort", **more}}
        await reply.start_chunked()
        if not is_first:
            await reply.event(b'{"text":"a","meta_info":{"id":"%b","finish_reason":null}}' % request.rid.encode())
        await reply.event(json.dumps({"text": "", "meta_info": meta}, separators=(",", ":")).encode())
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    record = await front.record()
    if is_first and status != 200:
        assert answer.status == (502 if status == 500 else status)
        assert more["message"] in answer.json()["error"]["message"]
    else:
        assert (answer.status, len(answer.events())) == (200, 2 if is_first else 3)
        assert json.loads(answer.events()[-2])["meta_info"]["finish_reason"] == {"type": "abort", **more}
    assert record.outcome == outcome


async def test_a3_18_an_abort_that_fails_does_not_hide_why_it_was_sent(
    front: RunningGateway, scripted: ScriptEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Mutations tried: the last failure is told in place of the first; what cannot be built is not caught."""

    def broken(*args: object) -> None:
        raise ValueError("this abort cannot be built")

    for backend in front.gateway.services.backends.values():
        monkeypatch.setattr(type(backend), "abort_request", broken)

    async def script(request: SeenRequest, reply: Reply) -> None:
        await until(lambda: len(scripted.requests) == 3, "all samples")
        if request is scripted.requests[0]:
            await reply.whole(b'{"error":{"message":"the first reason"}}', status=400)
            return
        await reply.gone()
        raise ConnectionError("it is closed")

    scripted.script = script
    answer = await call(front.address, "/generate", {"text": "a", "sampling_params": {"n": 3}})
    assert (answer.status, answer.json()["error"]["message"]) == (400, "the first reason")
    assert (await front.record()).outcome == "rejected"
    await front.settle(PATIENCE_S)
    assert "an abort that cannot be sent" in caplog.text

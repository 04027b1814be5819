"""Cancels that race with tokens, ends, shutdown and each other, one at a time and by the thousand."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from backends.abort_supervisor import AbortSupervisor
from backends.cancel_policy import CancelPolicy, OnCancel
from backends.errors import CallClosed, CallInterrupted
from backends.leg import Leg
from backends.leg_events import Cause, LegTimes
from backends.sglang.backend import SGLangBackend
from backends.types import Worker
from backends.upstream.base import AnswerHead, Origin, UpstreamCall
from backends.upstream.h1 import H1Client
from gateway.exchange import Exchange
from routers.load import RankLoad
from tests.fakes.raw_server import Connection, answer, raw_server
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import request_bytes, wire
from tests.integration.test_cancel_lifecycle import MARGIN_S, STOPPED, STREAM, UNARY, TimedIds

READS_ON = CancelPolicy(OnCancel.ABORT, is_stream=False, loses_aborts_in_pause=True)
TOKEN = b'{"text":"%b","meta_info":{"id":"x","finish_reason":null}}'


@pytest.fixture
def aborts(scripted: ScriptEngine) -> TimedIds:
    """The aborts that the shared engine gets from now on."""
    scripted.aborted = timed = TimedIds()
    return timed


# A token and the cancel.


@pytest.mark.parametrize("version", ["0.5.23", "0.5.20"], ids=["closed", "aborted, then closed"])
async def test_a3_7_a_token_that_comes_with_the_cancel_is_not_delivered_after_it(version: str) -> None:
    """Mutations tried: ``_wait`` hands out what came before it looks for interruptions; ``close`` keeps what came."""
    loop = asyncio.get_running_loop()
    replies: asyncio.Queue[Reply] = asyncio.Queue()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(TOKEN % b"before")
        replies.put_nowait(reply)
        await reply.gone()
        raise ConnectionError("it is closed")

    marks: list[int] = []

    def stop(exchange: Exchange) -> None:
        marks.append(exchange._relay.bytes_out)
        exchange.stop(Cause.SHUTDOWN)

    def later(hops: int, then: Callable[[], object]) -> None:
        """Call it after that many steps of the loop."""
        if hops:
            loop.call_soon(later, hops - 1, then)
        else:
            then()

    async with script_engine(script) as engine:
        engine.metadata["/server_info"] = {**METADATA["/server_info"], "version": version}
        async with running_gateway(engine.url) as gateway:
            for turn in range(200):
                async with wire(gateway.address) as connection:
                    await connection.send(request_bytes("/generate", STREAM))
                    status, headers = await connection.head()
                    first = await connection.chunk()
                    exchange = next(iter(gateway.gateway.services.live))
                    assert isinstance(exchange, Exchange)
                    reply = await replies.get()
                    event = b"data: " + TOKEN % b"racing" + b"\n\n"
                    reply.writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                    later(turn % 5, lambda exchange=exchange: stop(exchange))  # type: ignore[misc]
                    rest = (await connection.body(status, headers)).body
                told = (first + rest)[marks[-1] :]
                assert told.startswith(b'data: {"error"'), f"turn {turn}: {told!r}"
                assert b"engine_shutdown" in told
            assert len(first) in marks  # some tokens were not delivered
            await gateway.settle()


# A call that resists.


class ResistingCall:
    """A call whose reader swallows its cancellation, and which takes no notice of being closed."""

    def __init__(self) -> None:
        self.written_at: float | None = 0.0
        self.is_complete = False
        self.is_over = False
        self.let_go = asyncio.Event()

    async def head(self) -> AnswerHead:
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:  # what is tested here
                pass
        raise CallClosed("at last")

    def call_when_ready(self, ready: Callable[[], None]) -> bool:
        return False

    def whole(self) -> None:
        return None

    def drop_whole(self) -> None:
        raise AssertionError("there was none")

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        await self.head()

    async def read(self) -> bytes:
        return b""

    def interrupt(self) -> None:
        """Not taken notice of."""

    def close(self) -> None:
        """Not taken notice of."""


class Counters:
    """What was counted."""

    def __init__(self) -> None:
        self.confirmed = self.unconfirmed = 0

    def abort_sent(self, worker_id: str) -> None:
        """Seen by the engine itself."""

    def abort_confirmed(self) -> None:
        self.confirmed += 1

    def abort_unconfirmed(self) -> None:
        self.unconfirmed += 1

    def handoff_abandoned(self) -> None:
        raise AssertionError("there is no handoff")


class Bench:
    """Legs with calls of the test's own, and an engine that takes aborts on a real socket."""

    def __init__(self, client: H1Client, origin: Origin, **options: Any) -> None:
        self.counters = Counters()
        self.keeper = AbortSupervisor(client, self.counters, **options)
        self.load = RankLoad()
        self._worker = Worker("w", "http://w", origin)
        self._backend = SGLangBackend(client)

    def leg(self, engine_id: str, call: UpstreamCall) -> Leg:
        """A leg of a unary request."""
        return Leg(
            worker=self._worker,
            backend=self._backend,
            engine_ids=(engine_id,),
            policy=READS_ON,
            call=call,
            booking=self.load.book(requests=1, blocks=1, prefill_tokens=1),
            keeper=self.keeper,
            on_end=lambda leg: None,
        )


@asynccontextmanager
async def bench(aborted: Callable[[str], None], **options: Any) -> AsyncIterator[Bench]:
    """Run one; ``aborted`` is told the id of every abort, in the middle of the call."""

    async def engine(connection: Connection) -> None:
        while True:
            rid = json.loads((await connection.request()).body)["rid"]
            await asyncio.sleep(0)
            aborted(rid)
            await connection.send(answer(b""))

    client = H1Client()
    async with raw_server(engine) as server, asyncio.timeout(15 * PATIENCE_S):
        made = Bench(client, server.origin, **options)
        yield made
        await made.keeper.aclose(grace_s=0)
        await client.aclose()
    assert made.load.is_idle


async def test_a3_8_a_reader_that_resists_holds_up_nobody() -> None:
    """Mutation tried: ``ended`` keeps the leg until its reader has ended; then it is never let go."""
    seen: list[str] = []
    times = LegTimes(delay_s=0, retry_sleeps_s=(0.01,), abort_limit_s=0.05)
    async with bench(seen.append, times=times) as b:
        call = ResistingCall()
        leg = b.leg("a" * 32, call)
        started = time.monotonic()
        leg.cancel(Cause.CLIENT_GONE)
        assert time.monotonic() - started < 0.1 * TIME_SCALE
        try:
            await until(lambda: leg.is_ended, "the end of the schedule")
            assert (b.load.is_idle, b.counters.unconfirmed, len(b.keeper._kept)) == (True, 1, 0)
            assert len(b.keeper) == 1  # what is left is shown
        finally:
            call.let_go.set()
        await until(lambda: len(b.keeper) == 0, "the reader's end")


# Ends that race.


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a3_9_a_request_that_ends_by_itself_is_never_aborted(
    front: RunningGateway, scripted: ScriptEngine, aborts: TimedIds, is_stream: bool
) -> None:
    """Mutation tried: legs do not end with their answers; then they are never given back."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        if not is_stream:
            await reply.whole(STOPPED % request.rid.encode())
            return
        await reply.start_chunked()
        for event in (STOPPED % request.rid.encode(), b"[DONE]"):
            await reply.event(event)
        await reply.end_chunked()

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", STREAM if is_stream else UNARY))
        assert (await connection.answer()).status == 200
        assert len(front.gateway.services.aborter) == 0
    await asyncio.sleep(0.1)  # several times the least age of a request that is aborted
    assert (await front.record()).outcome == "complete"
    assert aborts == []


async def test_a3_10_at_most_one_abort_follows_an_end_that_races_with_the_cancel() -> None:
    """Mutation tried: the schedule goes on after the answer's end."""
    loop = asyncio.get_running_loop()
    ended: dict[str, float] = {}
    go = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        number = int(json.loads(request.body)["number"])
        await go.wait()
        await asyncio.sleep(number * 0.0005)  # around the time of the first abort
        await reply.whole(STOPPED % request.rid.encode())

    async with script_engine(script) as engine, running_gateway(engine.url, abort_delay_s=0) as gateway:
        engine.aborted = timed = TimedIds()
        legs = gateway.gateway.services.legs
        forget = legs.ended

        def note_end(leg: Leg) -> None:
            ended[leg.engine_ids[0]] = loop.time()
            forget(leg)

        legs.ended = note_end  # type: ignore[method-assign]
        for _ in range(5):
            go.clear()
            before = len(engine.requests)
            writers = [(await asyncio.open_connection(*gateway.address))[1] for _ in range(40)]
            for number, writer in enumerate(writers):
                writer.write(request_bytes("/generate", {"text": "a", "number": number}))
            await until(lambda before=before: len(engine.requests) == before + 40, "all requests")  # type: ignore[misc]
            go.set()
            for writer in writers:
                writer.close()
            await gateway.settle()
        assert len(ended) == 200
        late = [rid for rid, at in zip(timed, timed.times, strict=True) if at > ended[rid]]
        assert len(late) == len(set(late))  # one may have been under way


# Very many.


async def test_a3_11_a_shutdown_tells_a_hundred_engines_requests_and_their_clients() -> None:
    """Mutations tried: the supervisor closes without its grace; requests that are shut down are cut off."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        if json.loads(request.body)["stream"]:
            await reply.start_chunked()
            await reply.event(TOKEN % b"a")
        await reply.gone()
        raise ConnectionError("it is closed")

    before = asyncio.all_tasks()
    async with script_engine(script) as engine:
        async with running_gateway(engine.url, drain_timeout_s=0) as gateway, AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(wire(gateway.address)) for _ in range(100)]
            for number, client in enumerate(clients):
                await client.send(request_bytes("/generate", {"text": "a", "stream": number % 2 == 0}))
            heads = [await client.head() for client in clients[::2]]
            await until(lambda: len(engine.requests) == 100, "all requests")
            started = time.monotonic()
            gateway.gateway.begin_drain()
            async with asyncio.timeout(PATIENCE_S):
                await gateway.gateway.drained.wait()
            took_s = time.monotonic() - started
            unary = {request.rid for request in engine.requests if not json.loads(request.body)["stream"]}
            assert set(engine.aborted) == unary
            assert len(unary) == 50
            for client, (status, headers) in zip(clients[::2], heads, strict=True):
                *_, error, done = (await client.body(status, headers)).events()
                assert (json.loads(error)["error"]["type"], done) == ("engine_shutdown", b"[DONE]")
            for client in clients[1::2]:
                refused = await client.answer()
                assert (refused.status, refused.json()["error"]["type"]) == (503, "engine_shutdown")
                assert refused.headers["retry-after"] == "1"
            await gateway.settle()
            assert {record.outcome for record in gateway.records} == {"shutdown"}
            assert len(gateway.records) == 100
        assert took_s <= 1.5 + MARGIN_S
    await until(lambda: asyncio.all_tasks() <= before, "no task is left")


class EndableCall:
    """A call that ends when it is told to, as one of an engine that was aborted does."""

    def __init__(self) -> None:
        self.written_at: float | None = 0.0
        self.end = asyncio.Event()
        self._is_interrupted = False
        self._is_closed = False

    @property
    def is_complete(self) -> bool:
        return self.end.is_set()

    @property
    def is_over(self) -> bool:
        return self.end.is_set()

    async def head(self) -> AnswerHead:
        if self._is_interrupted:
            self._is_interrupted = False
            raise CallInterrupted
        await self.end.wait()
        return AnswerHead(200, [], 0, "application/json")

    async def read(self) -> bytes:
        if self._is_closed:
            raise CallClosed("closed")
        return b""

    def call_when_ready(self, ready: Callable[[], None]) -> bool:
        return False

    def whole(self) -> None:
        return None

    def drop_whole(self) -> None:
        raise AssertionError("there was none")

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        await self.head()

    def interrupt(self) -> None:
        self._is_interrupted = True

    def close(self) -> None:
        self._is_closed = True
        self.end.set()


async def test_a3_15_five_thousand_cancels_in_a_second_all_end_within_bounds() -> None:
    """Mutations tried: no limit of abort calls; legs that have ended are kept."""
    count, cap = 5000, 64
    calls: dict[str, EndableCall] = {}
    aborted: list[str] = []
    busiest = 0

    def abort(rid: str) -> None:
        nonlocal busiest
        busiest = max(busiest, b.keeper._client.active_connections)
        aborted.append(rid)
        calls[rid].end.set()

    # On a slow machine calls and their turns take long; each abort is to be sent once all the same.
    forever_s = 20 * PATIENCE_S
    times = LegTimes(delay_s=0, retry_sleeps_s=(forever_s,), abort_limit_s=forever_s)
    async with bench(abort, times=times, call_timeout_s=forever_s) as b:

        def cancel_all() -> None:
            for number in range(count):
                rid = f"{number:032x}"
                calls[rid] = EndableCall()
                legs.append(b.leg(rid, calls[rid]))
                legs[-1].cancel(Cause.CLIENT_GONE)

        legs: list[Leg] = []
        cancel_all()
        assert len(b.keeper) == count
        await until(lambda: len(b.keeper) == 0, "the end of all", 6 * PATIENCE_S)
        assert all(leg.is_ended for leg in legs)
        assert sorted(aborted) == [f"{number:032x}" for number in range(count)]
        assert b.counters.confirmed == count
        assert 1 < busiest <= cap
        assert (len(b.keeper._kept), len(b.keeper._tasks), len(b.keeper._slots)) == (0, 0, 1)


async def test_a3_15_above_the_cap_the_oldest_are_closed_so_that_memory_is_bounded() -> None:
    """Mutation tried: no cap; then all of them are kept."""
    cap = 200
    closed: list[str] = []
    async with bench(closed.append, times=LegTimes(delay_s=PATIENCE_S), max_kept=cap) as b:
        legs = [b.leg(f"{number:032x}", EndableCall()) for number in range(1000)]
        for leg in legs:
            leg.cancel(Cause.CLIENT_GONE)
            assert len(b.keeper._kept) <= cap
        assert [leg.is_ended for leg in legs] == [True] * 800 + [False] * 200
        assert b.load.in_flight == cap
        await until(lambda: len(b.keeper._tasks) == cap, "the readers of those that were closed ended")
        assert b.counters.unconfirmed == 800

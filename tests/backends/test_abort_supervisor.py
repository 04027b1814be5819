"""The abort supervisor against an engine on a real socket that registers, ignores, hangs and dies as told."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backends.abort_supervisor import AbortSupervisor
from backends.cancel_policy import CancelPolicy, OnCancel
from backends.errors import CallClosed, CallInterrupted
from backends.leg import Leg
from backends.leg_events import Cause, LegState, LegTimes
from backends.sglang.backend import SGLangBackend
from backends.types import Worker
from backends.upstream.base import UpstreamRequest
from backends.upstream.h1 import H1Client
from tests.fakes.raw_server import Connection, RawServer, answer, raw_server
from tests.fakes.running import PATIENCE_S, TIME_SCALE, until

STEP_S = 0.01 * TIME_SCALE
READS_ON = CancelPolicy(OnCancel.ABORT, is_stream=False, loses_aborts_in_pause=True)
THEN_CLOSES = CancelPolicy(OnCancel.ABORT, is_stream=True, closes_after_abort=True, loses_aborts_in_pause=True)
CLOSES = CancelPolicy(OnCancel.DROP, is_stream=True, loses_aborts_in_pause=True)
SCHEDULE_S = (STEP_S, STEP_S, STEP_S)
FOREVER_S = PATIENCE_S


class Engine:
    """What the scripted engine does with aborts, and what it saw.

    Attributes:
        ignored: Aborts of an id that have no effect before one has.
        abort_hangs: Its abort route never answers.
        abort_status: Status of its abort route; with any but 200 nothing is aborted.
        end: What it does to a generation that is aborted.
        aborts: Ids of all aborts, in order, with the loop's time.
        left: Ids of the generations whose connection went before their end.
    """

    def __init__(self) -> None:
        self.ignored = 0
        self.abort_hangs = False
        self.abort_status = b"200 OK"
        self.end: Callable[[Connection], Awaitable[None]] = self.answer_partially
        self.aborts: list[tuple[float, str]] = []
        self.left: list[str] = []
        self.concurrent = 0
        self.most_concurrent = 0
        self._running: dict[str, asyncio.Event] = {}
        self._counts: dict[str, int] = {}

    @property
    def aborted_ids(self) -> list[str]:
        """Ids of all aborts."""
        return [rid for _, rid in self.aborts]

    async def answer_partially(self, connection: Connection) -> None:
        """What SGLang does."""
        await connection.send(answer(b'{"text":"par","meta_info":{"finish_reason":{"type":"abort"}}}'))

    async def die(self, connection: Connection) -> None:
        """Reset instead of an answer."""
        connection.reset()

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            if b"/abort_request" in request.line:
                await self._abort(connection, json.loads(request.body)["rid"])
            else:
                await self._generate(connection, json.loads(request.body)["rid"])

    async def _abort(self, connection: Connection, rid: str) -> None:
        self.aborts.append((asyncio.get_running_loop().time(), rid))
        self.concurrent += 1
        self.most_concurrent = max(self.most_concurrent, self.concurrent)
        try:
            if self.abort_hangs:
                await connection.hang()
                return
            await asyncio.sleep(0)
            if self.abort_status != b"200 OK":
                await connection.send(answer(status=self.abort_status))
                return
            count = self._counts[rid] = self._counts.get(rid, 0) + 1
            if count > self.ignored and rid in self._running:
                self._running[rid].set()
            await connection.send(answer(b""))
        finally:
            self.concurrent -= 1

    async def _generate(self, connection: Connection, rid: str | list[str]) -> None:
        name = rid if isinstance(rid, str) else rid[0]
        ended = self._running[name] = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(connection.reader.read(1))
            waiting = group.create_task(ended.wait())
            await asyncio.wait([watch, waiting], return_when=asyncio.FIRST_COMPLETED)
            if not ended.is_set():
                self.left.append(name)
            watch.cancel()
            waiting.cancel()
        await self.end(connection)

    def finish(self, rid: str) -> None:
        """The generation ends by itself."""
        self._running[rid].set()


class Counters:
    """What was counted."""

    def __init__(self) -> None:
        self.sent = self.confirmed = self.unconfirmed = 0

    def abort_sent(self, worker_id: str) -> None:
        assert worker_id == "w"
        self.sent += 1

    def abort_confirmed(self) -> None:
        self.confirmed += 1

    def abort_unconfirmed(self) -> None:
        self.unconfirmed += 1

    def handoff_abandoned(self) -> None:
        raise NotImplementedError


class Booking:
    """Counts releases."""

    def __init__(self) -> None:
        self.releases = 0

    def first_token(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        self.releases += 1


class Bench:
    """An engine, a client, and a supervisor to be made with the test's own times."""

    def __init__(self, engine: Engine, server: RawServer, client: H1Client) -> None:
        self.engine = engine
        self.server = server
        self.client = client
        self.backend = SGLangBackend(client)
        self.worker = Worker("w", "http://w", server.origin)
        self.counters = Counters()
        self.bookings: list[Booking] = []
        self.legs: set[Leg] = set()
        self.keeper: AbortSupervisor

    def supervisor(self, **options: Any) -> AbortSupervisor:
        names = {field.name for field in dataclasses.fields(LegTimes)}
        given = {name: options.pop(name) for name in list(options) if name in names}
        times = LegTimes(**{"delay_s": STEP_S, "retry_sleeps_s": SCHEDULE_S, "after_resume_s": STEP_S,
                            "answer_wait_s": FOREVER_S, **given})  # fmt: skip
        self.keeper = AbortSupervisor(self.client, self.counters, times=times, **options)
        return self.keeper

    async def leg(self, *engine_ids: str, policy: CancelPolicy = READS_ON, is_written: bool = True) -> Leg:
        """A leg whose request the engine is running."""
        ids = engine_ids or ("a" * 32,)
        body = json.dumps({"rid": ids[0] if len(ids) == 1 else ids}).encode()
        before = len(self.engine._running)
        call = self.client.send(self.worker.origin, UpstreamRequest("POST", "/generate", [], [body]))
        booking = Booking()
        self.bookings.append(booking)
        leg = Leg(
            worker=self.worker,
            backend=self.backend,
            engine_ids=ids,
            call=call,
            booking=booking,
            policy=policy,
            keeper=self.keeper,
            on_end=self.legs.discard,
        )
        self.legs.add(leg)
        if is_written:
            await until(lambda: len(self.engine._running) > before, "the engine runs the request")
        return leg


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """Everything, and at its end nothing: every leg ended, every booking released once."""
    engine = Engine()
    client = H1Client()
    async with raw_server(engine) as server, asyncio.timeout(PATIENCE_S):
        made = Bench(engine, server, client)
        yield made
        await until(lambda: client.active_connections == 0, "no connection is busy")
        await client.aclose()
    assert made.legs == set()
    assert [booking.releases for booking in made.bookings] == [1] * len(made.bookings)


def cancelled(leg: Leg, *, is_paused: bool = False) -> Leg:
    """Cancel a leg as an exchange does whose client is gone."""
    leg.cancel(Cause.CLIENT_GONE, is_paused=is_paused)
    return leg


async def idle(supervisor: AbortSupervisor) -> None:
    await until(lambda: len(supervisor) == 0, "the supervisor has nothing left to do")


async def test_one_abort_ends_a_unary_call_and_is_confirmed() -> None:
    async with bench() as b:
        supervisor = b.supervisor(retry_sleeps_s=(FOREVER_S,))
        leg = cancelled(await b.leg())
        assert len(supervisor) == 1
        await idle(supervisor)
        assert b.engine.aborted_ids == ["a" * 32]
        assert (b.counters.sent, b.counters.confirmed, b.counters.unconfirmed) == (1, 1, 0)
        assert b.engine.left == []  # the connection stayed open to the end
        assert leg.is_ended


async def test_no_abort_sooner_than_the_delay() -> None:
    async with bench() as b:
        supervisor = b.supervisor(delay_s=5 * STEP_S)
        leg = await b.leg()
        assert leg.call.written_at is not None
        written_at = leg.call.written_at
        cancelled(leg)
        await idle(supervisor)
        assert b.engine.aborts[0][0] - written_at >= 5 * STEP_S * 0.95


@pytest.mark.parametrize("ignored", [1, 2, 3])
async def test_a2_8_ignored_aborts_are_repeated_until_one_works(ignored: int) -> None:
    async with bench() as b:
        b.engine.ignored = ignored
        supervisor = b.supervisor(retry_sleeps_s=[*[STEP_S] * ignored, FOREVER_S])
        cancelled(await b.leg())
        await idle(supervisor)
        assert len(b.engine.aborts) == ignored + 1
        assert (b.counters.confirmed, b.counters.unconfirmed) == (1, 0)


async def test_a2_9_an_engine_that_ignores_all_is_closed_after_the_schedule() -> None:
    async with bench() as b:
        b.engine.ignored = 99
        supervisor = b.supervisor()
        cancelled(await b.leg())
        await idle(supervisor)
        assert len(b.engine.aborts) == len(SCHEDULE_S) + 1
        assert (b.counters.confirmed, b.counters.unconfirmed) == (0, 1)
        await until(lambda: b.engine.left == ["a" * 32], "the engine sees the close")


async def test_a2_10_no_abort_once_the_engine_has_ended_by_itself() -> None:
    async with bench() as b:
        supervisor = b.supervisor(delay_s=FOREVER_S)
        cancelled(await b.leg())
        await asyncio.sleep(0)
        b.engine.finish("a" * 32)
        await idle(supervisor)
        assert b.engine.aborts == []
        assert (b.counters.confirmed, b.counters.unconfirmed) == (0, 0)  # there was nothing to confirm


async def test_an_engine_that_dies_of_it_has_ended_too() -> None:
    async with bench() as b:
        b.engine.end = b.engine.die
        supervisor = b.supervisor()
        cancelled(await b.leg())
        await idle(supervisor)
        assert b.counters.confirmed == 1


async def test_abort_then_close() -> None:
    async with bench() as b:
        b.engine.ignored = 99
        supervisor = b.supervisor()
        cancelled(await b.leg(policy=THEN_CLOSES))
        await idle(supervisor)
        assert len(b.engine.aborts) == 1
        await until(lambda: b.engine.left == ["a" * 32], "the engine sees the close after the abort")


async def test_a_paused_engine_gets_its_abort_after_the_pause() -> None:
    async with bench() as b:
        supervisor = b.supervisor()
        leg = cancelled(await b.leg(), is_paused=True)
        assert leg.is_ended
        await until(lambda: b.engine.left == ["a" * 32], "the call is closed at once")
        assert (b.engine.aborts, len(supervisor)) == ([], 1)
        supervisor.resumed("another")
        supervisor.resumed("w")
        resumed_at = asyncio.get_running_loop().time()
        await idle(supervisor)
        assert b.engine.aborted_ids == ["a" * 32]
        assert b.engine.aborts[0][0] - resumed_at >= STEP_S * 0.9


async def test_a_pause_without_end_is_given_up() -> None:
    async with bench() as b:
        supervisor = b.supervisor(max_pause_s=STEP_S)
        cancelled(await b.leg(), is_paused=True)
        await idle(supervisor)
        assert (b.engine.aborts, b.counters.unconfirmed) == ([], 1)


async def test_a_pause_that_begins_before_the_first_abort_closes_the_call() -> None:
    async with bench() as b:
        supervisor = b.supervisor(delay_s=FOREVER_S)
        leg = cancelled(await b.leg())
        supervisor.paused("another")
        assert not leg.is_ended
        supervisor.paused("w")
        assert leg.is_ended
        assert leg.state is LegState.OWED
        await supervisor.aclose(grace_s=0)
        assert (leg.state, b.engine.aborts) == (LegState.ENDED, [])


async def test_a3_12_an_abort_route_that_hangs_holds_nobody_up() -> None:
    """Mutation tried: submissions without their time limit; then they outlive their leg for ever."""
    async with bench() as b:
        b.engine.abort_hangs = True
        supervisor = b.supervisor(call_timeout_s=50 * STEP_S, abort_limit_s=75 * STEP_S, max_calls_per_worker=100)
        leg = cancelled(await b.leg(*(f"{index:032x}" for index in range(20))))
        await until(lambda: leg.is_ended, "the schedule's end")
        await idle(supervisor)
        assert b.engine.most_concurrent == 20  # one submission at a time, all ids of it at once
        assert b.counters.sent in (20, 40)
        assert b.counters.unconfirmed == 1


async def test_a3_15_abort_calls_are_bounded_per_worker() -> None:
    async with bench() as b:
        supervisor = b.supervisor(max_calls_per_worker=3)
        for index in range(15):
            cancelled(await b.leg(f"{index:032x}"))
        await idle(supervisor)
        assert b.engine.most_concurrent <= 3
        assert b.counters.confirmed == 15


async def test_a3_15_legs_above_the_cap_close_the_oldest() -> None:
    async with bench() as b:
        supervisor = b.supervisor(max_kept=2, delay_s=FOREVER_S)
        legs = [cancelled(await b.leg(f"{n:032x}")) for n in range(4)]
        assert [leg.is_ended for leg in legs] == [True, True, False, False]
        assert b.counters.unconfirmed == 2
        await until(lambda: len(supervisor) == 2, "the oldest are let go")
        await until(lambda: len(b.engine.left) == 2, "and their calls closed")
        await supervisor.aclose(grace_s=0)
        assert all(leg.is_ended for leg in legs)


async def test_aclose_lets_first_aborts_out_and_ends_all() -> None:
    async with bench() as b:
        b.engine.ignored = 99
        supervisor = b.supervisor(retry_sleeps_s=(FOREVER_S,))
        legs = [cancelled(await b.leg(f"{n:032x}")) for n in range(5)]
        await supervisor.aclose(grace_s=10 * STEP_S)
        assert sorted(b.engine.aborted_ids) == [leg.engine_ids[0] for leg in legs]
        assert all(leg.is_ended for leg in legs)
        assert len(supervisor) == 0


@pytest.mark.parametrize("policy", [READS_ON, THEN_CLOSES, CLOSES], ids=["reads on", "then closes", "closes"])
@pytest.mark.parametrize("is_paused", [False, True])
async def test_legs_that_come_just_before_or_after_the_end_are_ended(policy: CancelPolicy, is_paused: bool) -> None:
    async with bench() as b:
        supervisor = b.supervisor()
        before, after = await b.leg("b" * 32, policy=policy), await b.leg("c" * 32, policy=policy)
        cancelled(before, is_paused=is_paused)
        await supervisor.aclose(grace_s=0)  # its task has not run a single step
        cancelled(after, is_paused=is_paused)
        assert before.is_ended
        assert after.is_ended
        assert (len(supervisor), b.engine.aborts) == (0, [])


async def test_s2_14_an_empty_id_is_never_sent(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        supervisor = b.supervisor()
        cancelled(await b.leg(""))
        await idle(supervisor)
        assert b.engine.aborts == []
        assert "an abort needs an id" in caplog.text


# Aborts beside an exchange that goes on reading.


async def test_an_attached_abort_lets_the_reader_have_the_partial_answer() -> None:
    async with bench() as b:
        supervisor = b.supervisor(retry_sleeps_s=(FOREVER_S,))
        leg = await b.leg()
        leg.call_off()
        leg.call_off()  # asked twice, done once
        assert len(supervisor) == 1
        assert (await leg.call.head()).status == 200
        assert b'"par"' in await leg.call.read()
        leg.end()
        await idle(supervisor)
        assert len(b.engine.aborts) == 1
        leg.call_off()
        assert len(supervisor) == 0


async def test_an_attached_abort_that_never_works_closes_the_call() -> None:
    async with bench() as b:
        b.engine.ignored = 99
        supervisor = b.supervisor()
        leg = await b.leg()
        leg.call_off()
        with pytest.raises(CallClosed):
            await leg.call.head()
        assert len(b.engine.aborts) == len(SCHEDULE_S) + 1
        leg.end()
        await idle(supervisor)


REFUSALS = [b"401 Unauthorized", b"403 Forbidden", b"404 Not Found", b"405 Method Not Allowed"]


@pytest.mark.parametrize("status", REFUSALS)
async def test_s3_18_an_engine_that_takes_no_aborts_is_closed_at_once(
    status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench() as b:
        b.engine.abort_status = status
        supervisor = b.supervisor(retry_sleeps_s=(FOREVER_S,))
        cancelled(await b.leg("a" * 32))
        await idle(supervisor)
        assert (b.counters.sent, b.counters.confirmed, b.counters.unconfirmed) == (1, 0, 1)
        cancelled(await b.leg("b" * 32, "c" * 32))
        await idle(supervisor)
        assert b.engine.aborted_ids == ["a" * 32, "b" * 32, "c" * 32]
        await until(lambda: b.engine.left == ["a" * 32, "b" * 32], "the engine sees the close")
    assert caplog.text.count("takes no aborts") == 1


@pytest.mark.parametrize("status", REFUSALS)
async def test_s3_18_the_reader_of_a_request_that_can_only_be_closed_is_told(status: bytes) -> None:
    async with bench() as b:
        b.engine.abort_status = status
        supervisor = b.supervisor(retry_sleeps_s=(FOREVER_S,))
        leg = await b.leg()
        leg.call_off()
        with pytest.raises(CallClosed):
            await leg.call.head()
        leg.end()
        await idle(supervisor)
        assert b.counters.sent == 1


async def test_a_failure_that_is_no_refusal_is_repeated() -> None:
    async with bench() as b:
        b.engine.abort_status = b"500 Internal Server Error"
        supervisor = b.supervisor()
        cancelled(await b.leg())
        await idle(supervisor)
        assert b.counters.sent == len(SCHEDULE_S) + 1


async def test_one_item_is_not_worth_closing_all() -> None:
    async with bench() as b:
        b.engine.abort_status = b"403 Forbidden"
        supervisor = b.supervisor()
        leg = await b.leg("a" * 32, "b" * 32)
        leg.call_off(("b" * 32,))
        await idle(supervisor)
        assert not leg.call.is_over
        leg.end()


async def test_an_answer_that_nobody_has_read_yet_is_not_closed() -> None:
    async with bench() as b:
        supervisor = b.supervisor()
        leg = await b.leg()
        leg.call_off()
        await idle(supervisor)  # the reader is slow: the schedule ends before it looks
        assert len(b.engine.aborts) <= len(SCHEDULE_S)
        assert (await leg.call.head()).status == 200
        assert b'"par"' in await leg.call.read()
        leg.end()


async def test_an_answer_that_comes_after_the_last_abort_is_not_closed() -> None:
    async with bench() as b:
        b.engine.ignored = 99
        supervisor = b.supervisor(retry_sleeps_s=(20 * STEP_S,))
        leg = await b.leg()
        leg.call_off()
        await until(lambda: len(b.engine.aborts) == 2, "the last abort")
        b.engine.finish("a" * 32)
        await idle(supervisor)
        assert (await leg.call.head()).status == 200
        leg.end()


async def test_an_attached_abort_waits_for_the_request_to_be_written() -> None:
    async with bench() as b:
        supervisor = b.supervisor()
        leg = await b.leg(is_written=False)
        leg.call_off()
        assert leg.call.written_at is None
        assert (await leg.call.head()).status == 200
        written_at = leg.call.written_at
        assert written_at is not None
        assert b.engine.aborts[0][0] >= written_at + STEP_S * 0.9
        leg.end()
        await idle(supervisor)


async def test_an_attached_abort_waits_for_the_end_of_a_pause() -> None:
    async with bench() as b:
        supervisor = b.supervisor()
        leg = await b.leg()
        leg.call_off(is_paused=True)
        await asyncio.sleep(3 * STEP_S)
        assert b.engine.aborts == []
        supervisor.resumed("w")
        resumed_at = asyncio.get_running_loop().time()
        await leg.call.head()
        assert b.engine.aborts[0][0] - resumed_at >= STEP_S * 0.9
        leg.end()
        await idle(supervisor)


async def test_single_items_are_aborted_twice_and_may_be_again() -> None:
    async with bench() as b:
        b.engine.ignored = 99
        supervisor = b.supervisor()
        leg = await b.leg("a" * 32, "b" * 32, "c" * 32)
        leg.call_off(("b" * 32,))
        leg.call_off(("b" * 32,))
        await idle(supervisor)
        assert b.engine.aborted_ids == ["b" * 32] * 2
        leg.call_off(("b" * 32,))
        await idle(supervisor)
        assert b.engine.aborted_ids == ["b" * 32] * 4
        assert not leg.is_ended
        leg.end()


async def test_a_leg_that_is_taken_over_has_one_schedule() -> None:
    async with bench() as b:
        b.engine.ignored = 99
        supervisor = b.supervisor()
        leg = await b.leg()
        leg.call_off()
        cancelled(leg)
        leg.call_off()
        await idle(supervisor)
        assert len(b.engine.aborts) == len(SCHEDULE_S) + 1
        assert b.counters.unconfirmed == 1


async def test_the_exchange_that_lost_its_leg_cannot_disturb_its_new_owner() -> None:
    async with bench() as b:
        b.engine.end = b.engine.answer_partially
        supervisor = b.supervisor()
        leg = await b.leg()
        was_busy = asyncio.Event()

        async def exchange() -> None:
            with pytest.raises(CallInterrupted):
                await leg.call.head()
            was_busy.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(exchange())
            await asyncio.sleep(0)
            cancelled(leg)
            await was_busy.wait()
        await idle(supervisor)
        assert b.counters.confirmed == 1

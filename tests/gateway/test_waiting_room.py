"""The waiting room between events: what happens between a call and its answer, and who belongs together."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from backends.errors import CallClosed
from backends.types import EngineFacts, EngineKind, ProbeResult, Worker
from backends.upstream.base import Headers, Origin
from gateway.attempts import Attempts
from gateway.downstream import ClientRequest
from gateway.envelope import read_headers
from gateway.errors import GatewayError
from gateway.metrics import Metrics
from gateway.routes import ROUTES
from gateway.waiting_room import TURNS_AT_ONCE, WaitingRoom, Wanted
from routers.admission import AdmissionQueue
from routers.errors import NoReadyWorker, NoRoom
from routers.fleet import Fleet, Member
from routers.load import RankBooking
from tests.fakes.running import PATIENCE_S, until
from tests.gateway.envelopes import CHAT, NATIVE, parsed

FACTS = EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", "m")


def wanted(path: str = NATIVE, *, headers: Headers | None = None, **fields: Any) -> Wanted:
    """What a request wants."""
    body = {"text": "a", "model": "m", "messages": [], **fields}
    given = headers or []
    request = ClientRequest("POST", path, given, read_headers(given))
    return Wanted(request, ROUTES[path], parsed(body, given, path=path), "m", Attempts(3))


class House:
    """A fleet of one worker that gets one request at once, the room in front of it, and what was placed."""

    def __init__(self, facts: EngineFacts = FACTS, *, max_in_flight: int = 1) -> None:
        self.fleet = Fleet(lambda member: self.room.wake() if self.is_open else None, lambda: self.room.wake())
        self.is_open = False
        queue: AdmissionQueue[Any] = AdmissionQueue(
            max_requests=1000, max_bytes=1000_000, max_crowded_s=60, max_paused_s=60
        )
        metrics = Metrics(lambda: 0, lambda model: True)
        self.now = 0.0
        self.room = WaitingRoom(queue, self.fleet, lambda: self.now, metrics, holds_paused=True)
        self.is_open = True
        self.member = Member(Worker("w", "http://w", Origin("http", "w", 80)), max_in_flight=max_in_flight)
        self.fleet.add(self.member)
        self.member.identified(facts)
        self.placed: list[object] = []
        self.bookings: list[RankBooking] = []

    def place(self, name: object) -> None:
        """Place a request."""
        self.placed.append(name)
        self.bookings.append(self.member.load_of(0).book(requests=1, blocks=0, prefill_tokens=0))

    def wait(self, name: object, ask: Wanted | None = None) -> Coroutine[Any, Any, None]:
        """Have a request wait."""
        return self.room.wait(name, ask or wanted(), lambda: self.place(name))

    async def waiting(self, count: int) -> None:
        """Wait until so many wait."""
        await until(lambda: len(self.room) == count, f"{count} waiting, not {len(self.room)}")


async def outcome(waiting: Coroutine[Any, Any, None]) -> BaseException | None:
    """How a wait ends."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await waiting
    except (CallClosed, GatewayError, NoRoom, NoReadyWorker, ZeroDivisionError) as exc:
        return exc
    return None


async def test_nobody_overtakes_between_a_release_and_the_turn() -> None:
    house = House()
    assert house.room.place_now(lambda: house.place("first"))
    async with asyncio.TaskGroup() as group:
        group.create_task(house.wait("early"))
        await house.waiting(1)
        house.bookings[0].release()
        assert not house.room.place_now(lambda: house.place("late"))
        group.create_task(house.wait("late"))
        await until(lambda: len(house.placed) == 2, "the turn")
        await house.waiting(1)
        house.bookings[1].release()
    assert house.placed == ["first", "early", "late"]


async def test_another_pool_does_not_overtake_either() -> None:
    house = House()
    house.place("first")
    pinned = wanted(headers=[(b"x-data-parallel-rank", b"0")])
    async with asyncio.TaskGroup() as group:
        group.create_task(house.wait("early"))
        await house.waiting(1)
        group.create_task(house.wait("late", pinned))  # takes its place before the turn is called
        house.bookings[0].release()
        await until(lambda: len(house.placed) == 2, "the turn")
        house.bookings[1].release()
    assert house.placed == ["first", "early", "late"]


async def test_what_fails_on_its_turn_fails_alone() -> None:
    house = House()
    house.place("first")

    def fail() -> None:
        raise ZeroDivisionError

    async with asyncio.TaskGroup() as group:
        failing = group.create_task(outcome(house.room.wait("bad", wanted(), fail)))
        group.create_task(house.wait("good"))
        await house.waiting(2)
        house.bookings[0].release()
    assert isinstance(failing.result(), ZeroDivisionError)
    assert house.placed == ["first", "good"]


@pytest.mark.parametrize("is_called", [False, True], ids=["before its turn", "after its call"])
async def test_who_leaves_does_not_go(is_called: bool) -> None:
    house = House()
    house.place("first")
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(outcome(house.wait("gone")))
        await house.waiting(1)
        assert "gone" in house.room
        if is_called:
            house.bookings[0].release()
            house.room._take_turns()  # as the loop would, and before the waiting task runs
            assert house.placed == ["first", "gone"]
        house.room.leave("gone")
        house.room.leave("gone")
        assert len(house.room) == 0
    assert isinstance(leaving.result(), CallClosed)
    assert "gone" not in house.room
    house.room.leave("gone")


async def test_a_cancelled_task_takes_no_turn() -> None:
    house = House()
    house.place("first")
    async with asyncio.TaskGroup() as group:
        cancelled = group.create_task(house.wait("cancelled"))
        group.create_task(house.wait("next"))
        await house.waiting(2)
        cancelled.cancel()
        house.bookings[0].release()
        house.room._take_turns()  # before the cancelled task has run
    assert house.placed == ["first", "next"]
    assert len(house.room) == 0


async def test_many_go_in_several_steps() -> None:
    house = House(max_in_flight=1000)
    house.member.probed(ProbeResult.PAUSED, is_busy=False)
    async with asyncio.TaskGroup() as group:
        for number in range(2 * TURNS_AT_ONCE + 1):
            group.create_task(house.wait(number))
        await house.waiting(2 * TURNS_AT_ONCE + 1)
        house.member.probed(ProbeResult.UP, is_busy=False)
        house.room._take_turns()
        assert len(house.placed) == TURNS_AT_ONCE
    assert house.placed == list(range(2 * TURNS_AT_ONCE + 1))


async def test_a_closed_room_lets_nobody_wait() -> None:
    house = House()
    await house.wait("at once")
    async with asyncio.TaskGroup() as group:
        told = group.create_task(outcome(house.wait("inside")))
        await house.waiting(1)
        house.room.close()
        late = group.create_task(outcome(house.wait("outside")))
    for error in (told.result(), late.result()):
        assert isinstance(error, GatewayError)
        assert error.report.type == "engine_shutdown"
    assert house.placed == ["at once"]


async def test_who_waits_for_a_worker_that_is_removed_is_told_so() -> None:
    house = House()
    house.place("first")
    pinned = wanted(headers=[(b"x-forebay-worker", b"w")])
    async with asyncio.TaskGroup() as group:
        told = group.create_task(outcome(house.wait("pinned", pinned)))
        await house.waiting(1)
        other = Member(Worker("v", "http://v", Origin("http", "v", 80)), max_in_flight=1)
        house.fleet.add(other)
        other.identified(FACTS)
        house.fleet.remove("w")
    error = told.result()
    assert isinstance(error, GatewayError)
    assert (error.report.status, error.report.type) == (503, "unavailable")


async def test_a_worker_left_alone_is_no_place_to_wait_for() -> None:
    house = House()
    house.place("first")
    async with asyncio.TaskGroup() as group:
        told = group.create_task(outcome(house.wait("waiting")))
        await house.waiting(1)
        for _ in range(5):
            house.fleet.failed(house.member, house.now)
        house.bookings[0].release()
    assert isinstance(told.result(), NoReadyWorker)
    assert not house.room.is_hopeful(wanted())


async def test_one_request_tries_a_worker_that_was_left_alone() -> None:
    house = House(max_in_flight=3)
    for name in ("x", "y", "z"):
        house.place(name)

    def try_it() -> None:
        house.place("trial")
        house.fleet.sent(house.member, house.now)

    async with asyncio.TaskGroup() as group:
        group.create_task(house.room.wait("trial", wanted(), try_it))
        group.create_task(house.wait("next"))
        await house.waiting(2)
        for _ in range(5):
            house.fleet.failed(house.member, house.now)
        house.now += 10
        for booking in house.bookings:
            booking.release()
        house.room._take_turns()
        assert house.placed[3:] == ["trial"]
        house.fleet.succeeded(house.member)
    assert house.placed[3:] == ["trial", "next"]


async def test_the_pause_of_a_vllm_worker_is_no_hope_for_native_requests() -> None:
    house = House(replace(FACTS, engine=EngineKind.VLLM))
    house.member.probed(ProbeResult.PAUSED, is_busy=False)
    assert not house.room.is_hopeful(wanted())
    assert house.room.is_hopeful(wanted(CHAT))
    assert not house.room.is_hopeful(wanted(CHAT, headers=[(b"x-forebay-worker", b"v")]))
    failed = wanted(CHAT)
    failed.attempts.failed.add("w")
    assert not house.room.is_hopeful(failed)


# --- who belongs together


@pytest.mark.parametrize(
    ("headers", "others", "is_same"),
    [
        pytest.param({}, {}, True, id="nobody said who they are"),
        pytest.param({"authorization": "Bearer a"}, {"authorization": "bearer a"}, True, id="one key"),
        pytest.param({"authorization": "Bearer a"}, {"authorization": "Bearer b"}, False, id="two keys"),
        pytest.param({"authorization": "Bearer a"}, {"x-api-key": "a"}, True, id="one key in two places"),
        pytest.param({"authorization": "Bearer a", "x-session-id": "s"}, {"authorization": "Bearer a"}, True,
                     id="sessions of one key"),
        pytest.param({"x-session-id": "s"}, {"x-session-id": "t"}, False, id="two sessions"),
        pytest.param({"x-session-id": "s"}, {"x-smg-routing-key": "s"}, True, id="one session"),
        pytest.param({"x-session-id": "a"}, {"authorization": "Bearer a"}, False, id="a session is no key"),
    ],
)  # fmt: skip
def test_tenants(headers: dict[str, str], others: dict[str, str], is_same: bool) -> None:
    one, other = (
        wanted(headers=[(name.encode(), value.encode()) for name, value in each.items()]).tenant
        for each in (headers, others)
    )
    assert (one == other) is is_same
    assert "a" not in repr(one) or "x-session-id" in headers  # no key is kept


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, 0), (5, 5), (-5, -5), (0, 0), ("5", 0), (1.5, 0), (True, 0), (10**30, 10**30), ([1], 0)],
)
def test_priorities(value: Any, expected: int) -> None:
    asked = wanted(priority=value)
    assert asked.priority(lower_first=False) == expected
    assert asked.priority(lower_first=True) == -expected


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        pytest.param(lambda: wanted(), True, id="equal"),
        pytest.param(lambda: wanted(priority=3), True, id="another priority"),
        pytest.param(lambda: wanted(CHAT), False, id="a route that vLLM serves too"),
        pytest.param(lambda: wanted(headers=[(b"x-data-parallel-rank", b"0")]), False, id="a rank"),
        pytest.param(lambda: wanted(headers=[(b"x-forebay-worker", b"w")]), False, id="a worker"),
        pytest.param(lambda: _failed_on("w"), False, id="not again to one that failed"),
    ],
)
def test_pools(change: Callable[[], Wanted], is_same: bool) -> None:
    assert (wanted().pool == change().pool) is is_same


def _failed_on(worker_id: str) -> Wanted:
    asked = wanted()
    asked.attempts.failed.add(worker_id)
    return asked

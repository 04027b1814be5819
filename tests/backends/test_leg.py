"""Legs: what cancelling does at each stage, and that everything is given back once."""

import pytest

from backends.leg import Leg, cancel
from backends.lifecycle import CancelPlan, Cause
from backends.sglang.backend import SGLangBackend
from backends.types import Worker
from backends.upstream.base import AnswerHead, Origin, UpstreamRequest


class Call:
    """A call that notes what is done to it."""

    def __init__(self, *, is_written: bool = True, is_complete: bool = False) -> None:
        self.written_at = 1.0 if is_written else None
        self.is_complete = is_complete
        self.is_over = is_complete
        self.log: list[str] = []

    async def head(self) -> AnswerHead:
        raise NotImplementedError

    async def read(self) -> bytes:
        raise NotImplementedError

    def interrupt(self) -> None:
        self.log.append("interrupt")

    def close(self) -> None:
        self.log.append("close")


class Client:
    """A client that nobody asks for anything."""

    active_connections = connecting = idle_connections = 0

    def send(self, origin: Origin, request: UpstreamRequest) -> Call:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class Booking:
    """A booking that notes what is done to it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def first_token(self) -> None:
        self.log.append("first_token")

    def release(self) -> None:
        self.log.append("release")


class Aborter:
    """An aborter that only takes."""

    def __init__(self) -> None:
        self.adopted: list[tuple[Leg, CancelPlan]] = []

    def adopt(self, leg: Leg, plan: CancelPlan) -> None:
        self.adopted.append((leg, plan))


class Parts:
    """A leg and all that it touches."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.booking = Booking()
        self.aborter = Aborter()
        self.ended: list[Leg] = []
        self.leg = Leg(
            worker=Worker("w", "http://w", Origin("http", "w", 80)),
            backend=SGLangBackend(Client()),
            engine_ids=["e"],
            call=call,
            booking=self.booking,
            on_end=self.ended.append,
        )

    def cancel(self, plan: CancelPlan, cause: Cause = Cause.CLIENT_GONE) -> None:
        cancel(self.leg, cause, plan, self.aborter)


HANDED_OVER = [plan for plan in CancelPlan if plan is not CancelPlan.CLOSE]


def test_the_end_gives_everything_back_once() -> None:
    parts = Parts(Call())
    stopped: list[str] = []
    parts.leg.stop_aborting.append(lambda: stopped.append("stopped"))
    parts.leg.first_token()
    parts.leg.end()
    parts.leg.end()
    assert parts.leg.is_ended
    assert (parts.call.log, parts.booking.log, stopped) == (["close"], ["first_token", "release"], ["stopped"])
    assert parts.ended == [parts.leg]


def test_close_ends_here_and_now() -> None:
    parts = Parts(Call())
    parts.cancel(CancelPlan.CLOSE)
    assert parts.leg.is_ended
    assert (parts.leg.cause, parts.call.log, parts.aborter.adopted) == (Cause.CLIENT_GONE, ["close"], [])


@pytest.mark.parametrize("plan", HANDED_OVER)
def test_other_plans_hand_the_leg_over(plan: CancelPlan) -> None:
    parts = Parts(Call())
    stopped: list[str] = []
    parts.leg.stop_aborting.append(lambda: stopped.append("stopped"))
    parts.cancel(plan)
    assert not parts.leg.is_ended
    assert parts.leg.is_detached
    assert (parts.call.log, parts.aborter.adopted) == (["interrupt"], [(parts.leg, plan)])
    assert stopped == ["stopped"]  # one schedule of aborts at a time
    assert parts.booking.log == []


@pytest.mark.parametrize("plan", CancelPlan)
@pytest.mark.parametrize(
    "call",
    [pytest.param(lambda: Call(is_written=False), id="not written"),
     pytest.param(lambda: Call(is_complete=True), id="complete")],
)  # fmt: skip
def test_a3_3_what_the_engine_does_not_know_or_has_ended_is_only_closed(plan: CancelPlan, call: type[Call]) -> None:
    parts = Parts(call())
    parts.cancel(plan)
    assert parts.leg.is_ended
    assert not parts.leg.is_detached
    assert (parts.call.log, parts.aborter.adopted) == (["close"], [])


@pytest.mark.parametrize("plan", CancelPlan)
def test_the_first_cause_stays(plan: CancelPlan) -> None:
    parts = Parts(Call())
    parts.cancel(plan, Cause.CLIENT_ABORT)
    parts.cancel(CancelPlan.CLOSE, Cause.SHUTDOWN)
    assert parts.leg.cause is Cause.CLIENT_ABORT
    assert len(parts.call.log) == 1


def test_nothing_happens_after_the_end() -> None:
    parts = Parts(Call())
    parts.leg.end()
    parts.cancel(CancelPlan.ABORT_AND_READ)
    assert parts.leg.cause is None
    assert (parts.call.log, parts.aborter.adopted) == (["close"], [])

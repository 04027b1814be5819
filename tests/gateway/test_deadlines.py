"""Time limits of a request, with a clock that the test moves."""

import asyncio

import pytest

from gateway.deadlines import NO_LIMITS, Deadlines, TimeLimits
from gateway.errors import ErrorReport
from gateway.outcome import Outcome
from tests.fakes.running import PATIENCE_S, TIME_SCALE

STEP_S = 0.02 * TIME_SCALE


class Request:
    """A request in the state that the test wants."""

    def __init__(self) -> None:
        self.awaits_output = True
        self.silent_since: float | None = None
        self.now = 100.0
        self.reports: list[ErrorReport] = []
        self.expired = asyncio.Event()

    def expire(self, report: ErrorReport) -> None:
        self.reports.append(report)
        self.expired.set()

    def deadlines(self, limits: TimeLimits) -> Deadlines:
        return Deadlines(limits, self, lambda: self.now, self.expire)

    async def report(self) -> ErrorReport:
        async with asyncio.timeout(PATIENCE_S):
            await self.expired.wait()
        return self.reports[0]


def test_there_may_be_none() -> None:
    assert NO_LIMITS.are_off
    assert not TimeLimits(stall_s=1).are_off


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        pytest.param(TimeLimits(request_s=STEP_S), "the request took longer than", id="request"),
        pytest.param(TimeLimits(first_token_s=STEP_S), "no output within", id="first token"),
        pytest.param(TimeLimits(stall_s=STEP_S), "the engine sent nothing for", id="stall"),
    ],
)
async def test_each_limit_says_which_it_was(limits: TimeLimits, message: str) -> None:
    request = Request()
    request.silent_since = 0.0
    deadlines = request.deadlines(limits)
    report = await request.report()
    deadlines.cancel()
    assert (report.status, report.type, report.outcome) == (504, "timeout", Outcome.TIMEOUT)
    assert report.message.startswith(message)
    assert f"{STEP_S:g} s" in report.message


async def test_output_that_has_come_is_not_late() -> None:
    request = Request()
    request.awaits_output = False
    deadlines = request.deadlines(TimeLimits(first_token_s=STEP_S, request_s=4 * STEP_S))
    assert (await request.report()).message.startswith("the request")
    deadlines.cancel()


async def test_silence_counts_while_the_engine_is_awaited_and_from_its_last_byte() -> None:
    request = Request()
    looks = 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        if looks == 1:
            request.silent_since = 99.0  # the client has read on: the next look is for the engine
        return 100.0 if looks < 3 else 99.0 + 2 * STEP_S

    request.silent_since = 100.0
    deadlines = Deadlines(TimeLimits(stall_s=STEP_S), request, clock, request.expire)
    request.silent_since = None
    await asyncio.sleep(3 * STEP_S)
    assert request.reports == []
    request.silent_since = 100.0
    await request.report()
    deadlines.cancel()


async def test_a_cancelled_watch_tells_nobody() -> None:
    request = Request()
    request.silent_since = 0.0
    request.deadlines(TimeLimits(STEP_S, STEP_S, STEP_S)).cancel()
    await asyncio.sleep(3 * STEP_S)
    assert request.reports == []

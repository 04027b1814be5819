"""What a stop tells the client, and when one that does not read it is cut off."""

import asyncio

import pytest

from backends.leg_events import Cause
from gateway import stopping
from gateway.errors import ABORTED, SHUTTING_DOWN, TIMED_OUT, WORKER_REMOVED, ErrorReport
from gateway.stopping import Stop
from tests.fakes.running import PATIENCE_S


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        pytest.param(Cause.SHUTDOWN, SHUTTING_DOWN, id="shutdown"),
        pytest.param(Cause.WORKER_REMOVED, WORKER_REMOVED, id="the worker was removed"),
        pytest.param(Cause.CLIENT_ABORT, ABORTED, id="aborted"),
        pytest.param(Cause.CLIENT_GONE, None, id="nobody is there"),
    ],
)
def test_a_cause_says_what_the_client_is_told(cause: Cause, said: ErrorReport | None) -> None:
    assert Stop(cause).report is said


def test_a_deadline_says_which_it_was() -> None:
    assert Stop(Cause.DEADLINE, TIMED_OUT).report is TIMED_OUT


async def test_a_client_is_cut_off_once_unless_the_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "TELL_CLIENT_S", 0.02)
    cut = asyncio.Event()
    late, over = Stop(Cause.SHUTDOWN), Stop(Cause.SHUTDOWN)

    def never() -> None:
        raise AssertionError("the request was over")

    over.cut_later(never)
    over.over()
    late.cut_later(cut.set)
    assert not late.is_cut
    async with asyncio.timeout(PATIENCE_S):
        await cut.wait()
    assert (late.is_cut, over.is_cut) == (True, False)

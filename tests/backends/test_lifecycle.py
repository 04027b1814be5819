"""The table of cancel plans: contract, section 8, decision 12."""

import pytest

from backends.lifecycle import (
    ABORT_RETRY_SLEEPS_S,
    AbortTraits,
    CancelPlan,
    sglang_cancel_plan,
    sglang_traits,
)

NEW = (0, 5, 23)
FORGETS = (0, 5, 22)
UNKNOWN = ()


@pytest.mark.parametrize(
    ("version", "is_stream", "has_own_ids", "is_paused", "plan"),
    [
        pytest.param(NEW, True, True, False, CancelPlan.CLOSE, id="stream"),
        pytest.param(NEW, False, True, False, CancelPlan.ABORT_AND_READ, id="unary"),
        pytest.param(FORGETS, True, True, False, CancelPlan.ABORT_THEN_CLOSE, id="stream that would be forgotten"),
        pytest.param(FORGETS, False, True, False, CancelPlan.ABORT_AND_READ, id="unary, older"),
        pytest.param(UNKNOWN, True, True, False, CancelPlan.ABORT_THEN_CLOSE, id="stream, unknown version"),
        pytest.param(UNKNOWN, False, True, False, CancelPlan.ABORT_THEN_CLOSE, id="unary, unknown version"),
        pytest.param((0, 5, 16), False, True, False, CancelPlan.ABORT_THEN_CLOSE, id="unary, too old to be known"),
        pytest.param(NEW, True, False, False, CancelPlan.CLOSE, id="stream, the engine's own ids"),
        pytest.param(NEW, False, False, False, CancelPlan.CLOSE, id="unary, the engine's own ids"),
        pytest.param(FORGETS, True, False, True, CancelPlan.CLOSE, id="own ids, older, paused"),
        pytest.param(NEW, True, True, True, CancelPlan.CLOSE, id="stream, paused"),
        pytest.param(FORGETS, True, True, True, CancelPlan.CLOSE, id="stream, older, paused"),
        pytest.param(NEW, False, True, True, CancelPlan.CLOSE_AND_ABORT_LATER, id="unary, paused"),
        pytest.param(UNKNOWN, False, True, True, CancelPlan.CLOSE_AND_ABORT_LATER, id="unary, unknown, paused"),
    ],
)
def test_plans(version: tuple[int, ...], is_stream: bool, has_own_ids: bool, is_paused: bool, plan: CancelPlan) -> None:
    found = sglang_cancel_plan(version, is_stream=is_stream, has_own_ids=has_own_ids, is_paused=is_paused)
    assert found is plan


@pytest.mark.parametrize(
    ("version", "is_known", "stream_close_stops"),
    [
        pytest.param((), False, False, id="unreadable"),
        pytest.param((0, 4, 99), False, False, id="old"),
        pytest.param((0, 5, 16), False, False, id="before the first known"),
        pytest.param((0, 5, 17), True, False, id="first that forgets"),
        pytest.param((0, 5, 22, 9), True, False, id="last that forgets"),
        pytest.param((0, 5, 23), True, True, id="first that does not"),
        pytest.param((0, 6), True, True, id="newer"),
        pytest.param((1,), True, True, id="much newer"),
    ],
)
def test_traits(version: tuple[int, ...], is_known: bool, stream_close_stops: bool) -> None:
    assert sglang_traits(version) == AbortTraits(is_known=is_known, stream_close_stops=stream_close_stops)


def test_the_schedule_is_nine_submissions_over_four_and_a_half_seconds() -> None:
    assert len(ABORT_RETRY_SLEEPS_S) == 8
    assert sum(ABORT_RETRY_SLEEPS_S) == pytest.approx(4.55)

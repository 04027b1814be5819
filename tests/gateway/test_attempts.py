"""Attempts at one request: which failures let another worker be tried, and how deaths are counted."""

import pytest

from gateway.attempts import MAX_UNFIT, Attempts, Failure

UNREACHABLE, BUSY, DROPPED, DIED, FINAL = (
    Failure.UNREACHABLE,
    Failure.BUSY,
    Failure.DROPPED,
    Failure.DIED,
    Failure.FINAL,
)


def run(failures: list[Failure], most: int) -> tuple[list[bool], Attempts]:
    """What is said after each failure, each on a worker of its own."""
    attempts = Attempts(most)
    said = []
    for number, failure in enumerate(failures):
        attempts.begin()
        said.append(attempts.may_retry(f"w{number}", failure))
    return said, attempts


@pytest.mark.parametrize(
    ("failures", "most", "said", "deaths"),
    [
        pytest.param([UNREACHABLE], 3, [True], 0, id="nothing was sent"),
        pytest.param([BUSY], 3, [True], 0, id="refused for want of room"),
        pytest.param([DROPPED], 3, [True], 0, id="dropped by a living worker"),
        pytest.param([DIED], 3, [True], 1, id="one retry follows a death"),
        pytest.param([FINAL], 3, [False], 0, id="anything else is final"),
        pytest.param([BUSY, DROPPED, UNREACHABLE], 3, [True, True, False], 0, id="no more than allowed"),
        pytest.param([BUSY], 1, [False], 0, id="one attempt is no retry"),
        pytest.param([DIED], 1, [False], 1, id="a death in the only attempt"),
        pytest.param([DIED, DIED], 9, [True, False], 2, id="two deaths end it"),
        pytest.param([DIED, DIED], 2, [True, False], 2, id="two deaths, the second in the last attempt"),
        pytest.param([DIED, BUSY], 9, [True, False], 1, id="the retry after a death is the last: busy"),
        pytest.param([DIED, UNREACHABLE], 9, [True, False], 1, id="the retry after a death is the last: unreachable"),
        pytest.param([DIED, DROPPED], 9, [True, False], 1, id="the retry after a death is the last: dropped"),
        pytest.param([DIED, FINAL], 9, [True, False], 1, id="the retry after a death is the last: final"),
        pytest.param([BUSY, DIED], 9, [True, True], 1, id="a death later on"),
        pytest.param([BUSY, DIED, DIED], 9, [True, True, False], 2, id="a death later on, and another"),
        pytest.param([UNREACHABLE] * 5, 9, [True] * 5, 0, id="as many as there are"),
    ],
)
def test_transcripts(failures: list[Failure], most: int, said: list[bool], deaths: int) -> None:
    result, attempts = run(failures, most)
    assert result == said
    assert attempts.deaths == deaths
    assert attempts.count == len(failures)
    assert attempts.failed == {f"w{number}" for number in range(len(failures))}


def test_nothing_has_failed_at_first() -> None:
    attempts = Attempts(3)
    assert (attempts.count, attempts.deaths, attempts.failed) == (0, 0, set())


def test_a_stale_connection_costs_one_try_of_any_worker() -> None:
    attempts = Attempts(1)
    attempts.begin()
    assert attempts.may_retry("a", Failure.STALE)
    assert attempts.failed == set()
    attempts.begin()
    assert not attempts.may_retry("a", Failure.STALE)


def test_a_worker_that_lacks_something_may_be_asked_in_another_way() -> None:
    attempts = Attempts(1)
    attempts.begin()
    assert [attempts.may_retry("a", Failure.UNFIT) for _ in range(MAX_UNFIT + 1)] == [True] * MAX_UNFIT + [False]
    assert attempts.failed == set()
    assert not attempts.may_retry("a", Failure.DIED)
    assert not attempts.may_retry("a", Failure.UNFIT)

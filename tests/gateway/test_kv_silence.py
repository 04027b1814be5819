"""A source of KV events that is missing, and one that has nothing to say."""

import pytest

from gateway.kv_silence import MIN_ANSWERS, SILENCE_S, SilenceWatch
from routers.types import RankKey

A, B = RankKey("a", 0), RankKey("a", 1)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        pytest.param([(0, 1), (SILENCE_S / 2, 1), (SILENCE_S, 1), (SILENCE_S + 1, 1)], [0, 0, 3, 0], id="told once"),
        pytest.param([(0, 1), (SILENCE_S, 1)], [0, 0], id="too few answers"),
        pytest.param([(0, 1), (1, 1), (2, 1), (3, 1)], [0, 0, 0, 0], id="too soon"),
        pytest.param([(0, 1), (1, 1), (SILENCE_S, 2), (SILENCE_S + 1, 2)], [0, 0, 0, 0], id="an event came"),
        pytest.param([(0, None), (1, None), (SILENCE_S, None)], [0, 0, 3], id="nothing has ever come"),
        pytest.param(
            [(0, 1), (1, 1), (SILENCE_S, 1), (SILENCE_S + 1, 2), (SILENCE_S + 2, 2), (2 * SILENCE_S + 1, 2)],
            [0, 0, 3, 0, 0, 3],
            id="silent again",
        ),
    ],
)
def test_k_26_a_silent_source_is_told_of(answers: list[tuple[float, int | None]], told: list[int]) -> None:
    assert MIN_ANSWERS == 3
    watch = SilenceWatch()
    assert [watch.answered(A, ("0", last), at) for at, last in answers] == told


def test_ranks_are_apart_and_forgotten_with_their_worker() -> None:
    watch, position = SilenceWatch(after_s=0.0), ("0", 1)
    assert [watch.answered(A, position, 0.0) for _ in range(2)] == [0, 0]
    assert watch.answered(B, position, 0.0) == 0
    watch.forget("a")
    assert [watch.answered(A, position, 0.0) for _ in range(3)] == [0, 0, 3]

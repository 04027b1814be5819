"""The policy ``least-loaded``."""

import random
from collections import Counter

import pytest

from routers.least_loaded import LeastLoaded
from routers.load import RankLoad
from routers.types import Candidate, RankKey, RouteRequest


def candidates(*loads: tuple[int, int]) -> list[Candidate]:
    """One candidate for each pair of requests in flight and tokens to prefill."""
    made = []
    for index, (in_flight, tokens) in enumerate(loads):
        load = RankLoad()
        load.in_flight, load.prefill_tokens = in_flight, tokens
        made.append(Candidate(RankKey(f"w{index}", 0), load))
    return made


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        pytest.param([(5, 5)], "w0", id="only one"),
        pytest.param([(2, 0), (1, 999), (3, 0)], "w1", id="fewest in flight, whatever they prefill"),
        pytest.param([(1, 10), (1, 9), (1, 11)], "w1", id="then fewest tokens to prefill"),
        pytest.param([(1, 0), (0, 0), (1, 0)], "w1", id="an idle one"),
        pytest.param([(3, 3), (2, 2), (1, 1), (0, 0)], "w3", id="the last"),
    ],
)
def test_choice(loads: list[tuple[int, int]], chosen: str) -> None:
    placement = LeastLoaded(random.Random(1)).select(RouteRequest(), candidates(*loads))
    assert placement.candidate.key.worker_id == chosen
    assert placement.overlap_blocks is None


def test_ties_go_to_any_of_the_best_and_to_no_other() -> None:
    policy = LeastLoaded(random.Random(1))
    pool = candidates((1, 0), (2, 0), (1, 0), (1, 1), (1, 0))
    counts = Counter(policy.select(RouteRequest(), pool).candidate.key.worker_id for _ in range(300))
    assert set(counts) == {"w0", "w2", "w4"}
    assert min(counts.values()) > 60


def test_ties_follow_the_seed() -> None:
    pool = candidates(*[(0, 0)] * 9)
    runs = []
    for _ in range(2):
        policy = LeastLoaded(random.Random(7))
        runs.append([policy.select(RouteRequest(), pool).candidate.key for _ in range(20)])
    assert runs[0] == runs[1]


def test_nobody_to_choose_from() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        LeastLoaded(random.Random(1)).select(RouteRequest(), ())


def test_name() -> None:
    assert LeastLoaded(random.Random(1)).name == "least-loaded"

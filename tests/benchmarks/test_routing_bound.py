"""What caches can hit at most, where it can be told by hand."""

import random

import pytest

from benchmarks.routing_bound import Cache, Returns, Row, choices, hit_share


def rows(*prompts: list[int]) -> list[Row]:
    return [(float(second), 512 * len(ids), 1, ids) for second, ids in enumerate(prompts)]


@pytest.mark.parametrize(("room", "pieces"), [(10, 4), (5, 4), (4, 3), (3, 2), (0, 0)])
def test_one_cache_drops_what_was_used_longest_ago_the_end_of_a_prompt_first(room: int, pieces: int) -> None:
    asked = rows([1, 2, 3], [1, 4, 5], [1, 2, 3])
    found = hit_share(asked, [Cache(room)], choices(random.Random(1), Returns(asked))["any"])
    assert found == pytest.approx(pieces / 9)


@pytest.mark.parametrize("name", ["any", "fewest computed", "oldest dropped", "least missed"])
def test_a_session_stays_where_its_cache_is(name: str) -> None:
    asked = rows([1, 2, 3], [9, 4, 5], [1, 2, 3, 6], [9, 4, 5, 7])
    found = hit_share(asked, [Cache(10), Cache(10)], choices(random.Random(1), Returns(asked))[name])
    assert found == pytest.approx(6 / 14)


@pytest.mark.parametrize(("name", "number"), [("oldest dropped", 0), ("least missed", 1)])
def test_where_a_new_prompt_goes(name: str, number: int) -> None:
    # Of first turns one in three has a second, and that one a third.
    asked = rows([1, 11], [2, 21], [1, 11, 12], [3, 31], [1, 11, 12, 13])
    caches = [Cache(3), Cache(2)]
    caches[0].put([1, 11], 0.0)
    caches[0].put([1, 11, 12], 1.0)
    caches[1].put([2, 21], 2.0)
    assert choices(random.Random(1), Returns(asked))[name](caches, [4, 41], 2.5) is caches[number]

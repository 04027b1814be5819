"""Bookings: taken once, given back once."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routers.load import RankLoad


def figures(load: RankLoad) -> tuple[int, int, int]:
    """All of a load."""
    return load.in_flight, load.blocks, load.prefill_tokens


def test_a_booking_from_begin_to_end() -> None:
    load = RankLoad()
    assert load.is_idle
    booking = load.book(requests=2, blocks=3, prefill_tokens=40)
    assert figures(load) == (2, 3, 40)
    booking.first_token()
    booking.first_token()
    assert figures(load) == (2, 3, 0)
    assert not load.is_idle
    booking.release()
    assert load.is_idle


def test_a_booking_without_a_first_token() -> None:
    load = RankLoad()
    load.book(requests=1, blocks=1, prefill_tokens=9).release()
    assert load.is_idle


def test_a_second_release_is_an_error_and_changes_nothing() -> None:
    load = RankLoad()
    booking = load.book(requests=1, blocks=1, prefill_tokens=1)
    other = load.book(requests=1, blocks=0, prefill_tokens=0)
    booking.release()
    with pytest.raises(RuntimeError, match="twice"):
        booking.release()
    booking.first_token()
    assert figures(load) == (1, 0, 0)
    other.release()
    assert load.is_idle


@pytest.mark.parametrize(
    ("requests", "blocks", "tokens"),
    [(0, 0, 0), (-1, 0, 0), (1, -1, 0), (1, 0, -1)],
    ids=["none", "negative", "b", "t"],
)
def test_nonsense_is_not_booked(requests: int, blocks: int, tokens: int) -> None:
    load = RankLoad()
    with pytest.raises(ValueError, match="cannot book"):
        load.book(requests=requests, blocks=blocks, prefill_tokens=tokens)
    assert load.is_idle


@pytest.mark.parametrize("field", ["in_flight", "blocks", "prefill_tokens"])
def test_anything_booked_is_not_idle(field: str) -> None:
    load = RankLoad()
    setattr(load, field, 1)
    assert not load.is_idle


AMOUNTS = st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(0, 9999))


@given(st.lists(AMOUNTS, max_size=8), st.randoms(use_true_random=False))
def test_the_load_is_the_sum_of_what_is_live(amounts: list[tuple[int, int, int]], random: object) -> None:
    load = RankLoad()
    live = {load.book(requests=r, blocks=b, prefill_tokens=t): (r, b, t) for r, b, t in amounts}
    order = list(live)
    random.shuffle(order)  # type: ignore[attr-defined]
    for booking in order:
        assert figures(load) == tuple(map(sum, zip(*live.values(), strict=True)))
        booking.release()
        del live[booking]
    assert load.is_idle


def test_a_rank_is_full_from_its_limit_on() -> None:
    told: list[bool] = []
    load = RankLoad(lambda changed: told.append(changed.is_full))
    load.set_limit(2)
    bookings = [load.book(requests=1, blocks=0, prefill_tokens=0) for _ in range(3)]
    assert (load.is_full, told) == (True, [True])
    bookings[0].release()
    assert load.is_full
    bookings[1].release()
    assert (load.is_full, told) == (False, [True, False])
    load.set_limit(1)
    assert (load.is_full, told) == (True, [True, False, True])
    load.set_limit(math.inf)
    assert (load.is_full, told) == (False, [True, False, True, False])
    bookings[2].release()
    assert load.is_idle


def test_a_batch_is_taken_whole() -> None:
    load = RankLoad()
    load.set_limit(2)
    batch = load.book(requests=50, blocks=0, prefill_tokens=0)
    assert (load.is_full, load.in_flight) == (True, 50)
    batch.release()
    assert not load.is_full


def test_a_rank_without_a_limit_is_never_full() -> None:
    load = RankLoad()
    load.book(requests=10**9, blocks=0, prefill_tokens=0)
    assert not load.is_full

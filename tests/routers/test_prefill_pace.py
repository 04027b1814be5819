"""How far a rank has come with its prefill, by the pace of what it has computed before."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routers.load import RankBooking, RankLoad
from routers.prefill_pace import PrefillPace


class Time:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# What was booked on one rank: when, how many tokens, and when the first token came, or ``None``; the first of each
# transcript has set a pace of 100 tokens/s. Then a moment, and what should be done by then.
Step = tuple[float, int, float | None]
PACE: Step = (0.0, 1000, 10.0)
STEPS: dict[str, tuple[list[Step], float, int]] = {
    "no prefill goes on": ([PACE], 12.0, 0),
    "just sent": ([PACE, (20.0, 500, None)], 20.0, 0),
    "half-way": ([PACE, (20.0, 500, None)], 22.5, 250),
    "overdue": ([PACE, (20.0, 500, None)], 60.0, 500),
    "only the oldest is computed": ([PACE, (20.0, 500, None), (20.0, 300, None)], 23.0, 300),
    "its turn began when the one before ended": ([(0.0, 1000, 10.0), (2.0, 1000, None)], 11.0, 100),
    "nothing is known": ([(0.0, 1000, None)], 50.0, 0),
    "cached whole": ([PACE, (20.0, 0, None)], 25.0, 0),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_is_done(case: str) -> None:
    steps, moment, done = STEPS[case]
    time = Time()
    load = RankLoad()
    load.pace = PrefillPace(time)
    play(load, time, steps)
    time.now = moment
    booked = load.prefill_tokens
    assert booked == sum(tokens for _, tokens, ended_at in steps if ended_at is None)
    assert load.left_tokens() == booked - done


def play(load: RankLoad, time: Time, steps: Sequence[Step]) -> None:
    """Book, and let first tokens come, in the order of time."""
    moments = [(at, 0, number) for number, (at, _, _) in enumerate(steps)]
    moments += [(at, 1, number) for number, (_, _, at) in enumerate(steps) if at is not None]
    bookings: dict[int, RankBooking] = {}
    for time.now, is_end, number in sorted(moments):
        if is_end:
            bookings[number].first_token()
        else:
            bookings[number] = load.book(requests=1, blocks=0, prefill_tokens=steps[number][1])


def test_what_was_given_up_tells_nothing_of_the_pace() -> None:
    time, load = Time(), RankLoad()
    load.pace = PrefillPace(time)
    booking = load.book(requests=1, blocks=0, prefill_tokens=1000)
    time.now = 1.0
    booking.release()
    assert load.pace.tokens_per_s == 0
    assert load.is_idle


def test_the_pace_follows_the_rank() -> None:
    time = Time()
    pace = PrefillPace(time)
    for number, pace_per_s in enumerate([100] * 30 + [50] * 60):
        pace.begin(number, 1000)
        time.now += 1000 / pace_per_s
        pace.end(number, is_computed=True)
        if number == 29:
            assert pace.tokens_per_s == pytest.approx(100)
    assert pace.tokens_per_s == pytest.approx(50, rel=0.01)


def test_without_a_pace_prefill_counts_in_full() -> None:
    load = RankLoad()
    load.book(requests=1, blocks=0, prefill_tokens=1000)
    assert load.left_tokens() == load.prefill_tokens == 1000


@given(st.lists(st.tuples(st.sampled_from(["book", "first", "release"]), st.integers(0, 9), st.floats(0, 100))))
def test_what_is_left_is_never_less_than_nothing_nor_more_than_booked(steps: list[tuple[str, int, float]]) -> None:
    time, load = Time(), RankLoad()
    load.pace = PrefillPace(time)
    live = []
    for what, number, passes_s in steps:
        time.now += passes_s
        if what == "book":
            live.append(load.book(requests=1, blocks=0, prefill_tokens=number * 100))
        elif live and what == "first":
            live[number % len(live)].first_token()
        elif live:
            live.pop(number % len(live)).release()
        assert 0 <= load.left_tokens() <= load.prefill_tokens
    for booking in live:
        booking.release()
    assert load.is_idle
    assert load.left_tokens() == 0

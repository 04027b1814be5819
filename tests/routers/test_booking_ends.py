"""A leg's booking, whatever ends the leg: given back once, with all that it held, and not a moment too early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cancel_policy import CancelPolicy
from backends.leg import Leg
from backends.leg_events import Cause, Tick
from backends.sglang.backend import SGLangBackend
from backends.types import Worker
from backends.upstream.base import Origin
from routers.load import RankLoad
from tests.backends.test_leg import ABORTS, CLOSES, DRAINS, Call, Client, Keeper

SHARED = list(range(100, 108))


def leg(load: RankLoad, policy: CancelPolicy, *, tail: int, is_written: bool = True) -> Leg:
    """A leg that has booked the shared blocks, one of its own, and 40 tokens."""
    return Leg(
        worker=Worker("w", "http://w", Origin("http", "w", 80)),
        backend=SGLangBackend(Client()),
        engine_ids=("e",),
        policy=policy,
        call=Call(is_written=is_written),
        booking=load.book(requests=1, blocks=10, prefill_tokens=40, block_hashes=[*SHARED, tail]),
        keeper=Keeper(),
        on_end=lambda ended: None,
    )


STEP = st.one_of(
    st.sampled_from(["first token", "end", "error", "call off", "tick"]),
    st.sampled_from(Cause),
)


@given(
    st.sampled_from([ABORTS, CLOSES, DRAINS]), st.booleans(), st.booleans(), st.lists(st.tuples(st.booleans(), STEP))
)
def test_a9_11_bookings_are_freed_once_whatever_ends_a_leg(
    policy: CancelPolicy, is_written: bool, is_paused: bool, steps: list[tuple[bool, str]]
) -> None:
    load = RankLoad()
    legs = (leg(load, policy, tail=1, is_written=is_written), leg(load, policy, tail=2))
    for which, step in steps:
        one = legs[which]
        if step == "first token":
            one.first_token()
        elif step == "end":
            one.end()
        elif step == "error":
            one.end("reset")
        elif step == "call off":
            one.call_off(is_paused=is_paused)
        elif step == "tick":
            if not one.is_ended:
                one.on(Tick(10.0, 1.0))
        else:
            one.cancel(Cause(step), is_paused=is_paused)
        live = [other for other in legs if not other.is_ended]
        assert load.in_flight == len(live)
        assert load.blocks == (len(SHARED) + 2 * len(live) if live else 0)
        assert load.prefill_tokens == 40 * sum(not other.has_output for other in live)
    for one in legs:
        one.end()
    assert load.is_idle
    assert load.shared_blocks(SHARED) == 0


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("has_output", [False, True], ids=["before the first token", "after it"])
def test_every_cause_ends_in_nothing_booked(cause: Cause, has_output: bool) -> None:
    load = RankLoad()
    one = leg(load, CLOSES, tail=1)
    if has_output:
        one.first_token()
    one.cancel(cause)
    assert load.is_idle

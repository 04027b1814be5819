"""The life of a leg as transcripts: what happens, and what is to be done about it."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.cancel_policy import CancelPolicy, OnCancel
from backends.leg_events import (
    ABORT_RETRY_SLEEPS_S,
    Abort,
    CalledOff,
    Cancelled,
    Cause,
    Command,
    End,
    Event,
    GivenUp,
    LegEnd,
    LegState,
    LegTimes,
    Over,
    Paused,
    Produced,
    Resumed,
    Revealed,
    Simple,
    Tick,
    Told,
    WakeAt,
)
from backends.lifecycle import LegMachine

CLOSE, DETACH, RELEASE = Simple.CLOSE, Simple.DETACH, Simple.RELEASE
TIMES = LegTimes(
    delay_s=0.02,
    retry_sleeps_s=(0.1, 0.2, 0.4),
    answer_wait_s=1.0,
    after_resume_s=0.1,
    max_pause_s=60,
    handoff_drain_s=30,
)
STREAM = CancelPolicy(OnCancel.DROP, is_stream=True, loses_aborts_in_pause=True)
UNARY = CancelPolicy(OnCancel.ABORT, is_stream=False, loses_aborts_in_pause=True)
PAIR_STREAM = CancelPolicy(OnCancel.ABORT, is_stream=True, loses_aborts_in_pause=True)
FORGOTTEN = CancelPolicy(OnCancel.ABORT, is_stream=True, closes_after_abort=True, loses_aborts_in_pause=True)
VLLM = CancelPolicy(OnCancel.DROP, is_stream=False)
DECODE = CancelPolicy(OnCancel.DRAIN_TO_FIRST_OUTPUT, is_stream=True)
POLICIES = [
    pytest.param(policy, id=name)
    for name, policy in {
        "stream": STREAM,
        "unary": UNARY,
        "stream of a pair": PAIR_STREAM,
        "forgotten stream": FORGOTTEN,
        "vLLM": VLLM,
        "vLLM decode": DECODE,
    }.items()
]
IDS = ("a", "b")


def machine(policy: CancelPolicy = UNARY, ids: tuple[str, ...] = IDS, times: LegTimes = TIMES) -> LegMachine:
    return LegMachine(policy, ids, times)


def gone(at: float = 10.0, cause: Cause = Cause.CLIENT_GONE, written_at: float | None = 0.0, **more: Any) -> Cancelled:
    return Cancelled(at, cause, written_at, **more)


def off(at: float = 10.0, written_at: float | None = 0.0, **more: Any) -> CalledOff:
    return CalledOff(at, written_at, **more)


def tick(at: float, written_at: float | None = 0.0) -> Tick:
    return Tick(at, written_at)


def ends(how: LegEnd, error: str = "") -> list[Command]:
    return [CLOSE, RELEASE, End(how, error)]


def rounded(commands: list[Command]) -> list[Command]:
    """The same, with times that can be compared; beside an abort only limits wake, which are looked at elsewhere."""
    is_aborting = any(isinstance(c, Abort) for c in commands)
    kept = [c for c in commands if not (is_aborting and isinstance(c, WakeAt))]
    return [WakeAt(round(c.at, 6)) if isinstance(c, WakeAt) else c for c in kept]


def play(leg: LegMachine, *script: Event | list[Command] | LegState) -> None:
    """Events, each followed by the commands that it gives and the state that it leads to, where the script has them."""
    given_: list[Command] = []
    for step in script:
        if isinstance(step, list):
            assert rounded(given_) == rounded(step)
        elif isinstance(step, LegState):
            assert leg.state is step
        else:
            given_ = leg.on(step)


def aborts_of(leg: LegMachine, start: list[Command], *, until: float = 100.0) -> list[float]:
    """Run the timer and answer every abort at once; the times of the aborts, until the leg has ended."""
    at, commands, seen = 0.0, start, []
    while leg.state is not LegState.ENDED and at < until:
        wake = [command.at for command in commands if isinstance(command, WakeAt)]
        if any(isinstance(command, Abort) for command in commands):
            seen.append(at)
            commands = [*commands, *leg.on(Told(at))]
            wake = [command.at for command in commands if isinstance(command, WakeAt)]
        if not wake:
            break
        at = wake[-1]
        commands = leg.on(tick(at))
    return seen


# Ends.


@pytest.mark.parametrize("policy", POLICIES)
def test_a3_9_a_leg_that_ends_by_itself_is_never_aborted(policy: CancelPolicy) -> None:
    """Mutation tried: no check for the end in ``on``; then the late tick aborts."""
    leg = machine(policy)
    play(leg, Produced(), [], LegState.ANSWERING, Over(), ends(LegEnd.FINISHED), LegState.ENDED)
    assert leg.cause is Cause.FINISHED
    play(leg, tick(99.0), [], gone(), [], off(), [], Told(99.0), [], Produced(), [], Resumed(9.0), [], Over(), [])
    assert leg.cause is Cause.FINISHED


def test_the_end_of_a_broken_answer_is_the_engines_error() -> None:
    leg = machine()
    play(leg, Over("reset"), ends(LegEnd.FINISHED, "reset"))
    assert leg.cause is Cause.ENGINE_ERROR


@pytest.mark.parametrize("policy", POLICIES)
def test_first_output_comes_once(policy: CancelPolicy) -> None:
    leg = machine(policy)
    leg.on(Produced())
    with pytest.raises(ValueError, match="first output in the state ANSWERING"):
        leg.on(Produced())


# Cancelled.


@pytest.mark.parametrize("has_output", [False, True])
@pytest.mark.parametrize("policy", [pytest.param(STREAM, id="stream"), pytest.param(VLLM, id="vLLM")])
def test_a2_11_a4_9_what_is_dropped_is_closed_at_once(policy: CancelPolicy, has_output: bool) -> None:
    """Mutation tried: the drain to the first output for every policy."""
    leg = machine(policy)
    if has_output:
        leg.on(Produced())
    play(leg, gone(), ends(LegEnd.DROPPED))
    assert leg.cause is Cause.CLIENT_GONE


@pytest.mark.parametrize("policy", [pytest.param(p.values[0], id=p.id) for p in POLICIES if p.values[0] is not DECODE])
def test_a3_3_what_was_never_written_is_only_closed(policy: CancelPolicy) -> None:
    """Mutation tried: ``written_at`` not looked at."""
    play(machine(policy), gone(written_at=None), ends(LegEnd.DROPPED))


@pytest.mark.parametrize("cause", list(Cause)[:6])
def test_every_cause_goes_the_same_way_but_is_kept(cause: Cause) -> None:
    leg = machine()
    play(leg, gone(cause=cause), [DETACH, WakeAt(10.0)], LegState.TELLING, gone(cause=Cause.SHUTDOWN), [])
    assert leg.cause is cause


def test_a2_7_a_unary_call_is_aborted_at_once_and_read_on() -> None:
    """Mutation tried: the first abort only after ``Produced``."""
    leg = machine()
    play(leg, gone(), [DETACH, WakeAt(10.0)], tick(10.0), [Abort(IDS)], Told(10.01), [WakeAt(10.1)])
    play(leg, Produced(), [], Over(), ends(LegEnd.CONFIRMED))


def test_no_abort_sooner_than_the_delay_after_the_write() -> None:
    play(machine(), gone(at=10.0, written_at=9.995), [DETACH, WakeAt(9.995 + 0.02)])


def test_a2_8_an_abort_without_effect_is_repeated() -> None:
    leg = machine()
    play(leg, gone(), tick(10.0), Told(10.0), tick(10.1), [Abort(IDS)], Told(10.1))
    play(leg, Over(), ends(LegEnd.CONFIRMED))


def test_a2_9_a3_5_the_schedule_has_an_end() -> None:
    """Mutation tried: no limit of tries; then the transcript never ends."""
    leg = machine(times=LegTimes())
    seen = aborts_of(leg, leg.on(gone(at=0.0, written_at=-1.0)))
    steps = [later - sooner for sooner, later in itertools.pairwise(seen)]
    assert len(seen) == 9
    assert steps == pytest.approx(list(ABORT_RETRY_SLEEPS_S))
    assert leg.state is LegState.ENDED


def test_giving_up_is_unconfirmed() -> None:
    leg = machine(times=LegTimes(retry_sleeps_s=(0.5,)))
    play(leg, gone(), tick(10.0), Told(10.0), tick(10.5), Told(10.5), tick(11.0), ends(LegEnd.UNCONFIRMED))


def test_a3_12_submissions_never_run_beside_each_other_and_have_a_limit_in_all() -> None:
    """Mutation tried: no ``abort_limit_s``; then abort calls that hang hold the leg for nine of their time limits."""
    leg = machine()
    play(leg, gone(), tick(10.0), [Abort(IDS)], tick(10.2), [WakeAt(18.0)], Told(12.0), [WakeAt(10.1)])
    play(leg, tick(12.0), [Abort(IDS)], Told(14.0), tick(14.0), [Abort(IDS)], tick(18.0), ends(LegEnd.UNCONFIRMED))
    play(leg, Told(18.1), [], LegState.ENDED)


def test_a2_10_no_abort_after_the_end_between_two() -> None:
    """Mutation tried: ``ENDED`` not checked."""
    play(machine(), gone(), tick(10.0), Told(10.0), Over(), ends(LegEnd.CONFIRMED), tick(10.1), [])


def test_an_end_before_the_first_abort_has_nothing_to_confirm() -> None:
    play(machine(), gone(), Over("reset"), ends(LegEnd.FINISHED, "reset"))


def test_an_engine_that_takes_no_aborts_is_closed() -> None:
    play(machine(), gone(), tick(10.0), Told(10.0, is_refused=True), ends(LegEnd.UNCONFIRMED))


def test_abort_then_close() -> None:
    leg = machine(FORGOTTEN)
    play(leg, gone(), [DETACH, WakeAt(10.0)], tick(10.0), [Abort(IDS)], Told(10.0), ends(LegEnd.DROPPED))


def test_a_leg_without_ids_is_closed() -> None:
    play(machine(FORGOTTEN, ids=()), gone(), ends(LegEnd.DROPPED))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_given_up_ends_in_every_state(policy: CancelPolicy) -> None:
    for before in ([], [Produced()], [off()], [gone()], [gone(is_paused=True)]):
        leg = machine(policy)
        for event in before:
            leg.on(event)
        if leg.state is not LegState.ENDED:
            how = LegEnd.ABANDONED if leg.state is LegState.DRAINING else LegEnd.UNCONFIRMED
            play(leg, GivenUp(), ends(how))


# Called off by the client's own wish.


@pytest.mark.parametrize("policy", [pytest.param(p, id=i) for p, i in ((STREAM, "stream"), (UNARY, "unary"))])
def test_a_called_off_leg_is_still_its_clients(policy: CancelPolicy) -> None:
    leg = machine(policy)
    play(leg, off(), [WakeAt(10.0)], LegState.CALLED_OFF, tick(10.0), [Abort(IDS)], Told(10.0))
    play(leg, off(), [], Produced(), [], Over(), ends(LegEnd.CONFIRMED))
    assert leg.cause is Cause.CLIENT_ABORT


def test_a3_5_a3_6_its_client_is_let_go_after_the_wait_and_the_aborts_go_on() -> None:
    """Mutation tried: the wait begun again by every try; then the client waits for the whole schedule."""
    leg = machine(times=LegTimes(retry_sleeps_s=(0.3, 0.9, 0.9)))
    play(leg, off(), tick(10.0), [Abort(IDS)], Told(10.0), tick(10.3), [Abort(IDS)])
    play(leg, Told(10.4), tick(11.0), [DETACH, WakeAt(10.3 + 0.9)], LegState.TELLING, tick(11.21), Told(11.3))
    play(leg, tick(12.2), Told(13.0), tick(13.9), ends(LegEnd.UNCONFIRMED))
    assert leg.cause is Cause.CLIENT_ABORT


def test_an_answer_that_is_there_is_left_to_its_slow_reader() -> None:
    leg = machine()
    play(leg, off(), tick(10.0), Told(10.0), Tick(10.1, 0.0, is_over=True), [], LegState.CALLED_OFF, tick(99.0), [])
    play(leg, Over(), ends(LegEnd.CONFIRMED))


def test_a_stream_whose_client_is_let_go_is_closed_where_that_is_the_way() -> None:
    leg = machine(STREAM, times=LegTimes(retry_sleeps_s=(3.0,)))
    play(leg, Produced(), off(), tick(10.0), Told(10.0), tick(11.0), ends(LegEnd.UNCONFIRMED))


def test_a_unary_answer_that_has_begun_is_left_to_come() -> None:
    leg = machine(times=LegTimes(retry_sleeps_s=(3.0,)))
    play(leg, off(), tick(10.0), Told(10.0), Produced(), tick(11.0), [WakeAt(13.0)], LegState.CALLED_OFF)


def test_called_off_before_it_is_written_it_waits_for_that_and_the_delay() -> None:
    leg = machine()
    play(leg, off(written_at=None), [WakeAt(10.02)], tick(10.02, None), [WakeAt(10.04)])
    play(leg, tick(10.04, 10.03), [WakeAt(10.05)], tick(10.05, 10.03), [Abort(IDS)])


def test_a_called_off_leg_whose_client_leaves_goes_on_where_it_was() -> None:
    leg = machine()
    play(leg, off(), tick(10.0), Told(10.0), gone(at=10.05), [DETACH, WakeAt(10.1)])
    play(leg, tick(10.1), [Abort(IDS)])
    assert (leg.cause, leg.tries) == (Cause.CLIENT_ABORT, 2)


def test_a_called_off_stream_whose_client_leaves_is_closed() -> None:
    play(machine(STREAM), off(), tick(10.0), Told(10.0), gone(at=10.05), ends(LegEnd.DROPPED))
    play(machine(FORGOTTEN), off(), tick(10.0), Told(10.0), gone(at=10.05), ends(LegEnd.DROPPED))


def test_an_engine_that_takes_no_aborts_ends_the_clients_wait() -> None:
    play(machine(STREAM), off(), tick(10.0), Told(10.0, is_refused=True), ends(LegEnd.UNCONFIRMED))


# Items of a batch.


def test_an_item_is_aborted_twice_and_the_rest_goes_on() -> None:
    leg = machine(times=LegTimes(retry_sleeps_s=(0.1, 0.2, 0.4, 0.8)))
    play(leg, off(items=("b",)), [WakeAt(10.0)], LegState.WAITING, tick(10.0), [Abort(("b",))])
    play(
        leg, Told(10.0), [WakeAt(10.4)], off(items=("b",)), [WakeAt(10.4)], tick(10.4), [Abort(("b",))], Told(10.4), []
    )
    play(leg, Over(), ends(LegEnd.FINISHED))
    assert leg.cause is Cause.FINISHED


def test_all_of_it_after_an_item() -> None:
    leg = machine()
    play(leg, off(items=("b",)), off(at=10.01), [WakeAt(10.01)], tick(10.01), [Abort(IDS)])


def test_items_of_an_engine_that_takes_no_aborts_are_left() -> None:
    play(machine(), off(items=("b",)), tick(10.0), Told(10.0, is_refused=True), [], tick(11.0), [])


def test_items_wait_for_the_write_and_for_the_end_of_a_pause() -> None:
    leg = machine()
    play(leg, off(items=("b",), written_at=None), [WakeAt(10.02)], tick(10.02, None), [WakeAt(10.02 + 0.02)])
    play(leg, Paused(10.03), [WakeAt(70.03)], Resumed(11.0), [WakeAt(11.1)], tick(11.1), [Abort(("b",))])
    leg = machine()
    play(leg, off(items=("b",), is_paused=True), [WakeAt(70.0)], Resumed(11.0), [WakeAt(11.1)])


# Ids that the engine reveals.


def test_a3_13_children_are_aborted_when_they_appear_and_never_guessed() -> None:
    """Mutation tried: the request's own id aborted in their place."""
    leg = machine(FORGOTTEN, ids=())
    play(leg, off(), [WakeAt(10.0)], tick(10.0), [WakeAt(10.1)], Revealed(10.02, ("c1",)), [WakeAt(10.02)])
    play(leg, tick(10.02), [Abort(("c1",))], Revealed(10.03, ("c1", "c2")), [WakeAt(11.0)])
    play(leg, Told(10.04), [WakeAt(10.03)], tick(10.05), [Abort(("c2",))], Told(10.06))
    play(leg, tick(10.1), [Abort(("c1", "c2"))])


def test_revealed_ids_are_for_a_later_cancel() -> None:
    leg = machine(FORGOTTEN, ids=())
    play(leg, Revealed(5.0, ("c1",)), [], gone(), [DETACH, WakeAt(10.0)], tick(10.0), [Abort(("c1",))])


# Pauses.


def test_a_stream_that_is_cancelled_in_a_pause_is_closed() -> None:
    play(machine(FORGOTTEN), gone(is_paused=True), ends(LegEnd.DROPPED))


def test_a_unary_call_that_is_cancelled_in_a_pause_is_closed_and_aborted_afterwards() -> None:
    """Mutation tried: the abort at once; a real engine loses it for good."""
    leg = machine()
    play(leg, gone(is_paused=True), [CLOSE, RELEASE, WakeAt(70.0)], LegState.OWED, Resumed(20.0), [WakeAt(20.1)])
    play(leg, tick(20.1, None), [Abort(IDS)], Told(20.2), ends(LegEnd.DROPPED))


def test_a_pause_that_comes_back_before_the_owed_abort_defers_it_again() -> None:
    leg = machine()
    play(leg, gone(is_paused=True), Resumed(20.0), Paused(20.05), [WakeAt(80.05)], tick(20.1), [WakeAt(80.05)])
    play(leg, Resumed(30.0), [WakeAt(30.1)])


def test_what_is_owed_to_a_pause_without_end_is_given_up() -> None:
    play(machine(), gone(is_paused=True), tick(70.0), ends(LegEnd.UNCONFIRMED))


def test_what_is_owed_to_an_engine_that_refuses_is_unconfirmed() -> None:
    play(machine(), gone(is_paused=True), Resumed(20.0), tick(20.1), Told(20.2, is_refused=True))
    play(
        machine(),
        gone(is_paused=True),
        Resumed(20.0),
        tick(20.1),
        Told(20.2, is_refused=True),
        ends(LegEnd.UNCONFIRMED),
    )


@pytest.mark.parametrize("event", [Over(), Produced()], ids=lambda event: type(event).__name__)
def test_nothing_comes_from_a_call_that_was_closed(event: Event) -> None:
    leg = machine()
    leg.on(gone(is_paused=True))
    with pytest.raises(ValueError, match=r"call that was closed|state OWED"):
        leg.on(event)


def test_a_pause_before_the_first_abort_closes() -> None:
    play(machine(), gone(), Paused(10.01), [CLOSE, RELEASE, WakeAt(70.01)], LegState.OWED)
    play(machine(PAIR_STREAM), gone(), Paused(10.01), ends(LegEnd.DROPPED))


def test_a_pause_after_an_abort_suspends_the_schedule() -> None:
    leg = machine()
    play(leg, gone(), tick(10.0), Told(10.0), Paused(10.01), [WakeAt(70.01)], Resumed(20.0), [WakeAt(20.1)])
    play(leg, tick(20.1), [Abort(IDS)])


def test_called_off_in_a_pause_it_waits_for_its_end() -> None:
    leg = machine(STREAM)
    play(leg, off(is_paused=True), [WakeAt(70.0)], Resumed(20.0), [WakeAt(20.1)], tick(20.1), [Abort(IDS)])


def test_an_engine_that_loses_no_aborts_does_not_mind_a_pause() -> None:
    play(machine(VLLM), off(is_paused=True), [WakeAt(10.0)], Paused(10.0), [], tick(10.0), [Abort(IDS)])


@pytest.mark.parametrize("policy", POLICIES)
def test_pauses_mean_nothing_to_a_leg_that_is_not_aborted(policy: CancelPolicy) -> None:
    play(machine(policy), Paused(1.0), [], Resumed(2.0), [], LegState.WAITING)


# Legs that have to reach their first output.


def test_a4_2_a4_3_a_decode_leg_is_kept_to_its_first_output() -> None:
    """Mutation tried: closed at the cancel (A4.2); kept also after the first output (A4.3)."""
    play(machine(DECODE), gone(), [DETACH, WakeAt(40.0)], LegState.DRAINING, Produced(), ends(LegEnd.DRAINED))
    play(machine(DECODE), Produced(), gone(), ends(LegEnd.DROPPED))


def test_a4_1_a_decode_leg_that_is_not_written_yet_is_kept_too() -> None:
    """Mutation tried: S3.16's rule for the unwritten before the policy's."""
    play(machine(DECODE), gone(written_at=None), [DETACH, WakeAt(40.0)], LegState.DRAINING)


def test_a4_5_its_end_releases_it_too() -> None:
    play(machine(DECODE), gone(), Over(), ends(LegEnd.FINISHED))


def test_a4_6_whatever_breaks_after_the_cancel_is_its_end() -> None:
    leg = machine(DECODE)
    play(leg, gone(), Over("reset"), ends(LegEnd.ABANDONED, "reset"))  # nobody has taken the blocks over
    assert leg.cause is Cause.CLIENT_GONE


def test_a4_7_the_limit_is_set_once() -> None:
    """Mutation tried: the limit set anew by every event."""
    leg = machine(DECODE)
    play(leg, gone(), [DETACH, WakeAt(40.0)], gone(at=20.0), [], tick(39.0), [WakeAt(40.0)])
    play(leg, tick(40.0), ends(LegEnd.ABANDONED))


@pytest.mark.parametrize("before", [[], [gone()]], ids=["running", "draining"])
def test_a4_8_shutdown_does_not_wait(before: list[Event]) -> None:
    leg = machine(DECODE)
    for event in before:
        leg.on(event)
    play(leg, gone(at=11.0, cause=Cause.SHUTDOWN), ends(LegEnd.ABANDONED))


def test_a_draining_leg_takes_no_other_orders() -> None:
    play(machine(DECODE), gone(), off(), [], LegState.DRAINING)


# Any order.

EVENTS = st.one_of(
    st.just(Produced()),
    st.builds(Over, st.sampled_from(["", "reset"])),
    st.builds(gone, cause=st.sampled_from(list(Cause)[:6]), written_at=st.sampled_from([None, 0.0]),
              is_paused=st.booleans()),
    st.builds(off, written_at=st.sampled_from([None, 0.0]), is_paused=st.booleans(),
              items=st.sampled_from([(), ("a",), ("b",)])),
    st.builds(Revealed, st.just(0.0), st.sampled_from([("c",), ("c", "d")])),
    st.builds(Paused, st.just(0.0)),
    st.builds(Resumed, st.just(0.0)),
    st.builds(Tick, st.just(0.0), written_at=st.sampled_from([None, 0.0]), is_over=st.booleans()),
    st.builds(Told, st.just(0.0), is_refused=st.booleans()),
    st.just(GivenUp()),
)  # fmt: skip


@given(
    policy=st.sampled_from([p.values[0] for p in POLICIES]),
    ids=st.sampled_from([(), ("a",), IDS]),
    script=st.lists(st.tuples(EVENTS, st.floats(0, 50)), max_size=25),
)
def test_any_order_of_events_ends_once_and_aborts_nothing_afterwards(
    policy: CancelPolicy, ids: tuple[str, ...], script: list[tuple[Event, float]]
) -> None:
    leg = machine(policy, ids)
    now, ended, submitting, releases = 0.0, 0, False, 0
    causes: list[Cause] = []
    for event, step in script:
        now += step
        if hasattr(event, "at"):
            event.at = now
        if isinstance(event, Told) and not submitting:
            continue  # reported for a submission only
        submitting = submitting and not isinstance(event, Told)
        try:
            commands = leg.on(event)
        except ValueError:
            assert isinstance(event, Produced | Over)
            continue
        assert not (ended and commands)
        for command in commands:
            if isinstance(command, Abort):
                assert command.ids
                assert all(command.ids)
                assert not submitting
                submitting = True
            ended += isinstance(command, End)
            releases += command is RELEASE
        assert ended == (leg.state is LegState.ENDED)
        if leg.cause is not None:
            causes.append(leg.cause)
    assert len(set(causes)) <= 1
    assert releases <= 2
    leg.on(GivenUp())
    assert leg.state is LegState.ENDED

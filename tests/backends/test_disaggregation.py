"""Transcripts of requests over a prefill and a decode worker, and what holds in every one of them."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import pair_types
from backends.cancel_policy import CancelWindow, abort_capability
from backends.disaggregation import MAX_PREFILLS, PairMachine
from backends.leg_events import Cause
from backends.pair_events import (
    CalledOff,
    CallOffLeg,
    Cancelled,
    Command,
    DecodeEnded,
    DecodeFailed,
    DecodeItem,
    DecodeReady,
    DecodeUnsent,
    EndLeg,
    Event,
    Fail,
    Finish,
    LogFailure,
    Pass,
    PrefillDone,
    PrefillFailed,
    PrefillOpened,
    SendDecode,
    SendPrefill,
    Simple,
    StopLeg,
    Tick,
    WakeAt,
    in_order,
)
from backends.pair_types import (
    CALLED_OFF,
    HANDOFF_EXPIRED,
    HEADER_TIMEOUT,
    PREFILL_INCOMPLETE,
    PREFILL_PROTOCOL,
    Failure,
    HandoffPhase,
    Overlap,
    PairCapability,
    PairState,
    PairTimes,
    Part,
    PrefillState,
    pair_capability,
)
from backends.types import EngineKind

P, D = Part.PREFILL, Part.DECODE
OVER, DETACH, ABANDONED = Simple.OVER, Simple.DETACH_PREFILL, Simple.ABANDONED
GONE = Cause.CLIENT_GONE
TIMES = PairTimes()
SGLANG = pair_capability(EngineKind.SGLANG, abort_capability(EngineKind.SGLANG, (0, 5, 23)))
VLLM = pair_capability(EngineKind.VLLM, abort_capability(EngineKind.VLLM, (0, 32)))
NEVER = PairCapability(handoff_phase=HandoffPhase.HEADERS, cancel_window=CancelWindow.NEVER)
PRE_HANDOFF = PairCapability(handoff_phase=HandoffPhase.HEADERS, cancel_window=CancelWindow.PRE_HANDOFF)
VLLM_NEVER = PairCapability(
    handoff_phase=HandoffPhase.COMPLETION, cancel_window=CancelWindow.NEVER, must_consume_handoff=True
)
VLLM_FORGETFUL = PairCapability(handoff_phase=HandoffPhase.COMPLETION, cancel_window=CancelWindow.NEVER)
TENSORRT = PairCapability(
    handoff_phase=HandoffPhase.HEADERS, cancel_window=CancelWindow.PRE_HANDOFF, prefill_may_answer=True
)
BROKEN = Failure(502, "engine_error", "truncated", "the engine's answer broke off")
BUSY = Failure(503, "unavailable", "engine_error", "full", is_retryable=True)
REFUSED = Failure(400, "invalid_request", "rejected", "too long")
P_BROKEN = BROKEN.of_prefill()
HANDOFF = b'{"do_remote_prefill":true}'
DISPATCHED: list[Command] = [SendDecode()]

Step = tuple[Event, list[Command]]


def begun(capability: PairCapability, *, overlap: Overlap = Overlap.HEADERS, waits: bool = False) -> PairMachine:
    machine = PairMachine(capability, TIMES, overlap=overlap, waits_for_prefill=waits)
    commands = machine.start(0.0)
    assert commands[0] == SendPrefill(1)
    return machine


def play(machine: PairMachine, steps: list[Step]) -> None:
    for event, expected in steps:
        commands = [command for command in machine.on(event) if not isinstance(command, WakeAt)]
        assert commands == expected, event


TRANSCRIPTS: list[object] = [
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeItem(2, b"a"), [Pass(b"a")]),
            (PrefillDone(3), [EndLeg(P)]),
            (PrefillOpened(3), []),
            (PrefillDone(3), []),
            (PrefillFailed(3, BROKEN), []),
            (DecodeItem(4, b"b"), [Pass(b"b")]),
            (DecodeItem(5, b"c", is_ending=True), [Pass(b"c")]),
            (DecodeEnded(6, b"d"), [EndLeg(D), Finish(b"d"), OVER]),
        ],
        id="prefill ends while decode streams",
    ),
    pytest.param(
        SGLANG,
        [(PrefillFailed(1, BUSY), [EndLeg(P), Fail(BUSY.of_prefill()), OVER])],
        id="A0.2: prefill refuses, decode is not contacted",
    ),
    pytest.param(
        SGLANG,
        [
            (Tick(29.9), []),
            (Tick(30), [StopLeg(P, Cause.DEADLINE), Fail(HEADER_TIMEOUT), OVER]),
            (PrefillOpened(31), []),
        ],
        id="A0.3: prefill never answers",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (PrefillFailed(2, BROKEN), [EndLeg(P), StopLeg(D, Cause.SIBLING_FAILED), Fail(P_BROKEN), OVER]),
            (DecodeFailed(3, BUSY), []),
        ],
        id="A0.4: prefill fails while decode is asked; decode's own failure is late",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeItem(2, b"a"), [Pass(b"a")]),
            (DecodeItem(2, b"b"), [Pass(b"b")]),
            (DecodeItem(2, b"c"), [Pass(b"c")]),
            (PrefillFailed(3, BROKEN), [EndLeg(P), StopLeg(D, Cause.SIBLING_FAILED), Fail(P_BROKEN), OVER]),
        ],
        id="A0.5: prefill fails while decode streams",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeItem(2, b"a"), [Pass(b"a")]),
            (DecodeItem(3, b"end", is_ending=True), []),
            (DecodeEnded(4, b"[DONE]"), [EndLeg(D)]),
            (PrefillDone(5), [EndLeg(P), Finish(b"end[DONE]"), OVER]),
        ],
        id="A0.6: decode succeeds first, then prefill",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeItem(3, b"end", is_ending=True), []),
            (PrefillDone(4), [EndLeg(P), Pass(b"end")]),
            (Tick(40), []),
            (DecodeEnded(41, b"[DONE]"), [EndLeg(D), Finish(b"[DONE]"), OVER]),
        ],
        id="prefill ends inside decode's terminal",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeEnded(4, b"body"), [EndLeg(D)]),
            (PrefillFailed(5, BROKEN), [EndLeg(P), Fail(P_BROKEN), OVER]),
        ],
        id="A0.7: decode succeeds first, then prefill fails: the terminal is replaced",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeFailed(2, BUSY), [EndLeg(D), StopLeg(P, Cause.SIBLING_FAILED), Fail(BUSY), OVER]),
        ],
        id="A0.8: decode fails while prefill hangs",
    ),
    pytest.param(
        NEVER,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeFailed(2, BUSY), [EndLeg(D), DETACH, Fail(BUSY)]),
            (DecodeItem(2, b"late"), []),
            (DecodeEnded(2, b"late"), []),
            (DecodeUnsent(2), []),
            (DecodeFailed(2, BUSY), []),
            (PrefillFailed(9, BROKEN), [EndLeg(P), LogFailure(BROKEN), OVER]),
        ],
        id="S0.13: decode fails, prefill drains and its failure is logged",
    ),
    pytest.param(
        NEVER,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeFailed(2, BUSY), [EndLeg(D), DETACH, Fail(BUSY)]),
            (Tick(301), []),
            (Tick(302), [StopLeg(P, Cause.DEADLINE), OVER]),
        ],
        id="S0.16: also after decode's failure",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (Cancelled(2, GONE), [StopLeg(D, GONE), StopLeg(P, GONE), OVER]),
            (PrefillDone(3), []),
        ],
        id="client gone within the window",
    ),
    pytest.param(
        SGLANG,
        [(Cancelled(0.5, GONE), [StopLeg(P, GONE), OVER]), (PrefillOpened(1), [])],
        id="client gone before the handoff: decode is not sent",
    ),
    pytest.param(
        PRE_HANDOFF,
        [(Cancelled(0.5, GONE), [StopLeg(P, GONE), OVER])],
        id="A3.19: within the window before the handoff",
    ),
    pytest.param(
        PRE_HANDOFF,
        [
            (PrefillOpened(1), DISPATCHED),
            (Cancelled(2, GONE), [StopLeg(D, GONE), DETACH]),
            (CalledOff(2), []),
            (DecodeReady(2), []),
            (Cancelled(3, Cause.DEADLINE), []),
            (PrefillDone(4), [EndLeg(P), OVER]),
        ],
        id="A0.9, A3.19: not stopped after the handoff",
    ),
    pytest.param(
        NEVER,
        [
            (PrefillOpened(1), DISPATCHED),
            (Cancelled(2, GONE), [StopLeg(D, GONE), DETACH]),
            (Tick(301.9), []),
            (Tick(302), [StopLeg(P, Cause.DEADLINE), OVER]),
        ],
        id="S0.16: the tail has a limit",
    ),
    pytest.param(
        NEVER,
        [
            (Cancelled(2, GONE), [DETACH]),
            (PrefillOpened(3), []),
            (Cancelled(4, Cause.SHUTDOWN), [StopLeg(P, Cause.SHUTDOWN), OVER]),
        ],
        id="a shutdown ends the tail; a handoff that comes late is given to nobody",
    ),
    pytest.param(
        NEVER,
        [
            (PrefillOpened(1), DISPATCHED),
            (Cancelled(2, Cause.SHUTDOWN), [StopLeg(D, Cause.SHUTDOWN), StopLeg(P, Cause.SHUTDOWN), OVER]),
        ],
        id="a shutdown stops both",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (CalledOff(2), [CallOffLeg(D), CallOffLeg(P)]),
            (CalledOff(2), []),
            (PrefillDone(3), [EndLeg(P)]),
            (DecodeEnded(4, b"partial"), [EndLeg(D), Finish(b"partial"), OVER]),
        ],
        id="called off: the caller gets the partial answer",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (CalledOff(2), [CallOffLeg(D), CallOffLeg(P)]),
            (DecodeFailed(3, BROKEN), [EndLeg(D), StopLeg(P, Cause.SIBLING_FAILED), Fail(CALLED_OFF), OVER]),
        ],
        id="called off before the transfer: the engine's 500 is no failure",
    ),
    pytest.param(
        SGLANG,
        [
            (CalledOff(0.5), [CallOffLeg(P)]),
            (PrefillOpened(1), []),
            (PrefillFailed(2, BROKEN), [EndLeg(P), Fail(CALLED_OFF), OVER]),
        ],
        id="called off before the handoff: decode is not sent",
    ),
    pytest.param(
        SGLANG,
        [
            (CalledOff(0.5), [CallOffLeg(P)]),
            (PrefillOpened(1), []),
            (PrefillDone(2), [EndLeg(P), Fail(CALLED_OFF), OVER]),
        ],
        id="called off, and prefill succeeds all the same",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeUnsent(2), [EndLeg(D)]),
            (DecodeReady(90), [SendDecode()]),
            (DecodeUnsent(91), [EndLeg(D)]),
            (DecodeFailed(92, BUSY), [StopLeg(P, Cause.SIBLING_FAILED), Fail(BUSY), OVER]),
        ],
        id="decode's worker cannot be reached, nor another one",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeUnsent(2), [EndLeg(D)]),
            (CalledOff(3), [StopLeg(P, Cause.CLIENT_ABORT), Fail(CALLED_OFF), OVER]),
        ],
        id="called off while a worker for decode is looked for",
    ),
    pytest.param(
        SGLANG,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeUnsent(2), [EndLeg(D)]),
            (PrefillDone(3), [EndLeg(P)]),
            (Cancelled(4, GONE), [OVER]),
        ],
        id="client gone while a worker for decode is looked for",
    ),
    pytest.param(
        TENSORRT,
        [
            (PrefillOpened(1), DISPATCHED),
            (PrefillDone(2, answer=b"eos"), [EndLeg(P), StopLeg(D, Cause.FINISHED), Finish(b"eos"), OVER]),
        ],
        id="S0.19: prefill's first token ends it",
    ),
    pytest.param(
        TENSORRT,
        [
            (PrefillOpened(1), DISPATCHED),
            (Cancelled(2, GONE), [StopLeg(D, GONE), DETACH]),
            (PrefillDone(3, answer=b"eos"), [EndLeg(P), OVER]),
        ],
        id="S0.19, and the client is gone",
    ),
    # vLLM's form: the handoff is in prefill's answer.
    pytest.param(
        VLLM,
        [
            (Tick(100), []),
            (PrefillOpened(100), []),
            (PrefillDone(101, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (DecodeItem(102, b"role", has_output=False), []),
            (DecodeItem(103, b"a"), [Pass(b"rolea")]),
            (DecodeItem(140, b"", has_output=False), []),
            (DecodeItem(141, b"b", is_ending=True), [Pass(b"b")]),
            (DecodeEnded(142), [EndLeg(D), Finish(b""), OVER]),
        ],
        id="vLLM",
    ),
    pytest.param(
        VLLM,
        [(PrefillFailed(1, REFUSED), [EndLeg(P), Fail(REFUSED.of_prefill()), OVER])],
        id="vLLM: prefill refuses",
    ),
    pytest.param(
        VLLM,
        [(PrefillDone(1), [EndLeg(P), Fail(PREFILL_PROTOCOL), OVER])],
        id="vLLM: no handoff in prefill's answer",
    ),
    pytest.param(
        VLLM,
        [
            (PrefillDone(1, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (DecodeItem(2, b"role", has_output=False), []),
            (Tick(30.9), []),
            (Tick(31), [StopLeg(D, Cause.ENGINE_ERROR), Fail(HANDOFF_EXPIRED), OVER]),
        ],
        id="vLLM: no output before the lease ends",
    ),
    pytest.param(
        VLLM,
        [
            (PrefillDone(1, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (DecodeItem(31, b"a", is_ending=True), [StopLeg(D, Cause.ENGINE_ERROR), Fail(HANDOFF_EXPIRED), OVER]),
        ],
        id="vLLM: the first output after the lease, and before the timer",
    ),
    pytest.param(
        VLLM,
        [
            (PrefillDone(1, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (DecodeEnded(31, b"{}"), [StopLeg(D, Cause.ENGINE_ERROR), Fail(HANDOFF_EXPIRED), OVER]),
        ],
        id="vLLM: the whole answer after the lease",
    ),
    pytest.param(
        VLLM,
        [
            (PrefillDone(1, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (DecodeUnsent(2), [EndLeg(D)]),
            (DecodeReady(21), [SendDecode(HANDOFF)]),
            (DecodeUnsent(21), [EndLeg(D)]),
            (Tick(31), []),
            (DecodeReady(31), [ABANDONED, SendPrefill(2)]),
            (PrefillDone(32, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (DecodeEnded(61, b"{}"), [EndLeg(D), Finish(b"{}"), OVER]),
        ],
        id="vLLM: a handoff that is too old is not dispatched",
    ),
    pytest.param(
        VLLM,
        [
            (PrefillDone(1, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (Cancelled(2, GONE), [StopLeg(D, GONE), OVER]),
        ],
        id="vLLM: client gone, decode is told and takes the blocks over by its policy",
    ),
    pytest.param(
        VLLM,
        [
            (PrefillDone(1, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
            (DecodeUnsent(2), [EndLeg(D)]),
            (Cancelled(3, GONE), [ABANDONED, OVER]),
        ],
        id="vLLM: client gone while no decode worker can be had",
    ),
    pytest.param(
        VLLM,
        [
            (CalledOff(1), [CallOffLeg(P)]),
            (
                PrefillDone(2, HANDOFF),
                [
                    EndLeg(P),
                    SendDecode(HANDOFF, is_release=True),
                    StopLeg(D, Cause.CLIENT_ABORT),
                    Fail(CALLED_OFF),
                    OVER,
                ],
            ),
        ],
        id="S3.26: called off, but prefill has a handoff",
    ),
    pytest.param(
        VLLM_NEVER,
        [
            (Cancelled(1, GONE), [DETACH]),
            (
                PrefillDone(2, HANDOFF),
                [EndLeg(P), SendDecode(HANDOFF, is_release=True), StopLeg(D, GONE), OVER],
            ),
        ],
        id="S4.1: client gone during prefill that may not be stopped: decode is sent to take the blocks over",
    ),
    pytest.param(
        VLLM_FORGETFUL,
        [(Cancelled(1, GONE), [DETACH]), (PrefillDone(2, HANDOFF), [EndLeg(P), ABANDONED, OVER])],
        id="the same without a need to take them over",
    ),
]


@pytest.mark.parametrize(("capability", "steps"), TRANSCRIPTS)
def test_transcripts(capability: PairCapability, steps: list[Step]) -> None:
    machine = begun(capability)
    play(machine, steps)
    assert machine.is_over
    assert machine.state is PairState.ENDED
    assert not machine.is_detached


def test_prefill_again_has_a_limit() -> None:
    machine = begun(VLLM)
    for number in range(1, MAX_PREFILLS + 1):
        at = number * 100.0
        last = number == MAX_PREFILLS
        again: list[Command] = [Fail(HANDOFF_EXPIRED), OVER] if last else [SendPrefill(number + 1)]
        play(
            machine,
            [
                (PrefillDone(at, HANDOFF), [EndLeg(P), SendDecode(HANDOFF)]),
                (DecodeUnsent(at), [EndLeg(D)]),
                (DecodeReady(at + 20.1), [ABANDONED, *again]),
            ],
        )


def test_immediate_sends_both_at_once() -> None:
    machine = PairMachine(SGLANG, TIMES, overlap=Overlap.IMMEDIATE)
    assert machine.start(5.0) == [SendPrefill(1), SendDecode(), WakeAt(35.0)]
    play(
        machine,
        [
            (PrefillOpened(6), []),
            (DecodeItem(7, b"a"), [Pass(b"a")]),
            (PrefillDone(8), [EndLeg(P)]),
            (DecodeEnded(9), [EndLeg(D), Finish(b""), OVER]),
        ],
    )


def test_immediate_stops_decode_when_prefill_refuses_or_is_silent() -> None:
    machine = begun(SGLANG, overlap=Overlap.IMMEDIATE)
    stop = StopLeg(D, Cause.SIBLING_FAILED)
    play(machine, [(PrefillFailed(1, BUSY), [EndLeg(P), stop, Fail(BUSY.of_prefill()), OVER])])
    machine = begun(SGLANG, overlap=Overlap.IMMEDIATE)
    play(machine, [(Tick(30), [StopLeg(P, Cause.DEADLINE), stop, Fail(HEADER_TIMEOUT), OVER])])


def test_immediate_means_nothing_where_decode_needs_prefills_answer() -> None:
    assert PairMachine(VLLM, TIMES, overlap=Overlap.IMMEDIATE).start(0.0) == [SendPrefill(1)]


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole answer", "stream without its last bytes"])
def test_the_hold_is_bounded_and_never_restarted(is_whole: bool) -> None:
    """A0.10: what prefill sends meanwhile is no event, and neither is time."""
    machine = begun(NEVER)
    machine.on(PrefillOpened(1))
    first = machine.on(DecodeItem(2, b"end", is_ending=True))
    assert first == [WakeAt(32.0)]
    stopped: list[Command] = [StopLeg(D, Cause.DEADLINE)]
    if is_whole:
        stopped = []
        play(machine, [(DecodeEnded(10), [EndLeg(D)])])
    for second in range(11, 32):
        assert machine.on(Tick(second)) == [WakeAt(32.0)]
    assert machine.on(Tick(32)) == [*stopped, Fail(PREFILL_INCOMPLETE), DETACH, WakeAt(332.0)]
    assert machine.is_detached
    play(machine, [(PrefillDone(40), [EndLeg(P), OVER])])


def test_a_hold_of_nought_is_none() -> None:
    machine = PairMachine(SGLANG, PairTimes(hold_s=0))
    machine.start(0.0)
    machine.on(PrefillOpened(1))
    play(
        machine,
        [(DecodeEnded(2, b"x"), [EndLeg(D)]), (Tick(1e6), []), (PrefillDone(1e6), [EndLeg(P), Finish(b"x"), OVER])],
    )


def test_prefill_is_detached_when_the_hold_ends_even_inside_its_window() -> None:
    machine = begun(SGLANG)
    play(
        machine,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeEnded(2, b"x"), [EndLeg(D)]),
            (Tick(32), [Fail(PREFILL_INCOMPLETE), DETACH]),
            (PrefillFailed(33, BROKEN), [EndLeg(P), LogFailure(BROKEN), OVER]),
        ],
    )


def test_load_of_prefill_is_held_until_its_end() -> None:
    """A0.17, S0.18: no command before prefill's end gives it back."""
    machine = begun(SGLANG)
    seen = [*machine.on(PrefillOpened(1)), *machine.on(DecodeItem(2, b"a")), *machine.on(DecodeEnded(3))]
    assert EndLeg(P) not in seen
    assert EndLeg(P) in machine.on(PrefillDone(4))


def test_the_first_events_wait_for_prefill_where_the_client_wants_something_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_types, "HELD_LIMIT_BYTES", 3)
    machine = begun(SGLANG, waits=True)
    assert not machine.wants_decode
    play(machine, [(PrefillOpened(1), DISPATCHED), (DecodeItem(2, b"ab"), [])])
    assert machine.wants_decode
    play(machine, [(DecodeItem(3, b"cd"), [])])
    assert not machine.wants_decode
    assert not machine.has_passed
    play(machine, [(PrefillDone(4), [EndLeg(P), Pass(b"abcd")]), (DecodeItem(5, b"e"), [Pass(b"e")])])
    assert machine.has_passed
    assert machine.wants_decode


def test_a_failure_of_decode_is_told_though_its_events_wait() -> None:
    machine = begun(SGLANG, waits=True)
    stop = StopLeg(P, Cause.SIBLING_FAILED)
    play(
        machine,
        [
            (PrefillOpened(1), DISPATCHED),
            (DecodeItem(2, b"a"), []),
            (DecodeFailed(3, BUSY), [EndLeg(D), stop, Fail(BUSY), OVER]),
        ],
    )
    assert not machine.has_passed


@pytest.mark.parametrize("run", range(200))
def test_prefills_failure_wins_in_the_same_moment(run: int) -> None:
    """A0.16, whatever the order in which the readers report."""
    machine = begun(SGLANG)
    machine.on(PrefillOpened(1))
    events: list[Event] = [DecodeEnded(2, b"x"), PrefillFailed(2, BROKEN), Cancelled(2, GONE)]
    random.Random(run).shuffle(events)
    commands = [command for event in in_order(events) for command in machine.on(event)]
    assert commands == [EndLeg(P), StopLeg(D, Cause.SIBLING_FAILED), Fail(P_BROKEN), OVER]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param(
            [DecodeEnded(2, b"x"), PrefillDone(2)], [EndLeg(P), EndLeg(D), Finish(b"x"), OVER], id="both succeed"
        ),
        pytest.param(
            [DecodeItem(2, b"x"), Cancelled(2, GONE)], [StopLeg(D, GONE), StopLeg(P, GONE), OVER], id="item dropped"
        ),
        pytest.param(
            [Cancelled(2, GONE), PrefillDone(2), DecodeEnded(2, b"x")],
            [EndLeg(P), EndLeg(D), Finish(b"x"), OVER],
            id="the end counts for reporting",
        ),
        pytest.param(
            [PrefillFailed(2, BROKEN), Cancelled(2, Cause.SHUTDOWN)],
            [StopLeg(D, Cause.SHUTDOWN), StopLeg(P, Cause.SHUTDOWN), OVER],
            id="a shutdown comes first",
        ),
    ],
)
def test_events_of_one_moment(events: list[Event], expected: list[Command]) -> None:
    machine = begun(SGLANG)
    machine.on(PrefillOpened(1))
    assert [command for event in in_order(events) for command in machine.on(event)] == expected


def test_opening_comes_before_decode_in_one_moment() -> None:
    assert in_order([DecodeItem(1, b"a"), PrefillOpened(1)]) == [PrefillOpened(1), DecodeItem(1, b"a")]


@pytest.mark.parametrize(
    ("capability", "before", "event"),
    [
        pytest.param(SGLANG, [PrefillOpened(1)], PrefillOpened(2), id="S0.1: a second handoff"),
        pytest.param(SGLANG, [], PrefillDone(1), id="an end before the headers"),
        pytest.param(SGLANG, [PrefillOpened(1)], PrefillDone(1, answer=b"x"), id="an answer of prefill"),
        pytest.param(SGLANG, [PrefillOpened(1)], DecodeReady(1), id="a worker nobody looks for"),
        pytest.param(SGLANG, [PrefillOpened(1), DecodeItem(1, b"a")], DecodeUnsent(1), id="unsent, but answering"),
    ],
)
def test_impossible_events_raise(capability: PairCapability, before: list[Event], event: Event) -> None:
    machine = begun(capability)
    for one in before:
        machine.on(one)
    with pytest.raises(ValueError, match=r"prefill|decode"):
        machine.on(event)


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [(BROKEN, "prefill_failed"), (BUSY, "prefill_failed"), (REFUSED, "rejected"), (HEADER_TIMEOUT, "timeout")],
)
def test_failures_of_prefill_are_counted_as_such(failure: Failure, outcome: str) -> None:
    counted = failure.of_prefill()
    assert (counted.outcome, counted.part, counted.status) == (outcome, P, failure.status)


def test_capabilities_follow_the_engines() -> None:
    assert SGLANG.is_early
    assert not SGLANG.must_consume_handoff
    assert not VLLM.is_early
    assert VLLM.must_consume_handoff
    unknown = pair_capability(EngineKind.SGLANG, abort_capability(EngineKind.SGLANG, ()))
    assert unknown.cancel_window is CancelWindow.NEVER


def test_the_state_is_told() -> None:
    machine = PairMachine(SGLANG, TIMES)
    assert machine.prefill is PrefillState.SELECTED
    machine.start(0.0)
    seen = [(machine.state, machine.prefill)]
    events: list[Event] = [PrefillOpened(1), DecodeItem(2, b"a"), DecodeItem(3, b"b", is_ending=True)]
    for event in [*events, Cancelled(4, GONE), Cancelled(5, Cause.SHUTDOWN)]:
        machine.on(event)
        seen.append((machine.state, machine.prefill))
    assert seen == [
        (PairState.WAIT_HANDOFF, PrefillState.CONNECTING),
        (PairState.DISPATCH, PrefillState.OPEN),
        (PairState.STREAM, PrefillState.OPEN),
        (PairState.HOLD, PrefillState.OPEN),
        (PairState.ENDED, PrefillState.STOPPED),
        (PairState.ENDED, PrefillState.STOPPED),
    ]
    assert machine.cause is GONE


# What holds in every transcript.

PREFILL_KINDS = ["open", "done", "p fails"]
DECODE_KINDS = ["item", "role", "ending", "ended", "d fails", "unsent", "ready"]
KINDS = st.sampled_from([*PREFILL_KINDS, *DECODE_KINDS, "gone", "shutdown", "call off", "tick", "long"])
CAPABILITIES = st.sampled_from([SGLANG, NEVER, PRE_HANDOFF, VLLM, VLLM_NEVER, VLLM_FORGETFUL, TENSORRT])


class Shell:
    """Executes commands by the book, and reports only what a shell could see."""

    def __init__(self, capability: PairCapability, *, is_early: bool, waits: bool) -> None:
        overlap = Overlap.IMMEDIATE if is_early else Overlap.HEADERS
        self.capability = capability
        self.machine = PairMachine(capability, TIMES, overlap=overlap, waits_for_prefill=waits)
        self.now = 0.0
        self.live: set[Part] = set()
        self.sent: Counter[Part] = Counter()
        self.told: Counter[Part] = Counter()
        self.is_permitted = is_early and capability.is_early
        self.is_open = self.is_wanted = self.has_answered = self.prefill_failed = self.is_cancelled = False
        self.terminals: list[Command] = []
        self.woken_at: float | None = None
        self.execute(self.machine.start(0.0))

    def execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, SendPrefill):
                assert P not in self.live
                self._send(P)
                self.is_open = self.is_wanted = False
            elif isinstance(command, SendDecode):
                assert self.is_permitted
                assert bool(command.handoff) is not self.capability.is_early
                assert not self.terminals
                self._send(D)
                self.has_answered = self.is_wanted = False
            elif isinstance(command, EndLeg | StopLeg):
                assert command.part in self.live
                self.live.discard(command.part)
                self.told[command.part] += 1
            elif isinstance(command, CallOffLeg):
                assert command.part in self.live
            elif isinstance(command, Pass):
                assert not self.terminals
                assert not self.is_cancelled
                assert command.block
            elif isinstance(command, Finish | Fail):
                assert not self.is_cancelled
                assert not (isinstance(command, Finish) and self.prefill_failed)
                self.terminals.append(command)
            elif isinstance(command, WakeAt):
                self.woken_at = command.at

    def _send(self, part: Part) -> None:
        self.live.add(part)
        self.sent[part] += 1

    def event(self, kind: str) -> Event | None:
        """The event of a kind, if it can happen now."""
        early, at = self.capability.is_early, self.now
        if P in self.live:
            if kind == "open" and not self.is_open:
                self.is_open, self.is_permitted = True, self.is_permitted or early
                return PrefillOpened(at)
            if kind == "done" and (self.is_open or not early):
                self.is_permitted = True
                return PrefillDone(at, b"" if early else HANDOFF)
            if kind == "p fails":
                self.prefill_failed = not self.terminals
                return PrefillFailed(at, BROKEN)
        if D in self.live:
            if kind == "unsent" and not self.has_answered:
                self.is_wanted = True
                return DecodeUnsent(at)
            if kind in ("item", "role", "ending"):
                self.has_answered = True
                return DecodeItem(at, b"x", has_output=kind != "role", is_ending=kind == "ending")
            if kind == "ended":
                return DecodeEnded(at, b"x")
        if kind == "d fails" and (D in self.live or self.is_wanted):
            self.is_wanted = False
            return DecodeFailed(at, BUSY)
        if kind == "ready" and self.is_wanted:
            return DecodeReady(at)
        if kind in ("gone", "shutdown"):
            self.is_cancelled = self.is_cancelled or not self.terminals
            return Cancelled(at, GONE if kind == "gone" else Cause.SHUTDOWN)
        return CalledOff(at) if kind == "call off" else None

    def step(self, kind: str) -> None:
        if kind in ("tick", "long"):
            self.now = max(self.now, self.woken_at or 0.0) if kind == "tick" else self.now + 21
            event: Event | None = Tick(self.now)
        else:
            self.now += 0.25
            event = self.event(kind)
        if event is not None and not self.machine.is_over:
            self.execute(self.machine.on(event))


@given(CAPABILITIES, st.booleans(), st.booleans(), st.lists(KINDS, max_size=25), st.booleans())
def test_every_transcript_keeps_the_rules(
    capability: PairCapability, is_early: bool, waits: bool, kinds: list[str], fails: bool
) -> None:
    """Never two terminals, no success after prefill's failure, no decode without leave, each leg told exactly once."""
    shell = Shell(capability, is_early=is_early, waits=waits)
    for kind in kinds:
        shell.step(kind)
        assert len(shell.terminals) <= 1
    for kind in ("d fails" if fails else "ready", "open", "p fails" if fails else "done", "ended", "d fails", "done"):
        shell.step(kind)
    for _ in range(3):  # whatever is still due comes due
        shell.step("tick")
    assert shell.machine.is_over
    assert not shell.live
    assert shell.told == shell.sent
    assert len(shell.terminals) == (0 if shell.is_cancelled else 1)

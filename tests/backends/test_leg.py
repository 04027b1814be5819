"""Legs: what cancelling does at each stage, and that everything is given back once."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from backends.cancel_policy import CancelPolicy, OnCancel
from backends.leg import Leg
from backends.leg_events import (
    Cause,
    End,
    GivenUp,
    LegEnd,
    LegState,
    LegTimes,
    Paused,
    Resumed,
    Tick,
    Told,
)
from backends.lifecycle import LegMachine
from backends.sglang.backend import SGLangBackend
from backends.types import Worker
from backends.upstream.base import AnswerHead, Origin, UpstreamRequest
from backends.vllm.backend import VLLMBackend


class Call:
    """A call that notes what is done to it."""

    def __init__(self, *, is_written: bool = True, is_complete: bool = False) -> None:
        self.written_at = 1.0 if is_written else None
        self.is_complete = is_complete
        self.is_over = is_complete
        self.log: list[str] = []

    async def head(self) -> AnswerHead:
        raise NotImplementedError

    async def read(self) -> bytes:
        raise NotImplementedError

    def call_when_ready(self, ready: Callable[[], None]) -> bool:
        return False

    def whole(self) -> None:
        return None

    def drop_whole(self) -> None:
        raise AssertionError("there was none")

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        raise NotImplementedError

    def interrupt(self) -> None:
        self.log.append("interrupt")

    def close(self) -> None:
        self.log.append("close")


class Client:
    """A client that nobody asks for anything."""

    active_connections = connecting = idle_connections = 0

    def send(self, origin: Origin, request: UpstreamRequest) -> Call:
        raise NotImplementedError

    async def aclose(self) -> None:
        raise NotImplementedError


class Booking:
    """A booking that notes what is done to it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def first_token(self) -> None:
        self.log.append("first_token")

    def release(self) -> None:
        self.log.append("release")


class Keeper:
    """A keeper that notes what it is asked for."""

    times = LegTimes()

    def __init__(self) -> None:
        self.log: list[object] = []
        self.ends: list[End] = []

    def now(self) -> float:
        return 10.0

    def submit(self, leg: Leg, engine_ids: tuple[str, ...]) -> None:
        self.log.append(("abort", *engine_ids))

    def wake(self, leg: Leg, at: float) -> None:
        self.log.append(("wake", at))

    def read_on(self, leg: Leg) -> None:
        self.log.append("read on")

    def ended(self, leg: Leg, end: End) -> None:
        self.ends.append(end)


CLOSES = CancelPolicy(OnCancel.DROP, is_stream=True)
ABORTS = CancelPolicy(OnCancel.ABORT, is_stream=False)
DRAINS = CancelPolicy(OnCancel.DRAIN_TO_FIRST_OUTPUT, is_stream=True)


class Parts:
    """A leg and all that it touches."""

    def __init__(self, call: Call | None = None, policy: CancelPolicy = ABORTS, *, is_vllm: bool = False) -> None:
        self.call = call or Call()
        self.booking = Booking()
        self.keeper = Keeper()
        self.ended: list[Leg] = []
        self.first_tokens = 0
        self.leg = Leg(
            worker=Worker("w", "http://w", Origin("http", "w", 80)),
            backend=VLLMBackend(Client()) if is_vllm else SGLangBackend(Client()),
            engine_ids=("e", "f"),
            policy=policy,
            call=self.call,
            booking=self.booking,
            keeper=self.keeper,
            on_end=self.ended.append,
            on_first_token=self.count,
        )

    def count(self) -> None:
        self.first_tokens += 1


def test_the_end_gives_everything_back_once() -> None:
    parts = Parts()
    parts.leg.first_token()
    parts.leg.first_token()
    assert parts.first_tokens == 1
    parts.leg.end()
    parts.leg.end()
    assert parts.leg.is_ended
    assert (parts.call.log, parts.booking.log) == (["close"], ["first_token", "release"])
    assert (parts.ended, parts.keeper.ends) == ([parts.leg], [End(LegEnd.FINISHED)])
    assert parts.keeper.log == []


def test_a_policy_to_drop_ends_here_and_now() -> None:
    parts = Parts(policy=CLOSES)
    parts.leg.cancel(Cause.CLIENT_GONE)
    assert parts.leg.is_ended
    assert not parts.leg.is_detached
    assert (parts.leg.cause, parts.call.log, parts.keeper.log) == (Cause.CLIENT_GONE, ["close"], [])


def test_other_policies_hand_the_reading_over_and_keep_the_booking() -> None:
    parts = Parts()
    parts.leg.cancel(Cause.CLIENT_GONE)
    assert parts.leg.is_detached
    assert not parts.leg.is_ended
    assert (parts.call.log, parts.keeper.log) == (["interrupt"], ["read on", ("wake", 10.0)])
    parts.leg.on(Tick(10.0, 1.0))
    assert parts.keeper.log[2:] == [("abort", "e", "f"), ("wake", 18.0)]
    assert parts.leg.is_told
    assert parts.booking.log == []
    parts.leg.cancel(Cause.SHUTDOWN)
    assert parts.leg.cause is Cause.CLIENT_GONE


def test_a3_3_what_has_ended_or_was_never_written_is_only_closed() -> None:
    for call in (Call(is_written=False), Call(is_complete=True)):
        parts = Parts(call)
        parts.leg.cancel(Cause.CLIENT_GONE)
        assert parts.leg.is_ended
        assert not parts.leg.is_detached
        assert (parts.call.log, parts.keeper.log) == (["close"], [])


def test_called_off_it_is_still_the_exchanges_to_read() -> None:
    parts = Parts()
    parts.leg.call_off()
    assert parts.leg.was_called_off
    assert (parts.leg.is_detached, parts.leg.is_ended) == (False, False)
    assert parts.keeper.log == [("wake", 10.0)]
    parts.leg.end()
    parts.leg.call_off()
    assert parts.keeper.log == [("wake", 10.0)]


def test_items_can_be_called_off_by_their_ids() -> None:
    parts = Parts()
    parts.leg.call_off(("f",))
    parts.leg.on(Tick(10.0, 1.0))
    assert parts.keeper.log[1] == ("abort", "f")


def test_owed_aborts_are_owed_when_everything_is_given_back() -> None:
    parts = Parts(policy=CancelPolicy(OnCancel.ABORT, is_stream=False, loses_aborts_in_pause=True))
    parts.leg.cancel(Cause.CLIENT_GONE, is_paused=True)
    assert parts.leg.is_ended
    assert (parts.booking.log, parts.keeper.ends, parts.leg.state) == (["release"], [], LegState.OWED)
    parts.leg.first_token()  # the exchange looks at what it had read, and ends
    parts.leg.end()
    assert (parts.booking.log, parts.leg.state) == (["release"], LegState.OWED)


def test_revealed_ids_are_aborted_with_the_rest() -> None:
    parts = Parts()
    parts.leg.reveal(())
    parts.leg.reveal(("g",))
    parts.leg.cancel(Cause.CLIENT_GONE)
    parts.leg.on(Tick(10.0, 1.0))
    assert ("abort", "e", "f", "g") in parts.keeper.log


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'


def test_a4_4_where_the_first_output_matters_other_events_are_no_evidence() -> None:
    parts = Parts(policy=DRAINS, is_vllm=True)
    parts.leg.saw(ROLE)
    assert parts.booking.log == []
    parts.leg.saw(ROLE + TOKEN)
    parts.leg.saw(b"data: no JSON at all, of no interest now\n\n")
    assert parts.booking.log == ["first_token"]


def test_elsewhere_any_event_is_output() -> None:
    parts = Parts(policy=CLOSES, is_vllm=True)
    parts.leg.saw(ROLE)
    assert parts.booking.log == ["first_token"]


_STEPS: dict[str, Callable[[Leg], None]] = {
    "output": Leg.first_token,
    "end": Leg.end,
    "broken": lambda leg: leg.end("broken"),
    "gone": lambda leg: leg.cancel(Cause.CLIENT_GONE),
    "gone in a pause": lambda leg: leg.cancel(Cause.CLIENT_GONE, is_paused=True),
    "shutdown": lambda leg: leg.cancel(Cause.SHUTDOWN),
    "called off": Leg.call_off,
    "item called off": lambda leg: leg.call_off(("f",)),
    "revealed": lambda leg: leg.reveal(("g",)),
    "paused": lambda leg: leg.on(Paused(10.0)),
    "resumed": lambda leg: leg.on(Resumed(10.0)),
    "tick": lambda leg: leg.on(Tick(10.5, 1.0)),
    "told": lambda leg: leg.on(Told(10.5)),
    "given up": lambda leg: leg.on(GivenUp()),
}
_POLICIES = [
    CLOSES,
    ABORTS,
    DRAINS,
    CancelPolicy(OnCancel.ABORT, is_stream=True, loses_aborts_in_pause=True),
    CancelPolicy(OnCancel.ABORT, is_stream=False, closes_after_abort=True),
]


@given(st.lists(st.sampled_from(sorted(_STEPS)), max_size=8), st.sampled_from(_POLICIES), st.booleans())
def test_a_leg_without_a_machine_does_what_the_machine_says(
    steps: list[str], policy: CancelPolicy, is_complete: bool
) -> None:
    """The same events, to a leg as it is and to one that asks its machine from the beginning."""
    plain, asked = Parts(Call(is_complete=is_complete), policy), Parts(Call(is_complete=is_complete), policy)
    asked.leg._machine = LegMachine(policy, asked.leg.engine_ids, LegTimes())
    for step in steps:
        seen = []
        for parts in (plain, asked):
            leg = parts.leg
            try:
                _STEPS[step](leg)
                raised = ""
            except ValueError as exc:
                raised = str(exc)
            flags = leg.is_ended, leg.is_detached, leg.was_called_off, leg.has_output
            logs = parts.call.log, parts.booking.log, parts.keeper.log, parts.keeper.ends
            seen.append((raised, leg.state, leg.cause, leg.is_told, flags, logs, len(parts.ended), parts.first_tokens))
        assert seen[0] == seen[1]

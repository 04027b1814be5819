"""What can happen to a request over a prefill and a decode worker, and what can be done about it. Pure data."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from backends.leg_events import Cause
from backends.pair_types import Failure, Part

# Events. ``at`` is the clock's time.


@dataclass(slots=True)
class PrefillOpened:
    """Prefill has answered with headers of success."""

    at: float


@dataclass(slots=True)
class PrefillDone:
    """Prefill's answer has ended well.

    Attributes:
        handoff: What decode needs of it, where that is in the answer; else empty.
        answer: Not empty where it is the whole answer for the client.
    """

    at: float
    handoff: bytes = b""
    answer: bytes = b""


@dataclass(slots=True)
class PrefillFailed:
    """Prefill has failed, in whichever way: no connection, a status, an error inside of its answer, a broken one."""

    at: float
    failure: Failure


@dataclass(slots=True)
class DecodeUnsent:
    """The worker for decode could not be reached, so it has seen nothing; another one is looked for."""

    at: float


@dataclass(slots=True)
class DecodeReady:
    """Another worker for decode is there."""

    at: float


@dataclass(slots=True)
class DecodeItem:
    """Whole events of decode's answer, or a piece of its body.

    Attributes:
        block: The bytes.
        has_output: They show that decode has generated something, or has ended.
        is_ending: They hold a success terminal, or a part of one; what follows it belongs to it.
    """

    at: float
    block: bytes
    has_output: bool = True
    is_ending: bool = False


@dataclass(slots=True)
class DecodeEnded:
    """Decode's answer has ended with success; ``block`` is what has not been reported of it."""

    at: float
    block: bytes = b""


@dataclass(slots=True)
class DecodeFailed:
    """Decode has failed, or was cancelled by its engine."""

    at: float
    failure: Failure


@dataclass(slots=True)
class Cancelled:
    """Nobody waits for the answer any more, or nobody may: who is still to be told, the exchange tells."""

    at: float
    cause: Cause


@dataclass(slots=True)
class CalledOff:
    """The client wants the engines to stop, and the answer that there is."""

    at: float


@dataclass(slots=True)
class Tick:
    """The time that ``WakeAt`` asked for has come, or an earlier one."""

    at: float


Event = (
    PrefillOpened
    | PrefillDone
    | PrefillFailed
    | DecodeUnsent
    | DecodeReady
    | DecodeItem
    | DecodeEnded
    | DecodeFailed
    | Cancelled
    | CalledOff
    | Tick
)


def in_order(events: Sequence[Event]) -> list[Event]:
    """Events that became known at the same moment, in the order in which they count.

    A shutdown comes first, then prefill's failure, then its success, then decode, then the client's leaving: but items
    that are no end are dropped where it left.
    """
    is_ended = any(isinstance(event, DecodeEnded | DecodeFailed) for event in events)
    return sorted(events, key=lambda event: _rank(event, leaving=6 if is_ended else 4))


def _rank(event: Event, leaving: int) -> int:
    if isinstance(event, Cancelled):
        return 0 if event.cause is Cause.SHUTDOWN else leaving
    if isinstance(event, PrefillFailed):
        return 1
    if isinstance(event, PrefillOpened):
        return 2
    return 3 if isinstance(event, PrefillDone) else 5


# Commands.


@dataclass(slots=True)
class SendPrefill:
    """Send the prefill leg; ``number`` counts from 1, and each has a fresh engine id."""

    number: int


@dataclass(slots=True)
class SendDecode:
    """Send the decode leg.

    Attributes:
        handoff: What prefill's answer holds for it; empty where it is known without.
        is_release: Only so that it takes the blocks over: one token, which nobody gets.
    """

    handoff: bytes = b""
    is_release: bool = False


@dataclass(slots=True)
class EndLeg:
    """A leg's answer has ended, or never began: give back what is booked for it."""

    part: Part


@dataclass(slots=True)
class StopLeg:
    """Cancel a leg in the way of its policy; the machine hears no more of it."""

    part: Part
    cause: Cause


@dataclass(slots=True)
class CallOffLeg:
    """Have the engine stop a leg, whose answer is still read here."""

    part: Part


@dataclass(slots=True)
class Pass:
    """Send this to the client."""

    block: bytes


@dataclass(slots=True)
class Finish:
    """Send this to the client, and end its answer with success."""

    block: bytes


@dataclass(slots=True)
class Fail:
    """Tell the client, in the way that is still open, or try another pair where that is allowed."""

    failure: Failure


@dataclass(slots=True)
class LogFailure:
    """Prefill has failed and nobody is there to be told: log it with both ids."""

    failure: Failure


class Simple(enum.Enum):
    """Commands without data."""

    DETACH_PREFILL = "the prefill leg goes on under its process-wide owner, which goes on to report to the machine"
    ABANDONED = "a handoff is left that no decode worker will take over: count it"
    OVER = "nothing is left: forget the machine"


@dataclass(slots=True)
class WakeAt:
    """Report ``Tick`` at this time; replaces an earlier one."""

    at: float


Command = SendPrefill | SendDecode | EndLeg | StopLeg | CallOffLeg | Pass | Finish | Fail | LogFailure | Simple | WakeAt

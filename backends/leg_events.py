"""What can happen to a leg and what can be done about it: states, events and commands of its life. Pure data."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from backends.quick_enum import quick

# Sleeps between submissions of an abort: at most nine submissions over 4.55 s.
ABORT_RETRY_SLEEPS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0)


@quick
class Cause(enum.StrEnum):
    """Why a leg ended; the first one stays."""

    CLIENT_GONE = "client_gone"
    CLIENT_ABORT = "client_abort"
    DEADLINE = "deadline"
    SIBLING_FAILED = "sibling_failed"
    SHUTDOWN = "shutdown"
    WORKER_REMOVED = "worker_removed"
    ENGINE_ERROR = "engine_error"
    FINISHED = "finished"


@quick
class LegState(enum.Enum):
    """Where a leg stands."""

    WAITING = "the engine has shown no output; perhaps it has not got the request yet"
    ANSWERING = "the engine shows output"
    CALLED_OFF = "aborted for its client, who still reads"
    TELLING = "aborted; what comes is read and dropped"
    OWED = "closed while the engine was paused, to be aborted when it goes on"
    DRAINING = "nobody reads; kept until the first output"
    ENDED = "over"


@quick
class LegEnd(enum.Enum):
    """How a leg ended."""

    FINISHED = "by itself, or by its reader"
    DROPPED = "closed from this side, as its policy says"
    CONFIRMED = "the engine ended it after an abort"
    UNCONFIRMED = "it outlived every abort, or could not be told"
    DRAINED = "closed after the first output that its engine had to show"
    ABANDONED = "closed before that output came"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegTimes:
    """Durations in seconds.

    Attributes:
        delay_s: Earliest abort after the request was written.
        retry_sleeps_s: Between submissions of an abort, at least one; the last is also the wait after the last one.
        abort_limit_s: From the first submission to giving up, however late slow abort calls make the schedule.
        answer_wait_s: How long a called-off stream, or a call without output, may take to end after its first abort;
            then its client is let go.
        after_resume_s: From a pause's end to the aborts that waited for it.
        max_pause_s: Aborts that wait for the end of a pause are given up after this time.
        handoff_drain_s: Limit of ``DRAINING``, from the cancel on; nothing starts it again.
    """

    delay_s: float = 0.02
    retry_sleeps_s: Sequence[float] = ABORT_RETRY_SLEEPS_S
    abort_limit_s: float = 8.0
    answer_wait_s: float = 1.0
    after_resume_s: float = 0.1
    max_pause_s: float = 3600.0
    handoff_drain_s: float = 30.0


# Events. ``at`` is the clock's time, ``written_at`` the one at which the request was written, ``None`` before.


@dataclass(slots=True)
class Produced:
    """The engine has shown its first output."""


@dataclass(slots=True)
class Over:
    """The answer has ended, or its reader has; ``error`` says that it broke off."""

    error: str = ""


@dataclass(slots=True)
class Cancelled:
    """Nobody waits for the answer any more."""

    at: float
    cause: Cause
    written_at: float | None
    is_paused: bool = False


@dataclass(slots=True)
class CalledOff:
    """The client wants the engine to stop all of the request, or only ``items`` of it, and the answer that there is."""

    at: float
    written_at: float | None
    is_paused: bool = False
    items: tuple[str, ...] = ()


@dataclass(slots=True)
class Revealed:
    """The answer shows ids of samples that the engine has named by itself."""

    at: float
    ids: tuple[str, ...]


@dataclass(slots=True)
class Paused:
    """The engine is paused."""

    at: float


@dataclass(slots=True)
class Resumed:
    """The engine goes on."""

    at: float


@dataclass(slots=True)
class Tick:
    """The time that ``WakeAt`` asked for has come, or an earlier one. ``is_over``: the whole answer has arrived."""

    at: float
    written_at: float | None
    is_over: bool = False


@dataclass(slots=True)
class Told:
    """The aborts of one ``Abort`` are out: answered, failed, or timed out. ``is_refused``: the engine takes none."""

    at: float
    is_refused: bool = False


@dataclass(slots=True)
class GivenUp:
    """The leg has to end now, whatever was still to be done."""


Event = Produced | Over | Cancelled | CalledOff | Revealed | Paused | Resumed | Tick | Told | GivenUp


# Commands.


@dataclass(slots=True)
class Abort:
    """Submit one abort for each id, all at once, and report ``Told``. At most one such submission is under way."""

    ids: tuple[str, ...]


@quick
class Simple(enum.Enum):
    """Commands without data."""

    CLOSE = "close the call"
    DETACH = "interrupt the reader, and read the answer to its end from now on"
    RELEASE = "give back what is booked"


@dataclass(slots=True)
class WakeAt:
    """Report ``Tick`` at this time; replaces an earlier one."""

    at: float


@dataclass(slots=True)
class End:
    """Forget the leg, with everything given back."""

    how: LegEnd
    error: str = ""


Command = Abort | Simple | WakeAt | End

"""How a leg is told to stop: the plan for each engine, version and kind of call.

Pure. The facts behind the table were measured on real engines:

* SGLang releases a closed stream within tens of milliseconds, a closed unary call only after 3 to 4 s, since it
  polls for that. So streams are closed and unary calls are aborted by id.
* SGLang drops an abort for an id that it does not know yet, and answers 200 all the same. One that comes between
  registration and dispatch is spent for good, and with it the abort that closing would cause. That window has no
  measurable width from 5 ms after the request on, so aborts wait for 20 ms; and it is open for as long as the engine
  is paused, so nothing is aborted then.
* SGLang 0.5.17 to 0.5.22 forget a disconnected stream without stopping it, so they need the abort first.
"""

import enum
from dataclasses import dataclass

# Sleeps between submissions of an abort: at most nine submissions over 4.55 s.
ABORT_RETRY_SLEEPS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0)
# Earliest abort of a unary call after its request was written.
ABORT_DELAY_S = 0.02
# Limit of one call of the engine's abort route.
ABORT_CALL_TIMEOUT_S = 2.0
# How long after a paused engine goes on its closed unary calls are aborted.
ABORT_AFTER_RESUME_S = 0.1


class CancelPlan(enum.Enum):
    """What is done with a leg whose client is gone."""

    CLOSE = "close"
    ABORT_THEN_CLOSE = "abort, then close"
    ABORT_AND_READ = "abort, read to the end, retry by the schedule, then close"
    CLOSE_AND_ABORT_LATER = "close, abort when the engine is no longer paused"


class Cause(enum.StrEnum):
    """Why a leg was stopped from this side; the first cause stays."""

    CLIENT_GONE = "client_gone"
    CLIENT_ABORT = "client_abort"
    SHUTDOWN = "shutdown"
    WORKER_REMOVED = "worker_removed"


@dataclass(frozen=True, slots=True)
class AbortTraits:
    """What an engine release does with disconnects.

    Attributes:
        is_known: The release is one whose behaviour was measured or documented.
        stream_close_stops: Closing a stream's connection ends the generation at once.
    """

    is_known: bool
    stream_close_stops: bool


SGLANG_FORGETS_STREAMS = ((0, 5, 17), (0, 5, 23))
"""First release that forgets disconnected streams, and the first that no longer does."""


def sglang_traits(version: tuple[int, ...]) -> AbortTraits:
    """Traits of an SGLang release; anything older than the known ones, or unreadable, is unknown."""
    first_bad, first_good = SGLANG_FORGETS_STREAMS
    if version >= first_good:
        return AbortTraits(is_known=True, stream_close_stops=True)
    return AbortTraits(is_known=version >= first_bad, stream_close_stops=False)


def sglang_cancel_plan(version: tuple[int, ...], *, is_stream: bool, has_own_ids: bool, is_paused: bool) -> CancelPlan:
    """Choose the plan for one leg on SGLang.

    Args:
        version: Release of the engine, empty if unknown.
        is_stream: The engine streams to us.
        has_own_ids: The engine runs the request under the ids that we gave; false for native ``n > 1``, whose
            samples get ids that nobody knows, so that closing is all there is.
        is_paused: The engine is paused.
    """
    traits = sglang_traits(version)
    if not has_own_ids:
        return CancelPlan.CLOSE
    if is_paused:
        return CancelPlan.CLOSE if is_stream else CancelPlan.CLOSE_AND_ABORT_LATER
    if not is_stream:
        return CancelPlan.ABORT_AND_READ if traits.is_known else CancelPlan.ABORT_THEN_CLOSE
    return CancelPlan.CLOSE if traits.stream_close_stops else CancelPlan.ABORT_THEN_CLOSE

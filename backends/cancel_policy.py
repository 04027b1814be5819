"""What an engine release does with aborts and disconnects, and how its legs are cancelled: data, in this one place.

Pure. The facts were measured on real engines:

* SGLang releases a closed stream within tens of milliseconds, a closed unary call only after 3 to 4 s, since it
  polls for that. So streams are closed and unary calls are aborted by id.
* SGLang drops an abort for an id that it does not know yet, and answers 200 all the same. One that comes between
  registration and dispatch is spent for good, and with it the abort that closing would cause. That window has no
  measurable width from 5 ms after the request on, so aborts wait for 20 ms; and it is open for as long as the engine
  is paused, so nothing is aborted then.
* SGLang 0.5.17 to 0.5.22 forget a disconnected stream without stopping it, so they need the abort first.
* vLLM stops whatever is closed, in either mode. Of a disaggregated pair its decode side must take the prompt's blocks
  over before it is closed, or they stay pinned on the prefill side until a lease ends.
"""

import enum
import functools
from dataclasses import dataclass

from backends.quick_enum import quick
from backends.types import EngineKind

# The form of the capability record that this release reads.
CAPABILITY_VERSION = 1


@quick
class OnCancel(enum.StrEnum):
    """What is done to a leg for whose answer nobody waits any more."""

    DROP = "drop"
    """Close its connection."""
    ABORT = "abort"
    """Abort it by id, read its answer to the end, abort again while it has not ended, and close it at last."""
    DRAIN_TO_FIRST_OUTPUT = "drain_to_first_output"
    """Keep it until its first output, within a bound, then close it."""


@quick
class LegKind(enum.StrEnum):
    """Part of a leg in its request."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


@quick
class EarlyAbort(enum.StrEnum):
    """What an abort can do before the request's first output."""

    RETRY = "retry"
    """It may come too early and be lost, so it is repeated."""
    EXACT = "exact"
    """It is never lost."""
    UNSUPPORTED = "unsupported"
    """The engine knows no aborts, or nobody knows what it does with them."""


class CancelWindow(enum.StrEnum):
    """When the prefill leg of a pair may be aborted because its client is gone."""

    ANYTIME = "anytime"
    PRE_HANDOFF = "pre_handoff"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class AbortCapability:
    """What one engine release does with aborts and disconnects; shown by ``GET /workers``.

    Attributes:
        v: Version of this record's form; one that is not known here is not relied on.
        early: Aborts before the first output.
        group: One abort reaches all samples and items of a request.
        disconnect_aborts: Closing a stream's connection ends the generation at once.
        unary_disconnect_aborts: So does closing a unary call's.
        cancel_window: See ``CancelWindow``.
        must_consume_handoff: A decode leg has to take the prompt's blocks over before it is closed.
    """

    v: int
    early: EarlyAbort
    group: bool
    disconnect_aborts: bool
    unary_disconnect_aborts: bool
    cancel_window: CancelWindow
    must_consume_handoff: bool = False

    @property
    def is_known(self) -> bool:
        """The record can be relied on."""
        return self.v == CAPABILITY_VERSION and self.early is not EarlyAbort.UNSUPPORTED


_UNKNOWN = AbortCapability(
    v=CAPABILITY_VERSION,
    early=EarlyAbort.UNSUPPORTED,
    group=False,
    disconnect_aborts=False,
    unary_disconnect_aborts=False,
    cancel_window=CancelWindow.NEVER,
)
_SGLANG = AbortCapability(
    v=CAPABILITY_VERSION,
    early=EarlyAbort.RETRY,
    group=False,
    disconnect_aborts=True,
    unary_disconnect_aborts=False,
    cancel_window=CancelWindow.ANYTIME,
)
_SGLANG_FORGETFUL = AbortCapability(
    v=CAPABILITY_VERSION,
    early=EarlyAbort.RETRY,
    group=False,
    disconnect_aborts=False,
    unary_disconnect_aborts=False,
    cancel_window=CancelWindow.ANYTIME,
)
_VLLM = AbortCapability(
    v=CAPABILITY_VERSION,
    early=EarlyAbort.EXACT,
    group=True,
    disconnect_aborts=True,
    unary_disconnect_aborts=True,
    cancel_window=CancelWindow.ANYTIME,
    must_consume_handoff=True,
)

# First release that forgets disconnected streams, and the first that no longer does.
SGLANG_FORGETS_FROM = (0, 5, 17)
SGLANG_FORGETS_UNTIL = (0, 5, 23)


def abort_capability(engine: EngineKind, version: tuple[int, ...]) -> AbortCapability:
    """The record of an engine release; SGLang before 0.5.17, or of an unreadable version, is unknown."""
    if engine is EngineKind.VLLM:
        return _VLLM
    if version >= SGLANG_FORGETS_UNTIL:
        return _SGLANG
    return _SGLANG_FORGETFUL if version >= SGLANG_FORGETS_FROM else _UNKNOWN


@dataclass(frozen=True, slots=True)
class CancelPolicy:
    """How one leg is cancelled.

    Attributes:
        on_cancel: What is done.
        is_stream: The engine streams to us.
        closes_after_abort: With ``ABORT``: close once the first abort is out, rather than read on.
        loses_aborts_in_pause: An abort that reaches the paused engine is spent for nothing. So a stream is closed
            instead, and a unary call is closed and aborted when the engine goes on.
    """

    on_cancel: OnCancel
    is_stream: bool
    closes_after_abort: bool = False
    loses_aborts_in_pause: bool = False


# There are few, and a frozen one costs more to make than to look up.
_policy = functools.cache(CancelPolicy)


def cancel_policy(
    engine: EngineKind, capability: AbortCapability, *, kind: LegKind, is_stream: bool, has_ids: bool
) -> CancelPolicy:
    """Choose how a leg is cancelled when nobody waits for its answer any more.

    Args:
        engine: Who runs it.
        capability: What that release does.
        kind: The leg's part.
        is_stream: The engine streams to us.
        has_ids: The engine runs the request under ids that are known here, or reveals them in its stream. Where it
            does neither, closing is all there is.
    """
    if engine is EngineKind.VLLM:
        is_taking_over = kind is LegKind.DECODE and capability.must_consume_handoff
        return _policy(OnCancel.DRAIN_TO_FIRST_OUTPUT if is_taking_over else OnCancel.DROP, is_stream)
    if not has_ids:
        return _policy(OnCancel.DROP, is_stream)
    if not capability.is_known:
        return _policy(OnCancel.ABORT, is_stream, closes_after_abort=True, loses_aborts_in_pause=True)
    if kind is not LegKind.AGGREGATED or not is_stream:
        return _policy(OnCancel.ABORT, is_stream, loses_aborts_in_pause=True)
    if capability.disconnect_aborts:
        return _policy(OnCancel.DROP, is_stream, loses_aborts_in_pause=True)
    return _policy(OnCancel.ABORT, is_stream, closes_after_abort=True, loses_aborts_in_pause=True)

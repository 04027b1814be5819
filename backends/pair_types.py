"""What a prefill and a decode worker are to a request: parts, states, capabilities, durations, failures. Pure data."""

import enum
from dataclasses import dataclass, replace
from typing import Final

from backends.cancel_policy import AbortCapability, CancelWindow
from backends.types import EngineKind

# Answers that wait for prefill's end are held up to here; then decode is not read on.
HELD_LIMIT_BYTES: Final = 1024 * 1024


class Part(enum.StrEnum):
    """One of the two legs."""

    PREFILL = "prefill"
    DECODE = "decode"


class HandoffPhase(enum.StrEnum):
    """When decode may be sent: what of prefill's answer it needs."""

    HEADERS = "headers"
    COMPLETION = "completion"


class Overlap(enum.StrEnum):
    """With ``HandoffPhase.HEADERS``: whether decode waits for prefill's headers, or is sent beside it."""

    HEADERS = "headers"
    IMMEDIATE = "immediate"


class PairState(enum.Enum):
    """Where a request stands."""

    WAIT_HANDOFF = "decode may not be sent yet"
    DISPATCH = "decode is being asked, or is to be as soon as a worker can be"
    STREAM = "decode answers"
    HOLD = "decode has answered all of it; what prefill ends with is awaited"
    ENDED = "the client has its end, or is gone"


class PrefillState(enum.Enum):
    """Where the prefill leg stands."""

    SELECTED = "not sent"
    CONNECTING = "sent, no answer yet"
    OPEN = "it answers with success, and has not ended"
    DONE = "ended well"
    FAILED = "ended otherwise"
    STOPPED = "cancelled from this side; another owner sees to its end"
    ABANDONED = "cancelled because it outlived the limit of those that nobody waits for"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCapability:
    """How one engine kind hands prompts over.

    Attributes:
        handoff_phase: See ``HandoffPhase``.
        cancel_window: When a prefill leg may be stopped because nobody waits for it.
        must_consume_handoff: Decode has to take the prompt's blocks over, or they stay pinned.
        prefill_may_answer: Prefill's answer may be the whole answer, where its first token ends it.
    """

    handoff_phase: HandoffPhase
    cancel_window: CancelWindow
    must_consume_handoff: bool = False
    prefill_may_answer: bool = False

    @property
    def is_early(self) -> bool:
        """Decode may run beside prefill."""
        return self.handoff_phase is HandoffPhase.HEADERS

    def may_stop_prefill(self, *, was_dispatched: bool) -> bool:
        """Whether a prefill leg that nobody waits for is inside its window.

        Args:
            was_dispatched: Its handoff has been given to decode.
        """
        return self.cancel_window is CancelWindow.ANYTIME or (
            self.cancel_window is CancelWindow.PRE_HANDOFF and not was_dispatched
        )


def pair_capability(engine: EngineKind, capability: AbortCapability) -> PairCapability:
    """The record of an engine; an ``AbortCapability`` that is not known allows no cancelling of prefill."""
    return PairCapability(
        handoff_phase=HandoffPhase.COMPLETION if engine is EngineKind.VLLM else HandoffPhase.HEADERS,
        cancel_window=capability.cancel_window if capability.is_known else CancelWindow.NEVER,
        must_consume_handoff=capability.must_consume_handoff,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """Durations in seconds.

    Attributes:
        header_timeout_s: For prefill's headers, where they do not wait for its end; 0 for no limit.
        hold_s: From decode's success to prefill's end; 0 for no limit. Nothing starts it again.
        tail_s: How long a prefill leg may go on that nobody waits for.
        max_handoff_age_s: A handoff that is older is not given to decode; counted from prefill's answer.
        lease_s: From prefill's answer to decode's first output. Later the blocks may hold anything, and decode answers
            with success all the same.
    """

    header_timeout_s: float = 30.0
    hold_s: float = 30.0
    tail_s: float = 300.0
    max_handoff_age_s: float = 20.0
    lease_s: float = 30.0


class Held:
    """What decode has answered and may not pass yet."""

    __slots__ = ("_blocks", "_size_bytes")

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._size_bytes = 0

    @property
    def is_full(self) -> bool:
        """Decode is not to be read on."""
        return self._size_bytes >= HELD_LIMIT_BYTES

    def add(self, block: bytes) -> None:
        """More of it."""
        self._blocks.append(block)
        self._size_bytes += len(block)

    def take(self) -> bytes:
        """All of it, which is not held any more."""
        block = b"".join(self._blocks)
        self._blocks.clear()
        self._size_bytes = 0
        return block


@dataclass(slots=True)
class Dues:
    """Times at which something is to happen, ``None`` where nothing is.

    Attributes:
        header: Prefill's headers are late.
        hold: Prefill's end is late.
        lease: Decode's first output is late.
        tail: A prefill leg that nobody waits for is stopped.
    """

    header: float | None = None
    hold: float | None = None
    lease: float | None = None
    tail: float | None = None

    @property
    def first(self) -> float | None:
        """The earliest."""
        return min((at for at in (self.header, self.hold, self.lease, self.tail) if at is not None), default=None)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request over a pair fails, as data for whoever tells the client.

    Attributes:
        status: HTTP status, used while nothing has been sent.
        type: Short machine-readable name.
        outcome: Name under which the request is counted.
        message: For people.
        is_retryable: Another pair may be tried while nothing has been sent.
        part: The leg at fault, ``None`` if neither is.
        error: The exception behind it, where there is one.
    """

    status: int
    type: str
    outcome: str
    message: str
    is_retryable: bool = False
    part: Part | None = None
    error: Exception | None = None

    def of_prefill(self) -> "Failure":
        """The same, counted as prefill's where it is the engine's fault; refusals and deadlines stay what they are."""
        is_engines = self.outcome in ("engine_error", "truncated")
        return replace(self, outcome="prefill_failed" if is_engines else self.outcome, part=Part.PREFILL)


HEADER_TIMEOUT = Failure(
    504, "engine_timeout", "timeout", "the prefill worker did not begin to answer in time", part=Part.PREFILL
)
PREFILL_INCOMPLETE = Failure(
    504, "prefill_incomplete", "timeout", "the prefill worker did not end its part in time", part=Part.PREFILL
)
PREFILL_PROTOCOL = Failure(
    502, "prefill_protocol", "prefill_failed", "the prefill worker's answer has no handoff", part=Part.PREFILL
)
HANDOFF_EXPIRED = Failure(
    502, "handoff_expired", "engine_error", "the decode worker took the prompt over too late", part=Part.DECODE
)
CALLED_OFF = Failure(499, "aborted", "aborted", "the request was aborted")

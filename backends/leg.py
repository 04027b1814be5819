"""One upstream request of a client's request, from the write to its end."""

from collections.abc import Callable, Sequence
from typing import Protocol

from backends.base import Backend
from backends.lifecycle import CancelPlan, Cause
from backends.types import Worker
from backends.upstream.base import UpstreamCall


class Booking(Protocol):
    """Load that a leg has booked on its worker."""

    def first_token(self) -> None:
        """The prefill is over: give the booked prefill tokens back."""

    def release(self) -> None:
        """Give everything back; called exactly once."""


class Leg:
    """One upstream request: who carries it, under which ids, and what is still booked for it.

    The exchange owns a leg until ``end``, or until ``cancel`` hands it to the abort supervisor. Whoever owns it
    ends it, once.

    Attributes:
        worker: Where it runs.
        backend: The engine kind's part.
        engine_ids: Ids under which the engine runs it; one, or one for each item of a batch.
        call: The HTTP call.
        cause: Why it was cancelled; ``None`` while it was not.
        is_detached: The abort supervisor owns it.
        is_ended: Booking released, call over.
        aborting: Ids whose aborts run beside the exchange.
        stop_aborting: Ends the abort schedules that run beside the exchange.
    """

    __slots__ = (
        "_booking",
        "_on_end",
        "_on_first_token",
        "aborting",
        "backend",
        "call",
        "cause",
        "engine_ids",
        "is_detached",
        "is_ended",
        "stop_aborting",
        "worker",
    )

    def __init__(
        self,
        *,
        worker: Worker,
        backend: Backend,
        engine_ids: Sequence[str],
        call: UpstreamCall,
        booking: Booking,
        on_end: Callable[["Leg"], None],
        on_first_token: Callable[[], None] | None = None,
    ) -> None:
        self.worker = worker
        self.backend = backend
        self.engine_ids = engine_ids
        self.call = call
        self.cause: Cause | None = None
        self.is_detached = False
        self.is_ended = False
        self.aborting: set[str] = set()
        self.stop_aborting: list[Callable[[], object]] = []
        self._booking = booking
        self._on_end = on_end
        self._on_first_token = on_first_token

    def first_token(self) -> None:
        """The engine has produced something."""
        self._booking.first_token()
        if self._on_first_token is not None:
            self._on_first_token()
            self._on_first_token = None

    def end(self) -> None:
        """Release what the leg holds. A second call does nothing, since several parties may see the end."""
        if self.is_ended:
            return
        self.is_ended = True
        for stop in self.stop_aborting:
            stop()
        self.call.close()
        self._booking.release()
        self._on_end(self)


class Aborter(Protocol):
    """Takes over legs whose engine has to be told."""

    def adopt(self, leg: Leg, plan: CancelPlan) -> None:
        """Own ``leg`` until it has ended, and carry ``plan`` out."""


def cancel(leg: Leg, cause: Cause, plan: CancelPlan, aborter: Aborter) -> None:
    """Cancel a leg for good: by closing it here and now, or by handing it to ``aborter``.

    Returns at once in every case. The first cause stays; a second call does nothing. A request of which no byte
    was written is just dropped, since the engine knows nothing of it.
    """
    if leg.is_ended or leg.cause is not None:
        return
    leg.cause = cause
    if plan is CancelPlan.CLOSE or leg.call.written_at is None or leg.call.is_complete:
        leg.end()
        return
    leg.is_detached = True
    for stop in leg.stop_aborting:  # the plan has aborts of its own
        stop()
    leg.call.interrupt()
    aborter.adopt(leg, plan)

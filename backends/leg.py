"""One upstream request of a client's request, from the write to its end: the shell around ``LegMachine``."""

from collections.abc import Callable
from typing import Protocol

from backends.base import Backend
from backends.cancel_policy import CancelPolicy, OnCancel
from backends.leg_events import (
    Abort,
    CalledOff,
    Cancelled,
    Cause,
    Command,
    End,
    Event,
    LegEnd,
    LegState,
    LegTimes,
    Over,
    Produced,
    Revealed,
    Simple,
    WakeAt,
)
from backends.lifecycle import LegMachine
from backends.sse import data_of, events
from backends.types import Worker
from backends.upstream.base import UpstreamCall

# The same for all legs.
_PRODUCED = Produced()
_FINISHED = End(LegEnd.FINISHED)


class Booking(Protocol):
    """Load that a leg has booked on its worker."""

    def first_token(self) -> None:
        """The prefill is over: give the booked prefill tokens back."""

    def release(self) -> None:
        """Give everything back; called exactly once."""


class LegKeeper(Protocol):
    """Does for legs what takes time."""

    @property
    def times(self) -> LegTimes:
        """Durations of a new leg."""

    def now(self) -> float:
        """Monotonic seconds, as ``UpstreamCall.written_at`` counts them."""

    def submit(self, leg: "Leg", engine_ids: tuple[str, ...]) -> None:
        """Submit aborts, then report ``Told``."""

    def wake(self, leg: "Leg", at: float) -> None:
        """Report ``Tick`` at that time, and not at the one that was asked for before."""

    def read_on(self, leg: "Leg") -> None:
        """Read the leg's answer to its end, which nobody else does from now on."""

    def ended(self, leg: "Leg", end: End) -> None:
        """The leg is over: nothing of it is to be kept."""


class Leg:
    """One upstream request: who carries it, under which ids, and what is still booked for it.

    The exchange reads a leg until it calls ``end``, or until the leg is detached; then its keeper reads. Most legs show
    output and end, and nothing else happens to them: those never have a machine, which would say the same.

    Args:
        worker: Where it runs.
        backend: The engine kind's part.
        engine_ids: Ids under which the engine's abort route knows it: one, or one for each item of a batch.
        policy: How it is cancelled.
        call: The HTTP call.
        booking: What it has booked.
        keeper: Does what takes time.
        reveals_ids: Its answer shows ids under which the engine runs it.
        on_end: Told once, when the leg has given everything back.
        on_first_token: Told once, at its first output.
        on_abandoned: Told if it was closed before it had taken over what it should have.

    Attributes:
        can_be_aborted: The engine takes aborts for it; where not, closing is all there is.
        is_detached: Its keeper reads it.
        is_ended: Everything is given back.
        on_abandoned: See above.
        reveals_ids: See above.
        was_called_off: Its client has asked for an abort of all of it, or of an item.
    """

    __slots__ = (
        "_booking",
        "_has_output",
        "_keeper",
        "_machine",
        "_on_end",
        "_on_first_token",
        "backend",
        "call",
        "can_be_aborted",
        "engine_ids",
        "is_detached",
        "is_ended",
        "on_abandoned",
        "policy",
        "reveals_ids",
        "was_called_off",
        "worker",
    )

    def __init__(
        self,
        *,
        worker: Worker,
        backend: Backend,
        engine_ids: tuple[str, ...],
        policy: CancelPolicy,
        call: UpstreamCall,
        booking: Booking,
        keeper: LegKeeper,
        reveals_ids: bool = False,
        on_end: Callable[["Leg"], None],
        on_first_token: Callable[[], None] | None = None,
        on_abandoned: Callable[[], None] | None = None,
    ) -> None:
        self.worker = worker
        self.backend = backend
        self.engine_ids = engine_ids
        self.policy = policy
        self.call = call
        self.can_be_aborted = reveals_ids or bool(engine_ids)
        self.reveals_ids = reveals_ids
        self.is_detached = False
        self.is_ended = False
        self.on_abandoned = on_abandoned
        self.was_called_off = False
        self._has_output = False
        self._booking = booking
        self._keeper = keeper
        self._on_end = on_end
        self._on_first_token = on_first_token
        self._machine: LegMachine | None = None

    @property
    def cause(self) -> Cause | None:
        """Why it ended, or will; ``None`` while nothing has happened."""
        if self._machine is not None:
            return self._machine.cause
        return Cause.FINISHED if self.is_ended else None

    @property
    def state(self) -> LegState:
        """Where it stands."""
        if self._machine is not None:
            return self._machine.state
        if self.is_ended:
            return LegState.ENDED
        return LegState.ANSWERING if self._has_output else LegState.WAITING

    @property
    def is_told(self) -> bool:
        """An abort of all of it has been submitted."""
        return self._machine is not None and self._machine.is_told

    @property
    def has_output(self) -> bool:
        """Its engine has produced something."""
        return self._has_output

    def first_token(self) -> None:
        """The engine has produced something; only the first call counts."""
        if self._has_output or self.is_ended:  # what was read just before the end
            return
        self._has_output = True
        self._booking.first_token()
        if self._on_first_token is not None:
            self._on_first_token()
        if self._machine is not None:
            self._do(self._machine.on(_PRODUCED))

    def saw(self, block: bytes) -> None:
        """Whole events of the answer: note the first output among them.

        Where the first output is what the leg is kept for, an event without any is no evidence of it.

        Raises:
            AnswerMalformed: An event is not of the engine's shape.
        """
        if self._has_output:
            return
        if self.policy.on_cancel is not OnCancel.DRAIN_TO_FIRST_OUTPUT or any(
            self.backend.shows_output(data_of(event)) for event in events(block)
        ):
            self.first_token()

    def end(self, error: str = "") -> None:
        """The answer, or the interest in it, is over. A second call does nothing, since several may see the end."""
        if self.is_ended:
            return
        if error or self._machine is not None:
            self.on(Over(error))
            return
        self.call.close()
        self._release()
        self._keeper.ended(self, _FINISHED)
        self.on_abandoned = None  # whoever sent the leg holds it, and would hold itself

    def cancel(self, cause: Cause, *, is_paused: bool = False) -> None:
        """Nobody waits for the answer any more: end the leg in the way of its policy.

        Returns at once in every case. The first cause stays. A request of which no byte was written is dropped, since
        the engine knows nothing of it.

        Args:
            cause: Why.
            is_paused: The engine is paused.
        """
        if self.call.is_complete:
            self.end()
        else:
            self.on(Cancelled(self._keeper.now(), cause, self.call.written_at, is_paused))

    def call_off(self, items: tuple[str, ...] = (), *, is_paused: bool = False) -> None:
        """Have the engine stop all of it, or some of its items, while the exchange reads on.

        Args:
            items: Those of ``engine_ids`` that are to be stopped; empty for all.
            is_paused: The engine is paused.
        """
        if self.is_ended or self.is_detached:
            return
        self.was_called_off = True
        self.on(CalledOff(self._keeper.now(), self.call.written_at, is_paused, items))

    def reveal(self, engine_ids: tuple[str, ...]) -> None:
        """The answer shows ids that the engine has given its samples by itself."""
        if engine_ids:
            self.on(Revealed(self._keeper.now(), engine_ids))

    def on(self, event: Event) -> None:
        """Take any event; those that come after the end are late, and change nothing."""
        machine = self._machine
        if machine is None:
            if self.is_ended:
                return
            machine = self._machine = LegMachine(self.policy, self.engine_ids, self._keeper.times)
            if self._has_output:
                machine.on(_PRODUCED)
        self._do(machine.on(event))

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if command is Simple.CLOSE:
                self.call.close()
            elif command is Simple.RELEASE:
                self._release()
            elif isinstance(command, End):
                self._keeper.ended(self, command)
                self.on_abandoned = None  # whoever sent the leg holds it, and would hold itself
            elif isinstance(command, WakeAt):
                self._keeper.wake(self, command.at)
            elif isinstance(command, Abort):
                self._keeper.submit(self, command.ids)
            else:
                self.is_detached = True
                self.call.interrupt()
                self._keeper.read_on(self)

    def _release(self) -> None:
        if not self.is_ended:
            self.is_ended = True
            self._booking.release()
            self._on_end(self)

"""The life of one leg, from its write to its end: events in, commands out. Pure.

```
WAITING ── output ──> ANSWERING ──────────────────────────────┐
   │                      │                                   │ the engine's end,
   ├── called off ────────┤                                   │ or the reader's
   │                      v                                   v
   │                  CALLED_OFF ── no answer in time ──┐   ENDED <── closed, where the policy is to drop,
   │                      │                             v     ^       or nothing was written
   ├── cancelled ─────────┴────────────────────────> TELLING ─┤ the answer's end, or the schedule's: close
   │                                                  │       │
   │                                                  v       │
   ├── cancelled while the engine is paused ───────> OWED ────┤ the abort that was owed is out
   │                                                          │
   └── cancelled, and the first output is needed ─> DRAINING ─┘ first output, end, or limit: close
```

A leg that is *called off* is aborted for its own client, who gets what the engine has. A leg that is *cancelled* has
nobody who waits for its answer. Which of the ways a cancelled leg goes is its ``CancelPolicy``.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from backends.cancel_policy import CancelPolicy, OnCancel
from backends.leg_events import (
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

_CLOSE, _DETACH, _RELEASE = Simple.CLOSE, Simple.DETACH, Simple.RELEASE
_NOTHING: list[Command] = []


class LegMachine:
    """Decides what happens to one leg.

    Events that come after the end are late, and change nothing: timers, answers of aborts and the reader all race
    with it. An event that cannot be true in a state raises ``ValueError``.

    Args:
        policy: How it is cancelled.
        ids: Ids that the engine's abort route takes for it; empty where there are none, or none are known yet.
        times: Durations.

    Attributes:
        cause: Why it ended, or will; ``None`` while nothing has happened.
        tries: Times at which all of it was to be aborted.
        is_told: An abort of all of it has been submitted.
    """

    __slots__ = (
        "_due_at",
        "_has_produced",
        "_ids",
        "_is_submitting",
        "_items",
        "_lets_go_at",
        "_limit_at",
        "_policy",
        "_state",
        "_times",
        "cause",
        "is_told",
        "tries",
    )

    def __init__(self, policy: CancelPolicy, ids: tuple[str, ...], times: LegTimes) -> None:
        self._policy = policy
        self._ids = ids
        self._times = times
        self._state = LegState.WAITING
        self._has_produced = False
        self._is_submitting = False
        self._due_at: float | None = None
        self._lets_go_at: float | None = None
        self._limit_at: float | None = None
        self._items: list[tuple[float, tuple[str, ...]]] = []
        self.cause: Cause | None = None
        self.tries = 0
        self.is_told = False

    @property
    def state(self) -> LegState:
        """Where it stands."""
        return self._state

    def _enter(self, state: LegState) -> None:
        """The one place where the state changes."""
        self._state = state

    def on(self, event: Event) -> list[Command]:
        """Take one event and return what is to be done, in order."""
        if self._state is LegState.ENDED:
            return _NOTHING
        return _HANDLERS[type(event)](self, event)

    # The answer.

    def _on_produced(self, event: Produced) -> list[Command]:
        if self._has_produced or self._state is LegState.OWED:
            raise ValueError(f"first output in the state {self._state.name}")
        self._has_produced = True
        if self._state is LegState.DRAINING:
            return self._close(LegEnd.DRAINED)
        if self._state is LegState.WAITING:
            self._enter(LegState.ANSWERING)
        return _NOTHING

    def _on_over(self, event: Over) -> list[Command]:
        if self._state is LegState.OWED:
            raise ValueError("the end of a call that was closed")
        self.cause = self.cause or (Cause.ENGINE_ERROR if event.error else Cause.FINISHED)
        if self._state is LegState.DRAINING and event.error:
            return self._close(LegEnd.ABANDONED, event.error)
        return self._close(LegEnd.CONFIRMED if self.is_told else LegEnd.FINISHED, event.error)

    def _on_revealed(self, event: Revealed) -> list[Command]:
        new = tuple(one for one in event.ids if one not in self._ids)
        self._ids += new
        if not new or not self._is_aborting or self._due_at is None:
            return _NOTHING
        self._add_items(event.at, new)  # at once; the schedule goes on with all of them
        return self._wake()

    def _add_items(self, at: float, ids: tuple[str, ...]) -> None:
        self._items = sorted([*self._items, (at, ids)])

    # Cancelling.

    def _on_cancelled(self, event: Cancelled) -> list[Command]:
        if self._state in (LegState.TELLING, LegState.OWED):
            return _NOTHING
        if self._state is LegState.DRAINING:
            return self._close(LegEnd.ABANDONED) if event.cause is Cause.SHUTDOWN else _NOTHING
        self.cause = self.cause or event.cause
        on_cancel = self._policy.on_cancel
        if on_cancel is OnCancel.DRAIN_TO_FIRST_OUTPUT and not self._has_produced:
            if event.cause is Cause.SHUTDOWN:
                return self._close(LegEnd.ABANDONED)
            self._enter(LegState.DRAINING)
            self._limit_at = event.at + self._times.handoff_drain_s
            return [_DETACH, *self._wake()]
        if on_cancel is not OnCancel.ABORT or event.written_at is None or not self._ids:
            return self._close(LegEnd.DROPPED)
        if event.is_paused and self._policy.loses_aborts_in_pause:
            return self._close_in_pause(event.at)
        if self._policy.closes_after_abort and self.tries and not self._is_submitting:
            return self._close(LegEnd.DROPPED)
        is_begun = self._state is LegState.CALLED_OFF
        self._enter(LegState.TELLING)
        self._lets_go_at = None
        self._items = []
        if not is_begun:
            self._due_at = self._first_due(event.at, event.written_at)
        return [_DETACH, *self._wake()]

    def _close_in_pause(self, at: float) -> list[Command]:
        if self._policy.is_stream or self.tries:
            return self._close(LegEnd.DROPPED)
        self._enter(LegState.OWED)
        self._items = []
        self._due_at = self._lets_go_at = None
        self._limit_at = at + self._times.max_pause_s
        return [_CLOSE, _RELEASE, *self._wake()]

    def _on_called_off(self, event: CalledOff) -> list[Command]:
        if self._state in (LegState.CALLED_OFF, LegState.TELLING, LegState.OWED, LegState.DRAINING):
            return _NOTHING
        waits = event.is_paused and self._policy.loses_aborts_in_pause
        due_at = None if waits else self._first_due(event.at, event.written_at)
        if event.items:
            sleep_s = self._times.retry_sleeps_s[:3][-1]
            begins_at = event.at + self._times.max_pause_s if due_at is None else due_at
            if all(ids != event.items for _, ids in self._items):
                self._add_items(begins_at, event.items)
                self._add_items(begins_at + sleep_s, event.items)
            return self._wake()
        self.cause = Cause.CLIENT_ABORT
        self._enter(LegState.CALLED_OFF)
        self._items = []
        self._due_at = due_at
        if waits:
            self._limit_at = event.at + self._times.max_pause_s
        return self._wake()

    def _first_due(self, at: float, written_at: float | None) -> float:
        """Nothing is aborted that is not written, or was only just."""
        return max(at, (at if written_at is None else written_at) + self._times.delay_s)

    # Pauses.

    def _on_paused(self, event: Paused) -> list[Command]:
        if not self._policy.loses_aborts_in_pause:
            return _NOTHING
        if self._state is LegState.TELLING and (self._policy.is_stream or not self.tries):
            return self._close_in_pause(event.at)
        if not self._is_aborting and self._state is not LegState.OWED:
            self._items = [(event.at + self._times.max_pause_s, ids) for _, ids in self._items]
            return self._wake()
        self._due_at = self._lets_go_at = None
        self._limit_at = event.at + self._times.max_pause_s
        return self._wake()

    def _on_resumed(self, event: Resumed) -> list[Command]:
        due_at = event.at + self._times.after_resume_s
        self._items = [(min(at, due_at), ids) for at, ids in self._items]
        if self._due_at is None and (self._is_aborting or self._state is LegState.OWED):
            self._due_at = due_at
            self._limit_at = None
        return self._wake()

    # Aborts.

    @property
    def _is_aborting(self) -> bool:
        return self._state in (LegState.CALLED_OFF, LegState.TELLING)

    def _on_tick(self, event: Tick) -> list[Command]:
        at = event.at
        if self._limit_at is not None and at >= self._limit_at:
            return self._close(LegEnd.ABANDONED if self._state is LegState.DRAINING else LegEnd.UNCONFIRMED)
        if event.is_over and self._state is not LegState.OWED:
            self._due_at = self._lets_go_at = self._limit_at = None
            self._items = []
            return _NOTHING  # what has arrived is its reader's, however slow that is
        due_at = self._first_due(at, event.written_at)
        if at < due_at and self._state is not LegState.OWED:
            return self._postpone(due_at)
        commands = self._let_go(at)
        if self._state is LegState.ENDED:
            return commands
        if self._is_submitting:
            pass  # what is due goes out when that is back
        elif self._due_at is not None and at >= self._due_at:
            if self.tries > len(self._times.retry_sleeps_s):
                return self._close(LegEnd.UNCONFIRMED)
            commands += self._submit(at)
        elif self._items and at >= self._items[0][0]:
            commands += self._start(self._items.pop(0)[1])
        return commands + self._wake()

    def _postpone(self, at: float) -> list[Command]:
        self._due_at = None if self._due_at is None else max(at, self._due_at)
        self._items = [(max(at, due_at), ids) for due_at, ids in self._items]
        return self._wake()

    def _submit(self, at: float) -> list[Command]:
        sleeps_s = self._times.retry_sleeps_s
        self.tries += 1
        if self._limit_at is None:
            self._limit_at = at + self._times.abort_limit_s
        self._due_at = None if self._state is LegState.OWED else at + sleeps_s[min(self.tries, len(sleeps_s)) - 1]
        if self._state is LegState.CALLED_OFF and self._lets_go_at is None:
            self._lets_go_at = at + self._times.answer_wait_s
        self.is_told = self.is_told or bool(self._ids)
        return self._start(self._ids)

    def _start(self, ids: tuple[str, ...]) -> list[Command]:
        if not ids:
            return []
        self._is_submitting = True
        return [Abort(ids)]

    def _let_go(self, at: float) -> list[Command]:
        """A client waits only so long for an answer that an abort should have ended.

        A unary answer that has begun is on its way, however large it is; the schedule's end bounds it.
        """
        if self._lets_go_at is None or at < self._lets_go_at:
            return []
        self._lets_go_at = None
        if self._has_produced and not self._policy.is_stream:
            return []
        if self._policy.on_cancel is OnCancel.DROP:
            return self._close(LegEnd.UNCONFIRMED)
        self._enter(LegState.TELLING)
        return [_DETACH]

    def _on_told(self, event: Told) -> list[Command]:
        self._is_submitting = False
        if self._state is LegState.OWED:
            return self._close(LegEnd.UNCONFIRMED if event.is_refused else LegEnd.DROPPED)
        if not self._is_aborting:
            if event.is_refused:
                self._items = []
            return self._wake()
        if event.is_refused:
            return self._close(LegEnd.UNCONFIRMED)
        if self._state is LegState.TELLING and self._policy.closes_after_abort:
            return self._close(LegEnd.DROPPED)
        return self._wake()

    # Ends.

    def _on_given_up(self, event: GivenUp) -> list[Command]:
        return self._close(LegEnd.ABANDONED if self._state is LegState.DRAINING else LegEnd.UNCONFIRMED)

    def _close(self, how: LegEnd, error: str = "") -> list[Command]:
        self._enter(LegState.ENDED)
        return [_CLOSE, _RELEASE, End(how, error)]

    def _wake(self) -> list[Command]:
        times = [at for at in (self._lets_go_at, self._limit_at) if at is not None]
        if not self._is_submitting:
            times += [at for at in (self._due_at, *(at for at, _ in self._items[:1])) if at is not None]
        return [WakeAt(min(times))] if times else []


_HANDLERS: Final[Mapping[type, Callable[[LegMachine, Any], list[Command]]]] = {
    Produced: LegMachine._on_produced,
    Over: LegMachine._on_over,
    Cancelled: LegMachine._on_cancelled,
    CalledOff: LegMachine._on_called_off,
    Revealed: LegMachine._on_revealed,
    Paused: LegMachine._on_paused,
    Resumed: LegMachine._on_resumed,
    Tick: LegMachine._on_tick,
    Told: LegMachine._on_told,
    GivenUp: LegMachine._on_given_up,
}

"""A request over a prefill and a decode worker: events in, commands out. Pure.

```
WAIT_HANDOFF ── prefill's headers, or its whole answer ──> DISPATCH ── decode's first events ──> STREAM
     │                                                        │                                    │
     │ prefill's failure                                      │ either's failure                   │ decode's success
     v                                                        v                                    v
   ENDED <──────────────────────────────────────────────── ENDED <─── prefill's end, or limit ── HOLD
```

A failure of prefill may come long after its handoff: while decode is asked, while it streams, or after its end. So
decode's success is held back until prefill has ended, and is replaced by prefill's failure. A failure of decode passes
at once. Either way the other leg is told, exactly once: ended, or stopped. A prefill leg that may not be stopped goes
on under a process-wide owner, within a limit, since the transfer of the prompt's blocks needs it.

How a leg that is stopped is cancelled at its engine, and for how long that may take, is its ``LegMachine``'s matter: a
decode leg that has to take blocks over first is kept for that there.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from backends import pair_events as pair
from backends.leg_events import Cause
from backends.pair_types import (
    CALLED_OFF,
    HANDOFF_EXPIRED,
    HEADER_TIMEOUT,
    PREFILL_INCOMPLETE,
    PREFILL_PROTOCOL,
    Dues,
    Failure,
    Held,
    Overlap,
    PairCapability,
    PairState,
    PairTimes,
    Part,
    PrefillState,
)

# A prompt whose handoff grows too old while no decode worker can be had is prefilled so many times.
MAX_PREFILLS: Final = 3

_LIVE = (PrefillState.CONNECTING, PrefillState.OPEN)
_PREFILL, _DECODE = Part.PREFILL, Part.DECODE


class PairMachine:
    """Decides what happens to one attempt of a request over one pair.

    Events of a leg that has ended or was stopped are late, and change nothing: its reader races with the commands. An
    event that cannot be true in a state raises ``ValueError``.

    Args:
        capability: How the engines hand prompts over.
        times: Durations.
        overlap: Whether decode is sent beside prefill; only where the handoff needs nothing of prefill's answer.
        waits_for_prefill: The client wants something of prefill's answer, so its own may not begin before that.

    Attributes:
        cause: Why it was cancelled, ``None`` if it was not.
        has_passed: The client has got something.
        is_over: Nothing is left to do.
        is_detached: Prefill goes on though the client has its end or is gone.
    """

    def __init__(
        self,
        capability: PairCapability,
        times: PairTimes,
        *,
        overlap: Overlap = Overlap.HEADERS,
        waits_for_prefill: bool = False,
    ) -> None:
        self._capability = capability
        self._times = times
        self._overlap = overlap
        self._waits_for_prefill = waits_for_prefill
        self._state = PairState.WAIT_HANDOFF
        self._prefill = PrefillState.SELECTED
        self._number = 0
        self._decode_is_live = self._decode_is_wanted = self._was_dispatched = self._has_output = False
        self._is_ending = self._is_called_off = False
        self._handoff = b""
        self._held = Held()
        self._answered_at = 0.0
        self._dues = Dues()
        self._woken_at: float | None = None
        self.cause: Cause | None = None
        self.has_passed = False
        self.is_over = False

    @property
    def state(self) -> PairState:
        """Where the request stands."""
        return self._state

    @property
    def prefill(self) -> PrefillState:
        """Where the prefill leg stands."""
        return self._prefill

    @property
    def is_detached(self) -> bool:
        """Prefill goes on though the client has its end or is gone."""
        return self._state is PairState.ENDED and self._prefill in _LIVE

    @property
    def wants_decode(self) -> bool:
        """Decode's answer is to be read on: what waits of it is within the bound."""
        return self._decode_is_live and not self._held.is_full

    def start(self, at: float) -> list[pair.Command]:
        """Begin; called once."""
        commands = self._send_prefill(at)
        if self._capability.is_early and self._overlap is Overlap.IMMEDIATE:
            commands += self._send_decode()
        return self._settled(commands)

    def on(self, event: pair.Event) -> list[pair.Command]:
        """Take one event and return what is to be done, in order."""
        if self.is_over:
            return []
        return self._settled(_HANDLERS[type(event)](self, event))

    # Prefill.

    def _send_prefill(self, at: float) -> list[pair.Command]:
        self._number += 1
        self._prefill = PrefillState.CONNECTING
        self._state = PairState.WAIT_HANDOFF
        # Elsewhere headers come with the whole answer, however long prefill takes.
        if self._capability.is_early and self._times.header_timeout_s:
            self._dues.header = at + self._times.header_timeout_s
        return [pair.SendPrefill(self._number)]

    def _on_prefill_opened(self, event: pair.PrefillOpened) -> list[pair.Command]:
        del event
        if self._prefill is PrefillState.OPEN:
            raise ValueError("prefill has opened before")
        if self._prefill not in _LIVE:
            return []
        self._prefill = PrefillState.OPEN
        self._dues.header = None
        if self._state is PairState.WAIT_HANDOFF and self._capability.is_early and not self._is_called_off:
            return self._send_decode()
        return []

    def _on_prefill_done(self, event: pair.PrefillDone) -> list[pair.Command]:
        if self._prefill not in _LIVE:
            return []
        if self._capability.is_early and self._prefill is PrefillState.CONNECTING:
            raise ValueError("prefill has ended before it opened")
        if event.answer and not self._capability.prefill_may_answer:
            raise ValueError("an answer of a prefill that never gives one")
        self._prefill = PrefillState.DONE
        ended: list[pair.Command] = [pair.EndLeg(_PREFILL)]
        if not self._capability.is_early and not event.answer:
            return ended + self._hand_over(event)
        if self._state is PairState.ENDED:
            return ended
        if event.answer:
            self._is_ending = True
            return ended + self._stop_decode(Cause.FINISHED) + self._finish(event.answer)
        # Without decode it was called off before that was sent.
        return ended + (self._fail(CALLED_OFF) if self._state is PairState.WAIT_HANDOFF else self._pass_held())

    def _hand_over(self, event: pair.PrefillDone) -> list[pair.Command]:
        """Prefill's answer has brought the handoff, or should have."""
        is_unwanted = self._is_called_off or self._state is PairState.ENDED
        commands: list[pair.Command] = []
        if event.handoff:
            self._handoff, self._answered_at = event.handoff, event.at
            if not is_unwanted:
                return self._send_decode()
            if self._capability.must_consume_handoff:
                cause = self.cause or Cause.CLIENT_ABORT
                commands = [pair.SendDecode(event.handoff, is_release=True), pair.StopLeg(_DECODE, cause)]
            else:
                commands = [pair.Simple.ABANDONED]
        if self._state is PairState.ENDED:
            return commands
        return commands + self._fail(CALLED_OFF if is_unwanted else PREFILL_PROTOCOL)

    def _on_prefill_failed(self, event: pair.PrefillFailed) -> list[pair.Command]:
        if self._prefill not in _LIVE:
            return []
        self._prefill = PrefillState.FAILED
        ended: list[pair.Command] = [pair.EndLeg(_PREFILL)]
        if self._state is PairState.ENDED:
            return [*ended, pair.LogFailure(event.failure)]
        failure = CALLED_OFF if self._is_called_off else event.failure.of_prefill()
        return ended + self._stop_decode(Cause.SIBLING_FAILED) + self._fail(failure)

    def _let_prefill_go(self, at: float, cause: Cause, *, may_stop: bool = True) -> list[pair.Command]:
        """Nobody waits for prefill any more: stop it within its window, else let it go on elsewhere."""
        if self._prefill not in _LIVE:
            return []
        # Success of a prefill that answers at its end: it has blocks ready, which decode has to take over.
        is_ready = self._capability.must_consume_handoff and self._prefill is PrefillState.OPEN
        is_open = not is_ready and self._capability.may_stop_prefill(was_dispatched=self._was_dispatched)
        if (may_stop and is_open) or cause is Cause.SHUTDOWN:
            self._prefill = PrefillState.STOPPED
            return [pair.StopLeg(_PREFILL, cause), *([pair.Simple.ABANDONED] if is_ready else [])]
        self._dues.tail = at + self._times.tail_s
        return [pair.Simple.DETACH_PREFILL]

    # Decode.

    def _send_decode(self) -> list[pair.Command]:
        self._state = PairState.DISPATCH
        self._decode_is_live, self._decode_is_wanted, self._was_dispatched = True, False, True
        if not self._capability.is_early:
            self._dues.lease = self._answered_at + self._times.lease_s
        return [pair.SendDecode(self._handoff)]

    def _stop_decode(self, cause: Cause) -> list[pair.Command]:
        if not self._decode_is_live:
            return []
        self._decode_is_live = False
        return [pair.StopLeg(_DECODE, cause)]

    def _on_decode_unsent(self, event: pair.DecodeUnsent) -> list[pair.Command]:
        del event
        if not self._decode_is_live:
            return []
        if self._state is not PairState.DISPATCH:
            raise ValueError("decode has answered, so it was sent")
        self._decode_is_live, self._decode_is_wanted = False, True
        self._dues.lease = None
        return [pair.EndLeg(_DECODE)]

    def _on_decode_ready(self, event: pair.DecodeReady) -> list[pair.Command]:
        if self._state is PairState.ENDED:
            return []
        if not self._decode_is_wanted:
            raise ValueError("no worker for decode was looked for")
        if self._capability.is_early or event.at - self._answered_at <= self._times.max_handoff_age_s:
            return self._send_decode()
        self._decode_is_wanted = False
        if self._number == MAX_PREFILLS:
            return [pair.Simple.ABANDONED, *self._fail(HANDOFF_EXPIRED)]
        return [pair.Simple.ABANDONED, *self._send_prefill(event.at)]

    @property
    def _is_gated(self) -> bool:
        """What decode has answered may not pass yet.

        Without output it may still prove to have come too late, which the client is to be told with a status.
        """
        if not self._capability.is_early and not self._has_output:
            return True
        return self._prefill in _LIVE and (self._waits_for_prefill or self._is_ending)

    def _is_too_late(self, at: float) -> bool:
        return not self._has_output and self._dues.lease is not None and at >= self._dues.lease

    def _expire(self) -> list[pair.Command]:
        return self._stop_decode(Cause.ENGINE_ERROR) + self._fail(HANDOFF_EXPIRED)

    def _on_decode_item(self, event: pair.DecodeItem) -> list[pair.Command]:
        if not self._decode_is_live:
            return []
        if (event.has_output or event.is_ending) and self._is_too_late(event.at):
            return self._expire()
        if self._state is PairState.DISPATCH:
            self._state = PairState.STREAM
        if event.has_output or event.is_ending:
            self._has_output, self._dues.lease = True, None
        self._held.add(event.block)
        if event.is_ending:
            self._await_prefill(event.at)
        return [] if self._is_gated else self._pass_held()

    def _on_decode_ended(self, event: pair.DecodeEnded) -> list[pair.Command]:
        if not self._decode_is_live:
            return []
        if self._is_too_late(event.at):
            return self._expire()
        self._decode_is_live = False
        self._has_output, self._dues.lease = True, None
        self._held.add(event.block)
        self._await_prefill(event.at)
        return [pair.EndLeg(_DECODE), *([] if self._is_gated else self._pass_held())]

    def _on_decode_failed(self, event: pair.DecodeFailed) -> list[pair.Command]:
        if self._state is PairState.ENDED or not (self._decode_is_live or self._decode_is_wanted):
            return []
        ended: list[pair.Command] = [pair.EndLeg(_DECODE)] if self._decode_is_live else []
        # A decode worker that refuses the request lets its blocks go.
        if self._handoff and not self._has_output and (self._decode_is_wanted or event.failure.status >= 500):
            ended.append(pair.Simple.ABANDONED)
        self._decode_is_live = self._decode_is_wanted = False
        failure = CALLED_OFF if self._is_called_off else event.failure
        return ended + self._let_prefill_go(event.at, Cause.SIBLING_FAILED) + self._fail(failure)

    def _leave_handoff(self) -> list[pair.Command]:
        return [pair.Simple.ABANDONED] if self._handoff and self._decode_is_wanted else []

    def _await_prefill(self, at: float) -> None:
        """Decode has succeeded; the limit of what is awaited of prefill counts from the first sign of that."""
        if not self._is_ending and self._prefill in _LIVE and self._times.hold_s:
            self._dues.hold = at + self._times.hold_s
        self._is_ending = True
        self._state = PairState.HOLD

    def _pass_held(self) -> list[pair.Command]:
        """Nothing is in the way any more of what is held."""
        block = self._held.take()
        self._dues.hold = None
        if self._is_ending and not self._decode_is_live:
            return self._finish(block)
        self.has_passed = self.has_passed or bool(block)
        return [pair.Pass(block)] if block else []

    # Ends.

    def _finish(self, block: bytes) -> list[pair.Command]:
        self._enter_end()
        return [pair.Finish(block)]

    def _fail(self, failure: Failure) -> list[pair.Command]:
        self._enter_end()
        return [pair.Fail(failure)]

    def _enter_end(self) -> None:
        self._state = PairState.ENDED
        self._held.take()
        self._dues = Dues(tail=self._dues.tail)

    def _on_cancelled(self, event: pair.Cancelled) -> list[pair.Command]:
        if self._state is PairState.ENDED:
            return self._let_prefill_go(event.at, event.cause) if event.cause is Cause.SHUTDOWN else []
        self.cause = event.cause
        commands = self._stop_decode(event.cause) + self._leave_handoff()
        self._enter_end()
        return commands + self._let_prefill_go(event.at, event.cause)

    def _on_called_off(self, event: pair.CalledOff) -> list[pair.Command]:
        if self._state is PairState.ENDED or self._is_called_off:
            return []
        self._is_called_off = True
        if self._decode_is_wanted or (self._handoff and self._decode_is_live and not self._has_output):
            # What is to take blocks over is not aborted, but kept for that.
            commands = self._leave_handoff() + self._stop_decode(Cause.CLIENT_ABORT)
            return commands + self._let_prefill_go(event.at, Cause.CLIENT_ABORT) + self._fail(CALLED_OFF)
        live = ((_DECODE, self._decode_is_live), (_PREFILL, self._prefill in _LIVE))
        return [pair.CallOffLeg(part) for part, is_live in live if is_live]

    def _on_tick(self, event: pair.Tick) -> list[pair.Command]:
        at = event.at
        if self._dues.header is not None and at >= self._dues.header:
            self._prefill = PrefillState.STOPPED
            stopped: list[pair.Command] = [pair.StopLeg(_PREFILL, Cause.DEADLINE)]
            return stopped + self._stop_decode(Cause.SIBLING_FAILED) + self._fail(HEADER_TIMEOUT)
        if self._dues.hold is not None and at >= self._dues.hold:
            commands = self._stop_decode(Cause.DEADLINE) + self._fail(PREFILL_INCOMPLETE)
            return commands + self._let_prefill_go(at, Cause.DEADLINE, may_stop=False)
        if self._is_too_late(at):
            return self._expire()
        if self.is_detached and self._dues.tail is not None and at >= self._dues.tail:
            self._prefill = PrefillState.ABANDONED
            return [pair.StopLeg(_PREFILL, Cause.DEADLINE)]
        self._woken_at = None  # too early: ask again
        return []

    def _settled(self, commands: list[pair.Command]) -> list[pair.Command]:
        """The commands, and what follows from where they lead."""
        if self._state is PairState.ENDED and self._prefill not in _LIVE:
            self.is_over = True
            return [*commands, pair.Simple.OVER]
        due = self._dues.first
        if due is not None and due != self._woken_at:
            commands = [*commands, pair.WakeAt(due)]
        self._woken_at = due
        return commands


_HANDLERS: Final[Mapping[type, Callable[[PairMachine, Any], list[pair.Command]]]] = {
    pair.PrefillOpened: PairMachine._on_prefill_opened,
    pair.PrefillDone: PairMachine._on_prefill_done,
    pair.PrefillFailed: PairMachine._on_prefill_failed,
    pair.DecodeUnsent: PairMachine._on_decode_unsent,
    pair.DecodeReady: PairMachine._on_decode_ready,
    pair.DecodeItem: PairMachine._on_decode_item,
    pair.DecodeEnded: PairMachine._on_decode_ended,
    pair.DecodeFailed: PairMachine._on_decode_failed,
    pair.Cancelled: PairMachine._on_cancelled,
    pair.CalledOff: PairMachine._on_called_off,
    pair.Tick: PairMachine._on_tick,
}

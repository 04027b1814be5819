"""One attempt at a request over a pair: the runs of its samples, as one attempt to the exchange."""

import asyncio
from collections import deque
from dataclasses import dataclass

from backends.errors import CallClosed
from backends.leg import Leg
from backends.leg_events import Cause
from backends.pair_types import Part
from backends.sglang import pd as sglang
from backends.types import EngineKind
from gateway.envelope import Envelope
from gateway.pair_failure import PairFailed
from gateway.pair_legs import PairRequest, Seat
from gateway.pair_run import Output, PairRun
from gateway.prefixes import Sent
from routers.fleet import Member
from routers.types import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAttempt:
    """The samples of a request on their way over one pair; see ``Placed`` for what an attempt is.

    Attributes:
        request: The request.
        runs: One for each sample.
        turns: Runs that have something for the client.
        choice: Where the policy has put prefill, whose cache counts.
        sent: What is assumed of that rank since this was sent.
        sample_ids: Public ids of the runs, where there are several for one prompt; else empty.
    """

    request: PairRequest
    runs: tuple[PairRun, ...]
    turns: "Turns"
    choice: Placement
    sent: Sent | None
    sample_ids: tuple[str, ...]

    @property
    def decode(self) -> Seat:
        """Where the answer comes from."""
        return self.runs[0].legs.decode

    @property
    def prefill(self) -> Seat:
        """Where the prompt is computed."""
        return self.runs[0].legs.prefill

    @property
    def member(self) -> Member:
        """The worker that answers."""
        return self.decode.member

    @property
    def members(self) -> tuple[Member, ...]:
        """Both workers."""
        return self.prefill.member, self.decode.member

    @property
    def worker_id(self) -> str:
        """Id of the worker that answers."""
        return self.member.worker.id

    @property
    def dp_rank(self) -> int | None:
        """Rank that answers, ``None`` when the worker has only one."""
        return self.decode.dp_rank

    @property
    def overlap_blocks(self) -> int | None:
        """Prompt blocks cached where prefill runs, ``None`` if the policy did not look."""
        return self.choice.overlap_blocks

    @property
    def legs(self) -> tuple[Leg, ...]:
        """All legs that were sent."""
        return tuple(leg for run in self.runs for leg in run.sent)

    @property
    def sent_ids(self) -> tuple[str, ...]:
        """Ids given to the engines so far."""
        return tuple(one for run in self.runs for one in run.legs.sent_ids)

    @property
    def is_live(self) -> bool:
        """Some run has not ended."""
        return any(not run.is_ended for run in self.runs)

    @property
    def awaits_output(self) -> bool:
        """No output yet of what will show some before its end."""
        return self.request.is_stream and not any(run.has_output for run in self.runs)

    def is_on(self, worker_id: str) -> bool:
        """Whether that worker serves it now."""
        on = any(leg.worker.id == worker_id and not leg.is_ended for leg in self.legs)
        return self.is_live and (on or worker_id == self.worker_id)

    def blamed(self, error: Exception) -> Member:
        """The worker at fault, which need not be the one whose leg has failed."""
        part = error.failure.part if isinstance(error, PairFailed) else None
        if part is not None and self.prefill.facts.engine is EngineKind.SGLANG:
            part = sglang.part_at_fault(part, str(error))
        return self.prefill.member if part is Part.PREFILL else self.member

    def has_done_its_part(self, member: Member) -> bool:
        """Whether a worker other than the one that is judged has done what it was asked for: prefill, if all of it."""
        return member is self.prefill.member and all(run.prefill_is_done for run in self.runs)

    def cancel(self, cause: Cause) -> None:
        """Nobody waits for the answer any more."""
        for seat in (self.prefill, self.decode):
            seat.member.breaker.released()  # it may have been the trial, of which nothing will be known
        for run in self.runs:
            run.cancel(cause)

    def can_be_called_off(self, *, is_item: bool) -> bool:
        """Whether the engines can be told to stop it, and know of it already."""
        del is_item  # an item of a batch shares its legs with the others
        live = [leg for leg in self.legs if not leg.is_ended]
        return bool(live) and all(leg.can_be_aborted and leg.call.written_at is not None for leg in live)

    def call_off(self, envelope: Envelope, item_id: str | None) -> bool:
        """Have the engines stop it, or one sample of it; whether there was anything to stop.

        Args:
            envelope: The request.
            item_id: Public id of the sample, ``None`` for all; an item of a batch stands for the whole of it.
        """
        del envelope
        runs = self.runs
        if item_id in self.sample_ids:
            runs = (self.runs[self.sample_ids.index(item_id)],)
        live = [run for run in runs if not run.is_ended]
        for run in live:
            run.call_off()
        return bool(live)

    def end(self) -> None:
        """The exchange is over; what goes on without it has other owners."""
        self.turns.close()
        for run in self.runs:
            if not run.is_ended:
                run.cancel(Cause.SIBLING_FAILED)


class Turns:
    """Whose turn it is: the runs that have something for the client, in the order in which they got it."""

    __slots__ = ("_changed", "_is_closed", "_runs")

    def __init__(self) -> None:
        self._runs: deque[PairRun] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    def note(self, run: PairRun) -> None:
        """A run has something, or was stopped."""
        if not self._is_closed:
            self._runs.append(run)
            self._changed.set()

    def close(self) -> None:
        """Nobody will ask any more: let go of the runs, which hold this object."""
        self._is_closed = True
        self._runs.clear()

    async def next(self, limit_s: float) -> tuple[PairRun, Output] | None:
        """The next thing for the client; ``None`` after a wait without any.

        Args:
            limit_s: Longest wait in seconds, 0 for no limit.

        Raises:
            CallClosed: The request was stopped.
        """
        while True:
            while self._runs:
                run = self._runs.popleft()
                if run.is_stopped:
                    raise CallClosed
                if (output := run.take()) is not None:
                    return run, output
            self._changed.clear()
            try:
                async with asyncio.timeout(limit_s or None):
                    await self._changed.wait()
            except TimeoutError:
                return None

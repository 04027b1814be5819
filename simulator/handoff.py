"""What an engine with a role does with sequences beside scheduling them.

An engine of a prefill/decode pair keeps sequences back at two points: before they are scheduled,
while the other engine is waited for, and at their end, while their cache blocks are being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from simulator.faults import Fault, FaultTable, RequestFacts
from simulator.sequence import Finish, Sequence


class Handoff(Protocol):
    """One role of one boot of an engine; sequences that it keeps back are its own until it hands them on."""

    @property
    def pinned_blocks(self) -> int:
        """Blocks of ended sequences that are kept for another engine."""

    @property
    def is_busy(self) -> bool:
        """Whether sequences are kept back."""

    def rank_of(self, sequence: Sequence) -> int | None:
        """Return the rank that ``sequence`` has to run on, ``None`` for any."""

    def holds(self, sequence: Sequence) -> bool:
        """Take ``sequence`` before it is scheduled; ``False`` if there is nothing to wait for."""

    def keeps(self, sequence: Sequence) -> bool:
        """Look at ``sequence``, which has ended; ``True`` if its caller hears of that later."""

    def abort(self, matches: Callable[[Sequence], bool], finish: Finish | None = None) -> list[Sequence]:
        """End what is kept back and ``matches``; returns it. Without ``finish``, with the role's own error."""

    def waiting(self, rank: int) -> int:
        """Return how many sequences wait before being scheduled."""

    def queues(self, rank: int) -> Mapping[str, int]:
        """Return the lengths of the queues that SGLang's ``/v1/loads`` names."""

    def release_pins(self) -> None:
        """Give up all blocks kept for other engines."""

    def describe(self) -> dict[str, Any]:
        """Return what ``GET /_transfers`` shows."""

    def stop(self) -> None:
        """Close all connections and forget everything."""


def take_transfer_fault(faults: FaultTable, sequence: Sequence) -> Fault | None:
    """Return the fault that is scripted for the transfer of ``sequence``, counting it as used."""
    rids = (sequence.rid, sequence.name) if sequence.name else (sequence.rid,)
    return faults.take("transfer", RequestFacts("", "", True, rids)) if faults else None

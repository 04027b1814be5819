"""A cache listener that writes down what it hears."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.cache import Block, Lease


class Recorder:
    """Keeps one line per call."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def blocks_stored(self, lease: Lease, blocks: Sequence[Block]) -> None:
        """Write down how many."""
        self.heard.append(f"stored {len(blocks)}")

    def block_removed(self, block: Block) -> None:
        """Write it down."""
        self.heard.append("removed")

    def all_cleared(self) -> None:
        """Write it down."""
        self.heard.append("cleared")

"""Distinct blocks of chains that are held for some time: of live requests, or of assumptions about caches. Pure.

A sequence hash names its block together with all blocks before it. So where two chains have the same block, they have
been one until there: only where chains part or end is there anything to remember. What lies between two such places is
one run, which is found, taken and given up as a whole, however long it is.
"""

from collections.abc import Sequence

import msgspec


class Run(msgspec.Struct, eq=False):
    """Blocks in a row, behind each of which but the last all chains go on in the same way; for ``BlockTree`` alone.

    Attributes:
        blocks: Sequence hashes, at least one. The last one stays the last.
        before: What comes before its first block, ``None`` at a root.
        holds: Chains that end with it, and runs that come behind it.
        after: The runs that come behind it, by their first block.
    """

    blocks: Sequence[int]
    before: "Run | None"
    holds: int = 1
    after: "dict[int, Run]" = msgspec.field(default_factory=dict)


class BlockTree:
    """Blocks by sequence hash, each there for as long as some chain that contains it is held.

    Exact even where hashes collide: every block is given up by the way on which it came.

    Attributes:
        blocks: Number of distinct blocks; not to be changed by others.
    """

    __slots__ = ("_roots", "blocks")

    def __init__(self) -> None:
        """Hold nothing."""
        self._roots: dict[int, Run] = {}
        self.blocks = 0

    def leading(self, hashes: Sequence[int]) -> int:
        """Count the leading blocks of a chain that are held.

        Args:
            hashes: Sequence hashes from the first block on.
        """
        return self._follow(hashes)[2]

    def _follow(self, hashes: Sequence[int]) -> tuple[Run | None, int, int]:
        """How far a chain is held: its last run, how many blocks of that run it has, and how many of all."""
        run, used, found, length = None, 0, 0, len(hashes)
        after = self._roots
        while found < length and (following := after.get(hashes[found])) is not None:
            run, blocks = following, following.blocks
            whole = used = len(blocks)
            if used > length - found:
                used = length - found
            if blocks[used - 1] != hashes[found + used - 1]:
                used = _common(blocks, hashes, found, used - 1)
            found += used
            if used < whole:
                break
            after = run.after
        return run, used, found

    def hold(self, hashes: Sequence[int]) -> Run | None:
        """Hold a chain.

        Args:
            hashes: Sequence hashes from the first block on; those that are new are copied.

        Returns:
            What ``release`` takes, ``None`` if nothing is held.
        """
        run, used, found = self._follow(hashes)
        if run is not None:
            if used < len(run.blocks):
                run = self._part(run, used)
            run.holds += 1
        if found == len(hashes):
            return run
        new = Run(hashes[found:], run)
        self._behind(run)[new.blocks[0]] = new
        self.blocks += len(new.blocks)
        return new

    def _behind(self, run: Run | None) -> dict[int, Run]:
        return self._roots if run is None else run.after

    def _part(self, run: Run, cut: int) -> Run:
        """Make a run of the first ``cut`` blocks of a longer one, which becomes the rest of itself."""
        head = Run(run.blocks[:cut], run.before, 1, {run.blocks[cut]: run})
        self._behind(head.before)[head.blocks[0]] = head
        run.blocks, run.before = run.blocks[cut:], head
        return head

    def release(self, run: Run | None) -> None:
        """Give up a chain, once.

        Args:
            run: What ``hold`` returned.
        """
        while run is not None:
            run.holds -= 1
            if run.holds:
                return
            self.blocks -= len(run.blocks)
            del self._behind(run.before)[run.blocks[0]]
            run = run.before


def _common(blocks: Sequence[int], hashes: Sequence[int], begin: int, differs: int) -> int:
    """Count the blocks from ``begin`` on that a chain has in common: the first is, that at ``differs`` is not."""
    low, high = 1, differs
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] == hashes[begin + middle]:
            low = middle + 1
        else:
            high = middle
    return low

"""Distinct blocks of chains that are held for some time: of live requests, or of assumptions about caches. Pure.

A sequence hash names its block together with all blocks before it. So where a block is held, its predecessors are held
too: how much of a chain is held is found by bisection, and a block needs a count only where chains part or end.
"""

from collections.abc import Sequence


class BlockTree:
    """Blocks by sequence hash, each there for as long as some chain that contains it is held.

    Exact even where hashes collide: every block is given up by the way on which it came.
    """

    __slots__ = ("_extra", "_parents")

    def __init__(self) -> None:
        """Hold nothing."""
        self._parents: dict[int, int | None] = {}
        # Successors and ends of chains at a block, less one: absent for nearly all of them.
        self._extra: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of distinct blocks."""
        return len(self._parents)

    def leading(self, hashes: Sequence[int], guess: int = 0) -> int:
        """Count the leading blocks of a chain that are held.

        Args:
            hashes: Sequence hashes from the first block on.
            guess: A likely answer, in [0, ``len(hashes)``], such as that of another tree: it is tried before others.
        """
        held = self._parents
        if not held or not hashes or hashes[0] not in held:
            return 0
        low, high = 0, len(hashes)
        if guess:
            if hashes[guess - 1] not in held:
                high = guess - 1
            elif guess == high or hashes[guess] not in held:
                return guess
            else:
                low = guess
        if hashes[high - 1] in held:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if hashes[middle] in held:
                low = middle
            else:
                high = middle
        return low + 1

    def hold(self, hashes: Sequence[int]) -> int | None:
        """Hold a chain; costs as much as it has blocks that are new.

        Args:
            hashes: Sequence hashes from the first block on.

        Returns:
            What ``release`` takes, ``None`` if nothing is held.
        """
        shared = self.leading(hashes)
        parent = hashes[shared - 1] if shared else None
        new = hashes[shared:]
        fresh = dict(zip(new, (parent, *new[:-1]), strict=True)) if new else {}
        if len(fresh) != len(new) or not self._parents.keys().isdisjoint(fresh):
            new = self._until_known(new)
            fresh = dict(zip(new, (parent, *new[:-1]), strict=False))
        if parent is not None:
            self._extra[parent] = self._extra.get(parent, 0) + 1
        self._parents.update(fresh)
        return new[-1] if new else parent

    def _until_known(self, new: Sequence[int]) -> Sequence[int]:
        """Cut off what follows a collision, or a hash that is there twice; there is one."""
        seen: set[int] = set()
        while (block := new[len(seen)]) not in seen and block not in self._parents:
            seen.add(block)
        return new[: len(seen)]

    def release(self, end: int | None) -> None:
        """Give up a chain, once.

        Args:
            end: What ``hold`` returned.
        """
        parents, extra = self._parents, self._extra
        while end is not None:
            count = extra.get(end)
            if count is not None:
                if count > 1:
                    extra[end] = count - 1
                else:
                    del extra[end]
                return
            end = parents.pop(end)

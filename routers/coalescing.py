"""Prompts that are being computed, and requests that wait for the beginning which theirs share with them. Pure.

Of requests that share a beginning which a rank does not have, and that come together, each one computes it: engines
find only what was computed before. Those that wait for the first of them find it cached.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from routers.types import RankKey


class Prefill:
    """One prompt that a rank computes now.

    Args:
        key: The rank.
        hashes: Sequence hashes of the prompt's full blocks.
        cached_blocks: Leading ones that the rank had.

    Attributes:
        key: See above.
        hashes: See above.
        cached_blocks: Leading blocks that the rank has by now, as far as is known.
        waiting: Requests that wait for more of them, in the order in which they came.
    """

    __slots__ = ("cached_blocks", "hashes", "key", "waiting")

    def __init__(self, key: RankKey, hashes: Sequence[int], cached_blocks: int) -> None:
        self.key = key
        self.hashes = hashes
        self.cached_blocks = cached_blocks
        self.waiting: list[Waiting] = []

    def shared_blocks(self, hashes: Sequence[int]) -> int:
        """Leading blocks that another prompt has in common with this one; a hash stands for all before it, too."""
        mine = self.hashes
        most = min(len(mine), len(hashes))
        return bisect_left(range(most), 1, key=lambda index: int(mine[index] != hashes[index]))


class Waiting:
    """A request that waits for a prefill.

    Args:
        prefill: Whose.
        blocks: Leading blocks that are to be there before it goes.
        go: Called once, unless it leaves before.
    """

    __slots__ = ("_go", "_prefill", "blocks")

    def __init__(self, prefill: Prefill, blocks: int, go: Callable[[], None]) -> None:
        self._prefill: Prefill | None = prefill
        self._go = go
        self.blocks = blocks

    def leave(self) -> None:
        """It waits no more, and does not go; a second call, or one after it has gone, does nothing."""
        if self._prefill is not None:
            self._prefill.waiting.remove(self)
            self._prefill = None

    def go(self) -> None:
        """It waits no more, and goes."""
        if self._prefill is not None:
            self.leave()
            self._go()


class Coalescing:
    """The prefills of all ranks.

    Args:
        min_tokens: What a request waits for is at least so much, ``>= 1``.
    """

    def __init__(self, min_tokens: int) -> None:
        if min_tokens < 1:
            raise ValueError(f"min_tokens is {min_tokens}, must be at least 1")
        self._min_tokens = min_tokens
        self._prefills: dict[RankKey, list[Prefill]] = {}

    def __len__(self) -> int:
        """Prefills that have not ended."""
        return sum(map(len, self._prefills.values()))

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(len(prefill.waiting) for prefills in self._prefills.values() for prefill in prefills)

    def begin(self, key: RankKey, hashes: Sequence[int], block_size: int, cached_blocks: int) -> Prefill | None:
        """A rank is about to compute a prompt; ``None`` if that is too little for anybody to wait for.

        Args:
            key: The rank.
            hashes: Sequence hashes of the prompt's full blocks.
            block_size: Tokens of a block.
            cached_blocks: Leading blocks that it has.
        """
        if len(hashes) - cached_blocks < self._least_blocks(block_size):
            return None
        prefill = Prefill(key, hashes, cached_blocks)
        self._prefills.setdefault(key, []).append(prefill)
        return prefill

    def shared_with(
        self, key: RankKey, hashes: Sequence[int], block_size: int, cached_blocks: Callable[[], int]
    ) -> Prefill | None:
        """The oldest prefill of a rank that computes enough of a prompt's beginning to wait for.

        Args:
            key: The rank.
            hashes: Sequence hashes of the prompt's full blocks.
            block_size: Tokens of a block.
            cached_blocks: Looks up leading blocks that the rank has for certain; asked only if it matters.
        """
        least = self._least_blocks(block_size)
        cached = None
        for prefill in self._prefills.get(key, ()):
            if not _is_equal_at(prefill, hashes, prefill.cached_blocks + least):
                continue
            if cached is None:
                cached = cached_blocks()
            if _is_equal_at(prefill, hashes, max(cached, prefill.cached_blocks) + least):
                return prefill
        return None

    def wait(self, prefill: Prefill, hashes: Sequence[int], block_size: int, go: Callable[[], None]) -> Waiting:
        """Have a request wait until nearly all that it shares with a prefill is there, or the prefill has ended."""
        waiting = Waiting(prefill, prefill.shared_blocks(hashes) - self._least_blocks(block_size) + 1, go)
        prefill.waiting.append(waiting)
        return waiting

    def on(self, worker_id: str) -> list[Prefill]:
        """Prefills of a worker's ranks."""
        return [
            prefill for key, prefills in self._prefills.items() if key.worker_id == worker_id for prefill in prefills
        ]

    def progressed(self, prefill: Prefill, cached_blocks: int) -> None:
        """So many leading blocks of a prefill are there."""
        prefill.cached_blocks = max(prefill.cached_blocks, cached_blocks)
        for waiting in list(prefill.waiting):
            if waiting.blocks <= prefill.cached_blocks:
                waiting.go()

    def end(self, prefill: Prefill) -> None:
        """A prefill has ended, or nobody is to wait for it any more; a second call does nothing."""
        prefills = self._prefills.get(prefill.key, [])
        if prefill in prefills:
            prefills.remove(prefill)
            if not prefills:
                del self._prefills[prefill.key]
        for waiting in list(prefill.waiting):
            waiting.go()

    def _least_blocks(self, block_size: int) -> int:
        return -(-self._min_tokens // block_size)


def _is_equal_at(prefill: Prefill, hashes: Sequence[int], blocks: int) -> bool:
    """Whether two prompts have at least so many leading blocks in common."""
    mine = prefill.hashes
    return blocks <= len(mine) and blocks <= len(hashes) and mine[blocks - 1] == hashes[blocks - 1]

"""Blocks that ranks are assumed to hold since requests with them were sent there. Pure: time comes as an argument.

Twice of use: for the moment until an engine's events tell of what it computes (predictions), and for as long as a
cache usually keeps things, for ranks that tell nothing (the approximate index).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kv_events.index_types import Overlap, RankId
from routers.block_tree import BlockTree, Run

PREDICTED_TTL_S: Final = 2.0
APPROXIMATE_TTL_S: Final = 120.0
# At some 120 B each about 30 MB.
MAX_BLOCKS: Final = 1 << 18
# At some 200 B each about 13 MB.
MAX_ASSUMPTIONS: Final = 1 << 16
PRUNE_TO: Final = 0.8
# What a call drops at least while it prunes: well below a millisecond.
PRUNE_STEP_BLOCKS: Final = 1024


class Assumption(msgspec.Struct, eq=False):
    """One request's share of what its rank is assumed to hold; made and ended by ``AssumedBlocks`` alone.

    Attributes:
        rank: Worker id and data-parallel rank.
        expires_at: When it ends by itself, in seconds of the caller's clock.
        chain: What is held for it, ``None`` once it has ended.
    """

    rank: RankId
    expires_at: float
    chain: Run | None


class _Rank(msgspec.Struct):
    tree: BlockTree = msgspec.field(default_factory=BlockTree)
    by_end: dict[int, list[Assumption]] = msgspec.field(default_factory=dict)


class AssumedBlocks:
    """An index of assumptions, each of which lasts for some time; a block that is sent again lasts longer.

    Everything due is dropped at each call. Who calls seldom calls ``expire`` about once a second, so that it never is
    much at once.

    Args:
        ttl_s: How long an assumption lasts.
        max_blocks: Distinct blocks of all ranks together. The oldest assumptions make room, down to four fifths, in
            steps.
        max_assumptions: The same for assumptions, many of which may share their blocks; no steps.

    Attributes:
        blocks: Distinct blocks of all ranks together.
    """

    def __init__(self, ttl_s: float, max_blocks: int = MAX_BLOCKS, *, max_assumptions: int = MAX_ASSUMPTIONS) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._max_assumptions = max_assumptions
        self._ranks: dict[RankId, _Rank] = {}
        self._oldest_first: deque[Assumption] = deque()
        self._is_pruning = False
        self.blocks = 0

    def add(self, rank: RankId, sequence_hashes: Sequence[int], now: float) -> Assumption:
        """Assume that ``rank`` holds, or soon holds, a prompt's blocks.

        Args:
            rank: Where the request is sent.
            sequence_hashes: Of its prompt's full blocks, from the first.
            now: Seconds; never less than in an earlier call.

        Returns:
            What ``withdraw`` takes.
        """
        self.expire(now)
        assumption = Assumption(rank, now + self._ttl_s, None)
        if not sequence_hashes:
            return assumption
        state = self._ranks.get(rank)
        if state is None:
            state = self._ranks[rank] = _Rank()
        before = state.tree.blocks
        chain = assumption.chain = state.tree.hold(sequence_hashes)
        assert chain is not None  # there are hashes
        added = state.tree.blocks - before
        self.blocks += added
        state.by_end.setdefault(chain.blocks[-1], []).append(assumption)
        self._oldest_first.append(assumption)
        self._prune(added)
        return assumption

    def withdraw(self, assumption: Assumption) -> None:
        """The request failed before its first token: it has left nothing there. Fine after the assumption's end."""
        self._end(assumption)

    def confirm(self, rank: RankId, sequence_hashes: Iterable[int]) -> None:
        """The rank's events tell of these blocks: what is assumed of prompts that end with one of them is known."""
        state = self._ranks.get(rank)
        if state is not None:
            for end in sequence_hashes:
                for assumption in tuple(state.by_end.get(end, ())):
                    self._end(assumption)

    def overlap(self, sequence_hashes: Sequence[int], now: float) -> dict[RankId, int]:
        """Count the leading blocks of a prompt that ranks are assumed to hold; ranks without any are left out."""
        self.expire(now)
        found = {}
        for rank, state in self._ranks.items():
            blocks = state.tree.leading(sequence_hashes)
            if blocks:
                found[rank] = blocks
        return found

    def merge_into(self, overlap: Overlap, sequence_hashes: Sequence[int], now: float) -> None:
        """Raise ``overlap.device`` to what is assumed; assumptions that it knows of by itself are confirmed."""
        known = overlap.device
        for rank, blocks in self.overlap(sequence_hashes, now).items():
            if known.get(rank, 0) < blocks:
                known[rank] = blocks
            else:
                self.confirm(rank, (sequence_hashes[blocks - 1],))

    def clear_rank(self, rank: RankId) -> None:
        """The rank's cache was emptied, or the rank is gone."""
        state = self._ranks.pop(rank, None)
        if state is not None:
            self.blocks -= state.tree.blocks
            for assumptions in state.by_end.values():
                for assumption in assumptions:
                    assumption.chain = None

    def expire(self, now: float) -> None:
        """Drop what is due."""
        oldest_first = self._oldest_first
        while oldest_first and (oldest_first[0].expires_at <= now or oldest_first[0].chain is None):
            self._end(oldest_first.popleft())

    def _prune(self, added: int) -> None:
        while len(self._oldest_first) > self._max_assumptions:
            self._end(self._oldest_first.popleft())
        self._is_pruning = self._is_pruning or self.blocks > self._max_blocks
        if not self._is_pruning:
            return
        target = int(self._max_blocks * PRUNE_TO)
        # Faster than blocks come, and never above the bound.
        enough = min(self._max_blocks, self.blocks - 2 * added - PRUNE_STEP_BLOCKS)
        while self.blocks > max(target, enough):
            self._end(self._oldest_first.popleft())
        self._is_pruning = self.blocks > target

    def _end(self, assumption: Assumption) -> None:
        chain, assumption.chain = assumption.chain, None
        if chain is None:
            return
        state = self._ranks[assumption.rank]
        end = chain.blocks[-1]
        same_end = state.by_end[end]
        same_end.remove(assumption)
        if not same_end:
            del state.by_end[end]
        before = state.tree.blocks
        state.tree.release(chain)
        self.blocks -= before - state.tree.blocks
        if not state.by_end:
            del self._ranks[assumption.rank]

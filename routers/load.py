"""Load booked on ranks: taken in the same step as the choice, given back exactly once. Pure."""

from collections.abc import Callable, Sequence

from routers.block_tree import BlockTree, Run
from routers.prefill_pace import PrefillPace


class RankLoad:
    """What the live requests have booked on one rank.

    Args:
        on_fullness: Told when the rank has become full, and when it has room again.

    Attributes:
        in_flight: Requests, or items of batches, that run or wait there.
        blocks: KV blocks of their prompts; those known by hash count once, however many requests share them.
        prefill_tokens: Prompt tokens whose prefill has not ended.
        pace: Estimates how much of that is done; ``None`` where it counts in full until its end.
        is_full: ``in_flight`` has reached the limit, or passed it: a batch is taken whole while there is any room.
    """

    __slots__ = ("_limit", "_on_fullness", "_tree", "blocks", "in_flight", "is_full", "pace", "prefill_tokens")

    def __init__(self, on_fullness: "Callable[[RankLoad], None]" = lambda load: None) -> None:
        self._limit = float("inf")
        self._on_fullness = on_fullness
        self.in_flight = 0
        self.blocks = 0
        self.prefill_tokens = 0
        self.pace: PrefillPace | None = None
        self._tree = BlockTree()
        self.is_full = False

    def set_limit(self, limit: float) -> None:
        """Take as many requests at once from now on; ``math.inf`` for no limit."""
        self._limit = limit
        self.note()

    def note(self) -> None:
        """``in_flight`` has changed: see whether there is room."""
        if (self.in_flight >= self._limit) is not self.is_full:
            self.is_full = not self.is_full
            self._on_fullness(self)

    @property
    def is_idle(self) -> bool:
        """Nothing is booked."""
        return not (self.in_flight or self.blocks or self.prefill_tokens)

    def left_tokens(self) -> int:
        """Prompt tokens that are still to be computed, as far as that can be told."""
        return self.prefill_tokens if self.pace is None else self.prefill_tokens - self.pace.done_tokens()

    def shared_blocks(self, block_hashes: Sequence[int]) -> int:
        """Count the leading blocks of a prompt, by sequence hash, that live requests here use already."""
        return self._tree.leading(block_hashes)

    def book(
        self, *, requests: int, blocks: int, prefill_tokens: int, block_hashes: Sequence[int] = ()
    ) -> "RankBooking":
        """Take load on this rank; synchronous, so that no other choice can come between a choice and its booking.

        Args:
            requests: Number of sequences, ``>= 1``.
            blocks: KV blocks of their prompts.
            prefill_tokens: Prompt tokens that must be computed.
            block_hashes: Sequence hashes of the leading ones of these blocks, which other requests may share; the
                remaining blocks are the request's own.
        """
        if requests < 1 or blocks < 0 or prefill_tokens < 0:
            raise ValueError(f"cannot book {requests} requests, {blocks} blocks, {prefill_tokens} tokens")
        if not block_hashes:
            return RankBooking(self, requests, blocks, prefill_tokens)
        before = self._tree.blocks
        chain = self._tree.hold(block_hashes)
        self.blocks += self._tree.blocks - before
        return RankBooking(self, requests, max(0, blocks - len(block_hashes)), prefill_tokens, chain)

    def release_chain(self, chain: Run) -> None:
        """Give the blocks of a chain back, but for those that other requests share; for bookings only."""
        before = self._tree.blocks
        self._tree.release(chain)
        self.blocks -= before - self._tree.blocks


class RankBooking:
    """One request's share of a rank's load."""

    __slots__ = ("_blocks", "_chain", "_is_released", "_load", "_prefill_tokens", "_requests")

    def __init__(
        self, load: RankLoad, requests: int, blocks: int, prefill_tokens: int, chain: Run | None = None
    ) -> None:
        self._load = load
        self._requests = requests
        self._blocks = blocks
        self._prefill_tokens = prefill_tokens
        self._chain = chain
        self._is_released = False
        load.in_flight += requests
        load.blocks += blocks
        load.prefill_tokens += prefill_tokens
        if load.pace is not None and prefill_tokens:
            load.pace.begin(self, prefill_tokens)
        load.note()

    def first_token(self) -> None:
        """The prefill has ended: give its tokens back."""
        self._end_prefill(is_computed=True)

    def release(self) -> None:
        """Give everything back.

        Raises:
            RuntimeError: The booking was released before.
        """
        if self._is_released:
            raise RuntimeError("a booking was released twice")
        self._is_released = True
        self._end_prefill(is_computed=False)
        load = self._load
        load.in_flight -= self._requests
        load.blocks -= self._blocks
        if self._chain is not None:
            load.release_chain(self._chain)
        load.note()

    def _end_prefill(self, *, is_computed: bool) -> None:
        if self._prefill_tokens:
            load = self._load
            load.prefill_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            if load.pace is not None:
                load.pace.end(self, is_computed=is_computed)

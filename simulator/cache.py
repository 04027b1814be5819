"""Prefix cache of one rank: fixed-size blocks in a tree, least recently used leaves go first.

Pure: no clock; recency is the order of the calls. A running request holds a ``Lease``: the blocks
it shares or has filled are pinned, and the blocks it will still need are reserved, so a request
that was let in never runs out of room.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Namespace(NamedTuple):
    """Prompts share blocks only if all of this is equal; empty strings stand for nothing given."""

    extra_key: str = ""
    cache_salt: str = ""
    lora_name: str = ""


BASE = Namespace()


class CacheListener(Protocol):
    """What wants to know about blocks: the place where KV events hang on."""

    def blocks_stored(self, lease: Lease, blocks: Sequence[Block]) -> None:
        """Take note that ``blocks``, a chain, were filled by the request behind ``lease``."""

    def block_removed(self, block: Block) -> None:
        """Take note that ``block``, or one of several copies of it, was evicted."""

    def all_cleared(self) -> None:
        """Take note that the cache is empty."""


@dataclass(slots=True, eq=False)
class Block:
    """One filled block; ``parent`` is ``None`` only for the root of a namespace, which holds no tokens.

    A copy is a block of its own with the same tokens as its ``original``, without children. ``digest``
    is a memo of whoever names blocks, empty until then.
    """

    parent: Block | None
    token_bytes: bytes
    original: Block | None = None
    copies: list[Block] = field(default_factory=list)
    digest: bytes = b""
    children: dict[bytes, Block] = field(default_factory=dict)
    pins: int = 0
    last_used: int = 0
    is_present: bool = True

    @property
    def is_evictable(self) -> bool:
        """Whether the block may go now."""
        return self.is_present and not self.pins and not self.children and self.parent is not None


@dataclass(slots=True, eq=False)
class Lease:
    """One request's hold on the cache; given back exactly once with ``PrefixCache.release``."""

    namespace: Namespace
    blocks: list[Block]
    reserved_blocks: int
    cached_tokens: int
    session_id: str | None = None
    known_blocks: int = 0
    """Leading blocks that were stored when the lease began, also where they must be computed again."""
    copies: list[Block] = field(default_factory=list)
    is_released: bool = False


class PrefixCache:
    """Blocks of ``page_size`` tokens, ``num_blocks`` at most, pinned and reserved ones included.

    Args:
        num_blocks: Room.
        page_size: Tokens of a block.
        listener: Hears of every change.
        stores: Keep blocks for later prompts; otherwise only room is counted.
        keeps_copies: Like vLLM, store a block once more when a request computes it although it was
            there; otherwise the one that is there is used.
    """

    def __init__(
        self,
        num_blocks: int,
        page_size: int,
        listener: CacheListener | None = None,
        *,
        keeps_copies: bool = False,
        stores: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.page_size = page_size
        self._listener = listener
        self._keeps_copies = keeps_copies
        self._stores = stores
        self._roots: dict[Namespace, Block] = {}
        self._present = 0
        self._reserved = 0
        self._pinned = 0
        self._tick = 0
        self._heap: list[tuple[int, int, Block]] = []
        self._pushes = 0

    @property
    def stored_blocks(self) -> int:
        """Blocks that hold tokens, pinned or not."""
        return self._present

    @property
    def busy_blocks(self) -> int:
        """Blocks that running requests have pinned or reserved."""
        return self._pinned + self._reserved

    def stored(self) -> Iterator[tuple[Namespace, Block]]:
        """Yield every block once, parents before their children, without copies."""
        for namespace, root in self._roots.items():
            rest = list(root.children.values())
            while rest:
                block = rest.pop()
                yield namespace, block
                rest += block.children.values()

    def overlap_blocks(self, tokens: Sequence[int], namespace: Namespace = BASE) -> int:
        """Return how many leading full blocks of ``tokens`` are stored, without touching their recency."""
        return len(self._walk(self._pages(tokens), namespace, len(tokens)))

    def lease(
        self,
        tokens: Sequence[int],
        namespace: Namespace,
        *,
        match_tokens: int,
        total_tokens: int,
        session_id: str | None = None,
    ) -> Lease | None:
        """Pin the stored prefix of ``tokens`` and reserve room for the rest.

        Args:
            tokens: Prompt token ids.
            namespace: Prompts share blocks only inside one namespace.
            match_tokens: Leading tokens that may come from the cache.
            total_tokens: Tokens of prompt and answer together, at most.
            session_id: The session that the listener is told about.

        Returns:
            The lease, or ``None`` when pinned and reserved blocks leave too little room: nothing has
            changed then, not even how recently blocks were used.
        """
        known = self._walk(self._pages(tokens), namespace, len(tokens))
        blocks = known[: max(0, match_tokens) // self.page_size]
        needed = -(-total_tokens // self.page_size) - len(blocks)
        idle = sum(not block.pins for block in blocks)
        if self._pinned + idle + self._reserved + needed > self.num_blocks:
            return None
        self._pin(blocks)
        while self._present + self._reserved + needed > self.num_blocks:
            self._evict_one()
        self._reserved += needed
        return Lease(namespace, blocks, needed, len(blocks) * self.page_size, session_id, len(known))

    def fill(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Store the full blocks of ``tokens``, the lease's whole sequence so far."""
        start = len(lease.blocks)
        if not self._stores or start >= len(tokens) // self.page_size:
            return
        parent = lease.blocks[-1] if lease.blocks else self._root(lease.namespace)
        stored: list[Block] = []
        for page in self._pages(tokens[start * self.page_size :]):
            if not lease.reserved_blocks:
                break
            block = parent.children.get(page)
            if block is None:
                block = parent.children[page] = Block(parent, page)
                self._present += 1
                stored.append(block)
            elif self._keeps_copies and len(lease.blocks) < lease.known_blocks:
                stored.append(self._copy(block, lease))
            elif stored:
                # The next new block does not follow the last one: each chain is told by itself.
                self._tell_stored(lease, stored)
                stored = []
            lease.reserved_blocks -= 1
            self._reserved -= 1
            self._pin([block])
            lease.blocks.append(block)
            parent = block
        self._tell_stored(lease, stored)

    def release(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Store what is full of ``tokens``, then give everything back; the second call does nothing."""
        if lease.is_released:
            return
        self.fill(lease, tokens)
        lease.is_released = True
        self._reserved -= lease.reserved_blocks
        lease.reserved_blocks = 0
        self._unpin(lease.blocks)
        self._unpin(lease.copies)

    def keep(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Store what is full of ``tokens`` and give back the room that they do not need.

        Returns:
            Blocks that the lease still holds, a last one that is not full included.
        """
        self.fill(lease, tokens)
        needed = -(-len(tokens) // self.page_size)
        spare = max(0, lease.reserved_blocks - max(0, needed - len(lease.blocks)))
        lease.reserved_blocks -= spare
        self._reserved -= spare
        return len(lease.blocks) + lease.reserved_blocks

    def clear(self) -> None:
        """Forget every block; leases taken before must not be used any more."""
        self._roots.clear()
        self._heap.clear()
        self._present = self._reserved = self._pinned = 0
        if self._listener is not None:
            self._listener.all_cleared()

    def _pages(self, tokens: Sequence[int]) -> list[bytes]:
        raw = array("I", tokens).tobytes()
        width = self.page_size * 4
        return [raw[start : start + width] for start in range(0, len(raw) - width + 1, width)]

    def _tell_stored(self, lease: Lease, blocks: list[Block]) -> None:
        if blocks and self._listener is not None:
            self._listener.blocks_stored(lease, blocks)

    def _copy(self, block: Block, lease: Lease) -> Block:
        copy = Block(block.parent, block.token_bytes, original=block)
        block.copies.append(copy)
        self._present += 1
        self._pin([copy])
        lease.copies.append(copy)
        return copy

    def _root(self, namespace: Namespace) -> Block:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Block(None, b"")
        return root

    def _walk(self, pages: list[bytes], namespace: Namespace, match_tokens: int) -> list[Block]:
        block = self._roots.get(namespace)
        found: list[Block] = []
        if block is None:
            return found
        for page in pages[: max(0, match_tokens) // self.page_size]:
            block = block.children.get(page)
            if block is None:
                break
            found.append(block)
        return found

    def _pin(self, blocks: list[Block]) -> None:
        for block in blocks:
            if not block.pins:
                self._pinned += 1
            block.pins += 1

    def _unpin(self, blocks: list[Block]) -> None:
        # Parents count as used after their children, so that eviction never meets a parent first.
        for block in reversed(blocks):
            if not block.is_present:
                continue
            block.pins -= 1
            self._tick += 1
            block.last_used = self._tick
            if not block.pins:
                self._pinned -= 1
                self._offer(block)

    def _offer(self, block: Block) -> None:
        if block.is_evictable:
            self._pushes += 1
            heapq.heappush(self._heap, (block.last_used, self._pushes, block))

    def _evict_one(self) -> None:
        while True:
            last_used, _, block = heapq.heappop(self._heap)
            # Entries go stale when a block is used again, gets a child, or was offered twice.
            if block.is_evictable and block.last_used == last_used:
                break
        parent = block.parent
        assert parent is not None
        self._present -= 1
        if block.copies:
            # A copy goes in its place: what is left of the two keeps the children's parent.
            copy = block.copies.pop()
            copy.is_present = False
            block.last_used = copy.last_used
            self._offer(block)
        else:
            block.is_present = False
            if block.original is not None:
                block.original.copies.remove(block)
            else:
                del parent.children[block.token_bytes]
                self._offer(parent)
        if self._listener is not None:
            self._listener.block_removed(block)

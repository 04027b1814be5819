"""Prefix index: which ranks hold the leading blocks of a prompt. Pure.

One dictionary leads from the sequence hash of a block, which stands for its whole prefix, to the set of its holders as
an interned bit mask. Each holder (a tier of a rank) has a dictionary from the engine's name of a block to that key, for
parents and removals. All dictionaries are split into shards: one that has a million entries stops the loop for 60 ms
when it grows, a shard for about 1 ms. Nothing here is an object of its own for a block, so the garbage collector has
nothing to look through.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from kv_events.index_holder import (
    FIRST_BIT,
    MANY_BLOCKS,
    SHARD_MASK,
    SHARD_SHIFT,
    SHARDS,
    Holder,
    Rank,
    canonical,
    put_new,
)
from kv_events.index_namespaces import BASE_ID, OPAQUE_ID, SHIFT, NamespaceTable, inherit
from kv_events.index_types import ApplyReport, ChainHashes, Overlap, RankId, chain_hashes
from kv_events.types import BASE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Namespace, Tier

# An engine's own count of blocks, with room for what is being evicted while it is announced (K.43).
CAPACITY_SLACK = 1.25
# Without a count from the engine.
DEFAULT_CAPACITY_BLOCKS = 4_000_000
MAX_INTERNED_MASKS = 65_536
# More than one call can take from a namespace.
HELD = 1 << 40
_SEQUENCE_MASK = (1 << SHIFT) - 1
_DEVICE, _HOST, _DISK = Tier.DEVICE, Tier.HOST, Tier.DISK

__all__ = ["ApplyReport", "Overlap", "PrefixIndex", "RankId"]


class PrefixIndex:
    """Blocks of all ranks. One thread only.

    Ranks are added before anything is applied to them. What is cleared or removed is gone from lookups at once; its
    memory is given back by ``collect``, in pieces, which the owner calls while it says that there is more.

    Attributes:
        eagle_ranks: Those whose last blocks covered one token more, see ``local_hashes``; not to be changed by others.
            Prompts are found there by hashes made alike, and never by the others.
    """

    def __init__(self, hashes: ChainHashes = chain_hashes) -> None:
        """Create an empty index.

        Args:
            hashes: Computes sequence hashes, each in [0, 2^64); as many as there are whole blocks of tokens.
        """
        self._chain_hashes = hashes
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._ranks: dict[RankId, Rank] = {}
        self.eagle_ranks: set[RankId] = set()
        self._holders: list[Holder | None] = [None] * FIRST_BIT
        self._free_bits: list[int] = []
        self._live = 0
        self._condemned: deque[Holder] = deque()
        self._masks: dict[int, int] = {}
        self._namespaces = NamespaceTable()

    # Ranks

    def add_rank(self, rank: RankId, *, capacity_blocks: int | None = None, max_copies: int = 1) -> None:
        """Make room for a rank; one that is already there only gets the new limits.

        Args:
            rank: Worker id and data-parallel rank.
            capacity_blocks: Blocks that its device holds, above 0; ``None`` if unknown.
            max_copies: Copies of one block that its engine may hold and removes one by one: 2 for vLLM, 1 for SGLang.
        """
        capacity = DEFAULT_CAPACITY_BLOCKS if capacity_blocks is None else int(capacity_blocks * CAPACITY_SLACK)
        state = self._ranks.setdefault(rank, Rank(capacity, max_copies))
        state.capacity_blocks, state.max_copies = capacity, max_copies

    def clear_rank(self, rank: RankId, tier: Tier | None = None) -> None:
        """Forget the blocks of a rank, or of one of its tiers. Takes no time; unknown ranks are fine."""
        state = self._ranks.get(rank)
        if state is None:
            return
        for name in [tier] if tier else list(state.holders):
            holder = state.holders.pop(name, None)
            if holder is not None:
                self._live &= ~holder.bit
                self._condemned.append(holder)

    def remove_rank(self, rank: RankId) -> None:
        """Forget a rank and its blocks. Takes no time; unknown ranks are fine."""
        self.clear_rank(rank)
        self._ranks.pop(rank, None)
        self.eagle_ranks.discard(rank)

    def ranks(self) -> tuple[RankId, ...]:
        """Name the ranks that were added and not removed."""
        return tuple(self._ranks)

    def rank_blocks(self, rank: RankId, tier: Tier = Tier.DEVICE) -> int:
        """Count the blocks that a tier of a rank holds, by the engine's names, copies not counted."""
        state = self._ranks.get(rank)
        holder = state.holders.get(tier) if state else None
        return holder.blocks if holder else 0

    def distinct_blocks(self) -> int:
        """Count the blocks that anybody holds, and those that wait for ``collect``."""
        return sum(map(len, self._shards))

    def collect(self, max_blocks: int) -> bool:
        """Give back the memory of up to ``max_blocks`` forgotten blocks, about 1 µs each; true if there are more."""
        while self._condemned:
            holder = self._condemned[0]
            done = 0
            for key in holder.pop_keys(max_blocks):
                self._forget(key, holder.bit)
                done += 1
            max_blocks -= done
            if holder.is_empty():
                self._condemned.popleft()
                number = holder.bit.bit_length() - 1
                self._holders[number] = None
                self._free_bits.append(number)
            if max_blocks <= 0:
                break
        return bool(self._condemned)

    # Events

    def apply(self, rank: RankId, events: Iterable[KVEvent], report: ApplyReport | None = None) -> ApplyReport:
        """Apply events in their order.

        Args:
            rank: One that was added.
            events: What its engine announced.
            report: Goes on from here; ``None`` begins a new one.

        Raises:
            KeyError: The rank was not added, or has been removed.
        """
        report = report or ApplyReport()
        for event in events:
            if isinstance(event, BlockStored):
                if not self.store(rank, event, report):
                    report.orphans.append(event)
            elif isinstance(event, BlockRemoved):
                self.remove(rank, event, report)
            else:
                self.clear(rank, event)
        return report

    def clear(self, rank: RankId, event: AllBlocksCleared) -> None:
        """Apply a clear; raises ``KeyError`` as ``apply``."""
        if self._ranks[rank].holders:
            self.clear_rank(rank, event.tier)

    def store(self, rank: RankId, event: BlockStored, report: ApplyReport, gone: Collection[int] = ()) -> bool:
        """Apply a store but for the blocks in ``gone``; false, and nothing is done, if its parent is unknown.

        Raises ``KeyError`` as ``apply``.
        """
        state = self._ranks[rank]
        parent, namespace = None, event.namespace
        if event.parent_hash is not None:
            parent = self._find(state, event.parent_hash, event.tier)
            if parent is None:
                return False
        number = BASE_ID
        if namespace is None and (parent is None or parent <= _SEQUENCE_MASK):
            chain = self._chain_hashes(event, BASE, parent)
        else:
            number, named = self._namespace(parent, namespace)
            chain = self._chain_hashes(event, named, parent and parent & _SEQUENCE_MASK)
        if len(chain) < len(event.block_hashes):
            report.drop("short_tokens", len(event.block_hashes) - len(chain))
        if number:
            chain = [sequence | number << SHIFT for sequence in chain]
        pairs: Iterable[tuple[int, int]] = zip(event.block_hashes, chain, strict=False)
        holder, added = state.holders.get(event.tier) or self._holder(rank, state, event.tier), 0
        if gone:
            pairs = [pair for pair in pairs if pair[0] not in gone]
        elif number == BASE_ID and MANY_BLOCKS <= len(chain) <= state.room(holder):
            added = put_new(holder, self._shards, event.block_hashes, chain)
            report.stored += added
            pairs = islice(pairs, added, None)
        if added < len(chain):
            self._put(state, holder, pairs, number, report)
        if event.is_eagle is not (rank in self.eagle_ranks):
            (self.eagle_ranks.add if event.is_eagle else self.eagle_ranks.discard)(rank)
        return True

    def _namespace(self, parent: int | None, namespace: Namespace | None) -> tuple[int, Namespace]:
        """Give the number of the namespace of a store, and the one to hash its blocks in."""
        own: Namespace | None = namespace or BASE
        if parent is not None:
            inherited = self._namespaces.namespace(parent >> SHIFT)
            own = None if inherited is None else inherit(inherited, namespace)
        return self._namespaces.number(own), BASE if own is None or own.opaque else own

    def _put(
        self, state: Rank, holder: Holder, pairs: Iterable[tuple[int, int]], number: int, report: ApplyReport
    ) -> None:
        bit, names, shards, masks = holder.bit, holder.names, self._shards, self._masks
        room = state.room(holder)
        added = 0
        if number:
            # Held for the time of this call, since what is renamed below may be the last block of the namespace.
            self._namespaces.count(number, HELD)
        shared: int | None = None
        joined = bit
        sibling: Holder | None = None
        for name, key in pairs:
            table = names[name >> SHARD_SHIFT]
            if name in table:
                known = table[name]
                if known == key:
                    holder.add_copy(name, state.max_copies)
                    continue
                key = self._rename(holder, name, known, key, report)
            elif added >= room:
                report.drop("over_capacity")
                report.is_over_capacity |= holder.tier is Tier.DEVICE
                continue
            shard = shards[key >> SHARD_SHIFT & SHARD_MASK]
            if key not in shard:
                # The bit of the holder is one object for all its blocks.
                shard[key] = bit
            else:
                mask = shard[key]
                # Masks are interned: mostly the same object as for the block before.
                if mask is not shared:
                    shared, joined = mask, mask | bit
                    joined = masks.setdefault(joined, joined)
                    others = mask & self._live & ~bit
                    sibling = self._holders[others.bit_length() - 1] if others else None
                key = canonical(shard, name, key, sibling)
                if mask & bit:
                    holder.add_name(key)
                else:
                    shard[key] = joined
            table[name] = key
            added += 1
        holder.blocks += added
        report.stored += added
        if number:
            self._namespaces.count(number, added - HELD)
        if len(masks) > MAX_INTERNED_MASKS:
            masks.clear()

    def _rename(self, holder: Holder, name: int, known: int, key: int, report: ApplyReport) -> int:
        """Let a name stand for other content than before; in two namespaces it stands for nothing any more."""
        del holder.names[name >> SHARD_SHIFT][name]
        holder.copies.discard(name)
        holder.blocks -= 1
        if known >> SHIFT == key >> SHIFT:
            report.drop("renamed")
        else:
            report.drop("ambiguous")
            self._namespaces.count(key >> SHIFT, -1)
            key = (key & _SEQUENCE_MASK) | OPAQUE_ID << SHIFT
        self._release(holder, known)
        return key

    def remove(self, rank: RankId, event: BlockRemoved, report: ApplyReport) -> list[int]:
        """Apply a removal and return the names that the rank did not know. Raises ``KeyError`` as ``apply``."""
        holder = self._ranks[rank].holders.get(event.tier)
        if holder is None:
            return list(event.block_hashes)
        unknown = []
        copies, names, extra_names = holder.copies, holder.names, holder.extra_names
        bit, shards, removed = holder.bit, self._shards, 0
        for name in event.block_hashes:
            if copies and name in copies:
                copies.discard(name)
                continue
            key = names[name >> SHARD_SHIFT].pop(name, None)
            if key is None:
                unknown.append(name)
                continue
            removed += 1
            shard = shards[key >> SHARD_SHIFT & SHARD_MASK]
            # Of the base namespace, with this name and this holder alone.
            if key <= _SEQUENCE_MASK and not extra_names and shard.get(key) == bit:
                del shard[key]
            else:
                self._release(holder, key)
        holder.blocks -= removed
        report.removed += removed
        return unknown

    # Lookups

    def overlap(self, sequence_hashes: Sequence[int], namespace: Namespace = BASE) -> Overlap:
        """Count the leading blocks of a prompt that each rank holds; the first that is missing ends its count.

        Args:
            sequence_hashes: Of the prompt's blocks, from the first.
            namespace: Of the request.
        """
        result = Overlap()
        number = self._namespaces.find(namespace)
        if number is None or namespace.opaque is not None:
            return result
        tag = number << SHIFT
        keys = (sequence | tag for sequence in sequence_hashes) if tag else sequence_hashes
        shards, holding, last, depth = self._shards, self._live, -1, 0
        by_tier = {_DEVICE: result.device, _HOST: result.host, _DISK: result.disk}
        try:
            for key in keys:
                mask = shards[key >> SHARD_SHIFT & SHARD_MASK][key]
                # Masks are interned: mostly the same object as for the block before.
                if mask is not last:
                    still = holding & mask
                    if still != holding:
                        if depth:
                            self._note(by_tier, holding ^ still, depth)
                        holding = still
                        if not holding:
                            return result
                    last = mask
                depth += 1
        except KeyError:  # nobody holds this block
            pass
        if depth:
            self._note(by_tier, holding, depth)
        return result

    def _note(self, by_tier: dict[Tier, dict[RankId, int]], mask: int, depth: int) -> None:
        while mask:
            number = mask.bit_length() - 1
            if (holder := self._holders[number]) is not None:
                by_tier[holder.tier][holder.rank] = depth
            mask ^= 1 << number

    # Parts

    def holder_of(self, rank: RankId, tier: Tier) -> Holder | None:
        """Give what a tier of a rank holds, for a dump; not to be changed."""
        return self._ranks[rank].holders.get(tier)

    def namespace_of(self, key: int) -> Namespace | None:
        """Give the namespace of a key; ``None`` if no request can name it."""
        return self._namespaces.namespace(key >> SHIFT)

    def restore(
        self, rank: RankId, tier: Tier, namespace: Namespace | None, names: Sequence[int], sequences: Sequence[int]
    ) -> ApplyReport:
        """Put blocks back that were dumped; each is taken as it is, without its parent. Raises as ``apply``."""
        state, report = self._ranks[rank], ApplyReport()
        number = self._namespaces.number(namespace)
        keys = [sequence | number << SHIFT for sequence in sequences]
        self._put(state, self._holder(rank, state, tier), zip(names, keys, strict=True), number, report)
        return report

    def _find(self, state: Rank, name: int, tier: Tier) -> int | None:
        """Look a parent up: in the tier of its child, else in any other of the rank."""
        holders = state.holders
        own = holders.get(tier)
        key = own.names[name >> SHARD_SHIFT].get(name) if own else None
        if key is None and len(holders) > (own is not None):
            for holder in holders.values():
                key = holder.names[name >> SHARD_SHIFT].get(name)
                if key is not None:
                    break
        return key

    def _holder(self, rank: RankId, state: Rank, tier: Tier) -> Holder:
        holder = state.holders.get(tier)
        if holder is None:
            if self._free_bits:
                number = self._free_bits.pop()
            else:
                number = len(self._holders)
                self._holders.append(None)
            holder = Holder(rank, tier, 1 << number)
            self._holders[number] = state.holders[tier] = holder
            self._live |= holder.bit
        return holder

    def _release(self, holder: Holder, key: int) -> None:
        """One name fewer of a holder stands for ``key``."""
        if not holder.extra_names or not holder.drop_name(key):
            self._forget(key, holder.bit)
        elif key >> SHIFT:
            self._namespaces.count(key >> SHIFT, -1)

    def _forget(self, key: int, bit: int) -> None:
        shard = self._shards[key >> SHARD_SHIFT & SHARD_MASK]
        mask = shard.get(key, 0) & ~bit
        if mask:
            shard[key] = self._masks.setdefault(mask, mask)
        else:
            shard.pop(key, None)
        if key >> SHIFT != BASE_ID:
            self._namespaces.count(key >> SHIFT, -1)

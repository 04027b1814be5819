"""How the dictionaries of the prefix index lie in memory: spread over shards, with one object for each key."""

import random
from collections.abc import Iterator

import pytest

from kv_events.index import PrefixIndex, RankId
from kv_events.index_holder import SHARDS
from kv_events.types import BlockRemoved, BlockStored, Namespace, Tier
from tests.kv_events.blocks import removed, stored

SALT = Namespace(salt="tenant")


def keys(index: PrefixIndex, rank: RankId) -> Iterator[int]:
    holder = index.holder_of(rank, Tier.DEVICE)
    for table in holder.names if holder else ():
        yield from table.values()


def check_shared(index: PrefixIndex) -> None:
    """Every key of a holder is the very object that the index has for it."""
    objects = {key: key for shard in index._shards for key in shard}
    for rank in index.ranks():
        for key in keys(index, rank):
            assert objects[key] is key


@pytest.mark.parametrize("namespace", [pytest.param(None, id="base"), pytest.param(SALT, id="salt")])
@pytest.mark.parametrize("seed", range(20))
def test_holders_share_the_objects_of_keys(seed: int, namespace: Namespace | None) -> None:
    rng = random.Random(seed)
    index = PrefixIndex()
    # Ranks of one worker name blocks alike, those of another one in another way.
    ranks = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    for rank in ranks:
        index.add_rank(rank)
    for _ in range(60):
        rank = rng.choice(ranks)
        prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 6)))
        kind = rng.random()
        if kind < 0.7:
            index.apply(rank, [stored(prompt, 0, rank[0], namespace)])
        elif kind < 0.9:
            index.apply(rank, [removed(prompt, range(len(prompt)), rank[0])])
        elif kind < 0.95:
            # What is left of it stays until it is collected, a part at a time.
            index.clear_rank(rank)
        else:
            index.collect(3)
        check_shared(index)


def test_blocks_are_spread_over_shards() -> None:
    rng = random.Random(3)
    count = SHARDS * 200
    index = PrefixIndex(lambda event, namespace, parent: [rng.getrandbits(64) for _ in event.block_hashes])
    index.add_rank(("w", 0))
    names = tuple(rng.getrandbits(64) for _ in range(count))
    index.apply(("w", 0), [BlockStored(names, None, b"", 16)])
    holder = index.holder_of(("w", 0), Tier.DEVICE)
    assert holder is not None
    for tables in (holder.names, index._shards):
        assert [100 < len(table) < 300 for table in tables] == [True] * SHARDS
        # Within a shard the lowest bits, by which a dictionary looks for a place, are spread too.
        assert all(len({hash(key) & 63 for key in table}) > 48 for table in tables)


@pytest.mark.parametrize("name", [0, 1, 2**63, 2**64 - 1])
def test_any_name_of_64_bits_has_a_shard(name: int) -> None:
    index = PrefixIndex(lambda event, namespace, parent: [2**64 - 1 - name])
    index.add_rank(("w", 0))
    assert index.apply(("w", 0), [BlockStored((name,), None, b"", 16, namespace=SALT)]).stored == 1
    assert index.overlap([2**64 - 1 - name], SALT).device == {("w", 0): 1}
    assert index.apply(("w", 0), [BlockRemoved((name,))]).removed == 1
    assert index.distinct_blocks() == 0

"""The way of new blocks in runs does what the general way does, whatever the stores are."""

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events import index as index_module
from kv_events.index import ApplyReport, PrefixIndex, RankId
from kv_events.index_holder import FIRST_BIT, MANY_BLOCKS
from kv_events.types import BlockRemoved, BlockStored, KVEvent, Namespace, Tier

RANKS: tuple[RankId, ...] = (("a", 0), ("b", 0))
SPREAD = 0x9E37_79B9_7F4A_7C15
Step = tuple[RankId, KVEvent]


def wide(number: int) -> int:
    """A number of 64 bits, always in a new object."""
    return number * SPREAD % 2**64


def chain_of(event: BlockStored, namespace: Namespace, parent: int | None) -> list[int]:
    """Keys that the event names itself, one a byte, so that any may come again and any number be missing."""
    return [wide(number) for number in event.token_bytes]


NAMES = st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True)
STORES = st.builds(
    lambda names, keys, tier, is_salted: BlockStored(
        tuple(map(wide, names)), None, bytes(keys), 1, namespace=Namespace(salt="s") if is_salted else None, tier=tier
    ),
    NAMES,
    st.lists(st.integers(1, 12), max_size=7, unique=True),
    st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
    st.sampled_from([False, False, False, True]),
)
REMOVALS = st.builds(lambda names: BlockRemoved(tuple(map(wide, names))), NAMES)
STEPS = st.lists(st.tuples(st.sampled_from(RANKS), STORES | STORES | REMOVALS), max_size=12)


def run(steps: Iterable[Step], many_blocks: int, max_copies: int, capacity_blocks: int) -> tuple[object, ...]:
    """Everything that an index is after some steps, where stores of so many blocks are taken as runs."""
    index, reports = PrefixIndex(chain_of), []
    for rank in RANKS:
        index.add_rank(rank, capacity_blocks=capacity_blocks, max_copies=max_copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "MANY_BLOCKS", many_blocks)
        for rank, event in steps:
            reports.append(index.apply(rank, [event], ApplyReport()))
    holders = [
        (rank, tier, holder.bit, holder.names, holder.blocks, holder.copies, holder.extra_names)
        for rank in RANKS
        for tier in Tier
        if (holder := index.holder_of(rank, tier)) is not None
    ]
    return index._shards, holders, reports, [index.overlap([wide(number)]) for number in range(13)]


@given(steps=STEPS, max_copies=st.integers(1, 2), capacity_blocks=st.sampled_from([4, 100]))
def test_runs_are_stored_as_blocks_are(steps: list[Step], max_copies: int, capacity_blocks: int) -> None:
    assert run(steps, 1, max_copies, capacity_blocks) == run(steps, 10**9, max_copies, capacity_blocks)


def many(first: int, name: int, blocks: int = MANY_BLOCKS) -> BlockStored:
    return BlockStored(
        tuple(wide(name + number) for number in range(blocks)), None, bytes(range(first, first + blocks)), 1
    )


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(many(MANY_BLOCKS // 2, 1000), id="the second half is held, under other names"),
        pytest.param(many(MANY_BLOCKS + 1, MANY_BLOCKS - 2), id="the last names are other blocks'"),
        pytest.param(many(1, 1), id="all is held"),
    ],
)
@pytest.mark.parametrize("rank", RANKS)
def test_a_run_that_is_partly_known(rank: RankId, again: BlockStored) -> None:
    steps: list[Step] = [(RANKS[0], many(MANY_BLOCKS, 1)), (rank, again)]
    assert run(steps, MANY_BLOCKS, 1, 1000) == run(steps, 10**9, 1, 1000)


def test_every_mask_of_a_run_is_an_object_of_its_own() -> None:
    index, first = PrefixIndex(chain_of), count(1)
    for number in range(3):
        index.add_rank(("w", number))
        index.apply(("w", number), [many(next(first), 1)])
        holder = index.holder_of(("w", number), Tier.DEVICE)
        assert holder is not None
        assert holder.bit == 1 << (FIRST_BIT + number)
        assert holder.bit + 0 is not holder.bit

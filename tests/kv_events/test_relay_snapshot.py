"""Snapshots in parts: what is restored behaves like what was there, from the next event on too."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.index import PrefixIndex
from kv_events.relay_snapshot import held_blocks, restore_part, restore_shape, snapshot_parts
from kv_events.relay_wire import PART_BLOCKS
from kv_events.types import KVEvent, Tier
from tests.kv_events.blocks import query, stored
from tests.kv_events.test_snapshot import EVENTS, RANK, index_with, seen


def copy_of(index: PrefixIndex) -> PrefixIndex:
    """Another gateway's index, from the parts."""
    other = PrefixIndex()
    other.add_rank(("other", 0))
    other.add_rank(RANK, max_copies=2)
    restore_shape(other, RANK, is_eagle=RANK in index.eagle_ranks)
    for part, body in snapshot_parts(index, RANK):
        assert part.is_whole(len(body))
        assert restore_part(other, RANK, part, body) == 0
    return other


@settings(max_examples=60, deadline=None)
@given(before=st.lists(EVENTS, max_size=12), after=st.lists(EVENTS, max_size=8))
def test_k45_what_is_restored_equals_what_was_there(before: list[KVEvent], after: list[KVEvent]) -> None:
    index = index_with(before)
    index.collect(1_000)
    other = copy_of(index)
    assert seen(other) == seen(index)
    for one in (index, other):
        one.apply(RANK, after)
        one.collect(1_000)
    assert seen(other) == seen(index)


def test_large_caches_come_in_parts() -> None:
    index = index_with([])
    count = 2 * PART_BLOCKS + 5
    index.restore(RANK, Tier.DEVICE, None, range(count), range(10, 10 + count))
    assert held_blocks(index, RANK) == count
    sizes = [part.blocks for part, _ in snapshot_parts(index, RANK)]
    assert sizes == [PART_BLOCKS, PART_BLOCKS, 5]
    assert held_blocks(copy_of(index), RANK) == count


def test_overlapping_blocks_stay_so() -> None:
    index = index_with([stored("ab")])
    index.eagle_ranks.add(RANK)
    assert RANK in copy_of(index).eagle_ranks


def test_there_may_be_no_room() -> None:
    index = index_with([stored("abcdefgh")])
    small = PrefixIndex()
    small.add_rank(RANK, capacity_blocks=4)
    ((part, body),) = snapshot_parts(index, RANK)
    assert restore_part(small, RANK, part, body) == 3
    assert small.overlap(query("abcdefgh")).device.get(RANK, 0) <= 5


def test_a_rank_must_be_there() -> None:
    with pytest.raises(KeyError):
        next(snapshot_parts(PrefixIndex(), RANK))

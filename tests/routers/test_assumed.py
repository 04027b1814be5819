"""What ranks are assumed to hold: for how long, until when, and how much of it."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.hashing import sequence_hashes
from kv_events.index_types import Overlap
from routers.assumed import APPROXIMATE_TTL_S, PREDICTED_TTL_S, PRUNE_STEP_BLOCKS, AssumedBlocks, Assumption
from routers.types import RankKey

A, B = ("a", 0), ("b", 1)
SYSTEM = sequence_hashes(range(10))


def prompt(tail: int, blocks: int = 5) -> list[int]:
    """The shared beginning, and a tail of its own."""
    return sequence_hashes([*range(10), *range(tail, tail + blocks)])


def predictions() -> AssumedBlocks:
    return AssumedBlocks(PREDICTED_TTL_S)


def test_q_13_siblings_of_a_request_find_its_rank() -> None:
    index = predictions()
    index.add(A, prompt(100), 0.0)
    index.add(B, prompt(200, 2), 0.1)
    assert index.overlap(prompt(100), 0.2) == {A: 15, B: 10}
    assert index.overlap(prompt(200), 0.2) == {A: 10, B: 12}
    assert index.overlap(sequence_hashes([7, 8]), 0.2) == {}
    assert index.overlap([], 0.2) == {}
    assert index.blocks == 15 + 12


def test_keys_of_candidates_are_ranks() -> None:
    index = predictions()
    index.add(RankKey("a", 0), SYSTEM, 0.0)
    assert index.overlap(SYSTEM, 0.0)[A] == 10


@pytest.mark.parametrize("ttl_s", [PREDICTED_TTL_S, APPROXIMATE_TTL_S])
def test_assumptions_end_by_themselves_and_are_refreshed_by_what_is_sent_again(ttl_s: float) -> None:
    index = AssumedBlocks(ttl_s)
    index.add(A, prompt(100), 0.0)
    index.add(A, prompt(200), ttl_s / 2)
    assert index.overlap(prompt(100), ttl_s * 0.999) == {A: 15}
    assert index.overlap(prompt(100), ttl_s) == {A: 10}
    assert index.overlap(prompt(200), ttl_s * 1.499) == {A: 15}
    assert index.overlap(prompt(200), ttl_s * 1.5) == {}
    assert index.blocks == 0


def test_a_failed_request_takes_back_only_what_is_its_own() -> None:
    index = predictions()
    first = index.add(A, prompt(100), 0.0)
    sibling = index.add(A, prompt(100), 0.0)
    other = index.add(A, prompt(200), 0.0)
    index.withdraw(first)
    index.withdraw(first)
    assert index.overlap(prompt(100), 1.0) == {A: 15}
    index.withdraw(sibling)
    assert index.overlap(prompt(100), 1.0) == {A: 10}
    index.withdraw(other)
    assert (index.overlap(prompt(100), 1.0), index.blocks) == ({}, 0)


def test_withdrawing_after_the_end_does_nothing() -> None:
    index = predictions()
    late = index.add(A, SYSTEM, 0.0)
    index.expire(PREDICTED_TTL_S)
    index.add(A, SYSTEM, PREDICTED_TTL_S)
    index.withdraw(late)
    assert index.overlap(SYSTEM, PREDICTED_TTL_S) == {A: 10}


def test_a_prompt_without_full_blocks_leaves_nothing() -> None:
    index = predictions()
    index.withdraw(index.add(A, [], 0.0))
    assert (index.blocks, index.overlap(SYSTEM, 0.0)) == (0, {})


def test_confirmed_predictions_leave_and_others_stay() -> None:
    index = predictions()
    confirmed = [index.add(A, prompt(100), 0.0), index.add(A, prompt(100), 0.0)]
    index.add(A, prompt(200), 0.0)
    index.add(B, prompt(100), 0.0)
    index.confirm(A, prompt(100))
    index.confirm(("gone", 0), prompt(100))
    assert index.overlap(prompt(100), 1.0) == {A: 10, B: 15}
    for one in confirmed:
        index.withdraw(one)
    assert index.blocks == 15 + 15


def test_merging_takes_the_larger_and_confirms_what_is_known() -> None:
    index = predictions()
    index.add(A, prompt(100), 0.0)
    index.add(B, prompt(100), 0.0)
    overlap = Overlap({A: 12, B: 15, ("c", 0): 3})
    index.merge_into(overlap, prompt(100), 1.0)
    assert overlap == Overlap({A: 15, B: 15, ("c", 0): 3})
    assert index.overlap(prompt(100), 1.0) == {A: 15}
    empty = Overlap()
    index.merge_into(empty, prompt(200), 1.0)
    assert empty.device == {A: 10}


def test_a_cleared_rank_is_empty_at_once() -> None:
    index = predictions()
    late = index.add(A, prompt(100), 0.0)
    index.add(B, prompt(100), 0.0)
    index.clear_rank(A)
    index.clear_rank(("gone", 0))
    assert (index.overlap(prompt(100), 0.0), index.blocks) == ({B: 15}, 15)
    index.add(A, prompt(200), 0.0)
    index.withdraw(late)
    assert index.overlap(prompt(200), 0.0) == {A: 15, B: 10}
    index.expire(PREDICTED_TTL_S)
    assert index.blocks == 0


def test_the_oldest_make_room_in_steps_down_to_four_fifths() -> None:
    limit = 10 * PRUNE_STEP_BLOCKS
    index = AssumedBlocks(APPROXIMATE_TTL_S, limit)
    rng = random.Random(1)
    sizes, chains = [], []
    for number in range(300):
        chains.append([rng.getrandbits(64) for _ in range(100)])
        index.add(A, chains[-1], float(number) / 10)
        sizes.append(index.blocks)
    assert max(sizes) == limit - limit % 100
    peak = sizes.index(max(sizes))
    lowest = min(sizes[peak:])
    assert limit * 0.8 - 100 < lowest <= limit * 0.8
    assert min(later - earlier for earlier, later in itertools.pairwise(sizes)) >= -(PRUNE_STEP_BLOCKS + 300)
    assert index.overlap(chains[-1], 30.0) == {A: 100}
    assert index.overlap(chains[0], 30.0) == {}


def test_a_prompt_above_the_bound_is_not_kept() -> None:
    index = AssumedBlocks(APPROXIMATE_TTL_S, 8)
    index.add(A, SYSTEM, 0.0)
    assert (index.blocks, index.overlap(SYSTEM, 0.0)) == (0, {})


def test_the_number_of_assumptions_is_bounded_too() -> None:
    index = AssumedBlocks(APPROXIMATE_TTL_S, max_assumptions=3)
    for tail in (100, 200, 200, 200):
        index.add(A, prompt(tail), 0.0)
    assert index.overlap(prompt(100), 0.0) == {A: 10}
    for _ in range(50):
        index.withdraw(index.add(A, prompt(200), 0.0))
    assert len(index._oldest_first) <= 3


STEP = st.tuples(
    st.sampled_from(["add", "add", "withdraw", "confirm", "clear", "wait"]),
    st.sampled_from([A, B]),
    st.lists(st.integers(0, 2), max_size=8),
    st.integers(0, 99),
)


@given(st.lists(STEP, max_size=40), st.integers(1, 60))
def test_any_order_of_calls_against_a_plain_model(
    steps: list[tuple[str, tuple[str, int], list[int], int]], max_blocks: int
) -> None:
    index, bounded = AssumedBlocks(2.0), AssumedBlocks(2.0, max_blocks, max_assumptions=5)
    live: list[tuple[Assumption, list[int]]] = []
    now = 0.0
    for kind, rank, local, pick in steps:
        chain = sequence_hashes(local)
        bounded.add(rank, chain, now)
        if kind == "add":
            live.append((index.add(rank, chain, now), chain))
        elif kind == "withdraw" and live:
            index.withdraw(live.pop(pick % len(live))[0])
        elif kind == "confirm":
            index.confirm(rank, chain)
            live = [one for one in live if one[0].rank != rank or not one[1] or one[1][-1] not in chain]
        elif kind == "clear":
            index.clear_rank(rank)
            bounded.clear_rank(rank)
            live = [one for one in live if one[0].rank != rank]
        else:
            now += 0.7
            live = [one for one in live if one[0].expires_at > now]
        held = {rank: {block for one, chain in live if one.rank == rank for block in chain} for rank in (A, B)}
        shared = {rank: sum(block in held[rank] for block in chain) for rank in (A, B)}
        assert index.overlap(chain, now) == {rank: blocks for rank, blocks in shared.items() if blocks}
        assert index.blocks == len(held[A]) + len(held[B])
        assert bounded.blocks <= max_blocks
        assert len(bounded._oldest_first) <= 5
    for one in (index, bounded):
        one.expire(now + 2.0)
        assert (one.blocks, one._ranks, len(one._oldest_first)) == (0, {}, 0)

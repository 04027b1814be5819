"""Distinct blocks of live chains: against a plain count, at every length, and where hashes collide."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.hashing import sequence_hashes
from routers.block_tree import BlockTree, Run
from routers.load import RankBooking, RankLoad

# Prompts of few different blocks, so that they share beginnings and nothing else.
PROMPT = st.lists(st.integers(0, 2), max_size=12).map(sequence_hashes)


def leading(held: set[int], chain: Sequence[int]) -> int:
    """The plain count."""
    return next((index for index, block in enumerate(chain) if block not in held), len(chain))


@given(st.lists(st.tuples(PROMPT, st.booleans()), max_size=24), st.integers(0), PROMPT)
def test_blocks_are_those_of_the_chains_that_are_held(
    steps: list[tuple[list[int], bool]], seed: int, asked: list[int]
) -> None:
    tree, rng = BlockTree(), random.Random(seed)
    live: list[tuple[list[int], Run | None]] = []
    for chain, releases in steps:
        if releases and live:
            tree.release(live.pop(rng.randrange(len(live)))[1])
        else:
            live.append((chain, tree.hold(chain)))
        held = {block for chain, _ in live for block in chain}
        assert tree.blocks == len(held)
        assert tree.leading(asked) == leading(held, asked)
    for _, run in live:
        tree.release(run)
    assert tree.blocks == 0
    assert not tree._roots


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 64])
def test_what_is_shared_is_found_at_every_length(length: int) -> None:
    chain = sequence_hashes(range(length))
    for shared in range(length + 1):
        tree = BlockTree()
        tree.hold([*chain[:shared], *sequence_hashes(range(1000, 1003), chain[shared - 1] if shared else None)])
        assert tree.leading(chain) == shared
        tree.hold(chain)
        assert (tree.leading(chain), tree.blocks) == (length, length + 3)


def test_chains_may_be_any_sequence() -> None:
    tree = BlockTree()
    runs = [tree.hold((1, 2)), tree.hold([1, 2, 3]), tree.hold(()), tree.hold(range(5, 7))]
    assert (tree.blocks, [run and run.blocks[-1] for run in runs]) == (5, [2, 3, None, 6])


CHAINS_OF_ANYTHING = st.lists(st.lists(st.integers(0, 6), max_size=8), max_size=16)


@given(CHAINS_OF_ANYTHING, st.randoms(use_true_random=False))
def test_colliding_hashes_leave_nothing_behind(chains: list[list[int]], rng: random.Random) -> None:
    tree = BlockTree()
    runs = [tree.hold(chain) for chain in chains]
    assert tree.blocks <= sum(map(len, chains))
    rng.shuffle(runs)
    for run in runs:
        tree.release(run)
    assert tree.blocks == 0
    assert not tree._roots


# As booked on ranks.

REQUEST = st.tuples(PROMPT, st.integers(0, 3), st.integers(0, 999), st.booleans())


@given(st.lists(REQUEST, max_size=12), st.randoms(use_true_random=False))
def test_a9_11_the_load_is_that_of_live_requests_and_nothing_at_the_end(
    requests: list[tuple[list[int], int, int, bool]], rng: random.Random
) -> None:
    load = RankLoad()
    live: dict[RankBooking, tuple[list[int], int, int]] = {}
    for chain, own, tokens, with_hashes in requests:
        hashes = chain if with_hashes else []
        added = load.blocks + len(hashes) - load.shared_blocks(hashes)
        booking = load.book(requests=2, blocks=len(hashes) + own, prefill_tokens=tokens, block_hashes=hashes)
        assert load.blocks == added + own
        live[booking] = (hashes, own, tokens)
    order = list(live)
    rng.shuffle(order)
    for booking in order:
        if rng.random() < 0.5:
            booking.first_token()
            live[booking] = (*live[booking][:2], 0)
        assert load.in_flight == 2 * len(live)
        assert load.blocks == len({block for chain, _, _ in live.values() for block in chain}) + sum(
            own for _, own, _ in live.values()
        )
        assert load.prefill_tokens == sum(tokens for _, _, tokens in live.values())
        booking.release()
        del live[booking]
        with pytest.raises(RuntimeError, match="twice"):
            booking.release()
    assert load.is_idle


def test_q_1_shared_blocks_count_once_and_the_unfinished_block_for_each() -> None:
    load = RankLoad()
    system = sequence_hashes(range(10))
    one = load.book(requests=1, blocks=13, prefill_tokens=0, block_hashes=[*system, 100, 101])
    other = load.book(requests=1, blocks=12, prefill_tokens=0, block_hashes=[*system, 200])
    assert load.blocks == 10 + 2 + 1 + 1 + 1
    one.release()
    assert load.blocks == 10 + 1 + 1
    other.release()
    assert load.is_idle


def test_hashes_beyond_the_blocks_are_no_own_blocks() -> None:
    load = RankLoad()
    booking = load.book(requests=1, blocks=1, prefill_tokens=0, block_hashes=[1, 2, 3])
    assert load.blocks == 3
    booking.release()
    assert load.is_idle

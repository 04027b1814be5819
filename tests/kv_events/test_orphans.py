"""Children that come before their parents: kept within bounds, put in once the parent is there, never stale."""

import random

import pytest

from kv_events.index import ApplyReport, PrefixIndex
from kv_events.index_intake import PIECE_BLOCKS, RankIntake, pieces
from kv_events.orphans import OrphanLot
from kv_events.types import AllBlocksCleared, BlockStored, KVEvent, Namespace, Tier
from tests.kv_events.blocks import BLOCK_SIZE, query, removed, stored, tokens

RANK = ("a", 0)


def intake_of(*events: KVEvent, lot: OrphanLot | None = None) -> tuple[PrefixIndex, RankIntake, ApplyReport]:
    """An index to which events of one source happened."""
    index = PrefixIndex()
    index.add_rank(RANK)
    intake, report = RankIntake(index, RANK, lot), ApplyReport()
    for event in events:
        for _ in intake.apply(event, 0.0, report):
            pass
    return index, intake, report


@pytest.mark.parametrize(
    ("events", "expected", "waiting"),
    [
        pytest.param([stored("abcd", 2)], 0, 1, id="waits"),
        pytest.param([stored("abcd", 2), stored("ab")], 4, 0, id="A8.8 child, then parent"),
        pytest.param([stored("abcd", 3), stored("abc", 2), stored("ab", 1), stored("a")], 4, 0, id="backwards"),
        pytest.param([stored("abcd", 2), stored("abxy", 2), stored("ab")], 4, 0, id="two children"),
        pytest.param([stored("abcd", 2), removed("abcd", [3]), stored("ab")], 3, 0, id="removed while it waits"),
        pytest.param([stored("abcd", 2), removed("abcd", [2]), stored("ab")], 2, 0, id="hole while it waits"),
        pytest.param([stored("abcd", 3), stored("abc", 2), removed("abc", [2]), stored("ab")], 2, 1,
                     id="a child of what was removed waits on"),
        pytest.param([stored("abcd", 3), stored("abc", 2), removed("abc", [2]), stored("ab"), stored("abc", 2)], 4, 0,
                     id="removed and stored again"),
        pytest.param([stored("abcd", 2), removed("abcd", [3]), stored("abcd", 2), stored("ab")], 4, 0,
                     id="stored again while it waits"),
        pytest.param([stored("abcd", 2), removed("abcd", [3], tier=Tier.HOST), stored("ab")], 4, 0,
                     id="removed from another tier"),
        pytest.param([stored("abcd", 2), AllBlocksCleared(), stored("ab")], 2, 0, id="cleared while it waits"),
        pytest.param([stored("abcd", 2), AllBlocksCleared(Tier.HOST), stored("ab")], 4, 0, id="another tier cleared"),
        pytest.param([stored("ab"), removed("ab", [1]), stored("abcd", 2)], 1, 1, id="the parent has gone"),
    ],
)  # fmt: skip
def test_a8_8_orphans_wait_for_their_parent(events: list[KVEvent], expected: int, waiting: int) -> None:
    index, intake, _ = intake_of(*events)
    assert index.overlap(query("abcd")).device.get(RANK, 0) == expected
    assert len(intake.orphans) == waiting


def test_orphans_take_the_namespace_of_their_parent() -> None:
    salt = Namespace(salt="s")
    index, _, _ = intake_of(stored("ab", 1), stored("a", namespace=salt))
    assert index.overlap(query("ab")).device == {}
    assert index.overlap(query("ab", salt), salt).device == {RANK: 2}


def test_only_the_expired_are_dropped() -> None:
    lot = OrphanLot(max_age_s=30)
    assert lot.park(stored("ab", 1), 0.0)
    assert lot.park(stored("abc", 2), 10.0)
    assert (lot.next_expiry_s(), lot.expire(29.9), lot.expire(30.0), len(lot)) == (30.0, 0, 1, 1)
    assert (lot.next_expiry_s(), lot.expire(99.0), lot.next_expiry_s(), lot.size_bytes) == (40.0, 1, None, 0)
    assert lot.claim(range(10)) == []


@pytest.mark.parametrize("lot", [pytest.param(OrphanLot(max_events=2), id="events"),
                                 pytest.param(OrphanLot(max_bytes=1_400), id="bytes")])  # fmt: skip
def test_what_passes_a_bound_is_dropped_and_counted(lot: OrphanLot) -> None:
    _, intake, report = intake_of(stored("ab", 1), stored("xy", 1), stored("pq", 1), lot=lot)
    assert (len(intake.orphans), report.dropped) == (2, {"orphan_overflow": 1})


def test_a_root_is_no_orphan() -> None:
    assert not OrphanLot().park(stored("a"), 0.0)


def test_unknown_removals_are_counted() -> None:
    _, _, report = intake_of(stored("ab", 1), removed("ab", [0, 1]))
    assert report.dropped == {"unknown_hash": 1}


@pytest.mark.parametrize("is_eagle", [False, True])
def test_long_stores_are_applied_in_pieces(is_eagle: bool) -> None:
    blocks = 3 * PIECE_BLOCKS + 5
    prompt = tokens("".join(map(chr, range(32, 32 + blocks + 1))))[: 4 * (blocks * BLOCK_SIZE + is_eagle)]
    event = BlockStored(
        tuple(range(1, blocks + 1)), None, prompt, BLOCK_SIZE, is_eagle, mm_hashes=tuple((n,) for n in range(blocks))
    )
    whole = PrefixIndex()
    whole.add_rank(RANK)
    whole.apply(RANK, [event])
    cut, intake, report = intake_of(event)
    assert [len(piece.block_hashes) for piece in pieces(event)] == [PIECE_BLOCKS] * 3 + [5]
    assert report.stored == blocks
    assert cut._shards == whole._shards
    assert sum(1 for _ in intake.apply(event, 0.0, report)) == 3


def test_any_order_ends_in_what_the_right_order_gives() -> None:
    """Stores of trees in any order: once all are there, nothing waits and all is known."""
    rng = random.Random(3)
    for _ in range(200):
        prompts = {"".join(rng.choice("ab") for _ in range(rng.randint(1, 7))) for _ in range(6)}
        single = [stored(prompt[: n + 1], n) for prompt in prompts for n in range(len(prompt))]
        rng.shuffle(single)
        index, intake, _ = intake_of(*single)
        assert len(intake.orphans) == 0
        assert intake.orphans.size_bytes == 0
        for prompt in prompts:
            assert index.overlap(query(prompt)).device == {RANK: len(prompt)}

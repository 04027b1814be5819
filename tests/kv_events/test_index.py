"""The prefix index against a model that keeps whole prefixes, and the rules about namespaces, tiers and copies."""

import random
import tracemalloc

import pytest

from kv_events import index as index_module
from kv_events import index_namespaces
from kv_events.hashing import block_hashes, pack_tokens
from kv_events.index import ApplyReport, PrefixIndex, RankId
from kv_events.index_holder import FIRST_BIT, SHARDS
from kv_events.index_namespaces import inherit
from kv_events.index_types import chain_hashes
from kv_events.types import BASE, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Namespace, Tier
from tests.kv_events.blocks import BLOCK_SIZE, names, query, removed, stored, tokens

A: RankId = ("a", 0)
B: RankId = ("b", 0)
SALT = Namespace(salt="tenant")


def index_of(*events: KVEvent, max_copies: int = 1, capacity_blocks: int | None = None) -> PrefixIndex:
    """An index with rank A, to which ``events`` happened."""
    index = PrefixIndex()
    index.add_rank(A, max_copies=max_copies, capacity_blocks=capacity_blocks)
    index.apply(A, events)
    return index


def matched(index: PrefixIndex, prompt: str, namespace: Namespace = BASE, rank: RankId = A) -> int:
    """Leading blocks of ``prompt`` on the device of ``rank``."""
    return index.overlap(query(prompt, namespace), namespace).device.get(rank, 0)


class Model:
    """Each rank is the set of prefixes that it holds; nothing is clever."""

    def __init__(self) -> None:
        self.held: dict[RankId, set[str]] = {}

    def overlap(self, prompt: str) -> dict[RankId, int]:
        result = {}
        for rank, prefixes in self.held.items():
            depth = 0
            while depth < len(prompt) and prompt[: depth + 1] in prefixes:
                depth += 1
            if depth:
                result[rank] = depth
        return result


def random_step(rng: random.Random, index: PrefixIndex, model: Model, ranks: list[RankId]) -> None:
    rank = rng.choice(ranks)
    worker = rank[0]
    if rank not in model.held:
        index.add_rank(rank)
        model.held[rank] = set()
    held = model.held[rank]
    kind = rng.random()
    if kind < 0.55:
        prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 8)))
        after = rng.choice([n for n in range(len(prompt)) if n == 0 or prompt[:n] in held])
        report = index.apply(rank, [stored(prompt, after, worker)])
        new = {prompt[: n + 1] for n in range(after, len(prompt))}
        assert report.stored == len(new - held)
        held |= new
    elif kind < 0.97:
        gone = rng.sample(sorted(held), min(len(held), rng.randint(1, 3)))
        event = BlockRemoved(tuple(names(prefix, worker)[-1] for prefix in gone))
        assert index.apply(rank, [event]).removed == len(gone)
        held.difference_update(gone)
    elif kind < 0.985:
        index.apply(rank, [AllBlocksCleared()])
        held.clear()
    else:
        for other in [other for other in model.held if other[0] == worker]:
            index.remove_rank(other)
            del model.held[other]


@pytest.mark.parametrize("seed", range(2))
def test_a8_2_random_operations_equal_a_brute_force_model(seed: int) -> None:
    rng = random.Random(seed)
    index, model = PrefixIndex(), Model()
    ranks = [(worker, rank) for worker in "xyz" for rank in (0, 1)]
    for number in range(10_000):
        random_step(rng, index, model, ranks)
        index.collect(rng.randint(0, 3))
        prompt = "".join(rng.choice("ab") for _ in range(10))
        assert index.overlap(query(prompt)).device == model.overlap(prompt)
        if number % 500 == 0:
            assert [index.rank_blocks(rank) for rank in ranks] == [len(model.held.get(rank, ())) for rank in ranks]
    while index.collect(100):
        pass
    assert index.distinct_blocks() == len(set().union(*model.held.values()))
    for rank in ranks:
        index.remove_rank(rank)
    while index.collect(7):
        pass
    assert index.distinct_blocks() == 0


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([stored("abcd")], 4, id="all of it"),
        pytest.param([stored("abcd"), removed("abcd", [1])], 1, id="a hole ends the match"),
        pytest.param([stored("abcd"), removed("abcd", [0])], 0, id="a hole at the root"),
        pytest.param([stored("abcd"), removed("abcd", [1]), stored("ab", 1)], 4, id="a hole that is filled"),
        pytest.param([stored("ab"), stored("abcd", 2)], 4, id="child after its parent"),
        pytest.param([stored("abcd", 2)], 0, id="child without its parent"),
        pytest.param([stored("abcd"), stored("abcd"), removed("abcd", [3])], 3, id="stored twice, removed once"),
        pytest.param([stored("abcd"), removed("xy", [0])], 4, id="removal of an unknown hash"),
        pytest.param([stored("abcd"), AllBlocksCleared()], 0, id="cleared"),
        pytest.param([stored("abcd"), AllBlocksCleared(), stored("a")], 1, id="cleared and stored"),
        pytest.param([stored("xbcd")], 0, id="another first block"),
        pytest.param([stored("abcd", engine="e1"), stored("abcd", engine="e2"), removed("abcd", [3], "e1")], 4,
                     id="the same block under two names"),
        pytest.param([stored("abcd", engine="e1"), stored("abcd", engine="e2"), removed("abcd", [3], "e1"),
                      removed("abcd", [3], "e2")], 3, id="both names removed"),
    ],
)  # fmt: skip
def test_a8_3_matches(events: list[KVEvent], expected: int) -> None:
    assert matched(index_of(*events), "abcd") == expected


@pytest.mark.parametrize(
    ("removals", "expected"),
    [pytest.param(1, 4, id="one copy left"), pytest.param(2, 3, id="no copy left")],
)
def test_copies_are_counted_up_to_two(removals: int, expected: int) -> None:
    index = index_of(stored("abcd"), stored("abcd", 3), stored("abcd", 3), max_copies=2)
    index.apply(A, [removed("abcd", [3])] * removals)
    assert matched(index, "abcd") == expected


def test_a_clear_forgets_copies() -> None:
    index = index_of(stored("a"), stored("a"), AllBlocksCleared(), stored("a"), removed("a", [0]), max_copies=2)
    assert matched(index, "a") == 0


def test_ranks_do_not_share_blocks() -> None:
    index = index_of(stored("abcd"))
    index.add_rank(B)
    index.apply(B, [stored("ab", engine="b")])
    assert index.overlap(query("abcdx")).device == {A: 4, B: 2}
    index.apply(A, [AllBlocksCleared()])
    assert index.overlap(query("abcdx")).device == {B: 2}


def test_a_removed_rank_is_never_named_again() -> None:
    index = index_of(stored("abcd"))
    index.remove_rank(A)
    assert index.overlap(query("abcd")).device == {}
    with pytest.raises(KeyError):
        index.apply(A, [stored("abcd")])
    # Its bit is free only when nothing of it is left.
    index.add_rank(B)
    index.apply(B, [stored("x", engine="b")])
    assert index.overlap(query("abcd")).device == {}
    assert index.collect(3) is True
    assert index.collect(3) is False
    assert index.distinct_blocks() == 1


def test_bits_are_used_again() -> None:
    index = PrefixIndex()
    for number in range(1_000):
        index.add_rank(("w", number))
        index.apply(("w", number), [stored("ab")])
        index.remove_rank(("w", number))
        assert index.collect(10) is False
    index.add_rank(A)
    index.apply(A, [stored("ab")])
    assert index.holder_of(A, Tier.DEVICE).bit == 1 << FIRST_BIT  # type: ignore[union-attr]


def test_lower_tiers_are_reported_and_decide_nothing() -> None:
    index = index_of(stored("abcd"), stored("abcd", tier=Tier.HOST), removed("abcd", [1, 2, 3]))
    overlap = index.overlap(query("abcd"))
    assert (overlap.device, overlap.host, overlap.disk) == ({A: 1}, {A: 4}, {})
    index.apply(A, [AllBlocksCleared(Tier.HOST)])
    overlap = index.overlap(query("abcd"))
    assert (overlap.device, overlap.host) == ({A: 1}, {})


def test_a_parent_may_lie_in_another_tier() -> None:
    assert matched(index_of(stored("ab", tier=Tier.HOST), stored("a"), stored("abc", 2), stored("ab", 1)), "abc") == 3


@pytest.mark.parametrize(
    ("events", "in_base", "in_salt"),
    [
        pytest.param([stored("ab", namespace=SALT)], 0, 2, id="salted"),
        pytest.param([stored("a", namespace=SALT), stored("ab", 1)], 0, 2, id="unsalted child of a salted parent"),
        pytest.param([stored("a"), stored("ab", 1, namespace=SALT)], 1, 0, id="salted child of an unsalted parent"),
        pytest.param([stored("a", namespace=SALT), stored("ab", 1, namespace=Namespace(salt="x"))], 0, 1,
                     id="child of another salt"),
        pytest.param([stored("ab", namespace=Namespace(lora_name="ad"))], 0, 0, id="adapter by name"),
        pytest.param([stored("ab", namespace=Namespace(lora_id=7))], 0, 0, id="adapter by number"),
        pytest.param([stored("ab", namespace=Namespace(opaque="foo"))], 0, 0, id="opaque"),
        pytest.param([stored("a", namespace=Namespace(opaque="foo")), stored("ab", 1)], 0, 0, id="child of opaque"),
        pytest.param([stored("ab"), stored("ab", namespace=SALT)], 0, 0, id="one hash in two namespaces"),
        pytest.param([stored("ab"), stored("b" * 3, engine="e"), stored("ab", 1, namespace=SALT)], 1, 0,
                     id="ambiguous second block"),
    ],
)  # fmt: skip
def test_a8_9_namespaces_do_not_mix(events: list[KVEvent], in_base: int, in_salt: int) -> None:
    index = index_of(*events)
    assert (matched(index, "ab"), matched(index, "ab", SALT)) == (in_base, in_salt)
    assert matched(index, "ab", Namespace(opaque="foo")) == 0


def test_an_adapter_is_found_by_its_name_only() -> None:
    named, numbered = Namespace(lora_name="ad"), Namespace(lora_id=7)
    index = index_of(stored("ab", namespace=named), stored("ab", engine="e", namespace=numbered))
    assert (matched(index, "ab", named), matched(index, "ab", numbered), matched(index, "ab")) == (2, 2, 0)
    assert matched(index, "ab", Namespace(lora_name="other")) == 0


def test_vllm_names_the_salt_in_the_first_block_and_the_adapter_in_all() -> None:
    both = Namespace(lora_name="ad", salt="tenant")
    index = index_of(stored("a", namespace=both), stored("ab", 1, namespace=Namespace(lora_name="ad")))
    assert matched(index, "ab", both) == 2


@pytest.mark.parametrize(
    ("parent", "own", "expected"),
    [
        pytest.param(BASE, None, BASE, id="nothing said"),
        pytest.param(BASE, SALT, SALT, id="salt opened"),
        pytest.param(SALT, BASE, SALT, id="salt inherited"),
        pytest.param(SALT, Namespace(salt="x"), None, id="another salt"),
        pytest.param(SALT, Namespace(lora_name="ad"), None, id="adapter below a salt"),
        pytest.param(BASE, Namespace(lora_id=7), Namespace(lora_id=7), id="adapter opened"),
        pytest.param(Namespace(lora_id=7), Namespace(lora_id=8), None, id="another adapter"),
        pytest.param(Namespace(lora_id=7), SALT, Namespace(lora_id=7, salt="tenant"), id="salt below an adapter"),
        pytest.param(BASE, Namespace(opaque="x"), None, id="opaque"),
    ],
)
def test_k8_inheritance(parent: Namespace, own: Namespace | None, expected: Namespace | None) -> None:
    assert inherit(parent, own) == expected


def test_namespaces_without_a_number_left_are_opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_namespaces, "MAX_NAMESPACES", 1)
    index = index_of(stored("a", namespace=SALT), stored("b", namespace=Namespace(salt="x")))
    assert (matched(index, "a", SALT), matched(index, "b", Namespace(salt="x"))) == (1, 0)


def test_three_names_for_a_salted_block() -> None:
    index = index_of(*(stored("a", engine=engine, namespace=SALT) for engine in "xyz"))
    for engine, expected in (("x", 1), ("z", 1), ("y", 0)):
        index.apply(A, [removed("a", [0], engine)])
        assert matched(index, "a", SALT) == expected
    assert len(index._namespaces) == 0


def test_interned_masks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_INTERNED_MASKS", 2)
    index = PrefixIndex()
    for number in range(8):
        index.add_rank(("w", number))
        index.apply(("w", number), [stored("abcd"[: 1 + number % 4])])
    assert len(index._masks) <= 2
    assert index.overlap(query("abcd")).device == {("w", number): 1 + number % 4 for number in range(8)}


def test_blocks_of_an_opaque_namespace_have_no_hashes() -> None:
    with pytest.raises(ValueError, match="opaque"):
        chain_hashes(stored("a"), Namespace(opaque="x"), None)


def test_namespaces_are_forgotten_with_their_last_block() -> None:
    index = index_of()
    for number in range(100):
        salt = Namespace(salt=str(number))
        index.apply(A, [stored("ab", engine=str(number), namespace=salt)])
        assert matched(index, "ab", salt) == 2
        if number % 2:
            index.apply(A, [removed("ab", [0, 1], str(number))])
        else:
            index.clear_rank(A)
            index.collect(10)
        assert matched(index, "ab", salt) == 0
    assert len(index._namespaces) == 0


def test_a_name_for_new_content_no_longer_stands_for_the_old() -> None:
    index = index_of(stored("ab"))
    report = index.apply(A, [BlockStored(names("ab"), None, tokens("xy"), BLOCK_SIZE)])
    assert (matched(index, "ab"), matched(index, "xy"), index.rank_blocks(A)) == (0, 2, 2)
    assert report.dropped == {"renamed": 2}
    index.apply(A, [removed("ab", [0, 1])])
    assert index.distinct_blocks() == 0


def test_a_salted_name_for_new_content_keeps_its_namespace() -> None:
    index = index_of(stored("a", namespace=SALT))
    index.apply(A, [BlockStored(names("a"), None, tokens("x"), BLOCK_SIZE, namespace=SALT)])
    assert (matched(index, "a", SALT), matched(index, "x", SALT)) == (0, 1)


def test_a8_7_eagle_blocks_match() -> None:
    event = BlockStored(names("abc"), None, tokens("abcd")[: 4 * 13], BLOCK_SIZE, is_eagle=True)
    index = index_of(event)
    asked = block_hashes(tokens("abcd")[: 4 * 13], BLOCK_SIZE, is_eagle=True)
    assert index.overlap(asked).device == {A: 3}


def test_fewer_tokens_than_blocks_store_the_whole_ones() -> None:
    index = PrefixIndex()
    index.add_rank(A)
    report = index.apply(A, [BlockStored(names("ab"), None, tokens("a") + tokens("b")[:4], BLOCK_SIZE)])
    assert (matched(index, "ab"), report.stored, report.dropped) == (1, 1, {"short_tokens": 1})


def test_capacity_bounds_a_rank() -> None:
    index = index_of(capacity_blocks=4)
    report = index.apply(A, [stored("abcdefgh")])
    assert (report.stored, report.dropped, report.is_over_capacity) == (5, {"over_capacity": 3}, True)
    assert index.rank_blocks(A) == 5
    report = index.apply(A, [stored("abcdefgh", tier=Tier.HOST)])
    assert (report.stored, report.is_over_capacity) == (8, False)


def test_long_prompts_of_many_holders() -> None:
    rng = random.Random(5)
    index = PrefixIndex()
    prompt = [rng.randrange(2**32) for _ in range(4 * 300)]
    expected = {}
    for number in range(100):
        rank, blocks = ("w", number), rng.randint(1, 300)
        index.add_rank(rank)
        event_names = tuple(rng.randrange(2**64) for _ in range(blocks))
        index.apply(rank, [BlockStored(event_names, None, pack_tokens(prompt[: blocks * 4]), 4)])
        expected[rank] = blocks
    assert index.overlap(block_hashes(prompt, 4)).device == expected


def test_memory_of_blocks_is_bounded() -> None:
    """At most 150 bytes for a distinct block and 120 for each (rank, block), removal included."""
    blocks, ranks = 20_000, 4
    rng = random.Random(1)
    sequences = [rng.randrange(2**64) for _ in range(blocks)]

    def fill(count: int) -> int:
        index = PrefixIndex(lambda event, namespace, parent: [int(str(sequence)) for sequence in sequences])
        tracemalloc.start()
        for number in range(count):
            index.add_rank(("w", number))
            event = BlockStored(tuple(rng.randrange(2**64) for _ in sequences), None, b"", 4)
            index.store(("w", number), event, ApplyReport())
            del event
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert index.distinct_blocks() == blocks
        return used

    one, many = fill(1), fill(ranks)
    overhead = SHARDS * 64 * 4
    assert (many - one - overhead * ranks) / (blocks * (ranks - 1)) <= 120
    assert one - overhead <= blocks * (150 + 120)

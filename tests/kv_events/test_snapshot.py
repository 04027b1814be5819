"""Dumps: what is loaded behaves like what was dumped, from the next event on too."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.errors import BatchUndecodable
from kv_events.index import PrefixIndex
from kv_events.index_holder import SHARD_SHIFT
from kv_events.snapshot import SnapshotPosition, dump_rank, load_rank
from kv_events.types import AllBlocksCleared, KVEvent, Namespace, Tier
from tests.kv_events.blocks import names, query, removed, stored

RANK = ("w", 1)
POSITION = SnapshotPosition(3, 17, 2**64 - 1, True)
NAMESPACES = [
    None,
    Namespace(salt="s"),
    Namespace(lora_name="ad"),
    Namespace(lora_id=7),
    Namespace(lora_name="ad", salt="s"),
    Namespace(opaque="x"),
]
PROMPTS = st.text("ab", min_size=1, max_size=5)
EVENTS = st.one_of(
    st.builds(
        lambda prompt, namespace, tier: stored(prompt, engine=str(namespace), namespace=namespace, tier=tier),
        PROMPTS,
        st.sampled_from(NAMESPACES),
        st.sampled_from(Tier),
    ),
    st.builds(
        lambda prompt, namespace, tier: removed(prompt, [len(prompt) - 1], str(namespace), tier),
        PROMPTS,
        st.sampled_from(NAMESPACES),
        st.sampled_from(Tier),
    ),
    st.just(AllBlocksCleared(Tier.HOST)),
)


def index_with(events: list[KVEvent]) -> PrefixIndex:
    index = PrefixIndex()
    index.add_rank(("other", 0))
    index.add_rank(RANK, max_copies=2)
    index.apply(RANK, events)
    return index


def seen(index: PrefixIndex) -> list[object]:
    """All that can be asked of the index."""
    asked = [(prompt, namespace or Namespace()) for prompt in ("aaaaa", "ababa", "bbbbb") for namespace in NAMESPACES]
    found: list[object] = [index.overlap(query(prompt, namespace), namespace) for prompt, namespace in asked]
    return [*found, [index.rank_blocks(RANK, tier) for tier in Tier], index.distinct_blocks()]


@settings(max_examples=60, deadline=None)
@given(before=st.lists(EVENTS, max_size=12), after=st.lists(EVENTS, max_size=8))
def test_k45_what_is_loaded_equals_what_was_dumped(before: list[KVEvent], after: list[KVEvent]) -> None:
    first = index_with(before)
    second = index_with([stored("bab")])
    assert load_rank(second, dump_rank(first, RANK, POSITION)) == (RANK, POSITION)
    second.collect(100)
    first.collect(100)
    assert seen(second) == seen(first)
    # Dumped once more it is the same again.
    again = index_with([])
    load_rank(again, dump_rank(second, RANK, POSITION))
    first.apply(RANK, after)
    again.apply(RANK, after)
    again.collect(100)
    first.collect(100)
    assert seen(again) == seen(first)


def test_children_find_their_parents_after_a_load() -> None:
    index = index_with([])
    load_rank(index, dump_rank(index_with([stored("ab")]), RANK, POSITION))
    assert index.apply(RANK, [stored("abcd", 2)]).orphans == []
    assert index.overlap(query("abcd")).device == {RANK: 4}


def changed(**fields: object) -> bytes:
    """A dump of one block with other fields."""
    dump = msgspec.msgpack.decode(dump_rank(index_with([stored("a")]), RANK, POSITION))
    for number, value in ((int(key[1:]), value) for key, value in fields.items()):
        dump[number] = value
    return msgspec.msgpack.encode(dump)


BASE_NAMESPACE = [None, None, None, None]


@pytest.mark.parametrize(
    "snapshot",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="no MessagePack"),
        pytest.param(msgspec.msgpack.encode([1, 2, 3]), id="something else"),
        pytest.param(changed(f0=2), id="another format"),
        pytest.param(changed()[:-1], id="cut"),
        pytest.param(changed(f7=[["device", BASE_NAMESPACE, b"1234567", b"12345678", b""]]), id="half a name"),
        pytest.param(changed(f7=[["device", BASE_NAMESPACE, b"12345678", b"", b""]]), id="a name without its hash"),
        pytest.param(changed(f7=[["attic", BASE_NAMESPACE, b"", b"", b""]]), id="no tier"),
    ],
)
def test_what_is_no_dump_changes_nothing(snapshot: bytes) -> None:
    index = index_with([stored("ab")])
    with pytest.raises(BatchUndecodable, match="snapshot"):
        load_rank(index, snapshot)
    assert index.overlap(query("ab")).device == {RANK: 2}


def test_only_known_ranks_are_loaded() -> None:
    snapshot = dump_rank(index_with([stored("a")]), RANK, POSITION)
    with pytest.raises(KeyError):
        load_rank(PrefixIndex(), snapshot)
    with pytest.raises(KeyError):
        dump_rank(PrefixIndex(), RANK, POSITION)


def test_names_of_all_bits_survive() -> None:
    events: list[KVEvent] = [stored("ab")]
    index = index_with([])
    load_rank(index, dump_rank(index_with(events), RANK, POSITION))
    assert set(index.holder_of(RANK, Tier.DEVICE).names[names("ab")[0] >> SHARD_SHIFT]) >= {names("ab")[0]}  # type: ignore[union-attr]

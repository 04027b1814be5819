"""What becomes of events on the way in: shapes, limits, filters.

Some outcomes need more than one event and are decided behind the codec: a child before its parent, a block stored
twice and removed once, a removal of what is unknown or of a parent, a clearing of one rank of two, a child that
inherits or changes a salt, a block size that is not the worker's, and the sequence: gaps, restarts, late joins. Here
their events are shown to arrive unharmed, with the namespace as far as the event tells it.
"""

import struct
from typing import Any

import msgspec
import pytest

from kv_events.codec import MAX_PAYLOAD_BYTES, GroupKinds, decode_batch
from kv_events.codec_structs import MAX_EVENTS, MAX_TOKENS
from kv_events.errors import BatchUndecodable
from kv_events.hashing import pack_tokens
from kv_events.types import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent, Tier
from tests.kv_events.events import PLAIN, TOKENS, decode, encode, only, removed, stored, stored_array


def test_the_worked_example() -> None:
    batch = decode_batch(
        bytes.fromhex(
            "93cb3ff8000000000000 91 97ab426c6f636b53746f726564 92f9cf8000000000000005 c0 980102030405060708 04 c0"
            "a3475055 03"
        )
    )
    store = BlockStored((2**64 - 7, 2**63 + 5), None, pack_tokens(TOKENS), 4)
    assert batch == EventBatch(1.5, [store], 3, {}, False)


@pytest.mark.parametrize(
    ("batch", "dp_rank"),
    [
        pytest.param([1.5, [stored()]], None, id="two elements"),
        pytest.param([1.5, [stored()], None], None, id="no rank"),
        pytest.param([1.5, [stored()], 0], 0, id="rank 0"),
        pytest.param([1.5, [stored()], 7, "more", [1], {"x": 1}], 7, id="more elements"),
        pytest.param([1.5, [stored_array()], 7, "more"], 7, id="arrays, more elements"),
        pytest.param({"ts": 1.5, "events": [stored()], "data_parallel_rank": 2}, 2, id="map of maps, vLLM"),
        pytest.param({"ts": 1.5, "events": [stored_array()], "attn_dp_rank": 2}, 2, id="map of arrays, SGLang"),
        pytest.param({"ts": 1.5, "events": [stored()]}, None, id="map without a rank"),
        pytest.param({"ts": 1.5, "events": [stored()], "later": [[]]}, None, id="map with more"),
    ],
)
def test_shapes_of_batches(batch: Any, dp_rank: int | None) -> None:
    assert decode_batch(encode(batch)) == EventBatch(1.5, [PLAIN], dp_rank, {}, False)
    assert decode_batch(memoryview(encode(batch))) == decode_batch(encode(batch))


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored_array(), id="5 fields"),
        pytest.param(stored_array(None), id="6 fields"),
        pytest.param(stored_array(None, "GPU"), id="7 fields"),
        pytest.param(stored_array(None, "GPU", None), id="8 fields"),
        pytest.param(stored_array(None, "GPU", None, [None, None], 0, "full_attention", None), id="12 fields"),
        pytest.param(stored_array(None, "GPU", None, None, None, 0, "mla_attention"), id="media left empty"),
        pytest.param(stored_array(None, "GPU", None, None, [None, None], 0), id="media of no block"),
        pytest.param(stored_array(None, "GPU", None, 0), id="a lone integer is the group"),
        pytest.param(stored_array(None, "GPU", None, "full_attention"), id="a lone string is the kind"),
        pytest.param(stored_array(None, "GPU", None, None, 0, None, None, "LOCAL", "owner", 5, 1.5), id="more fields"),
        pytest.param(stored_array(None, "GPU", {"session_id": "s"}), id="metadata without a salt"),
        pytest.param(stored(), id="map"),
        pytest.param(
            stored(extra_keys=[], session_id="s", lora_name="", cache_salt="", locality="LOCAL"), id="empty values"
        ),
        pytest.param(stored(later={"a": [1, [2]]}, snapshot_version=3), id="unknown fields"),
        pytest.param({k: v for k, v in stored().items() if k not in ("medium", "lora_id", "lora_name")}, id="bare map"),
        pytest.param(stored(medium=None), id="no medium"),
        pytest.param(stored(medium=""), id="empty medium"),
        pytest.param(stored(group_idx=1, kv_cache_spec_kind="sink_full_attention"), id="kind before group"),
    ],
)
def test_a8_3_shapes_of_stores(event: Any) -> None:
    assert only(decode(event)) == PLAIN


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        pytest.param([-7, -1], (2**64 - 7, 2**64 - 1), id="signed"),
        pytest.param([2**63 + 5, 2**64 - 1], (2**63 + 5, 2**64 - 1), id="unsigned"),
        pytest.param([bytes(24) + b"\1" * 8, b"\xff" * 8], (0x0101010101010101, 2**64 - 1), id="bytes"),
        pytest.param([5, bytes(31) + b"\x06"], (5, 6), id="both"),
    ],
)
def test_hashes_become_unsigned_64_bits_everywhere(given: list[int | bytes], taken: tuple[int, ...]) -> None:
    arrays = decode(["BlockStored", [3, 4], given[0], TOKENS, 4], ["BlockRemoved", given])
    assert arrays.events == [BlockStored((3, 4), taken[0], PLAIN.token_bytes, 4), BlockRemoved(taken)]
    maps = decode(stored(block_hashes=given), stored(parent_block_hash=given[1]), removed(block_hashes=given))
    assert maps.events == [
        BlockStored(taken, None, PLAIN.token_bytes, 4),
        BlockStored((11, 12), taken[1], PLAIN.token_bytes, 4),
        BlockRemoved(taken),
    ]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored(group_idx=1), id="other group without a kind"),
        pytest.param(stored(group_idx=0, kv_cache_spec_kind="sliding_window"), id="sliding window"),
        pytest.param(stored(kv_cache_spec_kind="brand_new"), id="unknown kind"),
        pytest.param(stored_array(None, "GPU", None, None, 1), id="other group, array"),
        pytest.param(stored_array(None, "GPU", None, 3), id="a lone integer"),
        pytest.param(stored_array(None, "GPU", None, None, None, "mamba", 5), id="kind, array"),
        pytest.param(stored(locality="REMOTE"), id="remote"),
        pytest.param(stored(ownership="FOREIGN"), id="foreign"),
        pytest.param(stored_array(None, "GPU", None, None, 0, None, None, "REMOTE"), id="remote, array"),
        pytest.param(removed(group_idx=2), id="removal"),
        pytest.param(["BlockRemoved", [11], "GPU", 0, "sliding_window", 128], id="removal, array"),
        pytest.param({"type": "AllBlocksCleared", "group_idx": 1}, id="clearing"),
        pytest.param(["AllBlocksCleared", None, 1], id="clearing, array"),
    ],
)
def test_a8_3_irrelevant_events_are_counted(event: Any) -> None:
    assert decode(event) == EventBatch(1.5, [], 3, {"irrelevant": 1}, False)


def test_removals_have_the_kind_that_stores_of_their_group_had() -> None:
    kinds: GroupKinds = {}
    decode(
        stored(group_idx=0, kv_cache_spec_kind="sliding_window"),
        stored(group_idx=1, kv_cache_spec_kind="full_attention"),
        group_kinds=kinds,
    )
    batch = decode(removed(group_idx=0), removed(block_hashes=[12], group_idx=1), group_kinds=kinds)
    assert (batch.events, batch.dropped) == ([BlockRemoved((12,))], {"irrelevant": 1})
    assert decode(removed(group_idx=0)).events == [BlockRemoved((11,))]


def test_only_so_many_groups_are_remembered() -> None:
    kinds: GroupKinds = {}
    events = [stored(group_idx=group, kv_cache_spec_kind="full_attention") for group in range(1100)]
    assert len(decode(*events, group_kinds=kinds).events) == 1100
    assert len(kinds) == 1024


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", Tier.DEVICE), ("CPU", Tier.HOST), ("CPU_PINNED", Tier.HOST), ("DISK", Tier.DISK), (None, Tier.DEVICE)],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    cleared = None if medium is None else tier
    assert decode(
        stored(medium=medium), removed(medium=medium), {"type": "AllBlocksCleared", "medium": medium}
    ).events == [
        BlockStored((11, 12), None, PLAIN.token_bytes, 4, tier=tier),
        BlockRemoved((11,), tier),
        AllBlocksCleared(cleared),
    ]
    assert decode(stored_array(None, medium), ["BlockRemoved", [11], medium], ["AllBlocksCleared", medium]).events == [
        BlockStored((11, 12), None, PLAIN.token_bytes, 4, tier=tier),
        BlockRemoved((11,), tier),
        AllBlocksCleared(cleared),
    ]


@pytest.mark.parametrize("medium", ["EXTERNAL", "STORAGE", "gpu"])
def test_other_places_are_no_tiers(medium: str) -> None:
    batch = decode(stored(medium=medium), removed(medium=medium), {"type": "AllBlocksCleared", "medium": medium})
    assert batch == EventBatch(1.5, [], 3, {"medium": 3}, False)


@pytest.mark.parametrize(
    ("tokens", "kept", "dropped"),
    [
        pytest.param(TOKENS[:5], 1, {"incomplete_blocks": 1}, id="1.25 blocks for two hashes"),
        pytest.param(TOKENS[:4], 1, {"incomplete_blocks": 1}, id="one block for two hashes"),
        pytest.param(TOKENS[:3], 0, {"incomplete_blocks": 1}, id="no whole block"),
        pytest.param([], 0, {"incomplete_blocks": 1}, id="no tokens"),
        pytest.param([*TOKENS, 9], 2, {"incomplete_blocks": 1}, id="a token too many"),
    ],
)
def test_whole_blocks_are_kept(tokens: list[int], kept: int, dropped: dict[str, int]) -> None:
    expected: list[KVEvent] = [BlockStored((11, 12)[:kept], None, pack_tokens(TOKENS[: kept * 4]), 4)]
    media = [{"mm_objects": [{"mm_hash": 9}]}, {"mm_objects": [{"mm_hash": 8}]}]
    assert decode(stored(token_ids=tokens)) == EventBatch(1.5, expected[:kept], 3, dropped, False)
    for event in decode(stored(token_ids=tokens, block_mm_infos=media)).events:
        assert isinstance(event, BlockStored)
        assert event.mm_hashes == ((9,), (8,))[:kept]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored(block_hashes=[11, 11]), id="twice"),
        pytest.param(stored(parent_block_hash=12), id="its own parent"),
        pytest.param(stored(block_hashes=[-1, 2**64 - 1]), id="twice after all"),
    ],
)
def test_contradictory_hashes_drop_a_store(event: Any) -> None:
    assert decode(event, removed()) == EventBatch(1.5, [BlockRemoved((11,))], 3, {"duplicate_hash": 1}, False)


def test_nothing_stored_and_nothing_removed_is_nothing() -> None:
    empty = decode(stored(block_hashes=[], token_ids=[]), removed(block_hashes=[]))
    assert empty == EventBatch(1.5, [], 3, {}, False)


def test_pairs_become_tokens() -> None:
    pairs = [[token, token + 1] for token in range(1, 9)]
    assert only(decode(stored(token_ids=pairs))) == BlockStored((11, 12), None, pack_tokens(range(1, 10)), 4, True)
    array = ["BlockStored", [11, 12], None, pairs[:7], 4]
    batch = decode(array)
    assert batch.events == [BlockStored((11,), None, pack_tokens(range(1, 6)), 4, True)]
    assert batch.dropped == {"incomplete_blocks": 1}


MALFORMED = [
    pytest.param(stored(token_ids=[-1, *TOKENS[1:]]), id="negative token"),
    pytest.param(stored(token_ids=[2**32, *TOKENS[1:]]), id="token above 32 bits"),
    pytest.param(stored(token_ids=[1.0, *TOKENS[1:]]), id="float token"),
    pytest.param(stored(token_ids=["1", *TOKENS[1:]]), id="text token"),
    pytest.param(stored(token_ids=[*TOKENS[1:], [1, 2]]), id="a pair among tokens"),
    pytest.param(stored(token_ids=[[1, 2], *TOKENS[1:]]), id="tokens among pairs"),
    pytest.param(stored(token_ids=[[1, 2], [3, 4]]), id="pairs that do not overlap"),
    pytest.param(stored(token_ids=[[1, -2], [-2, 4]]), id="negative token in a pair"),
    pytest.param(stored(token_ids=[[1, 2, 3]]), id="triples"),
    pytest.param(stored(token_ids=None), id="no token list"),
    pytest.param(stored(token_ids=[*TOKENS, 9, 10, 11, 12]), id="more tokens than blocks"),
    pytest.param(stored(block_hashes=None), id="no hash list"),
    pytest.param(stored(block_hashes=["11", "12"]), id="text hashes"),
    pytest.param(stored(block_hashes=[1.5, 2.5]), id="float hashes"),
    pytest.param(stored(block_hashes=[b"1234567", b"7654321"]), id="short hashes"),
    pytest.param(stored(parent_block_hash="1"), id="text parent"),
    pytest.param(stored(block_size=0), id="block size 0"),
    pytest.param(stored(block_size=-4), id="negative block size"),
    pytest.param(stored(block_size="4"), id="text block size"),
    pytest.param(stored(medium=1), id="number as medium"),
    pytest.param(stored(lora_name=1), id="number as adapter's name"),
    pytest.param(stored(cache_salt=1), id="number as salt"),
    pytest.param(stored(extra_keys=[["a"]]), id="keys of one block of two"),
    pytest.param(stored(extra_keys=["a", "b"]), id="keys without lists"),
    pytest.param(stored(block_mm_infos=[None]), id="media of one block of two"),
    pytest.param({"type": "BlockStored"}, id="map without fields"),
    pytest.param(["BlockStored", [11, 12], None], id="array without fields"),
    pytest.param(stored_array(None, "GPU", 5), id="number as adapter's name, array"),
    pytest.param(["BlockRemoved"], id="removal of what"),
    pytest.param(removed(block_hashes=5), id="removal of a number"),
    pytest.param({"type": "AllBlocksCleared", "medium": 5}, id="clearing of a number"),
    pytest.param([], id="empty array"),
    pytest.param({}, id="empty map"),
    pytest.param({"type": 5}, id="number as kind"),
    pytest.param(5, id="number"),
    pytest.param(None, id="nothing"),
    pytest.param("BlockStored", id="text"),
    pytest.param(msgspec.Raw(b"\x81\xa4type\xa1\xff"), id="kind not UTF-8"),
]


@pytest.mark.parametrize("event", MALFORMED)
def test_a8_3_a_malformed_event_costs_only_itself(event: Any) -> None:
    batch = decode(stored(), event, removed())
    assert batch == EventBatch(1.5, [PLAIN, BlockRemoved((11,))], 3, {"malformed": 1}, True)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param({"type": "BlockMigrated", "block_hashes": [1]}, id="map"),
        pytest.param(["BlockMigrated", [1]], id="array"),
        pytest.param(["Ignored"], id="another kind"),
    ],
)
def test_an_unknown_event_costs_only_itself_and_nothing_is_missed(event: Any) -> None:
    batch = decode(stored(), event, removed())
    assert batch == EventBatch(1.5, [PLAIN, BlockRemoved((11,))], 3, {"unknown_event": 1}, False)


def test_maps_and_arrays_may_come_together() -> None:
    assert decode(stored(), ["BlockRemoved", [11]], {"type": "AllBlocksCleared"}, ["AllBlocksCleared"]).events == [
        PLAIN,
        BlockRemoved((11,)),
        AllBlocksCleared(),
        AllBlocksCleared(),
    ]


def array_of(count: int, items: bytes) -> bytes:
    return b"\xdd" + struct.pack(">I", count) + items


def raw_store(**raw: bytes) -> bytes:
    """Give a store with fields that are bytes already."""
    fields = {key: encode(value) for key, value in stored().items()} | raw
    return b"\xde" + struct.pack(">H", len(fields)) + b"".join(encode(key) + value for key, value in fields.items())


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        pytest.param(b"", "msgpack", id="empty"),
        pytest.param(b"\xc1", "msgpack", id="no MessagePack"),
        pytest.param(encode([1.5, []]) + b"\0", "msgpack", id="bytes behind"),
        pytest.param(encode([1.5]), "msgpack", id="no events"),
        pytest.param(encode(["now", []]), "msgpack", id="no time"),
        pytest.param(encode([1.5, [], "0"]), "msgpack", id="text as rank"),
        pytest.param(encode([1.5, [], -1]), "msgpack", id="negative rank"),
        pytest.param(encode(5), "msgpack", id="number"),
        pytest.param(encode({"ts": 1.5}), "msgpack", id="map without events"),
        pytest.param(encode([1.5, {}]), "events", id="events in a map"),
        pytest.param(encode([1.5, None]), "events", id="no list"),
        pytest.param(encode([1.5, [0] * (MAX_EVENTS + 1)]), "events", id="too many events"),
        pytest.param(b"\x92\x01" + array_of(2**32 - 1, b""), "msgpack", id="length of a liar"),
        pytest.param(b"\x93\x01\x91" + b"\x91" * 10**6 + b"\x90\xc0", "depth", id="too deep"),
        pytest.param(b"\x92\x01\x91" + raw_store(later=b"\x91" * 10**5 + b"\x90"), "depth", id="too deep in a field"),
    ],
)
def test_what_is_no_batch(payload: bytes, reason: str) -> None:
    with pytest.raises(BatchUndecodable, match=f"^{reason}$"):
        decode_batch(payload)


def test_a_payload_has_a_limit() -> None:
    padding = b"\xc6" + struct.pack(">I", MAX_PAYLOAD_BYTES - 9)
    largest = b"\x94\x01\x90\xc0" + padding + bytes(MAX_PAYLOAD_BYTES - 9)
    assert decode_batch(largest).events == []
    with pytest.raises(BatchUndecodable, match=r"^payload_bytes$"):
        decode_batch(memoryview(largest + b"\0"))


def test_the_most_events() -> None:
    events = array_of(MAX_EVENTS, encode(["AllBlocksCleared"]) * MAX_EVENTS)
    assert len(decode_batch(b"\x92\x01" + events).events) == MAX_EVENTS


@pytest.mark.parametrize(
    "field",
    [
        pytest.param({"token_ids": array_of(MAX_TOKENS + 1, bytes(MAX_TOKENS + 1))}, id="tokens"),
        pytest.param({"block_hashes": array_of(MAX_TOKENS + 1, bytes(MAX_TOKENS + 1))}, id="hashes"),
        pytest.param({"extra_keys": array_of(MAX_TOKENS + 1, b"\xc0" * (MAX_TOKENS + 1))}, id="keys"),
        pytest.param({"extra_keys": array_of(2, array_of(1025, bytes(1025)) + b"\xc0")}, id="keys of a block"),
    ],
)
def test_lists_in_an_event_have_limits(field: dict[str, bytes]) -> None:
    batch = decode_batch(b"\x92\x01\x92" + raw_store(**field) + encode(removed()))
    assert batch == EventBatch(1.0, [BlockRemoved((11,))], None, {"malformed": 1}, True)


def test_nothing_deep_is_decoded() -> None:
    deep = b"\x91" * 8 + b"\x90"
    batch = decode_batch(b"\x92\x01\x92" + raw_store(token_ids=deep) + raw_store(later=deep))
    assert batch == EventBatch(1.0, [PLAIN], None, {"malformed": 1}, True)

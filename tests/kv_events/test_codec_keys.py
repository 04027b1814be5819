"""Which namespace and which media the codec reads in a store."""

from typing import Any

import pytest

from kv_events.hashing import pack_tokens
from kv_events.types import BlockStored, KVEvent, Namespace
from tests.kv_events.events import TOKENS, decode, only, stored, stored_array

MEDIUM_A = "0123456789abcdef" + "0" * 48
MEDIUM_B = "00000000000000ff" + "1" * 48


def namespace_of(event: KVEvent) -> Namespace | None:
    assert isinstance(event, BlockStored)
    return event.namespace


@pytest.mark.parametrize(
    ("event", "namespace"),
    [
        pytest.param(
            stored_array(None, None, {"cache_salt": "s", "session_id": "x"}), Namespace(salt="s"), id="metadata"
        ),
        pytest.param(
            stored_array(None, "GPU", {"lora_name": "ad"}), Namespace(lora_name="ad"), id="adapter in metadata"
        ),
        pytest.param(stored(cache_salt="s"), Namespace(salt="s"), id="salt of SGLang"),
        pytest.param(
            stored(cache_salt="s", lora_name="ad"), Namespace(lora_name="ad", salt="s"), id="salt and adapter"
        ),
        pytest.param(stored(cache_salt="s", extra_keys=[["s"], None]), Namespace(salt="s"), id="salt said twice"),
        pytest.param(stored_array(None, "GPU", "ad"), Namespace(lora_name="ad"), id="adapter"),
        pytest.param(stored_array(7), Namespace(lora_id=7), id="adapter by number"),
        pytest.param(stored(lora_id=0), Namespace(lora_id=0), id="adapter 0"),
        pytest.param(
            stored(lora_id=7, lora_name="ad"), Namespace(lora_name="ad"), id="the name stands before the number"
        ),
        pytest.param(stored(extra_keys=[["dynamo-cache-salt:t"], None]), Namespace(salt="t"), id="marked salt"),
        pytest.param(
            stored(parent_block_hash=1, extra_keys=[["dynamo-cache-salt:t"], None]),
            Namespace(salt="t"),
            id="of a child",
        ),
        pytest.param(
            stored(extra_keys=[["dynamo-cache-salt:t"], ["dynamo-cache-salt:t"]]),
            Namespace(salt="t"),
            id="in every block",
        ),
        pytest.param(stored(extra_keys=[["tenant-a"], None]), Namespace(salt="tenant-a"), id="salt of vLLM"),
        pytest.param(
            stored(lora_id=1, lora_name="ad", extra_keys=[["ad"], ["ad"]]),
            Namespace(lora_name="ad"),
            id="adapter as key",
        ),
        pytest.param(
            stored(lora_id=1, lora_name="ad", extra_keys=[["ad", "t"], ["ad"]]),
            Namespace(lora_name="ad", salt="t"),
            id="adapter and salt as keys",
        ),
        pytest.param(
            stored(lora_name="t", extra_keys=[["t", "t"], ["t"]]), Namespace(lora_name="t", salt="t"), id="of one name"
        ),
        pytest.param(stored(lora_id=7, extra_keys=[[7], [7]]), Namespace(lora_id=7), id="number as key"),
        pytest.param(stored(extra_keys=[[None], []]), None, id="no keys"),
    ],
)
def test_namespaces(event: Any, namespace: Namespace | None) -> None:
    assert namespace_of(only(decode(event))) == namespace


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored(parent_block_hash=1, extra_keys=[["foo"], None]), id="string in a child"),
        pytest.param(stored(extra_keys=[["foo", "bar"], None]), id="two strings"),
        pytest.param(stored(extra_keys=[["dynamo-cache-salt:a", "foo"], None]), id="string beside a marked salt"),
        pytest.param(stored(extra_keys=[["dynamo-cache-salt:a", "dynamo-cache-salt:b"], None]), id="two marked salts"),
        pytest.param(stored(extra_keys=[["dynamo-cache-salt:"], None]), id="empty marked salt"),
        pytest.param(stored(extra_keys=[[""], None]), id="empty string"),
        pytest.param(stored(cache_salt="s", extra_keys=[["t"], None]), id="two salts"),
        pytest.param(stored(lora_id=7, extra_keys=[["foo"], ["foo"]]), id="adapter without a name"),
        pytest.param(stored(extra_keys=[[5], None]), id="integer"),
        pytest.param(stored(extra_keys=[[b"\0\1"], None]), id="bytes"),
        pytest.param(stored(extra_keys=[[1.5], None]), id="float"),
        pytest.param(stored(extra_keys=[[{"a": 1}], None]), id="map"),
        pytest.param(stored(extra_keys=[[["a", 1, 2]], None]), id="list of another length"),
    ],
)
def test_unknown_keys_close_the_door(event: Any) -> None:
    namespace = namespace_of(only(decode(event)))
    assert namespace is not None
    assert namespace.opaque


def test_an_unknown_key_leaves_the_blocks_before_it_open() -> None:
    event = stored(
        block_hashes=[1, 2, 3],
        token_ids=[*range(12)],
        lora_name="ad",
        extra_keys=[["ad"], ["ad", "foo"], ["ad", MEDIUM_B, "bar"]],
    )
    first, second = decode(event).events
    assert first == BlockStored((1,), None, pack_tokens(range(4)), 4, False, Namespace(lora_name="ad"), ((),))
    assert isinstance(second, BlockStored)
    assert second.namespace is not None
    assert (second.namespace.lora_name, bool(second.namespace.opaque)) == ("ad", True)
    assert (second.block_hashes, second.parent_hash) == ((2, 3), 1)
    assert (second.token_bytes, second.mm_hashes) == (pack_tokens(range(4, 12)), ((), (255,)))


def test_an_unknown_key_cuts_pairs_too() -> None:
    pairs = [[token, token + 1] for token in range(8)]
    first, second = decode(stored(token_ids=pairs, extra_keys=[None, ["foo"]])).events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.token_bytes, second.token_bytes) == (pack_tokens(range(5)), pack_tokens(range(4, 9)))
    assert first.mm_hashes is second.mm_hashes is None


def test_an_unknown_key_of_a_block_that_is_left_out_does_not_matter() -> None:
    batch = decode(stored(token_ids=TOKENS[:4], extra_keys=[None, ["foo"]]))
    assert batch.events == [BlockStored((11,), None, pack_tokens(TOKENS[:4]), 4)]


def test_different_unknown_keys_are_different_namespaces() -> None:
    events = decode(*(stored(extra_keys=[[key], None]) for key in (5, 6, 5))).events
    first, second, third = map(namespace_of, events)
    assert first == third != second


@pytest.mark.parametrize(
    ("event", "mm_hashes"),
    [
        pytest.param(stored(extra_keys=[[MEDIUM_A, MEDIUM_B], None]), ((255, 0x0123456789ABCDEF), ()), id="digests"),
        pytest.param(stored(extra_keys=[[[MEDIUM_B, -3]], [[MEDIUM_B, 1]]]), ((255,), (255,)), id="with offsets"),
        pytest.param(stored(extra_keys=[[MEDIUM_A.upper()], []]), ((0x0123456789ABCDEF,), ()), id="upper case"),
        pytest.param(
            stored(block_mm_infos=[None, {"mm_objects": [{"mm_hash": 9, "offsets": [[0, 2]]}, {"mm_hash": 3}]}]),
            ((), (3, 9)),
            id="infos",
        ),
        pytest.param(
            stored_array(None, None, None, None, [{"mm_objects": [{"mm_hash": 9}]}, None], 0), ((9,), ()), id="array"
        ),
    ],
)
def test_media_of_blocks(event: Any, mm_hashes: tuple[tuple[int, ...], ...]) -> None:
    store = only(decode(event))
    assert isinstance(store, BlockStored)
    assert (store.mm_hashes, store.namespace) == (mm_hashes, None)


def test_media_with_names_of_their_own_are_told_apart() -> None:
    def media(name: str) -> Any:
        store = only(decode(stored(extra_keys=[[[name, 0]], None])))
        assert isinstance(store, BlockStored)
        return store.mm_hashes

    assert media("cat.png") == media("cat.png") != media("dog.png")
    assert media("cat.png")[1] == ()


def test_a_salt_beside_media() -> None:
    store = only(decode(stored(extra_keys=[[MEDIUM_A, "tenant"], [MEDIUM_A]])))
    assert isinstance(store, BlockStored)
    assert (store.namespace, store.mm_hashes) == (Namespace(salt="tenant"), ((0x0123456789ABCDEF,),) * 2)

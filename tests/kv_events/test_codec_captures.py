"""Recorded messages of real engines: what is read in them, and that the prompts behind them have the same hashes."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from kv_events.codec import decode_batch
from kv_events.hashing import block_hashes, local_hashes, namespace_seed, pack_tokens, sequence_hashes
from kv_events.types import (
    BASE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    Namespace,
    Tier,
)
from tests.kv_events.captured import (
    CAPTURES,
    SGLANG_STREAMS,
    VLLM_STREAMS,
    load,
    payloads,
    sglang_stream,
    vllm_messages,
    vllm_prompt,
)

RELEASES = load("sglang/kv_encoding_by_version.json")
# The first two blocks of one prompt, by either form of vLLM's hashes.
VLLM_ROOT = (702757842669265042, 12727516518541667169)


def unsigned(value: int) -> int:
    return value % 2**64


def expected(event: dict[str, Any]) -> KVEvent:
    """Say what must be read in an event of SGLang, from what its own classes read."""
    if event["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    hashes = tuple(map(unsigned, event["block_hashes"]))
    if event["type"] == "BlockRemoved":
        return BlockRemoved(hashes)
    parent = event["parent_block_hash"]
    tokens = np.array(event["token_ids"], dtype="<u4").tobytes()
    namespace = Namespace(salt=event["cache_salt"]) if "cache_salt" in event else None
    parent = None if parent is None else unsigned(parent)
    return BlockStored(hashes, parent, tokens, event["block_size"], namespace=namespace)


def vllm_batches(name: str, step: str) -> list[EventBatch]:
    return [decode_batch(frames[-1]) for frames in vllm_messages(name, step)]


def only_store(name: str, step: str) -> BlockStored:
    """Give the one store of a step."""
    (store,) = [event for batch in vllm_batches(name, step) for event in batch.events if isinstance(event, BlockStored)]
    return store


def own_hashes(store: BlockStored, parent: int | None = None) -> list[int]:
    """Hash a store as the index does."""
    seed = namespace_seed(store.namespace or BASE)
    assert seed is not None
    return sequence_hashes(local_hashes(store.token_bytes, store.block_size, seed), parent)


def test_no_message_loses_anything() -> None:
    batches = [decode_batch(payload) for payload in payloads()]
    assert len(batches) > 80
    assert [batch for batch in batches if batch.dropped or batch.is_suspect] == []


@pytest.mark.parametrize("name", SGLANG_STREAMS)
def test_sglang_streams_read_as_recorded(name: str) -> None:
    count = 0
    for frames, (timestamp_s, events, dp_rank) in sglang_stream(name):
        batch = decode_batch(frames[-1])
        assert batch == EventBatch(timestamp_s, list(map(expected, events)), dp_rank, {}, False)
        count += len(events)
    assert count >= 10


@pytest.mark.parametrize("name", SGLANG_STREAMS)
def test_sglang_hashes_prove_the_tokens(name: str) -> None:
    """SGLang's hash is of the parent's digest, or the salt's, and the tokens: they are right if it comes out."""
    digests: dict[int, bytes] = {}
    proved = 0
    for frames, _ in sglang_stream(name):
        for event in decode_batch(frames[-1]).events:
            if not isinstance(event, BlockStored) or (event.parent_hash and event.parent_hash not in digests):
                continue
            digest = b"" if event.parent_hash is None else digests[event.parent_hash]
            if event.namespace and event.parent_hash is None:
                digest = hashlib.sha256(f"sglang-cache-salt-v1\0{event.namespace.salt}".encode()).digest()
            size = event.block_size * 4
            for index, block_hash in enumerate(event.block_hashes):
                digest = hashlib.sha256(digest + event.token_bytes[index * size : (index + 1) * size]).digest()
                assert int.from_bytes(digest[:8], "big") == block_hash
                digests[block_hash] = digest
                proved += 1
    assert proved >= 9


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_of_sglang_says_the_same(release: str) -> None:
    shapes = {name: decode_batch(bytes.fromhex(shape["payload_hex"])) for name, shape in RELEASES[release].items()}
    hashes = (unsigned(-7571192861005801925), 3445007186246569662)
    tokens = pack_tokens([352, 350, 14, 320, 340, 325, 286, 192])
    store, removal = BlockStored(hashes, None, tokens, 4), BlockRemoved(hashes[:1])
    salted = BlockStored(hashes, None, tokens, 4, namespace=Namespace(salt="s"))
    wanted: dict[str, tuple[KVEvent, int | None]] = {
        "stored": (store, 0),
        "stored_medium": (store, 0),
        "stored_metadata": (salted, 0),
        "removed": (removal, 0),
        "removed_medium": (removal, 0),
        "cleared": (AllBlocksCleared(), 0),
        "cleared_dprank_none": (AllBlocksCleared(), None),
    }
    for name, batch in shapes.items():
        event, dp_rank = wanted[name]
        assert batch == EventBatch(1.5, [event], dp_rank, {}, False), name


def test_a_prompt_of_sglang_has_the_hashes_of_its_blocks() -> None:
    answer = (CAPTURES / "sglang" / "http" / "gen_prompt_token_ids.http").read_bytes().split(b"### RESPONSE", 1)[1]
    answer = answer.split(b"\r\n\r\n", 1)[1].removesuffix(b"\n### END\n")
    prompt, output = json.loads(answer)["prompt_token_ids"], json.loads(answer)["output_ids"]
    stored: dict[int | None, list[int]] = {}
    for frames, _ in sglang_stream("kv_events"):
        for event in decode_batch(frames[-1]).events:
            if isinstance(event, BlockStored):
                parent = stored[event.parent_hash][-1] if event.parent_hash is not None else None
                chain = own_hashes(event, parent)
                stored |= {block: chain[: index + 1] for index, block in enumerate(event.block_hashes)}
    indexed = {chain[-1] for chain in stored.values()}
    # The first page is the prompt's alone, the second ends with what was generated.
    hashes = block_hashes([*prompt, *output], 4)
    assert len(hashes) == 2
    assert {*hashes} <= indexed


@pytest.mark.parametrize(
    ("stream", "step", "request_name", "namespace"),
    [
        pytest.param("frames-int-hash", "store80", "kv/store-80", BASE, id="plain"),
        pytest.param("frames-int-hash", "exact64", "kv/exact-64", BASE, id="whole blocks only"),
        pytest.param("frames-int-hash", "salt", "kv/salted", Namespace(salt="tenant-a"), id="salt"),
        pytest.param("frames-int-hash", "session", "kv/session-id", BASE, id="session"),
        pytest.param("frames-int-hash", "evict", "kv/evict-2000", BASE, id="62 blocks"),
        pytest.param("frames-dp2-lora-bytes-hash", "rank0", "dp2/rank0", BASE, id="byte hashes"),
        pytest.param("frames-dp2-lora-bytes-hash", "rank1", "dp2/rank1", BASE, id="rank 1"),
        pytest.param("frames-dp2-lora-bytes-hash", "lora", "dp2/lora", Namespace(lora_name="my-lora"), id="adapter"),
        pytest.param(
            "frames-dp2-lora-bytes-hash",
            "lora-salt",
            "dp2/lora-salt",
            Namespace(lora_name="my-lora", salt="tenant-a"),
            id="adapter and salt",
        ),
    ],
)
def test_a_prompt_of_vllm_has_the_hashes_of_its_blocks(
    stream: str, step: str, request_name: str, namespace: Namespace
) -> None:
    store, prompt = only_store(stream, step), vllm_prompt(request_name)
    assert (store.parent_hash, store.tier, store.mm_hashes, store.is_eagle) == (None, Tier.DEVICE, None, False)
    assert store.namespace == (None if namespace == BASE else namespace)
    assert len(store.block_hashes) == len(prompt) // 32
    assert own_hashes(store) == block_hashes(prompt, 32, namespace)
    assert store.token_bytes == pack_tokens(prompt[: len(prompt) // 32 * 32])


def test_a_longer_prompt_of_vllm_goes_on_where_the_first_ended() -> None:
    first, more = only_store("frames-int-hash", "store80"), only_store("frames-int-hash", "extend")
    assert first.block_hashes == VLLM_ROOT
    assert more.parent_hash == VLLM_ROOT[-1]
    chain = own_hashes(first)
    assert [*chain, *own_hashes(more, chain[-1])] == block_hashes(vllm_prompt("kv/store-130"), 32)


def test_bytes_and_integers_of_vllm_are_the_same_hashes() -> None:
    assert only_store("frames-dp2-lora-bytes-hash", "rank0").block_hashes == VLLM_ROOT
    assert only_store("frames-dp2-lora-bytes-hash", "rank1").block_hashes == VLLM_ROOT


def test_ranks_of_vllm_name_themselves() -> None:
    assert [vllm_batches("frames-dp2-lora-bytes-hash", step)[0].dp_rank for step in ("rank0", "rank1")] == [0, 1]
    assert vllm_batches("frames-dp2-lora-bytes-hash", "rank1-again") == []


def test_vllm_clears_together_with_the_next_store() -> None:
    (batch,) = vllm_batches("frames-int-hash", "store80")
    assert [type(event) for event in batch.events] == [AllBlocksCleared, BlockStored]


def test_vllm_stores_blocks_as_they_fill_while_decoding() -> None:
    stores = [event for batch in vllm_batches("frames-int-hash", "decode") for event in batch.events]
    parent = None
    for store in stores:
        assert isinstance(store, BlockStored)
        assert (len(store.block_hashes), store.parent_hash) == (1, parent)
        parent = store.block_hashes[0]
    assert len(stores) == 2


def test_vllm_stores_the_last_block_of_a_cached_prompt_again() -> None:
    first, again = only_store("frames-int-hash", "exact64"), only_store("frames-int-hash", "exact64again")
    assert (again.block_hashes, again.parent_hash) == (first.block_hashes[1:], first.block_hashes[0])


def test_vllm_removes_before_it_stores_and_a_copied_block_twice() -> None:
    (batch,) = vllm_batches("frames-int-hash", "evict2")
    *removals, store = batch.events
    assert isinstance(store, BlockStored)
    hashes = [event.block_hashes for event in removals if isinstance(event, BlockRemoved)]
    assert len(hashes) == len(removals)
    assert {len(each) for each in hashes} == {1}
    copied = only_store("frames-int-hash", "exact64again").block_hashes
    assert hashes.count(copied) == 2


def test_every_parent_of_vllm_was_stored_before() -> None:
    for name in VLLM_STREAMS:
        seen: set[int] = set()
        for step in load(f"vllm/kv-events/{name}.json"):
            for batch in vllm_batches(name, step):
                for event in batch.events:
                    if isinstance(event, BlockStored):
                        assert event.parent_hash is None or event.parent_hash in seen
                        seen.update(event.block_hashes)
        assert len(seen) >= 2

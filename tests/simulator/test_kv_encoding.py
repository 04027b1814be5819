"""Hashes and payloads of KV events, byte by byte against recorded servers."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from simulator.cache import BASE, Namespace
from simulator.kv_encoding import (
    Cleared,
    KvEvent,
    KvFormat,
    Removed,
    SGLangFormat,
    Stored,
    Unknown,
    VllmFormat,
    format_of,
    pack_batch,
    sequence_bytes,
)
from simulator.options import EngineOptions
from tests.simulator.wire import CAPTURES, VLLM_CAPTURES

SGLANG = SGLangFormat("0.5.23")
VLLM = VllmFormat(["my-lora"], uses_byte_hashes=False)
VLLM_BYTES = VllmFormat(["my-lora"], uses_byte_hashes=True)


def sglang_frames(name: str) -> list[list[bytes]]:
    lines = (CAPTURES / name).read_text().splitlines()
    return [[bytes.fromhex(frame) for frame in json.loads(line)["frames_hex"]] for line in lines]


def vllm_frames(path: Path) -> list[list[bytes]]:
    found = json.loads(path.read_text())
    batches = [batch for part in found.values() for batch in part["batches"]]
    return [[bytes.fromhex(frame) for frame in batch["frames_hex"]] for batch in batches]


RECORDED = [
    *[
        pytest.param(SGLANG, sglang_frames(f"{name}.jsonl"), id=name)
        for name in ("kv_events", "kv_events_dp2_rank0", "kv_events_dp2_rank1")
    ],
    pytest.param(VLLM, vllm_frames(VLLM_CAPTURES / "kv-events/frames-int-hash.json"), id="vllm-int"),
    pytest.param(VLLM_BYTES, vllm_frames(VLLM_CAPTURES / "kv-events/frames-dp2-lora-bytes-hash.json"), id="vllm-bytes"),
]


def digest_named(name: Any) -> bytes:
    """Return any digest that events call ``name``."""
    if isinstance(name, bytes):
        return name
    half: bytes = (name % (1 << 64)).to_bytes(8, "big")
    return half + bytes(16) + half


def namespace_in(event: dict[str, Any]) -> Namespace:
    salt, lora = event.get("cache_salt", ""), event.get("lora_name") or ""
    salts = [key for key in (event.get("extra_keys") or [None])[0] or [] if key != lora]
    return Namespace("", salts[0] if salts else salt, lora)


def meaning(event: dict[str, Any]) -> KvEvent:
    """Return the event that the engine must have had in mind."""
    if event["type"] == "AllBlocksCleared":
        return Cleared()
    digests = tuple(map(digest_named, event["block_hashes"]))
    if event["type"] == "BlockRemoved":
        return Removed(digests)
    parent = event["parent_block_hash"]
    tokens = array("I", event["token_ids"]).tobytes()
    known = None if parent is None else digest_named(parent)
    return Stored(digests, known, tokens, event["block_size"], namespace_in(event), event.get("session_id"))


@pytest.mark.parametrize(("form", "batches"), RECORDED)
def test_recorded_payloads_come_out_again(form: KvFormat, batches: list[list[bytes]]) -> None:
    assert batches
    for _, sequence, payload in batches:
        at_s, events, rank = msgspec.msgpack.decode(payload)
        assert pack_batch(form, at_s, [meaning(event) for event in events], rank) == payload
        assert sequence_bytes(int.from_bytes(sequence, "big")) == sequence


@pytest.mark.parametrize(("form", "batches"), RECORDED)
def test_recorded_hashes_come_out_again(form: KvFormat, batches: list[list[bytes]]) -> None:
    digests: dict[Any, bytes] = {}
    checked = 0
    for _, _, payload in batches:
        for event in msgspec.msgpack.decode(payload)[1]:
            parent = event.get("parent_block_hash")
            # The record begins in the middle: some parents were stored before it. Hashes with an adapter are opaque.
            is_unknown = parent is not None and parent not in digests
            if event["type"] != "BlockStored" or is_unknown or event.get("lora_name"):
                continue
            digest = None if parent is None else digests[parent]
            size, namespace = event["block_size"], namespace_in(event)
            for index, name in enumerate(event["block_hashes"]):
                page = array("I", event["token_ids"][index * size : (index + 1) * size]).tobytes()
                digest = digests[name] = form.digest(digest, page, namespace)
                assert form.name(digest) == name
                checked += 1
    assert checked >= 4


def test_the_worked_sglang_chain() -> None:
    first = SGLANG.digest(None, array("I", [1, 2, 3, 4]).tobytes(), BASE)
    second = SGLANG.digest(first, array("I", [5, 6, 7, 8]).tobytes(), BASE)
    assert [SGLANG.name(first), SGLANG.name(second)] == [-3488128144981237669, 5674439469042975057]


def test_an_extra_key_leaves_no_trace_in_sglang_and_a_salt_does() -> None:
    page = array("I", [1, 2]).tobytes()
    plain, keyed, salted = (SGLANG.digest(None, page, n) for n in (BASE, Namespace("k"), Namespace("", "s")))
    assert plain == keyed != salted


VERSIONS = json.loads((CAPTURES / "kv_encoding_by_version.json").read_text())
FORMS = ["stored", "stored_medium", "stored_metadata", "removed", "removed_medium", "cleared"]


@pytest.mark.parametrize(("version", "name"), [(v, name) for v in VERSIONS for name in FORMS if name in VERSIONS[v]])
def test_shapes_of_all_versions(version: str, name: str) -> None:
    at_s, (shape,), rank = VERSIONS[version][name]["decoded"]
    form = SGLangFormat(version)
    digests = tuple(map(digest_named, [-7571192861005801925, 3445007186246569662]))
    tokens = array("I", [352, 350, 14, 320, 340, 325, 286, 192]).tobytes()
    salted = Namespace("", "s" if name == "stored_metadata" else "")
    events: dict[str, KvEvent] = {
        "stored": Stored(digests, None, tokens, 4, salted, None),
        "removed": Removed(digests[:1]),
        "cleared": Cleared(),
    }
    packed = msgspec.msgpack.decode(pack_batch(form, at_s, [events[name.partition("_")[0]]], rank))
    # The records without a medium are of a cache that has none to tell: the position stays, the key does not.
    if isinstance(shape, dict):
        if name in ("stored", "removed"):
            shape["medium"] = "GPU"
        assert list(packed[1][0]) == list(shape)
    else:
        shape = ["GPU" if index in MEDIUM_AT[shape[0]] else item for index, item in enumerate(shape)]
    assert packed == [at_s, [shape], rank]


MEDIUM_AT = {"BlockStored": {6}, "BlockRemoved": {2}, "AllBlocksCleared": set[int]()}


def test_the_unknown_event_has_the_shape_of_its_version() -> None:
    assert SGLANG.shapes(Unknown()) == [{"type": "BlockPondered"}]
    assert SGLangFormat("0.5.9").shapes(Unknown()) == [["BlockPondered"]]
    assert VLLM.shapes(Unknown()) == [{"type": "BlockPondered"}]


def test_the_form_follows_the_options() -> None:
    assert isinstance(format_of(EngineOptions()), SGLangFormat)
    digest = bytes(range(32))
    assert format_of(EngineOptions(engine="vllm")).name(digest) == int.from_bytes(digest[-8:], "big")
    assert format_of(EngineOptions(engine="vllm", kv_byte_hashes=True)).name(digest) == digest

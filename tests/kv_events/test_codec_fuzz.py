"""Bytes from anywhere: the only error that comes out of the codec is ``BatchUndecodable``."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_events import codec
from kv_events.codec import decode_batch
from kv_events.errors import BatchUndecodable
from kv_events.types import BlockStored, EventBatch
from tests.kv_events.captured import payloads

encode = msgspec.msgpack.Encoder().encode
PAYLOADS = list(payloads())
SMALL = [payload for payload in PAYLOADS if len(payload) < 600]

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=9)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
TAGS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockMoved"]) | VALUES
HASHES = st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=6, max_size=12), max_size=4)
TOKENS = st.lists(st.integers(-1, 2**32), max_size=12) | st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "block_hashes": HASHES,
    "parent_block_hash": st.none() | st.integers(0, 9),
    "token_ids": TOKENS,
    "block_size": st.integers(0, 4),
    "lora_id": st.none() | st.integers(0, 3),
    "medium": st.sampled_from([None, "GPU", "CPU", "?"]),
    "lora_name": st.none() | st.sampled_from(["", "a", "b"]),
    "extra_keys": st.lists(st.none() | st.lists(st.sampled_from(["a", "b", "0" * 64, 1, None, ["x", 1]]), max_size=3)),
    "group_idx": st.integers(0, 1),
    "kv_cache_spec_kind": st.sampled_from(["full_attention", "mamba"]),
    "cache_salt": st.sampled_from(["", "a"]),
}
MAP_EVENTS = st.builds(
    lambda tag, fields: {"type": tag, **fields},
    TAGS,
    st.fixed_dictionaries({}, optional={name: values | VALUES for name, values in FIELDS.items()}),
)
NEAR_STORES = st.fixed_dictionaries({"type": st.just("BlockStored"), **FIELDS})
ARRAY_EVENTS = st.builds(
    lambda tag, fields: [tag, *fields],
    TAGS,
    st.tuples(*(values | VALUES for values in FIELDS.values())).flatmap(
        lambda fields: st.integers(0, len(fields)).map(lambda end: fields[:end])
    ),
)


def decode_or_refuse(payload: bytes) -> EventBatch | None:
    """Decode, with one error alone allowed."""
    try:
        batch = decode_batch(payload)
    except BatchUndecodable as error:
        reason = error.args[0]
    else:
        check(batch)
        return batch
    assert reason in ("payload_bytes", "msgpack", "events", "depth")
    return None


def check(batch: EventBatch) -> None:
    """Check what holds for everything that is accepted."""
    for event in batch.events:
        if isinstance(event, BlockStored):
            tokens = len(event.block_hashes) * event.block_size + event.is_eagle
            assert len(event.token_bytes) == tokens * 4
            assert len({*event.block_hashes, event.parent_hash}) == len(event.block_hashes) + 1
            assert all(0 <= value < 2**64 for value in event.block_hashes)
            assert event.mm_hashes is None or len(event.mm_hashes) == len(event.block_hashes)
    assert batch.is_suspect == ("malformed" in batch.dropped)


@settings(deadline=None)
@given(payload=st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    decode_or_refuse(payload)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=VALUES)
def test_random_values(value: Any) -> None:
    decode_or_refuse(encode(value))


@given(
    events=st.lists(MAP_EVENTS | ARRAY_EVENTS | NEAR_STORES | VALUES, max_size=4), rank=st.none() | st.integers(0, 9)
)
def test_random_events_lose_only_themselves(events: list[Any], rank: int | None) -> None:
    batch = decode_or_refuse(encode([0.5, events, rank]))
    assert batch is not None
    # What stores tell of groups of layers holds for the events behind them.
    group_kinds: dict[int, str] = {}
    alone = [decode_batch(encode([0.5, [event], rank]), group_kinds) for event in events]
    assert batch.dropped == {
        reason: sum(each.dropped.get(reason, 0) for each in alone) for each in alone for reason in each.dropped
    }
    assert batch.events == [event for each in alone for event in each.events]


@pytest.mark.parametrize("index", range(0, len(SMALL), 7))
def test_real_payloads_cut_anywhere_are_refused(index: int) -> None:
    payload = SMALL[index]
    assert [cut for cut in range(len(payload)) if decode_or_refuse(payload[:cut])] == []


@settings(deadline=None)
@given(data=st.data())
def test_real_payloads_with_changed_bytes(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(PAYLOADS)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(bytes(payload))


@pytest.mark.parametrize("guess", [True, False])
@given(
    events=st.lists(MAP_EVENTS, max_size=20) | st.lists(ARRAY_EVENTS, max_size=20) | st.lists(VALUES, max_size=3),
    is_map=st.booleans(),
)
def test_a_wrong_guess_of_the_shape_changes_nothing(guess: bool, events: list[Any], is_map: bool) -> None:
    payload = encode({"ts": 0.5, "events": events} if is_map else [0.5, events])
    expected = decode_or_refuse(payload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_has_maps", lambda payload: guess)
        assert decode_or_refuse(payload) == expected


@pytest.mark.parametrize("count", [1, 15, 16, 300])
@pytest.mark.parametrize("is_map", [True, False])
def test_the_shape_of_usual_batches_is_guessed(count: int, is_map: bool) -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1]} if is_map else ["BlockRemoved", [1]]
    assert codec._has_maps(encode([0.5, [event] * count])) is is_map

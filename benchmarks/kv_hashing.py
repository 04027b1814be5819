"""``python -m benchmarks.kv_hashing``: hashing prompts, reading ids, decoding events, beside plain Python forms.

Times are of this thread's CPU, the least of several repeats, so that a busy machine shows less; its caches still do.
"""

import json
import random
from collections.abc import Callable
from typing import Final

import msgspec
import xxhash

from benchmarks.cpu_time import least_cpu_us
from kv_events.codec import decode_batch
from kv_events.hashing import CHAIN_SEED, block_hashes, pack_tokens, parse_ids

_BLOCK_SIZE: Final = 16
_REPEATS: Final = 9
_REPEAT_S: Final = 0.03
# Of a prompt of so many tokens, in microseconds.
_AIMS_US: Final = {2_000: 60.0, 100_000: 4_000.0}


def plain_hashes(tokens: list[int]) -> list[int]:
    """The definition, word for word."""
    hashes: list[int] = []
    for start in range(0, len(tokens) - _BLOCK_SIZE + 1, _BLOCK_SIZE):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + _BLOCK_SIZE])
        local = xxhash.xxh3_64_intdigest(block, CHAIN_SEED)
        if hashes:
            pair = hashes[-1].to_bytes(8, "little") + local.to_bytes(8, "little")
            local = xxhash.xxh3_64_intdigest(pair, CHAIN_SEED)
        hashes.append(local)
    return hashes


def plain_ids(raw: bytes) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in json.loads(raw))


def _plain_events(payload: bytes) -> list[tuple[object, ...]]:
    """Only what the index needs, of a well-formed batch of maps or arrays."""
    events: list[tuple[object, ...]] = []
    for event in msgspec.msgpack.decode(payload)[1]:
        fields = event if isinstance(event, list) else list(event.values())
        hashes = [value.to_bytes(8, "little") for value in fields[1]]
        is_store = fields[0] == "BlockStored"
        events.append((hashes, b"".join(token.to_bytes(4, "little") for token in fields[3]) if is_store else b""))
    return events


def _events(rng: random.Random) -> dict[str, bytes]:
    """A store of 32 blocks in the form of vLLM, the same as an array, and 100 removals of a block."""
    hashes = [rng.getrandbits(64) for _ in range(32)]
    tokens = [rng.randrange(128_000) for _ in range(32 * _BLOCK_SIZE)]
    store = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": rng.getrandbits(64),
        "token_ids": tokens,
        "block_size": _BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * 32,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    array = ["BlockStored", hashes, None, tokens, _BLOCK_SIZE, None, "GPU"]
    removals = [{"type": "BlockRemoved", "block_hashes": [value], "medium": "GPU", "group_idx": 0} for value in hashes]
    batches = {"store, map": [store], "store, array": [array], "32 removals": removals}
    return {name: msgspec.msgpack.encode([1.5, events, 0]) for name, events in batches.items()}


def _cpu_us(call: Callable[[], object]) -> float:
    return least_cpu_us(call, _REPEATS, _REPEAT_S)


def _row(name: str, ours: Callable[[], object], plain: Callable[[], object], aim_us: float | None = None) -> None:
    ours_us, plain_us = _cpu_us(ours), _cpu_us(plain)
    aim = "" if aim_us is None else f"   aim {aim_us:,.0f} us: {'met' if ours_us <= aim_us else 'missed'}"
    print(f"{name:32} {ours_us:10,.1f} us   plain {plain_us:10,.1f} us   ratio {plain_us / ours_us:5.1f}{aim}")


def main() -> None:
    """Measure and print."""
    rng = random.Random(1)
    for count, aim_us in _AIMS_US.items():
        tokens = [rng.randrange(128_000) for _ in range(count)]
        packed, raw = pack_tokens(tokens), json.dumps(tokens).encode()
        if block_hashes(packed, _BLOCK_SIZE) != plain_hashes(tokens) or parse_ids(raw) != plain_ids(raw):
            raise AssertionError("the fast form and the plain one differ")
        _row(f"hash {count:,} tokens", lambda: block_hashes(packed, _BLOCK_SIZE), lambda: plain_hashes(tokens), aim_us)  # noqa: B023  # called at once
        _row(f"read {count:,} ids", lambda: parse_ids(raw), lambda: plain_ids(raw))  # noqa: B023  # called at once
    for name, payload in _events(rng).items():
        _row(f"decode {name}", lambda: decode_batch(payload), lambda: _plain_events(payload))  # noqa: B023


if __name__ == "__main__":
    main()

"""KV events as the engines write them: block hashes, event shapes, payloads and frames.

Pure. Shapes and hashes are those of recorded servers; what an engine leaves out is left out here.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from simulator.cache import Block, Namespace
from simulator.options import EngineOptions

Frames = list[bytes]

END_OF_REPLAY = b"\xff" * 8
_SALT_PREFIX = b"sglang-cache-salt-v1\0"


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that were filled, each the child of the one before.

    ``parent`` is the digest of the block before the first, ``None`` at a root; ``token_bytes`` holds four
    bytes for each token in the machine's order.
    """

    digests: tuple[bytes, ...]
    parent: bytes | None
    token_bytes: bytes
    block_size: int
    namespace: Namespace
    session_id: str | None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that were evicted, in this order."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything is gone."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """An event that no consumer has ever heard of, for a scripted fault."""


KvEvent = Stored | Removed | Cleared | Unknown


class KvFormat(Protocol):
    """How one engine kind and version names blocks and writes events."""

    clears_at_start: bool
    """Whether the first batch of a process says that the cache is empty."""
    tells_clear_at_once: bool
    """Whether a flush is published by itself; otherwise with the next events."""

    def digest(self, parent: bytes | None, token_bytes: bytes, namespace: Namespace) -> bytes:
        """Return the digest of a block; ``parent`` is ``None`` for the first one of a namespace."""

    def name(self, digest: bytes) -> int | bytes:
        """Return what events call the block."""

    def shapes(self, event: KvEvent) -> list[Any]:
        """Return what is packed for ``event``."""


class SGLangFormat:
    """SGLang: a SHA-256 chain, of which events carry the first 8 bytes as a signed number.

    ``version`` decides on the shape: arrays of growing length up to 0.5.19, maps from then on.
    """

    clears_at_start = True
    tells_clear_at_once = True

    def __init__(self, version: str) -> None:
        numbers = _version_numbers(version)
        self._is_map = numbers > (0, 5, 19)
        self._has_medium = numbers > (0, 5, 5)
        self._has_metadata = numbers > (0, 5, 16)

    def digest(self, parent: bytes | None, token_bytes: bytes, namespace: Namespace) -> bytes:
        """Chain from the parent's whole digest; a salt seeds the chain, an ``extra_key`` leaves no trace."""
        if parent is None:
            salt = namespace.cache_salt
            parent = hashlib.sha256(_SALT_PREFIX + salt.encode("utf-8", "replace")).digest() if salt else b""
        tokens = array("I", token_bytes)
        return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()

    def name(self, digest: bytes) -> int:
        """Return the signed number."""
        return int.from_bytes(digest[:8], "big", signed=True)

    def shapes(self, event: KvEvent) -> list[Any]:
        """Return one map or array."""
        if isinstance(event, Stored):
            return [self._stored(event)]
        if isinstance(event, Removed):
            hashes = [self.name(digest) for digest in event.digests]
            if self._is_map:
                return [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}]
            return [["BlockRemoved", hashes, *(["GPU"] if self._has_medium else [])]]
        tag = _tag(event)
        return [{"type": tag} if self._is_map else [tag]]

    def _stored(self, event: Stored) -> Any:
        hashes = [self.name(digest) for digest in event.digests]
        parent = None if event.parent is None else self.name(event.parent)
        tokens = array("I", event.token_bytes).tolist()
        metadata = {}
        if event.namespace.cache_salt:
            metadata["cache_salt"] = event.namespace.cache_salt
        if event.session_id is not None and self._is_map:
            metadata["session_id"] = event.session_id
        if not self._is_map:
            medium = ["GPU"] if self._has_medium else []
            tail = [metadata] if metadata and self._has_metadata else []
            return ["BlockStored", hashes, parent, tokens, event.block_size, None, *medium, *tail]
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": event.block_size,
            "lora_id": None,
            "medium": "GPU",
            **metadata,
        }


class VllmFormat:
    """vLLM: SHA-256 over pickles, of which events carry the last 8 bytes as a number, or all 32."""

    clears_at_start = False
    tells_clear_at_once = False
    _SEED = hashlib.sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()

    def __init__(self, lora_names: Sequence[str], *, uses_byte_hashes: bool) -> None:
        self._lora_ids = {name: number for number, name in enumerate(lora_names, 1)}
        self._uses_byte_hashes = uses_byte_hashes

    def digest(self, parent: bytes | None, token_bytes: bytes, namespace: Namespace) -> bytes:
        """Chain from the parent's digest; adapter and salt are part of what is hashed.

        The same as a real server's without an adapter; how that one enters is not known.
        """
        keys = [("lora_name", namespace.lora_name)] if namespace.lora_name else []
        if namespace.cache_salt and parent is None:
            keys.append(("cache_salt", namespace.cache_salt))
        hashed = (parent or self._SEED, tuple(array("I", token_bytes)), tuple(keys) or None)
        return hashlib.sha256(pickle.dumps(hashed, protocol=5)).digest()

    def name(self, digest: bytes) -> int | bytes:
        """Return the number or the bytes."""
        return digest if self._uses_byte_hashes else int.from_bytes(digest[-8:], "big")

    def shapes(self, event: KvEvent) -> list[Any]:
        """Return one map; of removals one for each block."""
        if isinstance(event, Removed):
            return [
                {"type": "BlockRemoved", "block_hashes": [self.name(digest)], "medium": "GPU", "group_idx": 0}
                for digest in event.digests
            ]
        if not isinstance(event, Stored):
            return [{"type": _tag(event)}]
        namespace = event.namespace
        firsts = [event.parent is None and not index for index in range(len(event.digests))]
        keys = [_extra_keys(namespace, is_first=is_first) for is_first in firsts]
        shape = {
            "type": "BlockStored",
            "block_hashes": [self.name(digest) for digest in event.digests],
            "parent_block_hash": None if event.parent is None else self.name(event.parent),
            "token_ids": array("I", event.token_bytes).tolist(),
            "block_size": event.block_size,
            "lora_id": self._lora_ids.get(namespace.lora_name),
            "medium": "GPU",
            "lora_name": namespace.lora_name or None,
            "extra_keys": [None if key is None else list(key) for key in keys],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        if event.session_id is not None:
            shape["session_id"] = event.session_id
        return [shape]


def format_of(options: EngineOptions) -> KvFormat:
    """Return how the engine that ``options`` describe names blocks and writes events."""
    if options.engine == "vllm":
        names = [name for name in options.lora_names.split(",") if name]
        return VllmFormat(names, uses_byte_hashes=options.kv_byte_hashes)
    return SGLangFormat(options.version)


def _version_numbers(version: str) -> tuple[int, ...]:
    parts = [part for part in version.split(".") if part.isdecimal()]
    return tuple(map(int, parts))


def _extra_keys(namespace: Namespace, *, is_first: bool) -> tuple[str, ...] | None:
    """Return vLLM's extra keys of a block: the adapter for every block, the salt for a chain's first."""
    keys = [namespace.lora_name, namespace.cache_salt if is_first else ""]
    return tuple(key for key in keys if key) or None


def _tag(event: KvEvent) -> str:
    return "AllBlocksCleared" if isinstance(event, Cleared) else "BlockPondered"


def name_block(block: Block, namespace: Namespace, form: KvFormat) -> bytes:
    """Return the digest of ``block``, computing what is missing of its chain."""
    chain = []
    while not block.digest and block.parent is not None:
        chain.append(block)
        block = block.parent
    digest = block.digest or None
    for member in reversed(chain):
        digest = member.digest = form.digest(digest, member.token_bytes, namespace)
    return digest or b""


def pack_batch(form: KvFormat, at_s: float, events: Sequence[KvEvent], rank: int) -> bytes:
    """Return the payload of one batch; ``at_s`` is seconds since the epoch."""
    shapes = [shape for event in events for shape in form.shapes(event)]
    return msgspec.msgpack.encode([at_s, shapes, rank])


def sequence_bytes(sequence: int) -> bytes:
    """Return the frame of a sequence number."""
    return struct.pack(">Q", sequence)

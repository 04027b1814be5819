"""What separates blocks besides their tokens: adapters, salts, media, and keys that nobody here understands. Pure.

An unknown key closes the door: its block goes into a namespace that no request can name, and so do its children.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from kv_events.codec_structs import MmInfo, Stored
from kv_events.types import Namespace

_SALT_PREFIX: Final = "dynamo-cache-salt:"
# vLLM names media by 64 hexadecimal digits, unless the client names them.
_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_U64: Final = 2**64 - 1
_KEY: Final = msgspec.msgpack.Decoder(str | int | tuple[str, int] | None)

MmHashes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """What the keys of one event say about its blocks.

    Attributes:
        namespace: Of the event, as far as it tells; ``None`` if it tells nothing.
        mm_hashes: Digests of media by block, sorted; ``None`` where no block has any.
        opaque_from: Index of the first block with an unknown key, ``None`` if there is none.
        opaque: Namespace of the blocks from there on.
    """

    namespace: Namespace | None = None
    mm_hashes: MmHashes | None = None
    opaque_from: int | None = None
    opaque: Namespace | None = None


NO_KEYS: Final = BlockKeys()


def read_keys(event: Stored) -> BlockKeys:
    """Read the namespace and the media of a store.

    Raises:
        ValueError: The keys are not one entry for each block.
    """
    has_keys = event.extra_keys is not None and any(event.extra_keys)
    if not (has_keys or event.lora_name or event.lora_id is not None or event.cache_salt or event.block_mm_infos):
        return NO_KEYS
    lora_name = event.lora_name or None
    lora_id = event.lora_id if lora_name is None else None
    salt = event.cache_salt or None
    keys = _Keys(lora_name, event.lora_id, salt)
    if event.extra_keys and has_keys:
        _check_count(event, event.extra_keys)
        for index, block in enumerate(event.extra_keys):
            if block:
                keys.read_block(index, block, is_root=index == 0 and event.parent_block_hash is None)
    if event.block_mm_infos:
        _check_count(event, event.block_mm_infos)
        keys.media = dict(enumerate(map(_digests, event.block_mm_infos)))
    namespace = None
    if lora_name or lora_id is not None or keys.salt:
        namespace = Namespace(lora_name=lora_name, lora_id=lora_id, salt=keys.salt)
    opaque = None
    if keys.opaque_from is not None:
        opaque = Namespace(lora_name=lora_name, lora_id=lora_id, salt=keys.salt, opaque=keys.opaque)
    return BlockKeys(namespace, keys.mm_hashes(len(event.block_hashes)), keys.opaque_from, opaque)


def _check_count(event: Stored, entries: Sequence[object]) -> None:
    if len(entries) != len(event.block_hashes):
        raise ValueError("not one entry for each block")


def _digests(info: MmInfo | None) -> list[int]:
    return [item.mm_hash & _U64 for item in info.mm_objects] if info else []


class _Keys:
    """Gathers the keys of the blocks in order."""

    def __init__(self, lora_name: str | None, lora_id: int | None, salt: str | None) -> None:
        self._lora_name = lora_name
        self._lora_id = lora_id
        self.salt = salt
        self.media: dict[int, list[int]] = {}
        self.opaque_from: int | None = None
        self.opaque = ""

    def read_block(self, index: int, raws: Sequence[Raw], is_root: bool) -> None:
        """Sort the keys of one block into adapter, salt, media and unknown."""
        unknown: list[Raw] = []
        plain: list[tuple[str, Raw]] = []
        is_adapter_seen = False
        for raw in raws:
            try:
                key = _KEY.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                unknown.append(raw)
                continue
            if key is None:
                continue
            # An adapter's name may be a salt's too; then the key comes twice.
            if not is_adapter_seen and key in (self._lora_name, self._lora_id):
                is_adapter_seen = True
            elif isinstance(key, tuple):
                self.media.setdefault(index, []).append(_medium(key[0]))
            elif isinstance(key, int):
                unknown.append(raw)
            elif _DIGEST.fullmatch(key):
                self.media.setdefault(index, []).append(_medium(key))
            else:
                plain.append((key, raw))
        unknown += self._without_salt(index, plain, is_root)
        if unknown and self.opaque_from is None:
            self.opaque_from = index
            self.opaque = xxh3_64_hexdigest(b"".join(bytes(memoryview(raw)) for raw in unknown))

    def _without_salt(self, index: int, plain: list[tuple[str, Raw]], is_root: bool) -> list[Raw]:
        """Take the salt from among the strings of a block; give back what is none."""
        marked = [key.removeprefix(_SALT_PREFIX) for key, _ in plain if key.startswith(_SALT_PREFIX)]
        if index == 0 and self.salt is None and len(marked) == 1 and marked[0]:
            self.salt = marked[0]
        # vLLM does not mark the salt. An adapter without a name here may have put its name there.
        elif is_root and self.salt is None and not marked and len(plain) == 1 and not self._is_nameless():
            self.salt = plain[0][0] or None
        return [raw for key, raw in plain if key.removeprefix(_SALT_PREFIX) != self.salt]

    def _is_nameless(self) -> bool:
        return self._lora_name is None and self._lora_id is not None

    def mm_hashes(self, blocks: int) -> MmHashes | None:
        """Give the media by block."""
        if not any(self.media.values()):
            return None
        return tuple(tuple(sorted(self.media.get(index, ()))) for index in range(blocks))


def _medium(name: str) -> int:
    """The digest's first 64 bits; a hash of any other name."""
    return int(name[:16], 16) if _DIGEST.fullmatch(name) else xxh3_64_intdigest(name.encode())

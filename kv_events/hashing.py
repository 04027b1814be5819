"""From tokens to the hashes under which blocks are indexed and looked up. Pure.

Tokens travel as bytes, four for each, little-endian. The local hash of a block covers its tokens and its namespace,
the sequence hash also everything before it. The hashes of the engines are not reproduced here: see ``types``.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kv_events.types import BASE, Namespace

CHAIN_SEED: Final = 1337
_LORA_NAME_SEED: Final = 0
_SALT_SEED: Final = 1
# Ours: no other implementation has a namespace for adapters without a name.
_LORA_ID_SEED: Final = 2
_U64: Final = 2**64 - 1
_U32: Final = 2**32 - 1
_TOKEN_BYTES: Final = 4

_PAIR: Final = Struct("<QQ").pack
_IS_LITTLE_ENDIAN: Final = sys.byteorder == "little"
_NINE: Final = ord("9")
_IDS: Final = msgspec.json.Decoder(list[int])


def namespace_seed(namespace: Namespace) -> int | None:
    """Give the seed of the local hashes of a namespace.

    The base has 1337. A LoRA name adds its hash with seed 0 and a salt its hash with seed 1, as other routers do; an
    adapter without a name adds the hash of ``lora_id:<number>`` with seed 2. Empty strings count as absent.

    Returns:
        A value in [0, 2^64), or ``None`` for an opaque namespace, whose blocks are never matched.
    """
    if namespace is BASE:
        return CHAIN_SEED
    if namespace.opaque is not None:
        return None
    seed = CHAIN_SEED
    if namespace.lora_name:
        seed += xxh3_64_intdigest(namespace.lora_name.encode(), _LORA_NAME_SEED)
    elif namespace.lora_id is not None:
        seed += xxh3_64_intdigest(b"lora_id:%d" % namespace.lora_id, _LORA_ID_SEED)
    if namespace.salt:
        seed += xxh3_64_intdigest(namespace.salt.encode(), _SALT_SEED)
    return seed & _U64


def local_hashes(
    token_bytes: bytes | memoryview,
    block_size: int,
    seed: int,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Hash each full block by itself.

    Args:
        token_bytes: Tokens, four bytes each.
        block_size: Tokens in a block, at least 1.
        seed: Of the namespace.
        is_eagle: Each block covers one token more, the first of the next block.
        mm_hashes: Digests of media by block, each in [0, 2^64); a block without an entry has none.

    Returns:
        A hash for each full block; none for a partial last block.

    Raises:
        ValueError: The block size is below 1, or the bytes are no whole number of tokens.
    """
    _check_blocks(token_bytes, block_size)
    stride = block_size * _TOKEN_BYTES
    width = stride + _TOKEN_BYTES * is_eagle
    starts = range(0, len(token_bytes) - width + 1, stride)
    if mm_hashes is None:
        return [xxh3_64_intdigest(token_bytes[start : start + width], seed) for start in starts]
    blocks = [bytes(token_bytes[start : start + width]) for start in starts]
    for index, media in enumerate(mm_hashes[: len(blocks)]):
        blocks[index] += b"".join(value.to_bytes(8, "little") for value in sorted(media))
    return [xxh3_64_intdigest(block, seed) for block in blocks]


def sequence_hashes(local: Iterable[int], parent: int | None = None) -> list[int]:
    """Chain local hashes, so that each names its block with all blocks before it.

    Args:
        local: Local hashes in order.
        parent: Sequence hash of the block before the first, ``None`` at a root.
    """
    hashes: list[int] = []
    append = hashes.append
    for block in local:
        parent = block if parent is None else xxh3_64_intdigest(_PAIR(parent, block), CHAIN_SEED)
        append(parent)
    return hashes


def chained_hashes(
    token_bytes: bytes | memoryview,
    block_size: int,
    seed: int,
    parent: int | None = None,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Give ``sequence_hashes`` of ``local_hashes``, for plain blocks in one pass, which takes two thirds of the time.

    Args:
        token_bytes: As for ``local_hashes``, like all else that it has.
        block_size: Likewise.
        seed: Likewise.
        parent: As for ``sequence_hashes``.
        is_eagle: As for ``local_hashes``.
        mm_hashes: As for ``local_hashes``.

    Raises:
        ValueError: As ``local_hashes``.
    """
    stride = block_size * _TOKEN_BYTES
    if is_eagle or mm_hashes is not None or len(token_bytes) < stride:
        return sequence_hashes(local_hashes(token_bytes, block_size, seed, is_eagle, mm_hashes), parent)
    _check_blocks(token_bytes, block_size)
    rest = len(token_bytes) % stride
    # Cut in C: a slice for each block takes as long as its hash.
    blocks = _cutter(stride).iter_unpack(token_bytes[:-rest] if rest else token_bytes)
    digest, pack = xxh3_64_intdigest, _PAIR
    if parent is not None:
        return [parent := digest(pack(parent, digest(block, seed)), CHAIN_SEED) for (block,) in blocks]
    (first,) = next(blocks)
    parent = digest(first, seed)
    return [parent, *[parent := digest(pack(parent, digest(block, seed)), CHAIN_SEED) for (block,) in blocks]]


def _check_blocks(token_bytes: bytes | memoryview, block_size: int) -> None:
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, must be at least 1")
    if len(token_bytes) % _TOKEN_BYTES:
        raise ValueError(f"{len(token_bytes)} bytes are no whole number of tokens")


@lru_cache(maxsize=64)
def _cutter(stride: int) -> Struct:
    return Struct(f"{stride}s")


def block_hashes(
    tokens: bytes | memoryview | Sequence[int] | npt.NDArray[np.integer],
    block_size: int,
    namespace: Namespace = BASE,
    *,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Give the sequence hashes of a prompt's full blocks.

    Args:
        tokens: Token ids, or their bytes, four each.
        block_size: Tokens in a block, at least 1.
        namespace: The request's; nothing matches an opaque one, so it has no hashes.
        is_eagle: As for ``local_hashes``.
        mm_hashes: As for ``local_hashes``.

    Raises:
        ValueError: A token is not in [0, 2^32), or an argument is not valid for ``local_hashes``.
    """
    seed = namespace_seed(namespace)
    if seed is None:
        return []
    token_bytes = tokens if isinstance(tokens, bytes | memoryview) else pack_tokens(tokens)
    return chained_hashes(token_bytes, block_size, seed, None, is_eagle, mm_hashes)


def pack_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Bring token ids into bytes, four each, little-endian.

    Raises:
        ValueError: A token is no integer in [0, 2^32), or an array is not flat.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or (tokens.size and not _are_ids(tokens)):
            raise ValueError("token ids must be a flat array of integers in [0, 2^32)")
        return tokens.astype("<u4").tobytes()
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as exc:
        raise ValueError(f"token ids must be integers in [0, 2^32): {exc}") from exc
    if not _IS_LITTLE_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def parse_ids(raw: bytes) -> bytes:
    """Read a flat list of token ids into bytes, four each, little-endian.

    Args:
        raw: Valid JSON, which is not checked: other texts may be read as anything.

    Raises:
        ValueError: It is anything but a list of integers in [0, 2^32).
    """
    # numpy reads digits several times faster than a JSON parser makes integers, but it forgives more: an empty list,
    # numbers of other kinds.
    if raw[:1] == b"[" and raw[1:2].isdigit() and _has_integers_alone(raw):
        ids = np.fromstring(raw[1:-1], dtype=np.int64, sep=",")
        # There is no sign, and what has more than 64 bits is read as the highest number.
        if ids.max() <= _U32:
            return ids.astype("<u4").tobytes()
    return _parse_any(raw)


def _has_integers_alone(raw: bytes) -> bool:
    """Whether a valid JSON list with something in it has nothing but integers from 0 on.

    All else has a letter, a bracket or a brace, which come behind the digits, or one of three other characters. To
    search for these takes a sixth of the time that it takes to look every character up in a table.
    """
    highest = np.frombuffer(raw, np.uint8, len(raw) - 2, 1).max()
    return bool(highest <= _NINE) and b"-" not in raw and b"." not in raw and b'"' not in raw


def parse_plain_ids(raw: bytes) -> bytes:
    """Read what is known to be a JSON list of ids, at least one, each of at most nine digits; nothing is checked.

    Reading short numbers alone takes half as long as checking them and reading long ones.
    """
    return np.fromstring(raw[1:-1], dtype=np.uint32, sep=",").astype("<u4", copy=False).tobytes()


def _parse_any(raw: bytes) -> bytes:
    """The same for lists that look unusual, most of them wrong in a way that a JSON parser can name."""
    try:
        return pack_tokens(_IDS.decode(raw))
    except msgspec.DecodeError as exc:
        raise ValueError(f"not a list of token ids: {exc}") from exc


def _are_ids(tokens: npt.NDArray[np.integer]) -> bool:
    return int(tokens.min()) >= 0 and int(tokens.max()) <= _U32

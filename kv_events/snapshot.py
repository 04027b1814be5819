"""What the index knows of a source, as bytes: for another gateway that joins, or the same one after a restart. Pure.

Blocks are given by the engine's names, the sequence hashes and the namespaces; tokens are not kept. With them go the
number and the digest of the last message, so that whoever loads them can ask the publisher whether they still hold.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from kv_events.errors import BatchUndecodable
from kv_events.index import PrefixIndex, RankId
from kv_events.index_namespaces import SHIFT
from kv_events.types import BASE, Namespace, Tier

FORMAT = 1
_SEQUENCE_MASK = (1 << SHIFT) - 1
_Namespace = tuple[str | None, int | None, str | None, str | None]


class _Blocks(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Blocks of one tier in one namespace; names and sequences are little-endian, eight bytes each."""

    tier: Tier
    namespace: _Namespace
    names: bytes
    sequences: bytes
    copies: bytes


class _Dump(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    worker_id: str
    dp_rank: int
    epoch: int
    last_seq: int | None
    last_digest: int | None
    is_complete: bool
    blocks: list[_Blocks]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Dump)


@dataclass(frozen=True, slots=True)
class SnapshotPosition:
    """Where in its publisher's messages a snapshot was taken, as ``SequenceMachine`` has it.

    Attributes:
        epoch: Of the gateway that took it.
        last_seq: Newest message that is in it; ``None`` if unknown.
        last_digest: Of that message's payload; ``None`` if unknown.
        is_complete: All that the cache held then is in it.
    """

    epoch: int
    last_seq: int | None
    last_digest: int | None
    is_complete: bool


def dump_rank(index: PrefixIndex, rank: RankId, position: SnapshotPosition) -> bytes:
    """Write down what a rank holds. Orphans are left out. About 0.3 s for a million blocks, in one go.

    Raises:
        KeyError: The rank is not in the index.
    """
    blocks: list[_Blocks] = []
    for tier in Tier:
        holder = index.holder_of(rank, tier)
        if holder is None:
            continue
        parts: dict[int, tuple[list[int], list[int]]] = {}
        for table in holder.names:
            for name, key in table.items():
                names, sequences = parts.setdefault(key >> SHIFT, ([], []))
                names.append(name)
                sequences.append(key & _SEQUENCE_MASK)
        for number, (names, sequences) in parts.items():
            copies = holder.copies.intersection(names)
            namespace = _as_tuple(index.namespace_of(number << SHIFT))
            blocks.append(_Blocks(tier, namespace, _pack(names), _pack(sequences), _pack(copies)))
    return _ENCODER.encode(
        _Dump(FORMAT, *rank, position.epoch, position.last_seq, position.last_digest, position.is_complete, blocks)
    )


def load_rank(index: PrefixIndex, snapshot: bytes) -> tuple[RankId, SnapshotPosition]:
    """Put what was dumped into the index, in place of what the rank holds.

    Returns:
        The rank, and where to go on. The rank must have been added, with the limits of its engine.

    Raises:
        BatchUndecodable: ``snapshot``: it is none, or one of another format; the index is as before.
        KeyError: The rank is not in the index.
    """
    try:
        dump = _DECODER.decode(snapshot)
        parts = [(part, _unpack(part.names), _unpack(part.sequences), _unpack(part.copies)) for part in dump.blocks]
    except (msgspec.DecodeError, ValueError) as exc:
        raise BatchUndecodable("snapshot") from exc
    if dump.format != FORMAT or any(len(names) != len(sequences) for _, names, sequences, _ in parts):
        raise BatchUndecodable("snapshot")
    rank = (dump.worker_id, dump.dp_rank)
    index.clear_rank(rank)
    for part, names, sequences, copies in parts:
        namespace = BASE if part.namespace == _as_tuple(BASE) else Namespace(*part.namespace)
        index.restore(rank, part.tier, namespace, names, sequences)
        index.restore(rank, part.tier, namespace, *_again(names, sequences, set(copies)))
    return rank, SnapshotPosition(dump.epoch, dump.last_seq, dump.last_digest, dump.is_complete)


def _again(names: list[int], sequences: list[int], copies: set[int]) -> tuple[list[int], list[int]]:
    """The blocks that are held twice, to be stored a second time."""
    pairs = [pair for pair in zip(names, sequences, strict=True) if pair[0] in copies] if copies else []
    return [name for name, _ in pairs], [sequence for _, sequence in pairs]


def _as_tuple(namespace: Namespace | None) -> _Namespace:
    if namespace is None:
        return (None, None, None, "")
    return (namespace.lora_name, namespace.lora_id, namespace.salt, namespace.opaque)


def _pack(numbers: Iterable[int]) -> bytes:
    return np.fromiter(numbers, dtype="<u8").tobytes()


def _unpack(packed: bytes) -> list[int]:
    values: list[int] = np.frombuffer(packed, dtype="<u8").tolist()
    return values

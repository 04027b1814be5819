"""All that a rank holds, in parts that fit between other work: for a gateway that comes late to a relay. Pure.

Unlike ``snapshot`` it is made and applied piece by piece, since nobody may wait for a million blocks.
"""

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from kv_events.index import PrefixIndex, RankId
from kv_events.index_holder import Holder
from kv_events.index_namespaces import SHIFT
from kv_events.relay_wire import PART_BLOCKS, Part
from kv_events.types import BASE, Namespace, Tier

_MASK = (1 << SHIFT) - 1
_BASE_FIELDS = (None, None, None, None)
# Names, and below them their sequence hashes.
_Columns = npt.NDArray[np.uint64]


def snapshot_parts(index: PrefixIndex, rank: RankId) -> Iterator[tuple[Part, bytes]]:
    """Write down what a rank holds, about a millisecond of work for each part; orphans are left out.

    The rank must not be changed until the iterator has ended.

    Raises:
        KeyError: The rank is not in the index.
    """
    for tier in Tier:
        holder = index.holder_of(rank, tier)
        if holder is None:
            continue
        # Names and sequence hashes that do not fill a part yet, by number of the namespace.
        rests: dict[int, _Columns] = {}
        for table in holder.names:
            for number, columns in _by_namespace(table):
                rest = np.concatenate((rests[number], columns), axis=1) if number in rests else columns
                whole = rest.shape[1] // PART_BLOCKS * PART_BLOCKS
                for start in range(0, whole, PART_BLOCKS):
                    yield _part(index, rank[1], holder, number, rest[:, start : start + PART_BLOCKS])
                rests[number] = rest[:, whole:]
        for number, rest in rests.items():
            if rest.shape[1]:
                yield _part(index, rank[1], holder, number, rest)


def _by_namespace(table: dict[int, int]) -> Iterator[tuple[int, _Columns]]:
    """Split a table by namespace; of the base alone, which is usual, the numbers need not be looked at one by one."""
    names = _numbers(table.keys())
    try:
        yield 0, np.array((names, _numbers(table.values())))
    except OverflowError:
        spaces = np.fromiter((key >> SHIFT for key in table.values()), dtype="<u8", count=len(table))
        columns = np.array((names, _numbers([key & _MASK for key in table.values()])))
        for number in np.unique(spaces).tolist():
            yield number, columns[:, spaces == number]


def _numbers(values: Collection[int]) -> npt.NDArray[np.uint64]:
    return np.fromiter(values, dtype="<u8", count=len(values))


def restore_part(index: PrefixIndex, rank: RankId, part: Part, body: bytes) -> int:
    """Put the blocks of a part into the index; returns how many there was no room for.

    Args:
        index: Where.
        rank: Whose, added with the limits of its engine.
        part: What the body holds.
        body: Of the length that ``part.is_whole`` says.

    Raises:
        KeyError: The rank is not in the index.
    """
    numbers: list[int] = np.frombuffer(body, dtype="<u8").tolist()
    names, sequences = numbers[: part.blocks], numbers[part.blocks : 2 * part.blocks]
    namespace = BASE if part.namespace == _BASE_FIELDS else Namespace(*part.namespace)
    report = index.restore(rank, part.tier, namespace, names, sequences)
    if part.copies:
        # Stored once more, each under the same sequence hash.
        by_name = dict(zip(names, sequences, strict=True))
        copies = [name for name in numbers[2 * part.blocks :] if name in by_name]
        index.restore(rank, part.tier, namespace, copies, [by_name[name] for name in copies])
    return report.dropped.get("over_capacity", 0)


def restore_shape(index: PrefixIndex, rank: RankId, *, is_eagle: bool) -> None:
    """Note how the blocks of a rank, about to be restored, were hashed."""
    (index.eagle_ranks.add if is_eagle else index.eagle_ranks.discard)(rank)


def held_blocks(index: PrefixIndex, rank: RankId) -> int:
    """Count the blocks that ``snapshot_parts`` will give."""
    return sum(index.rank_blocks(rank, tier) for tier in Tier)


def _part(index: PrefixIndex, dp_rank: int, holder: Holder, number: int, columns: _Columns) -> tuple[Part, bytes]:
    copies = holder.copies.intersection(columns[0].tolist()) if holder.copies else set()
    namespace = index.namespace_of(number << SHIFT)
    fields: tuple[str | None, int | None, str | None, str | None] = (None, None, None, "")
    if namespace is not None:
        fields = (namespace.lora_name, namespace.lora_id, namespace.salt, namespace.opaque)
    body = columns.tobytes() + _numbers(copies).tobytes()
    return Part(dp_rank, holder.tier, fields, columns.shape[1], len(copies)), body

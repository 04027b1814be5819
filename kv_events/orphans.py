"""Stores that wait for their parent, since events of a source may come without the ones before them. Pure.

Nothing here is in the index. What waits is taken out when its parent is stored, is changed by removals like anything
else, and is given up after a while.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from kv_events.types import BlockStored, Tier

_K = TypeVar("_K")

MAX_EVENTS = 4096
MAX_BYTES = 32 << 20
MAX_AGE_S = 30.0
# What an event costs besides its tokens: objects, and the integers of its names.
EVENT_BYTES = 400
NAME_BYTES = 150


@dataclass(slots=True)
class _Waiting:
    event: BlockStored
    size_bytes: int
    until_s: float
    gone: set[int] = field(default_factory=set)


class OrphanLot:
    """The waiting stores of one source, within bounds; the names in them are unique only within their tier."""

    def __init__(self, max_events: int = MAX_EVENTS, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S) -> None:
        """Start empty; a store that would pass a bound is refused."""
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        # In order of arrival, which is the order of expiry too.
        self._waiting: dict[int, _Waiting] = {}
        self._children: dict[int, list[int]] = {}
        self._holders: dict[tuple[Tier, int], list[int]] = {}
        self._next = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        """Count the waiting stores."""
        return len(self._waiting)

    def park(self, event: BlockStored, now_s: float, gone: Collection[int] = ()) -> bool:
        """Keep a store whose parent is unknown; false if there is no room. Blocks in ``gone`` were removed since."""
        size = EVENT_BYTES + len(event.token_bytes) + NAME_BYTES * len(event.block_hashes)
        if event.parent_hash is None or len(self) >= self._max_events or self.size_bytes + size > self._max_bytes:
            return False
        number, self._next = self._next, self._next + 1
        self._waiting[number] = _Waiting(event, size, now_s + self._max_age_s, set(gone))
        self._children.setdefault(event.parent_hash, []).append(number)
        for name in event.block_hashes:
            self._holders.setdefault((event.tier, name), []).append(number)
        self.size_bytes += size
        return True

    def claim(self, names: Iterable[int]) -> list[tuple[BlockStored, set[int]]]:
        """Take out what waits for any of these names, in order of arrival, each with the blocks removed meanwhile."""
        if not self._waiting:
            return []
        numbers = sorted({number for name in names for number in self._children.get(name, ())})
        return [(waiting.event, waiting.gone) for waiting in map(self._take, numbers)]

    def remove(self, names: Iterable[int], tier: Tier) -> int:
        """Note that blocks were removed; returns how many of the names are waiting. Copies are not counted."""
        found = 0
        for name in names if self._waiting else ():
            numbers = self._holders.get((tier, name), ())
            for number in numbers:
                self._waiting[number].gone.add(name)
            found += bool(numbers)
        return found

    def clear(self, tier: Tier | None = None) -> None:
        """Drop everything, or what lies in one tier."""
        for number in [n for n, waiting in self._waiting.items() if tier in (None, waiting.event.tier)]:
            self._take(number)

    def expire(self, now_s: float) -> int:
        """Drop what has waited for too long; returns how many stores."""
        old = []
        for number, waiting in self._waiting.items():
            if waiting.until_s > now_s:
                break
            old.append(number)
        for number in old:
            self._take(number)
        return len(old)

    def next_expiry_s(self) -> float | None:
        """Give the time of the next expiry; ``None`` if nothing waits."""
        return next((waiting.until_s for waiting in self._waiting.values()), None)

    def _take(self, number: int) -> _Waiting:
        waiting = self._waiting.pop(number)
        self.size_bytes -= waiting.size_bytes
        assert waiting.event.parent_hash is not None
        _discard(self._children, waiting.event.parent_hash, number)
        for name in waiting.event.block_hashes:
            _discard(self._holders, (waiting.event.tier, name), number)
        return waiting


def _discard(table: dict[_K, list[int]], key: _K, number: int) -> None:
    numbers = table.get(key, [])
    if number in numbers:
        numbers.remove(number)
    if not numbers:
        table.pop(key, None)

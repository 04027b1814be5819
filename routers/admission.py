"""The queue of requests that no rank can take now: bounded, fair between tenants, within one first come first served.

Requests that may go to the same ranks form a *pool*: what one of them can have, the oldest of them gets. Pure: the time
is passed in, in seconds of any one clock.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from routers.errors import QueueFull

# Priorities beyond it count as it, so that there are few tiers.
MAX_PRIORITY = 100
# Requests of higher tiers that go before one that waits, until one of its tier has its turn.
MAX_JUMPS = 64

T = TypeVar("T")


class Ticket(Generic[T]):
    """One waiting request.

    Attributes:
        item: What the owner of the queue knows it by.
    """

    __slots__ = ("_key", "_number", "_offered_at", "_paused_before_s", "_pool", "_size_bytes", "_tier", "item")

    def __init__(
        self, item: T, pool: "_Pool[T]", key: Hashable, tier: int, size_bytes: int, number: int, now: float
    ) -> None:
        self.item = item
        self._pool = pool
        self._key = key
        self._tier = tier
        self._size_bytes = size_bytes
        self._number = number
        self._offered_at = now
        self._paused_before_s = pool.paused_until(now)

    def paused_s(self, now: float) -> float:
        """How much of its wait was for paused workers."""
        return self._pool.paused_until(now) - self._paused_before_s

    def crowded_s(self, now: float) -> float:
        """How much of its wait was for room."""
        return now - self._offered_at - self.paused_s(now)


_Tickets = OrderedDict[Ticket[T], None]


class _Pool(Generic[T]):
    """The waiting requests that may go to the same ranks, the oldest first, and how long those were paused."""

    __slots__ = ("_changed_at", "_paused_s", "is_paused", "name", "tickets")

    def __init__(self, name: Hashable, *, is_paused: bool, now: float) -> None:
        self.name = name
        self.tickets: _Tickets[T] = OrderedDict()
        self.is_paused = is_paused
        self._changed_at = now
        self._paused_s = 0.0

    def paused_until(self, now: float) -> float:
        return self._paused_s + (now - self._changed_at if self.is_paused else 0.0)

    def set_paused(self, is_paused: bool, now: float) -> None:
        self._paused_s = self.paused_until(now)
        self._changed_at = now
        self.is_paused = is_paused


class _Tier(Generic[T]):
    """The waiting requests of one priority: a ring of tenants, and of each one its tickets by pool.

    Attributes:
        jumps: Requests of higher tiers that went first since one of this tier had its turn.
    """

    __slots__ = ("_ring", "jumps")

    def __init__(self) -> None:
        self._ring: OrderedDict[Hashable, dict[Hashable, _Tickets[T]]] = OrderedDict()
        self.jumps = 0

    def add(self, ticket: Ticket[T]) -> None:
        by_pool = self._ring.setdefault(ticket._key, {})
        by_pool.setdefault(ticket._pool.name, OrderedDict())[ticket] = None

    def remove(self, ticket: Ticket[T]) -> None:
        by_pool = self._ring[ticket._key]
        tickets = by_pool[ticket._pool.name]
        del tickets[ticket]
        if not tickets:
            del by_pool[ticket._pool.name]
        if not by_pool:
            del self._ring[ticket._key]

    def next(self, servable: set[Hashable]) -> Ticket[T] | None:
        """The oldest ticket of the tenant whose turn it is; that tenant is the last one then."""
        for key, by_pool in self._ring.items():
            if not servable.isdisjoint(by_pool):
                self._ring.move_to_end(key)
                oldest = [next(iter(tickets)) for pool, tickets in by_pool.items() if pool in servable]
                return min(oldest, key=lambda ticket: ticket._number)
        return None

    @property
    def is_empty(self) -> bool:
        return not self._ring


class AdmissionQueue(Generic[T]):
    """Who waits, and who is next.

    Of those that can be served the highest priority goes first, though not more than ``MAX_JUMPS`` times before the
    same waiting tier. Within a priority tenants take turns, so that none waits for more than one request of each
    other; within a tenant the oldest goes first.

    Args:
        max_requests: Requests that may wait, ``>= 0``.
        max_bytes: Size of what may wait. The first one to wait may be larger.
        max_crowded_s: Longest wait for room.
        max_paused_s: Longest wait for paused workers. The two are counted apart: a request that has waited for a pause
            to end has then as long a wait for room as others.
    """

    def __init__(self, *, max_requests: int, max_bytes: int, max_crowded_s: float, max_paused_s: float) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._max_crowded_s = max_crowded_s
        self._max_paused_s = max_paused_s
        self._pools: dict[Hashable, _Pool[T]] = {}
        self._tiers: dict[int, _Tier[T]] = {}
        self._waiting: set[Ticket[T]] = set()
        self._size_bytes = 0
        self._number = 0

    def __len__(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def __contains__(self, ticket: object) -> bool:
        """Whether a ticket waits."""
        return ticket in self._waiting

    @property
    def size_bytes(self) -> int:
        """Size of what waits."""
        return self._size_bytes

    @property
    def heads(self) -> list[Ticket[T]]:
        """The oldest ticket of each pool."""
        return [next(iter(pool.tickets)) for pool in self._pools.values()]

    def has_pool(self, pool: Hashable) -> bool:
        """Whether anything of that pool waits."""
        return pool in self._pools

    def tickets_like(self, ticket: Ticket[T]) -> list[Ticket[T]]:
        """All tickets of the pool of one that waits, the oldest first."""
        return list(ticket._pool.tickets)

    def offer(
        self, item: T, *, pool: Hashable, key: Hashable, priority: int, size_bytes: int, is_paused: bool, now: float
    ) -> Ticket[T]:
        """Let a request wait.

        Args:
            item: The request.
            pool: Same for all requests that may go to the same ranks.
            key: The tenant.
            priority: Higher goes first.
            size_bytes: What the request holds while it waits.
            is_paused: Nothing but paused workers could take it.
            now: Time.

        Raises:
            QueueFull: As many wait as may.
        """
        if len(self._waiting) >= self._max_requests:
            raise QueueFull(f"no worker has room, and {len(self._waiting)} requests wait for one")
        if self._waiting and self._size_bytes + size_bytes > self._max_bytes:
            raise QueueFull(f"no worker has room, and requests of {self._size_bytes} bytes wait for one")
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = _Pool(pool, is_paused=is_paused, now=now)
        tier = max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))
        self._number += 1
        ticket = Ticket(item, known, key, tier, size_bytes, self._number, now)
        known.tickets[ticket] = None
        self._tiers.setdefault(tier, _Tier()).add(ticket)
        self._waiting.add(ticket)
        self._size_bytes += size_bytes
        return ticket

    def remove(self, ticket: Ticket[T]) -> None:
        """A request waits no more; in constant time.

        Raises:
            KeyError: It did not wait.
        """
        self._waiting.remove(ticket)
        self._size_bytes -= ticket._size_bytes
        del ticket._pool.tickets[ticket]
        if not ticket._pool.tickets:
            del self._pools[ticket._pool.name]
        tier = self._tiers[ticket._tier]
        tier.remove(ticket)
        if tier.is_empty:
            del self._tiers[ticket._tier]

    def next(self, can_serve: Callable[[Ticket[T]], bool]) -> Ticket[T] | None:
        """Take the next request out of the queue, ``None`` if none can be served.

        Args:
            can_serve: Whether there is room for the pool of a ticket; asked once for each pool.
        """
        servable = {ticket._pool.name for ticket in self.heads if can_serve(ticket)}
        if not servable:
            return None
        levels = sorted(self._tiers, key=lambda level: (self._tiers[level].jumps < MAX_JUMPS, -level))
        level, ticket = next((level, found) for level in levels if (found := self._tiers[level].next(servable)))
        self._tiers[level].jumps = 0
        for other, tier in self._tiers.items():
            tier.jumps += other < level
        self.remove(ticket)
        return ticket

    def set_paused(self, ticket: Ticket[T], is_paused: bool, now: float) -> None:
        """What the pool of a waiting ticket waits for: paused workers, or room."""
        ticket._pool.set_paused(is_paused, now)

    def is_paused(self, ticket: Ticket[T]) -> bool:
        """Whether the pool of a ticket waits for paused workers, as far as was told."""
        return ticket._pool.is_paused

    def expire(self, now: float) -> list[Ticket[T]]:
        """Take out what has waited for as long as it may."""
        expired: list[Ticket[T]] = []
        for head in self.heads:
            for ticket in self.tickets_like(head):
                if self._left_s(ticket, now) > 0:
                    break  # who came later has waited less
                self.remove(ticket)
                expired.append(ticket)
        return expired

    def next_expiry_s(self, now: float) -> float | None:
        """Time until something expires if all stays as it is, ``None`` if nothing waits."""
        return min((self._left_s(ticket, now) for ticket in self.heads), default=None)

    def _left_s(self, ticket: Ticket[T], now: float) -> float:
        if ticket._pool.is_paused:
            return self._max_paused_s - ticket.paused_s(now)
        return self._max_crowded_s - ticket.crowded_s(now)

"""The requests that are being served now, by the ids that clients know."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from backends.leg import Leg
from backends.leg_events import Cause


class LiveRequest(Protocol):
    """What can be done to a request from outside."""

    def stop(self, cause: Cause) -> None:
        """Stop it for ``cause``; returns at once."""

    def is_on(self, worker_id: str) -> bool:
        """Whether that worker serves it now."""

    def abort(self, item_id: str | None) -> str | None:
        """Have the engine stop it, or one item of it, and let the client have what there is.

        Returns:
            The worker's id, empty if it waits for one, ``None`` if there is nothing to stop.
        """


class LiveRequests:
    """Registry of live requests; several may share one public id."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[tuple[LiveRequest, str | None]]] = {}
        self._all: set[LiveRequest] = set()
        self._empty: asyncio.Event | None = None

    def __len__(self) -> int:
        """Number of live requests."""
        return len(self._all)

    def __iter__(self) -> Iterator[LiveRequest]:
        """A snapshot of all live requests."""
        return iter(tuple(self._all))

    @property
    def ids(self) -> tuple[str, ...]:
        """All public ids, items of batches included."""
        return tuple(self._by_id)

    async def wait_empty(self) -> None:
        """Wait until no request is live; meant for the time when nothing is admitted any more."""
        while self._all:
            if self._empty is None:
                self._empty = asyncio.Event()
            await self._empty.wait()

    def add(self, request: LiveRequest) -> None:
        """A request has arrived; its ids are not known yet."""
        self._all.add(request)

    def name(self, request: LiveRequest, public_id: str, item_ids: tuple[str, ...]) -> None:
        """The ids of ``request`` are known."""
        self._by_id.setdefault(public_id, []).append((request, None))
        if item_ids != (public_id,):
            self.name_items(request, tuple(item_id for item_id in item_ids if item_id != public_id))

    def name_items(self, request: LiveRequest, item_ids: tuple[str, ...]) -> None:
        """The ids of parts of ``request`` are known."""
        for item_id in item_ids:
            self._by_id.setdefault(item_id, []).append((request, item_id))

    def find(self, public_id: str) -> tuple[tuple[LiveRequest, str | None], ...]:
        """Requests known under an id, with the item that the id stands for (``None``: all of the request)."""
        return tuple(self._by_id.get(public_id, ()))

    def remove(self, request: LiveRequest, ids: Iterable[str]) -> None:
        """``request`` has ended; ``ids`` are all of its ids."""
        self._all.discard(request)
        if self._empty is not None and not self._all:
            self._empty.set()
            self._empty = None
        for public_id in ids:
            entries = self._by_id.pop(public_id, None)
            if entries is None or (len(entries) == 1 and entries[0][0] is request):
                continue
            if left := [entry for entry in entries if entry[0] is not request]:
                self._by_id[public_id] = left


class LiveLegs:
    """The upstream requests that have not ended, those without a client included."""

    def __init__(self) -> None:
        self._legs: set[Leg] = set()
        self._waiters: dict[str, list[asyncio.Event]] = {}
        self._reserved: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of live legs."""
        return len(self._legs)

    def add(self, leg: Leg) -> None:
        """A leg has been sent."""
        self._legs.add(leg)

    def ended(self, leg: Leg) -> None:
        """A leg has ended."""
        self._legs.discard(leg)
        self._settle(leg.worker.id)

    def reserve(self, worker_id: str) -> None:
        """A leg is to be sent to that worker, which is not done before that is over; ``unreserve`` follows."""
        self._reserved[worker_id] += 1

    def unreserve(self, worker_id: str) -> None:
        """The leg was sent, or will not be."""
        self._reserved[worker_id] -= 1
        if not self._reserved[worker_id]:
            del self._reserved[worker_id]
        self._settle(worker_id)

    def _settle(self, worker_id: str) -> None:
        if self._waiters and self._is_idle(worker_id):
            for waiter in self._waiters.pop(worker_id, ()):
                waiter.set()

    def _is_idle(self, worker_id: str) -> bool:
        return worker_id not in self._reserved and not any(leg.worker.id == worker_id for leg in self._legs)

    async def wait_none(self, worker_id: str) -> None:
        """Wait until no leg is live on that worker."""
        if self._is_idle(worker_id):
            return
        waiter = asyncio.Event()
        self._waiters.setdefault(worker_id, []).append(waiter)
        await waiter.wait()

"""Where requests wait that no worker can take now: all that could are full, or paused.

Nothing polls: a booking that is given back, a worker whose state changes, and one timer for the wait that ends first
are what wakes the room, and with nobody in it each of them costs one comparison. A request's rank is chosen, booked
and written to in its turn, in one step, so that no other request can take the place that it was called for.
"""

import asyncio
import enum
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from backends.errors import CallClosed
from backends.quick_enum import quick
from backends.types import EngineKind
from gateway.attempts import Attempts
from gateway.auth import bearer_of
from gateway.downstream import ClientRequest
from gateway.eligibility import check_eligible, kind_of, may_come_back
from gateway.envelope import Envelope
from gateway.errors import SHUTTING_DOWN, WORKER_REMOVED, GatewayError
from gateway.metrics import Metrics
from gateway.routes import Route
from routers.admission import AdmissionQueue, Ticket
from routers.errors import NoReadyWorker, NoRoom, NoSuchRank, RoutingError
from routers.fleet import Fleet

# Each turn writes a request, some 0.1 ms; after so many of them others get to run.
TURNS_AT_ONCE = 32
_INTEGER = re.compile(rb"-?\d{1,400}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request wants a rank for.

    Attributes:
        request: What came besides the body.
        route: The route.
        envelope: The request.
        model: Pool to choose from.
        attempts: The attempts so far; takes the time that it waits.
        needs_one_worker: No pair of workers can serve it.
    """

    request: ClientRequest
    route: Route
    envelope: Envelope
    model: str
    attempts: Attempts
    needs_one_worker: bool = False

    @property
    def pool(self) -> Hashable:
        """The same for all requests that may go to the same ranks."""
        envelope = self.envelope
        kind = kind_of(self.route, envelope)
        pins = envelope.worker_id, envelope.dp_rank, envelope.min_weight_version
        return self.model, kind, self.needs_one_worker, pins, frozenset(self.attempts.failed)

    @property
    def tenant(self) -> Hashable:
        """Whose request it is: by API key, and without one by session."""
        by_name = self.request.by_name
        key = bearer_of(by_name) or by_name.get(b"x-api-key")
        return self.envelope.stickiness_key if key is None else (hash(key),)

    def priority(self, *, lower_first: bool) -> int:
        """The request's ``priority``, so that higher goes first; 0 if it has none, or none that can be read."""
        match = _INTEGER.fullmatch(self.envelope.body.text("priority"))
        value = int(match[0]) if match else 0
        return -value if lower_first else value


class _Waiter:
    """A request that waits: how it is placed, and what its task waits for."""

    __slots__ = ("has_left", "place", "turn", "wanted")

    def __init__(self, wanted: Wanted, place: Callable[[], None]) -> None:
        self.wanted = wanted
        self.place = place
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_left = False

    def call(self) -> None:
        """It is its turn."""
        try:
            self.place()
        except Exception as exc:  # noqa: BLE001 -- whatever it is, it is this request's, and its task tells it
            self.turn.set_exception(exc)
        else:
            self.turn.set_result(None)

    def refuse(self, error: Exception) -> None:
        """It waits in vain."""
        if not self.turn.done():
            self.turn.set_exception(error)


@quick
class _Standing(enum.Enum):
    ROOM = "a rank has room"
    CROWDED = "all ranks are full"
    PAUSED = "all workers that could serve it are paused"


class WaitingRoom:
    """Places requests, at once or in their turn.

    Args:
        queue: Holds those that wait.
        fleet: The workers.
        clock: Monotonic seconds.
        metrics: Told how long requests waited.
        holds_paused: Requests wait for paused workers; else they are refused.
    """

    def __init__(
        self,
        queue: AdmissionQueue[_Waiter],
        fleet: Fleet,
        clock: Callable[[], float],
        metrics: Metrics,
        *,
        holds_paused: bool,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._clock = clock
        self._metrics = metrics
        self._holds_paused = holds_paused
        self._tickets: dict[object, Ticket[_Waiter]] = {}
        self._is_due = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    def __contains__(self, request: object) -> bool:
        """Whether a request waits."""
        return request in self._tickets

    def place_now(self, place: Callable[[], None]) -> bool:
        """Place a request if nobody waits and a rank has room; ``False`` if it must ``wait``.

        Args:
            place: Chooses, books and sends.

        Raises:
            GatewayError: As ``place`` does.
            RoutingError: As ``place`` does, for reasons that no wait can end.
        """
        if self._tickets:
            return False
        try:
            place()
        except (NoRoom, NoReadyWorker):
            return False
        return True

    async def wait(self, request: object, wanted: Wanted, place: Callable[[], None]) -> None:
        """Wait for the request's turn, and place it; at once where nobody is before it.

        Args:
            request: Under which ``leave`` knows it.
            wanted: What it wants.
            place: Chooses, books and sends; called at most once.

        Raises:
            NoRoom: Too many wait, or it waited for too long.
            NoReadyWorker: No worker can serve it, or none did before the pause had lasted for too long.
            GatewayError: The gateway is being shut down, or its worker was removed; or as ``place`` does.
            CallEnded: It has left.
        """
        standing = self._standing(wanted)
        if standing is _Standing.ROOM and not self._is_due and not self._queue.has_pool(wanted.pool):
            place()
            return
        if self._is_closed:
            raise GatewayError(SHUTTING_DOWN)
        started = self._clock()
        waiter = _Waiter(wanted, place)
        ticket = self._offer(waiter, is_paused=standing is _Standing.PAUSED)
        self._tickets[request] = ticket
        self._set_timer()
        if standing is _Standing.ROOM:
            self.wake()
        try:
            await waiter.turn
        finally:
            del self._tickets[request]
            self._drop(ticket)
            waited_s = self._clock() - started
            wanted.attempts.waited(waited_s)
            self._metrics.queue_seconds(waited_s)
        if waiter.has_left:  # after it had been called, and before it could go
            raise CallClosed("the request left")

    def leave(self, request: object) -> None:
        """The request ends its wait, if it waits."""
        ticket = self._tickets.get(request)
        if ticket is not None:
            ticket.item.has_left = True
            self._drop(ticket)
            ticket.item.refuse(CallClosed("the request left"))

    def is_hopeful(self, wanted: Wanted) -> bool:
        """Whether a worker could take the request, now or after a wait."""
        try:
            self._standing(wanted)
        except (GatewayError, RoutingError):
            return False
        return True

    def wake(self) -> None:
        """There may be room, or a worker has changed: see who can go. Returns at once."""
        if self._tickets and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def close(self) -> None:
        """Nobody waits any more: those who do are told that the gateway is being shut down."""
        self._is_closed = True
        for head in self._queue.heads:
            self._refuse_pool(head, GatewayError(SHUTTING_DOWN))

    def _offer(self, waiter: _Waiter, *, is_paused: bool) -> Ticket[_Waiter]:
        wanted = waiter.wanted
        engines = set(self._fleet.engines_serving(wanted.model))
        return self._queue.offer(
            waiter,
            pool=wanted.pool,
            key=wanted.tenant,
            priority=wanted.priority(lower_first=engines == {EngineKind.VLLM} and wanted.envelope.native is None),
            size_bytes=len(wanted.envelope.body.raw),
            is_paused=is_paused,
            now=self._clock(),
        )

    def _drop(self, ticket: Ticket[_Waiter]) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
        if not self._queue and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_pool(self, head: Ticket[_Waiter], error: Exception) -> None:
        for ticket in self._queue.tickets_like(head):
            self._drop(ticket)
            ticket.item.refuse(error)

    def _standing(self, wanted: Wanted) -> _Standing:
        """How things stand for a request.

        Raises:
            RoutingError: No worker can serve it, nor is one likely to soon.
            GatewayError: None ever will.
        """
        asked = wanted.route, wanted.envelope, wanted.model, wanted.attempts.failed
        try:
            check_eligible(self._fleet, self._clock, *asked, needs_one_worker=wanted.needs_one_worker)
        except NoRoom:
            return _Standing.CROWDED
        except NoReadyWorker:
            if self._holds_paused and may_come_back(self._fleet, *asked, needs_one_worker=wanted.needs_one_worker):
                return _Standing.PAUSED
            raise
        return _Standing.ROOM

    def _has_room(self, ticket: Ticket[_Waiter]) -> bool:
        try:
            return self._standing(ticket.item.wanted) is _Standing.ROOM
        except (GatewayError, RoutingError):
            return False  # since the last look, for which a trial that was sent is enough

    def _take_turns(self) -> None:
        self._is_due = False
        self._look_around()
        for _ in range(TURNS_AT_ONCE):
            ticket = self._queue.next(self._has_room)
            if ticket is None:
                break
            if not ticket.item.turn.done():  # else its task was cancelled, and has not run yet
                ticket.item.call()
        else:
            self.wake()
        self._set_timer()

    def _look_around(self) -> None:
        """Refuse what has nothing to wait for any more, and note what the others wait for."""
        for head in self._queue.heads:
            try:
                standing = self._standing(head.item.wanted)
            except NoSuchRank:
                self._refuse_pool(head, GatewayError(WORKER_REMOVED))
            except (GatewayError, RoutingError) as exc:
                self._refuse_pool(head, exc)
            else:
                self._queue.set_paused(head, standing is _Standing.PAUSED, self._clock())

    def _set_timer(self) -> None:
        """Have the timer end the wait that ends first."""
        now = self._clock()
        left_s = self._queue.next_expiry_s(now)
        if left_s is None or (self._timer is not None and self._timer_at <= now + left_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = now + left_s
        self._timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._clock()
        for ticket in self._queue.expire(now):
            if self._queue.is_paused(ticket):
                error: Exception = NoReadyWorker(f"the workers were paused for {ticket.paused_s(now):.0f} s")
            else:
                error = NoRoom(f"no worker had room within {ticket.crowded_s(now):.0f} s")
            ticket.item.refuse(error)
        self._set_timer()

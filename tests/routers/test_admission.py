"""The queue: who waits, who is next, who has waited for too long; and that nobody is lost or served twice."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from routers.admission import MAX_JUMPS, MAX_PRIORITY, AdmissionQueue, Ticket
from routers.errors import QueueFull

AGE_S, HOLD_S = 30.0, 300.0
Queue = AdmissionQueue[Any]


def queue_of(*, max_requests: int = 1000, max_bytes: int = 1000) -> Queue:
    """An empty queue."""
    return AdmissionQueue(max_requests=max_requests, max_bytes=max_bytes, max_crowded_s=AGE_S, max_paused_s=HOLD_S)


def offer(
    queue: Queue,
    item: object,
    key: Hashable = "a",
    *,
    pool: Hashable = "p",
    priority: int = 0,
    size_bytes: int = 0,
    is_paused: bool = False,
    now: float = 0.0,
) -> Ticket[Any]:
    """Let something wait."""
    return queue.offer(item, pool=pool, key=key, priority=priority, size_bytes=size_bytes, is_paused=is_paused, now=now)


def served(queue: Queue) -> list[Any]:
    """Serve all that waits."""
    items = []
    while (ticket := queue.next(lambda ticket: True)) is not None:
        items.append(ticket.item)
    return items


def items(tickets: Sequence[Ticket[Any]]) -> list[Any]:
    """What was offered."""
    return [ticket.item for ticket in tickets]


# --- who is next


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        pytest.param(["a1", "a2", "a3"], "a1 a2 a3", id="one tenant: first come, first served"),
        pytest.param(["a1", "a2", "a3", "b1", "b2", "c1"], "a1 b1 c1 a2 b2 a3", id="tenants take turns"),
        pytest.param(["a1", "b1+5", "a2+5", "a3-5"], "b1+5 a2+5 a1 a3-5", id="priorities first"),
        pytest.param(["a1+101", "b1+100", "a2+9999999999"], "a1+101 b1+100 a2+9999999999", id="the highest tier"),
        pytest.param(["a1-101", "b1-100", "a2-9999999999"], "a1-101 b1-100 a2-9999999999", id="the lowest tier"),
    ],
)
def test_the_order(offers: list[str], expected: str) -> None:
    queue = queue_of()
    for text in offers:
        offer(queue, text, text[0], priority=int(text[2:] or 0))
    assert served(queue) == expected.split()
    assert (len(queue), queue.size_bytes, queue.heads) == (0, 0, [])


def test_priorities_have_a_bound() -> None:
    queue = queue_of()
    for priority in range(-3 * MAX_PRIORITY, 3 * MAX_PRIORITY):
        offer(queue, priority, priority=priority)
    assert len(queue._tiers) == 2 * MAX_PRIORITY + 1


def test_a_tenant_that_comes_back_is_behind_those_who_wait() -> None:
    queue = queue_of()
    for item in ("a1", "b1", "b2"):
        offer(queue, item, item[0])
    assert [queue.next(lambda t: True).item for _ in range(2)] == ["a1", "b1"]  # type: ignore[union-attr]
    offer(queue, "a2", "a")
    assert served(queue) == ["b2", "a2"]


def test_the_jumps_over_a_waiting_tier_have_a_bound() -> None:
    queue = queue_of()
    offer(queue, "low", priority=-1)
    offer(queue, "lowest", priority=-2)
    for number in range(3 * MAX_JUMPS):
        offer(queue, number, priority=1)
    order = served(queue)
    assert order.index("low") == MAX_JUMPS
    assert order.index("lowest") == MAX_JUMPS + 1


def test_only_what_can_be_served_is_taken() -> None:
    queue = queue_of()
    for item, pool in (("a1", "x"), ("a2", "y"), ("b1", "x"), ("b2", "y"), ("a3", "y")):
        offer(queue, item, item[0], pool=pool)
    asked: list[Any] = []

    def only_y(ticket: Ticket[Any]) -> bool:
        asked.append(ticket.item)
        return bool(ticket.item in ("a2", "a3", "b2"))

    assert queue.next(only_y).item == "a2"  # type: ignore[union-attr]
    assert asked == ["a1", "a2"]  # one of each pool
    assert queue.next(only_y).item == "b2"  # type: ignore[union-attr]
    assert queue.next(only_y).item == "a3"  # type: ignore[union-attr]
    assert queue.next(only_y) is None
    assert (queue.has_pool("x"), queue.has_pool("y")) == (True, False)
    assert served(queue) == ["b1", "a1"]  # it was a's turn last
    assert queue.next(lambda ticket: True) is None


def test_a_blocked_tier_does_not_hold_up_a_lower_one() -> None:
    queue = queue_of()
    offer(queue, "blocked", priority=5, pool="x")
    offer(queue, "free", pool="y")
    ticket = queue.next(lambda ticket: ticket.item == "free")
    assert ticket is not None
    assert ticket.item == "free"
    assert served(queue) == ["blocked"]


# --- bounds


def test_only_so_many_wait() -> None:
    queue = queue_of(max_requests=2)
    first = offer(queue, 1)
    offer(queue, 2)
    with pytest.raises(QueueFull, match="2 requests"):
        offer(queue, 3)
    queue.remove(first)
    offer(queue, 4)
    assert served(queue) == [2, 4]


def test_none_wait_where_none_may() -> None:
    with pytest.raises(QueueFull):
        offer(queue_of(max_requests=0), 1)


def test_only_so_many_bytes_wait() -> None:
    queue = queue_of(max_bytes=100)
    huge = offer(queue, "huge", size_bytes=101)  # or it could never be served
    with pytest.raises(QueueFull, match="101 bytes"):
        offer(queue, "small", size_bytes=1)
    queue.remove(huge)
    for item in ("one", "two"):
        offer(queue, item, size_bytes=50)
    with pytest.raises(QueueFull):
        offer(queue, "small", size_bytes=1)
    assert queue.size_bytes == 100


def test_what_is_gone_cannot_be_removed() -> None:
    queue = queue_of()
    ticket = offer(queue, 1)
    assert ticket in queue
    queue.remove(ticket)
    assert ticket not in queue
    with pytest.raises(KeyError):
        queue.remove(ticket)


# --- time


def test_waits_for_room_end() -> None:
    queue = queue_of()
    assert queue.next_expiry_s(0) is None
    assert queue.expire(0) == []
    for now in (0.0, 1.0, 2.0):
        offer(queue, now, pool=now % 2, now=now)
    assert queue.next_expiry_s(10) == AGE_S - 10
    assert items(queue.expire(AGE_S - 0.5)) == []
    assert items(queue.expire(AGE_S + 1)) == [0.0, 1.0]
    assert queue.next_expiry_s(AGE_S + 1) == 1
    assert items(queue.expire(1e9)) == [2.0]
    assert len(queue) == 0


def test_waits_for_a_pause_and_for_room_are_counted_apart() -> None:
    queue = queue_of()
    early = offer(queue, "early", now=0)
    queue.set_paused(early, True, 20)
    offer(queue, "late", now=120)
    assert queue.is_paused(early)
    assert queue.next_expiry_s(120) == HOLD_S - 100
    assert (early.crowded_s(120), early.paused_s(120)) == (20, 100)
    queue.set_paused(early, True, 150)  # told once more
    queue.set_paused(early, False, 220)
    assert queue.next_expiry_s(220) == AGE_S - 20
    assert items(queue.expire(230)) == ["early"]
    queue.set_paused(queue.heads[0], True, 235)  # the same wait goes on, 100 s of it were for a pause before
    assert items(queue.expire(235 + HOLD_S - 101)) == []
    assert items(queue.expire(235 + HOLD_S - 100)) == ["late"]


def test_pools_have_their_own_pauses() -> None:
    queue = queue_of()
    offer(queue, "paused", pool="x", is_paused=True)
    offer(queue, "crowded", pool="y")
    assert items(queue.expire(AGE_S)) == ["crowded"]
    assert items(queue.expire(HOLD_S)) == ["paused"]


def test_the_pool_of_a_ticket() -> None:
    queue = queue_of()
    tickets = [offer(queue, item, key=item, pool=pool) for item, pool in ((1, "x"), (2, "y"), (3, "x"))]
    assert items(queue.tickets_like(tickets[2])) == [1, 3]
    assert items(queue.heads) == [1, 2]


# --- properties


@given(st.lists(st.sampled_from("aaaaabbc"), min_size=1, max_size=60), st.lists(st.sampled_from("abcd"), max_size=40))
def test_no_tenant_waits_for_two_requests_of_another(before: list[str], during: list[str]) -> None:
    queue = queue_of()
    for key in before:
        offer(queue, key, key)
    since: dict[str, Counter[str]] = {key: Counter() for key in set(before)}
    waiting = Counter(before)
    while (ticket := queue.next(lambda ticket: True)) is not None:
        key = ticket.item
        waiting[key] -= 1
        for other, others in since.items():
            others[key] += 1
            assert other == key or others[key] <= 1
        del since[key]
        if during:
            new = during.pop()
            offer(queue, new, new)
            waiting[new] += 1
        for each in waiting:
            if waiting[each] and each not in since:
                since[each] = Counter()
    assert not +waiting


class Waiting(RuleBasedStateMachine):
    """Anything in any order: nobody is lost, served twice, or kept for longer than may be."""

    tickets = Bundle("tickets")

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue_of(max_requests=12, max_bytes=100)
        self.now = 0.0
        self.number = 0
        self.inside: dict[Ticket[Any], tuple[str, int]] = {}
        self.out: set[Any] = set()

    @rule(
        target=tickets,
        key=st.sampled_from("abc"),
        pool=st.sampled_from("xyz"),
        priority=st.integers(-2, 2),
        size=st.integers(0, 30),
        is_paused=st.booleans(),
    )
    def offer(self, key: str, pool: str, priority: int, size: int, is_paused: bool) -> Ticket[Any] | None:
        used = sum(size for _, size in self.inside.values())
        is_full = len(self.inside) == 12 or (bool(self.inside) and used + size > 100)
        self.number += 1
        try:
            ticket = offer(self.queue, self.number, key, pool=pool, priority=priority, size_bytes=size,
                           is_paused=is_paused, now=self.now)  # fmt: skip
        except QueueFull:
            assert is_full
            return None
        assert not is_full
        self.inside[ticket] = (pool, size)
        return ticket

    def leaves(self, ticket: Ticket[Any]) -> None:
        del self.inside[ticket]
        assert ticket.item not in self.out
        self.out.add(ticket.item)

    @rule(ticket=consumes(tickets))
    def cancel(self, ticket: Ticket[Any] | None) -> None:
        if ticket in self.inside:
            self.queue.remove(ticket)
            self.leaves(ticket)

    @rule(open_pools=st.sets(st.sampled_from("xyz")))
    def serve(self, open_pools: set[str]) -> None:
        ticket = self.queue.next(lambda ticket: self.inside[ticket][0] in open_pools)
        if ticket is None:
            assert not [pool for pool, _ in self.inside.values() if pool in open_pools]
        else:
            assert self.inside[ticket][0] in open_pools
            self.leaves(ticket)

    @rule(seconds=st.sampled_from([0.5, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        ticket = data.draw(st.sampled_from(list(self.inside)))
        self.queue.set_paused(ticket, is_paused, self.now)
        assert self.queue.is_paused(ticket) is is_paused

    @rule()
    def expire(self) -> None:
        for ticket in self.queue.expire(self.now):
            self.leaves(ticket)
        for ticket in self.inside:
            limits = (ticket.crowded_s(self.now) < AGE_S, ticket.paused_s(self.now) < HOLD_S)
            assert limits[self.queue.is_paused(ticket)]
        left_s = self.queue.next_expiry_s(self.now)
        assert (left_s is None) is (not self.inside)
        assert left_s is None or left_s > 0

    @invariant()
    def adds_up(self) -> None:
        assert len(self.queue) == len(self.inside)
        assert self.queue.size_bytes == sum(size for _, size in self.inside.values())
        assert all(ticket in self.queue for ticket in self.inside)
        assert {self.inside[head][0] for head in self.queue.heads} == {pool for pool, _ in self.inside.values()}


TestWaiting = Waiting.TestCase

"""The registry of live requests."""

import asyncio

from backends.leg_events import Cause
from gateway.live import LiveRequests
from tests.fakes.running import PATIENCE_S


class Live:
    """A request that can do nothing."""

    def stop(self, cause: Cause) -> None:
        raise NotImplementedError

    def is_on(self, worker_id: str) -> bool:
        """Not asked here."""
        raise NotImplementedError

    def abort(self, item_id: str | None) -> str | None:
        raise NotImplementedError


def test_a_request_is_found_by_its_ids() -> None:
    live, one, two = LiveRequests(), Live(), Live()
    live.add(one)
    live.add(two)
    assert (len(live), live.ids, set(live)) == (2, (), {one, two})
    live.name(one, "a", ("a",))
    live.name(two, "b", ("b_0", "b_1"))
    assert list(live.ids) == ["a", "b", "b_0", "b_1"]
    assert live.find("a") == ((one, None),)
    assert live.find("b") == ((two, None),)
    assert live.find("b_1") == ((two, "b_1"),)
    assert live.find("c") == ()
    live.remove(two, ("b", "b_0", "b_1"))
    assert (list(live.ids), len(live)) == (["a"], 1)
    live.remove(one, ("a", "a"))
    assert (list(live.ids), len(live)) == ([], 0)


def test_g_3_several_requests_may_share_a_public_id() -> None:
    live, one, two = LiveRequests(), Live(), Live()
    for request in (one, two):
        live.add(request)
        live.name(request, "same", ("same",))
    assert live.find("same") == ((one, None), (two, None))
    live.remove(one, ("same",))
    assert live.find("same") == ((two, None),)
    live.remove(two, ("same",))
    assert live.ids == ()


def test_iterating_is_over_a_snapshot() -> None:
    live, one = LiveRequests(), Live()
    live.add(one)
    for request in live:
        live.remove(request, ())
    assert len(live) == 0
    live.remove(one, ("never named",))


async def test_all_who_wait_learn_that_it_is_empty() -> None:
    live, one, two = LiveRequests(), Live(), Live()
    live.add(one)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        waiting = [group.create_task(live.wait_empty()) for _ in range(3)]
        await asyncio.sleep(0)
        live.add(two)
        live.remove(one, ())
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        live.remove(two, ())
    await live.wait_empty()
    live.add(one)
    live.remove(one, ())
    await live.wait_empty()

"""When a connection is taken for a slow client's, look by look."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from backends.upstream.base import Headers
from gateway.errors import ErrorReport
from gateway.slow_clients import LAST_CHANCE_S, MIN_BODY_BYTES_PER_S, Due, SlowClientWatch

LIMIT_S = 60.0
ENOUGH = int(MIN_BODY_BYTES_PER_S * LIMIT_S)
N, R, H, B = Due.NOTHING, Due.REQUEST, Due.HEAD, Due.BODY


class Clock:
    """A loop that runs its one timer when it is told to."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self.timers.append((delay_s, callback))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def fire(self, delay_s: float) -> None:
        ((after_s, callback),) = self.timers
        assert after_s == delay_s
        self.timers.clear()
        callback()


class Connection:
    """A connection in the state that the test wants; also its own transport."""

    def __init__(self) -> None:
        self.transport: Any = self
        self.received_bytes = 0
        self.headers: Headers = None  # type: ignore[assignment]
        self.due = Due.REQUEST
        self.end = ""

    def close(self) -> None:
        self.end = "closed"

    def refuse(self, report: ErrorReport) -> None:
        self.end = f"{report.status} {report.type}"


@pytest.mark.parametrize(
    ("looks", "ends"),
    [
        pytest.param([(R, None, 0)], ["closed"], id="never sent anything"),
        pytest.param([(R, None, 9)], ["closed"], id="empty lines"),
        pytest.param([(H, "a", 9), (H, "a", 0)], ["", "408 timeout"], id="half a head"),
        pytest.param([(H, "a", 9), (H, "a", ENOUGH)], ["", "408 timeout"], id="head in drops"),
        pytest.param([(H, "a", 9), (H, "b", 9), (H, "c", 9)], ["", "", ""], id="another request each time"),
        pytest.param([(H, "a", 9), (B, "a", ENOUGH - 1)], ["", "408 timeout"], id="slow head, slow body"),
        pytest.param([(H, "a", 9), (B, "a", ENOUGH)], ["", ""], id="slow head, then its body comes"),
        pytest.param([(B, "a", ENOUGH), (B, "a", ENOUGH), (B, "a", 0)], ["", "", "408 timeout"], id="it stops coming"),
        pytest.param([(B, "a", 9), (N, "a", 9), (B, "a", 9), (B, "a", 9)], ["", "", "", "408 timeout"], id="a pause"),
        pytest.param([(N, "a", 9), (N, "a", 0), (N, "a", 0)], ["", "", ""], id="idle, or an answer under way"),
        pytest.param([(N, "a", 9), (R, "a", 2), (R, "a", 0)], ["", "", "closed"], id="empty lines behind a request"),
    ],
)
def test_what_was_due_at_two_looks_is_not_waited_for(looks: list[tuple[Due, str | None, int]], ends: list[str]) -> None:
    clock, connection = Clock(), Connection()
    lists: dict[str | None, Any] = {"a": [], "b": [], "c": [], None: None}
    SlowClientWatch(connection, LIMIT_S, clock)  # type: ignore[arg-type]
    for (due, request, received_bytes), end in zip(looks, ends, strict=True):
        connection.due, connection.headers, connection.received_bytes = due, lists[request], received_bytes
        clock.fire(LIMIT_S)
        if end:
            assert not connection.end
            clock.fire(LAST_CHANCE_S)
        assert (connection.end, connection.received_bytes) == (end, 0)


@pytest.mark.parametrize(
    ("due", "then"),
    [
        pytest.param((R, 0), (H, 9), id="a request begins"),
        pytest.param((R, 0), (N, 99), id="a request is here"),
        pytest.param((H, 0), (N, 99), id="the rest is here"),
        pytest.param((B, 9), (N, 99), id="the rest of the body is here"),
        pytest.param((B, 9), (B, ENOUGH), id="much of the body is here"),
    ],
)
def test_a_loop_that_was_not_run_reads_before_it_judges(due: tuple[Due, int], then: tuple[Due, int]) -> None:
    clock, connection = Clock(), Connection()
    connection.headers = []
    SlowClientWatch(connection, LIMIT_S, clock)  # type: ignore[arg-type]
    connection.due, connection.received_bytes = due
    clock.fire(LIMIT_S)
    connection.due, connection.received_bytes = then
    if due[0] is R and then[0] is H:
        connection.headers = []  # of the new one
    clock.fire(LAST_CHANCE_S)
    assert (connection.end, connection.received_bytes) == ("", 0)
    clock.fire(LIMIT_S)  # and begins anew
    assert not connection.end


def test_it_ends_with_the_connection() -> None:
    clock = Clock()
    watch = SlowClientWatch(Connection(), LIMIT_S, clock)  # type: ignore[arg-type]
    clock.fire(LIMIT_S)
    watch.cancel()
    assert not clock.timers


async def test_two_connections_have_a_timer_each() -> None:
    connections = [Connection(), Connection()]
    watches = [SlowClientWatch(connection, 0.001, asyncio.get_running_loop()) for connection in connections]
    watches[1].cancel()
    async with asyncio.timeout(10):
        while not connections[0].end:  # noqa: ASYNC110 -- what is waited for here has no event
            await asyncio.sleep(0.001)
    watches[0].cancel()
    assert [connection.end for connection in connections] == ["closed", ""]

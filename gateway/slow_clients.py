"""Clients that send a request too slowly, or never begin one.

A timer for each request, or a look at the clock for each piece of one, would be paid by every request. One timer a
connection is not: what was incomplete at one look and still is at the next has had a whole limit, and at most two.
"""

import asyncio
import enum
from typing import Protocol

from backends.upstream.base import Headers
from gateway.errors import ErrorReport, too_slow

# A body that comes more slowly than this counts as not coming.
MIN_BODY_BYTES_PER_S = 512
# A loop that was not run for long has timers before it has what came meanwhile: it gets a moment to read that.
LAST_CHANCE_S = 0.1


class Due(enum.Enum):
    """What a client is to send now."""

    NOTHING = enum.auto()
    """It is somebody else's turn, the connection is not read, or another limit holds."""
    REQUEST = enum.auto()
    """A request, of which nothing has come."""
    HEAD = enum.auto()
    """The rest of a request's line and headers."""
    BODY = enum.auto()
    """The rest of a request's body."""


class Reading(Protocol):
    """The connection that is looked at.

    Attributes:
        transport: Its transport.
        received_bytes: What the client has sent since the last look, which sets it to 0.
        headers: Headers of the request that comes, or came last: another list for each, ``None`` before the first.
    """

    transport: asyncio.Transport
    received_bytes: int
    headers: Headers

    @property
    def due(self) -> Due:
        """What the client is to send."""

    def refuse(self, report: ErrorReport) -> None:
        """Answer the request that comes with an error, and close."""


class SlowClientWatch:
    """Looks at one connection for as long as it is open.

    Args:
        connection: Just made.
        limit_s: Time between two looks, above 0.
        loop: Runs it.
    """

    __slots__ = ("_connection", "_is_last_chance", "_limit_s", "_loop", "_seen", "_timer")

    def __init__(self, connection: Reading, limit_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._limit_s = limit_s
        self._loop = loop
        self._is_last_chance = False
        self._seen: object = connection.headers  # of what was due at the last look
        self._timer = loop.call_later(limit_s, self._look)

    def cancel(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        connection, due = self._connection, self._connection.due
        is_overdue = self._seen is connection.headers and self._is_slow(due)
        self._is_last_chance = is_overdue and not self._is_last_chance
        if self._is_last_chance:
            self._timer = self._loop.call_later(LAST_CHANCE_S, self._look)
            return
        self._timer = self._loop.call_later(self._limit_s, self._look)
        self._seen = self if due is Due.NOTHING else connection.headers  # itself is no request's
        connection.received_bytes = 0
        if is_overdue:
            self._give_up(due)

    def _is_slow(self, due: Due) -> bool:
        """What was due for a whole limit, and still is, has not come as it should."""
        if due is Due.BODY:
            return self._connection.received_bytes < MIN_BODY_BYTES_PER_S * self._limit_s
        return due is not Due.NOTHING

    def _give_up(self, due: Due) -> None:
        if due is Due.REQUEST:
            self._connection.transport.close()
        elif due is Due.HEAD:
            self._connection.refuse(too_slow(f"the request's head was not complete after {self._limit_s:g} s"))
        else:
            rate = f"less than {MIN_BODY_BYTES_PER_S} bytes/s for {self._limit_s:g} s"
            self._connection.refuse(too_slow(f"the request's body came at {rate}"))

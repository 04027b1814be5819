"""A checking client of event streams: raw asyncio, one connection a stream."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import httptools

_DONE: Final = b"data: [DONE]"


class EventCounter:
    """Counts the events of one stream, however they are cut, and finds what does not belong there.

    Attributes:
        events: Events with data, ``[DONE]`` excluded.
        is_done: ``[DONE]`` has come.
        fault: What is wrong with the stream, ``None`` if nothing is.
    """

    __slots__ = ("_held", "events", "fault", "is_done")

    def __init__(self) -> None:
        self._held = b""
        self.events = 0
        self.is_done = False
        self.fault: str | None = None

    def feed(self, data: bytes) -> int:
        """Take one piece of the body; returns the events that it completed."""
        *whole, self._held = (self._held + data).split(b"\n\n")
        before = self.events
        for event in whole:
            if self.is_done:
                self.fault = self.fault or f"more after [DONE]: {event[:80]!r}"
            elif event == _DONE:
                self.is_done = True
            elif event.startswith(b'data: {"error"') or not (event.startswith(b"data: {") and event.endswith(b"}")):
                self.fault = self.fault or f"no event of a good answer: {event[:80]!r}"
            else:
                self.events += 1
        return self.events - before

    def verdict(self, expected: int | None) -> str | None:
        """What is wrong with the stream now that it has ended, ``None`` if nothing is.

        Args:
            expected: Events that there should be; ``None`` if any number above 0 is right.
        """
        if self.fault is not None:
            return self.fault
        if self._held:
            return f"an event is unfinished: {self._held[:80]!r}"
        if not self.is_done:
            return f"no [DONE] after {self.events} events"
        if self.events != expected if expected is not None else not self.events:
            return f"{self.events} events, not {expected or 'any'}"
        return None


@dataclass(frozen=True, slots=True)
class Watch:
    """Who wants to know how streams get on.

    Attributes:
        on_events: Called with the number of events that came.
        on_first: Called at a stream's first event.
        on_done: Called once when a stream is over, with what is wrong with it.
    """

    on_events: Callable[[int], None]
    on_first: Callable[[], None]
    on_done: Callable[[str | None], None]


class StreamClient(asyncio.Protocol):
    """One stream on one connection.

    Args:
        request: The request's bytes.
        expected: Events that there should be, ``None`` if that is not known.
        watch: Told what happens.
    """

    def __init__(self, request: bytes, expected: int | None, watch: Watch) -> None:
        self._request = request
        self._expected = expected
        self._watch = watch
        self._counter = EventCounter()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (asyncio callback)."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def begin(self) -> None:
        """Send the request."""
        if self._transport is not None:
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse one read (asyncio callback)."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(f"no valid HTTP: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over (asyncio callback)."""
        self._end(f"the connection ended after {self._counter.events} events: {exc}")

    def on_headers_complete(self) -> None:
        """The status has come (httptools callback)."""
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"status {status}")

    def on_body(self, body: bytes) -> None:
        """A piece of the body, unchunked (httptools callback)."""
        before = self._counter.events
        came = self._counter.feed(body)
        self._watch.on_events(came)
        if came and not before:
            self._watch.on_first()

    def on_message_complete(self) -> None:
        """The answer is complete (httptools callback)."""
        self._end(self._counter.verdict(self._expected))

    def _end(self, fault: str | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._watch.on_done(fault)
        if self._transport is not None:
            self._transport.close()


def request_bytes(path: str, body: bytes) -> bytes:
    """One HTTP/1.1 request with a JSON body."""
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body

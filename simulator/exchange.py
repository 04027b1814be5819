"""One HTTP request and the writing of its answer, with uvicorn's spelling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol
from urllib.parse import unquote

from simulator.faults import RequestFacts
from simulator.log import RequestEntry

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class _DateHeader:
    """The current ``date`` and ``server`` lines, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = b""

    def lines(self) -> bytes:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._lines = f"date: {formatdate(second, usegmt=True)}\r\nserver: uvicorn\r\n".encode()
        return self._lines


_DATE = _DateHeader()


class Request:
    """One complete request."""

    __slots__ = ("body", "entry", "headers", "is_keep_alive", "method", "path", "query")

    def __init__(self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], is_keep_alive: bool) -> None:
        path, _, query = target.partition(b"?")
        self.method = method
        self.path = unquote(path.decode("latin-1"))
        self.query = query.decode("latin-1")
        self.headers = headers
        self.is_keep_alive = is_keep_alive
        self.body = b""
        self.entry: RequestEntry

    def header(self, name: bytes) -> str | None:
        """Return the value of the header ``name``, given in lower case."""
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None


class Line(Protocol):
    """The connection below an exchange."""

    is_paused: bool

    @property
    def has_backlog(self) -> bool:
        """Whether slow parts are still to be written."""

    def buffer(self, data: bytes, entry: RequestEntry) -> None:
        """Write ``data`` soon, in order."""

    def write_slowly(self, parts: Iterator[bytes], entry: RequestEntry) -> None:
        """Write ``parts`` as the client reads them."""

    def exchange_over(self, exchange: Exchange) -> None:
        """Go on after ``exchange``."""

    def cut(self, *, reset: bool) -> None:
        """End the connection now."""

    def log_changed(self) -> None:
        """Take note that a log entry has changed."""


class Exchange:
    """One request and its answer.

    ``on_disconnect`` is called once if the client leaves before the end of the answer;
    ``on_writable`` each time the client has read enough to write on; ``on_abort_finish`` when the fault of that name
    strikes. None of them is kept beyond the end.
    """

    __slots__ = (
        "connection",
        "entry",
        "facts",
        "has_lower_case_framing",
        "is_chunked",
        "is_over",
        "on_abort_finish",
        "on_disconnect",
        "on_writable",
        "request",
        "starts_aborted",
        "tail",
    )

    def __init__(self, connection: Line, request: Request) -> None:
        self.connection = connection
        self.request = request
        self.entry = request.entry
        self.is_over = False
        self.is_chunked = False
        self.facts: RequestFacts | None = None  # set only while faults are waiting for this request
        self.starts_aborted = False
        self.tail = b""
        """Header lines after all others but the framing, complete."""
        self.has_lower_case_framing = False
        """Spell ``transfer-encoding`` and ``connection`` as uvicorn's httptools parser does, not its h11 one."""
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.on_abort_finish: Callable[[], None] | None = None

    @property
    def is_writable(self) -> bool:
        """Whether the transport's buffer has room."""
        return not self.connection.is_paused and not self.connection.has_backlog

    def head(self, status: int, headers: bytes) -> None:
        """Write the head; ``headers`` are complete lines."""
        self.entry.status = status
        self.write(self._head_bytes(status, headers))

    def respond(self, status: int, body: bytes, content_type: str | None = "application/json", extra: str = "") -> None:
        """Write a whole answer; ``extra`` goes before its length, as uvicorn puts route headers."""
        lines = f"{extra}content-length: {len(body)}\r\n"
        if content_type is not None:
            lines += f"content-type: {content_type}\r\n"
        self.entry.status = status
        head = self._head_bytes(status, f"{lines}vary: Origin\r\n".encode() + self.tail)
        if self.request.method == "HEAD":
            self.write(head)
        elif len(body) <= 65536:
            self.write(head + body)
        else:
            self.write(head)
            self.write_slowly(body[start : start + 262144] for start in range(0, len(body), 262144))
        self.finish()

    def start_stream(self, extra: str = "") -> None:
        """Write the head of an event stream."""
        self.is_chunked = True
        lines = f"{extra}content-type: text/event-stream; charset=utf-8\r\nvary: Origin\r\n"
        framing = b"transfer-encoding" if self.has_lower_case_framing else b"Transfer-Encoding"
        self.head(200, b"%b%b%b: chunked\r\n" % (lines.encode(), self.tail, framing))

    def send_event(self, event: bytes) -> None:
        """Write one event as one HTTP chunk."""
        self.entry.events += 1
        self.connection.buffer(b"%x\r\n%b\r\n" % (len(event), event), self.entry)

    def send_comment(self, comment: bytes) -> None:
        """Write a comment as one HTTP chunk; it is not counted as an event."""
        self.connection.buffer(b"%x\r\n%b\r\n" % (len(comment), comment), self.entry)
        self.connection.log_changed()

    def finish_stream(self) -> None:
        """Write the last chunk and end the exchange."""
        self.write(b"0\r\n\r\n")
        self.finish()

    def write(self, data: bytes) -> None:
        """Write raw bytes, in order with everything before."""
        self.connection.buffer(data, self.entry)

    def write_slowly(self, parts: Iterator[bytes]) -> None:
        """Write ``parts`` one after the other as the client reads them."""
        self.connection.write_slowly(parts, self.entry)

    def finish(self, ended: str = "complete") -> None:
        """End the exchange; the connection goes on with the next request or closes."""
        if self.is_over:
            return
        self._end(ended)
        self.connection.exchange_over(self)

    def cut(self, ended: str, *, reset: bool) -> None:
        """End the exchange by ending the connection: with a reset, or with a clean close."""
        if self.is_over:
            return
        self._end(ended)
        self.connection.cut(reset=reset)

    def lost(self, *, has_backlog: bool = False) -> None:
        """Take note that the client is gone; ``has_backlog``: before the last bytes were written."""
        if self.is_over:
            if has_backlog:
                self._mark("client_closed")
            return
        on_disconnect = self.on_disconnect
        self._end("client_closed")
        if on_disconnect is not None:
            on_disconnect()

    def _end(self, ended: str) -> None:
        self.is_over = True
        # They know who writes the answer, who knows this exchange: no cycle is left for the collector.
        self.on_disconnect = self.on_writable = self.on_abort_finish = None
        self._mark(ended)

    def _mark(self, ended: str) -> None:
        self.entry.ended = ended
        self.entry.finished_s = time.monotonic()
        self.connection.log_changed()

    def _head_bytes(self, status: int, headers: bytes) -> bytes:
        line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n".encode()
        if self.request.is_keep_alive:
            return b"%b%b%b\r\n" % (line, _DATE.lines(), headers)
        name = b"connection" if self.has_lower_case_framing else b"Connection"
        return b"%b%b%b%b: close\r\n\r\n" % (line, _DATE.lines(), headers, name)

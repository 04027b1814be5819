"""HTTP/1.1 server side of one connection, with full control of the socket."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Protocol, cast

import httptools

from simulator.exchange import Exchange, Request
from simulator.log import RequestEntry

_MAX_PIPELINED = 16


class Host(Protocol):
    """What a connection needs from the engine."""

    keep_alive_s: float

    def accepted(self, connection: Connection) -> bool:
        """Take note of a connection; ``False``: it is being dealt with, read nothing."""

    def gone(self, connection: Connection) -> None:
        """Take note that a connection has ended."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""

    def note(self, request: Request, connection: Connection) -> RequestEntry:
        """Make the log entry of a request."""

    def note_disconnect(self, exchange: Exchange) -> None:
        """Take note that a client left before its answer was complete."""

    def log_changed(self) -> None:
        """Take note that a log entry has changed."""


class Connection(asyncio.Protocol):
    """One accepted connection; requests on it are answered in order."""

    def __init__(self, host: Host, loop: asyncio.AbstractEventLoop, number: int) -> None:
        self.host = host
        self.number = number
        self.is_paused = False
        self.exchange: Exchange | None = None
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._buffer: list[bytes] = []
        self._is_flush_due = False
        self._slow: deque[tuple[Iterator[bytes], RequestEntry]] = deque()
        self._idle: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._is_muted = False
        self._held_input: list[bytes] = []
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register with the engine and start the idle clock."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        self._is_muted = not self.host.accepted(self)
        if not self._is_muted:
            self._arm_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the open exchange, drop the queued requests."""
        self._transport = None
        self._parser = None  # it knows this connection: no cycle is left for the collector
        self._disarm_idle()
        has_backlog = bool(self._slow)
        self._queue.clear()
        self._slow.clear()
        self._buffer.clear()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            if exchange.entry.connection_state == "open":
                exchange.entry.connection_state = "closed"
            if has_backlog or not exchange.is_over:
                self.host.note_disconnect(exchange)
            exchange.lost(has_backlog=has_backlog)
        self.host.gone(self)

    def eof_received(self) -> None:
        """Treat a half-closed client as gone, as uvicorn does."""

    def data_received(self, data: bytes) -> None:
        """Parse; bytes that are no HTTP get uvicorn's plain 400."""
        if self._is_muted:
            self._held_input.append(data)
            return
        if self._parser is None:
            return
        self._disarm_idle()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(b"Unsupported upgrade request.")
        except httptools.HttpParserError:
            self._refuse(b"Invalid HTTP request received.")

    def pause_writing(self) -> None:
        """Stop producing: the client reads too slowly."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """Go on with what was held back, in a fresh turn.

        Closing a transport from inside this call makes asyncio end the connection twice.
        """
        self.is_paused = False
        self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._pump()
        exchange = self.exchange
        if exchange is not None and exchange.on_writable is not None and exchange.is_writable:
            exchange.on_writable()

    # -- httptools callbacks ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start collecting a request."""
        self._target = b""
        self._headers = []
        self._body = []

    def on_url(self, url: bytes) -> None:
        """Collect the target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Answer ``Expect: 100-continue`` if nothing else is being answered."""
        if self.exchange is not None or self._transport is None:
            return
        for name, value in self._headers:
            if name == b"expect" and value.lower() == b"100-continue":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Collect a part of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Hand the request over, or queue it behind the one being answered."""
        assert self._parser is not None
        method = self._parser.get_method().decode("ascii")
        request = Request(method, self._target, self._headers, self._parser.should_keep_alive())
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        request.entry = self.host.note(request, self)
        if self.exchange is None and not self._queue:
            self._start(request)
            return
        self._queue.append(request)
        if len(self._queue) >= _MAX_PIPELINED and self._transport is not None:
            self._transport.pause_reading()

    def log_changed(self) -> None:
        """Take note that a log entry has changed."""
        self.host.log_changed()

    # -- writing ---------------------------------------------------------------------------------

    @property
    def has_backlog(self) -> bool:
        """Whether slow parts are still to be written."""
        return bool(self._slow)

    def buffer(self, data: bytes, entry: RequestEntry) -> None:
        """Write ``data`` with everything else that this turn of the event loop produces."""
        entry.written_bytes += len(data)
        if entry.first_byte_s is None:
            entry.first_byte_s = time.monotonic()
        if self._slow:
            self._slow.append((iter((data,)), entry))
            return
        self._buffer.append(data)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Give the collected bytes to the transport."""
        self._is_flush_due = False
        if self._buffer and self._transport is not None:
            data = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
            self._buffer.clear()
            self._transport.write(data)

    def write_slowly(self, parts: Iterator[bytes], entry: RequestEntry) -> None:
        """Write ``parts`` as the transport takes them."""
        self.flush()
        self._slow.append((parts, entry))
        if len(self._slow) == 1:
            self._pump()

    def _pump(self) -> None:
        while self._slow and not self.is_paused and self._transport is not None:
            parts, entry = self._slow[0]
            part = next(parts, None)
            if part is None:
                self._slow.popleft()
                continue
            entry.written_bytes += len(part)
            self._transport.write(part)
        if not self._slow and self.exchange is not None and self.exchange.is_over:
            self._next()

    # -- course of the connection ----------------------------------------------------------------

    def unmute(self) -> None:
        """Read on after a delay at the connection's start."""
        self._is_muted = False
        self._arm_idle()
        held, self._held_input = self._held_input, []
        for data in held:
            self.data_received(data)

    def send_and_close(self, data: bytes) -> None:
        """Write ``data`` outside any exchange and close."""
        if self._transport is not None:
            self._transport.write(data)
            self._transport.close()

    def exchange_over(self, exchange: Exchange) -> None:
        """Go on after ``exchange``, once its slow parts are out."""
        if self.exchange is exchange and not self._slow:
            self._next()

    def cut(self, *, reset: bool) -> None:
        """End the connection now: abort it, or flush and close it cleanly."""
        transport = self._transport
        if transport is None:
            return
        self.flush()
        if self.exchange is not None:
            self.exchange.entry.connection_state = "reset" if reset else "closed"
        if reset:
            # Linger 0 makes the kernel send a reset instead of a FIN.
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()

    def _start(self, request: Request) -> None:
        self.exchange = Exchange(self, request)
        self.host.handle(self.exchange)

    def _next(self) -> None:
        over, self.exchange = self.exchange, None
        transport = self._transport
        if over is None or transport is None:
            return
        if not over.request.is_keep_alive or self._is_closing:
            self.flush()
            over.entry.connection_state = "closed"
            transport.close()
        elif self._queue:
            transport.resume_reading()
            # A fresh turn: a pipelined burst must not recurse.
            self._loop.call_soon(self._start_queued)
        else:
            self._arm_idle()

    def _start_queued(self) -> None:
        if self._queue and self.exchange is None and self._transport is not None:
            self._start(self._queue.popleft())

    def _refuse(self, message: bytes) -> None:
        if self._transport is None:
            return
        if self.exchange is not None:
            self._is_closing = True
            return
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
        self.send_and_close(head % len(message) + b"connection: close\r\n\r\n" + message)

    def _arm_idle(self) -> None:
        if self.host.keep_alive_s > 0:
            self._idle = self._loop.call_later(self.host.keep_alive_s, self._close_idle)

    def _disarm_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _close_idle(self) -> None:
        if self.exchange is None and self._transport is not None:
            self._transport.close()

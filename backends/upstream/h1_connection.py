"""One HTTP/1.1 connection to a worker: ``httptools`` on ``asyncio.Protocol``."""

import asyncio
import functools
import select
from typing import Any, Protocol, cast

import httptools

from backends.errors import AnswerBroken, AnswerMalformed, ConnectionDropped, UpstreamError
from backends.upstream.base import AnswerHead, Headers, Origin
from backends.upstream.h1_call import H1Call
from backends.upstream.lost_peer import TO_WORKERS, set_options

# More of a head, 1xx answers before it included, is no engine's.
MAX_HEAD_BYTES = 256 * 1024
# Larger bodies are not copied into one buffer with the head.
JOIN_BODY_BELOW_BYTES = 64 * 1024
# What is left of an answer of this announced length after the read with its head goes past the parser, which would
# copy it and has nothing to say about it.
PLAIN_FROM_BYTES = 64 * 1024


class Pool(Protocol):
    """Where connections are kept between calls."""

    def connection_opened(self, connection: "H1Connection") -> None:
        """Count a connection."""

    def connection_closed(self, connection: "H1Connection") -> None:
        """Forget a connection."""

    def release(self, origin: Origin, connection: "H1Connection") -> None:
        """Keep a clean connection for reuse."""


class H1Connection(asyncio.Protocol):
    """One TCP or TLS connection to a worker; carries one call at a time."""

    __slots__ = (
        "_call",
        "_chunked",
        "_content_length",
        "_head_bytes",
        "_headers",
        "_is_paused",
        "_parser",
        "_plain_left_bytes",
        "_poll",
        "_pool",
        "_served",
        "_status",
        "_transport",
        "idle_since",
        "origin",
    )

    def __init__(self, pool: Pool, origin: Origin) -> None:
        self._pool = pool
        self.origin = origin
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._poll: select.poll | None = None
        self._call: H1Call | None = None
        self._served = 0
        self._is_paused = False
        self._head_bytes = 0
        # Of the present answer, and set with its status.
        self._headers: Headers = []
        self._status = 0
        self._content_length: int | None = None
        self._chunked = False
        self._plain_left_bytes = 0
        self.idle_since = 0.0

    def start(self, call: H1Call) -> None:
        """Write the call's request; small bodies go out in one buffer with the head."""
        assert self._transport is not None
        body = call.request.body
        self._call = call
        if self._parser is None:  # behind a whole answer it is ready for the next one
            self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = self._status = 0
        self._headers = []
        if sum(map(len, body)) < JOIN_BODY_BELOW_BYTES:
            self._transport.write(b"".join([call.wire_head, *body]))
        else:
            self._transport.writelines([call.wire_head, *body])

    def is_usable(self) -> bool:
        """False once either side has begun to close, or the worker has sent what nobody asked for.

        The kernel may hold a stray answer, or the end of the connection, that the loop has not read yet; the next
        request must not get that for its own.
        """
        if self._transport is None or self._transport.is_closing():
            return False
        return self._poll is None or not self._poll.poll(0)

    def abandon(self) -> None:
        """The call gave up inside its answer: nothing else can be carried, so close without waiting."""
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def shut_down(self) -> None:
        """The client is being closed: a call that is still running ends with an error."""
        if self._head_bytes:
            self._lost(AnswerBroken("this side was shut down inside the answer"))
        else:
            self._lost(ConnectionDropped("this side was shut down before any byte of an answer"))
        self.abandon()

    def pause_reading(self) -> None:
        """Stop reading until ``resume_reading``."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Undo ``pause_reading``."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (asyncio callback)."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        set_options(transport.get_extra_info("socket"), TO_WORKERS)
        if self.origin.scheme == "http" and hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._pool.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        """Feed one read to the parser and report to the call once (asyncio callback)."""
        call = self._call
        if call is None:
            # Bytes that no request asked for: the connection cannot be trusted any more.
            self.abandon()
            return
        if self._plain_left_bytes:
            self._plain_received(call, data)
            return
        if not self._status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._lost(AnswerMalformed(f"not a valid HTTP answer: {exc}"))
            self.abandon()
        else:
            if not self._status and self._head_bytes > MAX_HEAD_BYTES:
                self._lost(AnswerMalformed(f"the answer's head is larger than {MAX_HEAD_BYTES} bytes"))
                self.abandon()
        call.on_read_done()  # of a whole answer too, and only now: what comes next may use this connection

    def _plain_received(self, call: H1Call, data: bytes) -> None:
        """Take more of a body of known length, of which nothing but its end is to be found."""
        left = self._plain_left_bytes - len(data)
        call.on_data(data if left >= 0 else data[:left])
        if left > 0:
            self._plain_left_bytes = left
        else:
            is_reusable = left == 0 and self._parser.should_keep_alive()
            self._parser = None  # it waits for the rest of this body
            self._complete(reusable=is_reusable)
        call.on_read_done()

    def eof_received(self) -> None:
        """The worker closes; the transport follows (asyncio callback).

        It would first write what is left of the request, to somebody who may never read it.
        """
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end to the call, if one is running (asyncio callback)."""
        self._pool.connection_closed(self)
        self._transport = self._parser = None  # the parser holds this object
        call = self._call
        if call is None:
            return
        if self._status and not self._chunked and self._content_length is None and exc is None:
            self._complete(reusable=False)  # a body that ends with the connection
            call.on_read_done()
            return
        detail = f": {exc}" if exc is not None else ""
        if self._head_bytes:
            self._lost(AnswerBroken(f"the connection ended inside the answer{detail}"))
        else:
            self._lost(
                ConnectionDropped(f"the connection ended before any byte of an answer{detail}"),
                may_resend=self._served > 0,
            )

    def _lost(self, error: UpstreamError, *, may_resend: bool = False) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.on_lost(error, may_resend=may_resend)

    def _complete(self, *, reusable: bool) -> None:
        call, self._call = self._call, None
        self._served += 1
        self._plain_left_bytes = 0
        if self._is_paused:
            self.resume_reading()
        if call is not None:
            call.on_complete()
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size():
            self._transport.abort()  # answered before the request was read: what is left of it may never be
        elif reusable and not self._transport.is_closing():  # the rest is looked at when it is used again
            self._pool.release(self.origin, self)
        else:
            self._transport.close()

    # httptools callbacks

    def on_message_begin(self) -> None:
        """Begin of an answer; one that nobody asked for ends the connection (httptools callback)."""
        if self._call is None:
            self._pool.connection_closed(self)
            self.abandon()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; trailers are dropped, nobody waits for them (httptools callback)."""
        if not self._status:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """End of a head; informational answers are skipped (httptools callback)."""
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = []
            return
        self._status = status
        by_name = dict(self._headers)
        coding, size = by_name.get(b"transfer-encoding"), by_name.get(b"content-length")
        self._chunked = coding is not None and coding.lower().find(b"chunked") >= 0
        length = int(size) if size is not None and not self._chunked else None
        self._content_length = length
        if length is not None and length >= PLAIN_FROM_BYTES:
            self._plain_left_bytes = length
        if self._call is not None:
            media_type = _media_type(by_name.get(b"content-type", b""))
            self._call.on_head(AnswerHead(status, self._headers, length, media_type))

    def on_body(self, data: bytes) -> None:
        """A piece of the body, already unchunked (httptools callback)."""
        if self._plain_left_bytes:
            self._plain_left_bytes -= len(data)
        if self._call is not None:
            self._call.on_data(data)

    def on_message_complete(self) -> None:
        """End of an answer (httptools callback)."""
        if self._status and self._call is not None:
            self._complete(reusable=self._parser.should_keep_alive())


@functools.lru_cache(maxsize=64)
def _media_type(content_type: bytes) -> str:
    """The media type alone; engines have few."""
    return content_type.split(b";", 1)[0].strip().lower().decode("latin-1")

"""The HTTP server's connection: uvicorn's, with the two things that the data plane needs and ASGI cannot say.

An ASGI application learns that its client has left only by awaiting ``receive``, which takes a task for every
request. Here the connection itself calls the exchange, in the same loop step in which the socket tells.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from backends.upstream.base import Headers
from gateway.direct import DirectCycle, Serving
from gateway.errors import ErrorReport, InvalidRequest, headers_too_large
from gateway.lingering import ClosesWhenRead, last_answer, told
from gateway.slow_clients import Due, SlowClientWatch

SCOPE_KEY = "forebay.connection"
# A client may go on sending a body that was refused, and must read the refusal; this bounds how long it is humoured.
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
# Requests that may wait behind the one that is answered; with more of them the connection is no longer read, and then
# nobody sees the client leave.
MAX_PIPELINED = 8
MAX_HEAD_BYTES = 64 * 1024  # of a request's line and headers
# How long a client that wanted the connection closed may go on sending a body that was refused.
LINGER_S = 30.0


class DirectApplication(Protocol):
    """An ASGI application that serves some requests without ASGI."""

    def accept(self, target: bytes, headers: Headers, connection: "ConnectionProtocol") -> Serving | None:
        """Take a POST whose head is complete, or leave it (``None``) to the ASGI entry; never raises.

        Args:
            target: As the client sent it.
            headers: Lower-case names.
            connection: Its ``running`` request is this one.
        """


class ConnectionProtocol(HttpToolsProtocol):
    """One client connection.

    Attributes:
        is_gone: The client has closed its side; a half-close counts, since nobody can tell it from a whole one.
        received_bytes: See ``slow_clients.Reading``.
        running: The request that is answered now; written here alone.
        refusal: What was answered past ASGI in place of the request that came, ``None`` if nothing was.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_gone = False
        self._on_gone: Callable[[], None] | None = None
        self._discarded_bytes = 0
        self.running: RequestResponseCycle | None = None
        self._is_read = self._has_head = False
        self._head_bytes = 0
        self._linger: asyncio.TimerHandle | None = None
        self.received_bytes = 0
        self.refusal: ErrorReport | None = None
        self._slow_watch: SlowClientWatch | None = None
        self._is_resuming = False
        # uvicorn goes by the handlers of its logger alone, which anybody in the process may have added.
        self.access_log = self.access_log and self.config.access_log
        # Messages are logged only where ASGI has them, and uvicorn's limit would have to be looked at.
        has_own_ways = self.access_log or self.limit_concurrency is not None
        self._direct: DirectApplication | None = None if has_own_ways or not hasattr(self.app, "accept") else self.app
        self._idle_since: float | None = None

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call ``on_gone`` once when the client goes, at once if it is gone already; ``None`` ends the watch."""
        self._on_gone = on_gone
        if self.is_gone:
            self._tell()

    def _tell(self) -> None:
        self.is_gone = True
        self._give_up_answer()
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    def _give_up_answer(self) -> None:
        """Let uvicorn know that the running answer ends here; of pipelined ones it would only mark the last."""
        if self.running is not None and not self.running.response_complete:
            self.running.disconnected = True

    def abort(self) -> None:
        """End the connection abruptly."""
        self._give_up_answer()
        self.transport.abort()

    @property
    def holds_back_body(self) -> bool:
        """The client of the running request waits to be told whether to send its body, and has not been."""
        return self.running is not None and self.running.waiting_for_100_continue

    @property
    def due(self) -> Due:
        """What the client is to send now; see ``slow_clients.Reading``."""
        if self._idle_since is not None or self._linger is not None or self.flow.read_paused:
            return Due.NOTHING  # the first two have limits of their own
        cycle = self.cycle
        if self._has_head and not self._is_read:
            return Due.BODY if cycle is self.running else Due.NOTHING
        if cycle is not None and not cycle.response_complete:
            return Due.NOTHING  # of another answer
        return Due.REQUEST if self._is_read or self.headers is None else Due.HEAD

    def close_when_read(self) -> None:
        """Send no more, and close when the client has sent the rest of its body, or for too long."""
        if self._is_read:
            self.transport.close()
        elif self._linger is None:
            self._linger_on()

    def _linger_on(self) -> None:
        """Send no more, and take what comes until the client closes, or for too long."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger = self.loop.call_later(LINGER_S, self.transport.abort)

    # uvicorn and asyncio callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected (asyncio callback)."""
        super().connection_made(transport)
        limit_s = getattr(self.app, "client_timeout_s", 0.0)
        if limit_s:
            self._slow_watch = SlowClientWatch(self, limit_s, self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over (asyncio callback)."""
        for timer in (self._linger, self._slow_watch):
            if timer is not None:
                timer.cancel()
        self._tell()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        # These hold this object, and each connection would wait for the garbage collector.
        self.cycle = self.scope = self.running = self._slow_watch = None  # type: ignore[assignment]
        self.pipeline.clear()

    def eof_received(self) -> None:
        """The client sends no more (asyncio callback). With an answer under way nobody is left to read it."""
        was_watched = self._on_gone is not None
        self._tell()
        if was_watched:
            self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Remember whose answer is under way (uvicorn hook)."""
        self.running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        """One read (asyncio callback)."""
        if self.refusal is not None:
            self._discard(len(data))
            return
        self._idle_since = None
        self.received_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._ignore_upgrade()
            if rest := data[exc.args[0] :]:
                self.data_received(rest)
            return
        except httptools.HttpParserError:
            self.send_400_response("this is not HTTP as it should be")
            return
        if not self._has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.refuse(headers_too_large(MAX_HEAD_BYTES))

    def _ignore_upgrade(self) -> None:
        """Read on behind a head that asks for another protocol, as if it had not asked.

        Clients that would rather speak HTTP/2 ask with every request. The parser takes such a request for complete and
        would read its body as the next one, so another parser is told of the body alone.
        """
        framing = [b"%b: %b\r\n" % h for h in self.headers if h[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self._is_resuming = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        self._is_resuming = False

    def _discard(self, size: int) -> None:
        """Count what nobody wants any more, and end the connection when it is too much."""
        self._discarded_bytes += size
        if self._discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        """A piece of a request's target (httptools callback)."""
        if not self._is_resuming:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header (httptools callback)."""
        if self._is_resuming:
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_message_begin(self) -> None:
        """Begin of a request (httptools callback)."""
        if self._is_resuming:
            return
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._discarded_bytes = 0
        self._is_read = self._has_head = False
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        """End of a request's head (httptools callback). uvicorn stops reading where a request has to wait."""
        if self._is_resuming:
            return
        if not self._begin_direct():
            self._begin_asgi()
        self._has_head = True

    def _begin_direct(self) -> bool:
        """Take the request past ASGI; ``False`` if there is anything unusual about it."""
        parser, previous = self.parser, self.cycle
        if (
            self._direct is None
            or self.expect_100_continue
            or (previous is not None and not previous.response_complete)
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or not parser.should_keep_alive()
            or parser.should_upgrade()
        ):
            return False
        cycle = DirectCycle(
            self.transport,
            self.flow,
            self.server_state.default_headers,
            self.on_response_complete,
            self._start_asgi_task,
        )
        self.running = cycle
        serving = self._direct.accept(self.url, self.headers, self)
        if serving is None:
            return False
        cycle.serving = serving
        self.cycle = cycle
        return True

    def _begin_asgi(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # makes the scope
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        self.scope["extensions"] = {SCOPE_KEY: {"connection": self}}  # lets the application find this connection
        super().on_headers_complete()
        if not self.cycle.keep_alive or self.expect_100_continue:
            self.cycle.transport = cast(asyncio.Transport, ClosesWhenRead(self.transport, self.close_when_read))
        if 0 < len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of a request's body; what nobody wants any more is bounded (httptools callback)."""
        cycle = self.cycle
        if cycle.response_complete:
            self._discard(len(body))
        elif isinstance(cycle, DirectCycle):
            cycle.add(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End of a request (httptools callback)."""
        if self.parser.should_upgrade():
            return  # of its head only
        self._is_read = True
        if isinstance(self.cycle, DirectCycle):
            self.cycle.complete()
        else:
            super().on_message_complete()
        if self._linger is not None:
            self.transport.close()

    # A timer for each request would cost more than parsing it: one is kept for as long as the connection is.

    def on_response_complete(self) -> None:
        """An answer is complete: go on with what was pipelined behind it, or be idle (uvicorn hook)."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._look_later(self.timeout_keep_alive)

    def _look_later(self, delay_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(delay_s, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for long enough (uvicorn hook)."""
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the end of the answer under way sets the next timer
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._look_later(left_s)
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in the gateway's error shape (uvicorn hook)."""
        self.refuse(InvalidRequest(msg).report)

    def refuse(self, report: ErrorReport) -> None:
        """Answer something that never became a whole request, and close."""
        running = self.running
        is_its_body = running is self.cycle and self._has_head and not self._is_read
        if running is not None and not running.response_complete:
            if running is self.cycle and not is_its_body and not self.pipeline:
                running.keep_alive, self.refusal = False, report  # what comes behind it is refused, not the request
                return
            if running.response_started or not is_its_body:
                self.transport.abort()  # what is written now would be taken for a part of another answer
                return
            self._tell()
            running.message_event.set()
        if self._linger is not None or self.transport.is_closing():
            self.transport.abort()
            return
        self.refusal = report = told(report, [] if self._is_read else self.headers or [])
        if running is None or not is_its_body or not running.response_started:  # else it has its answer
            self.transport.write(last_answer(report))
        self._linger_on()


def connection_of(scope: Mapping[str, Any]) -> ConnectionProtocol | None:
    """The connection of an ASGI scope, ``None`` under another server."""
    extensions = scope.get("extensions") or {}
    found = extensions.get(SCOPE_KEY, {}).get("connection")
    return found if isinstance(found, ConnectionProtocol) else None

"""The second HTTP client for workers: the same interface on ``httpx``.

The reference for what the first one does by hand, and what mocks and other transports can be put under. Each call
costs a task and some thirty times the work of ``backends.upstream.h1``, and the pool's bookkeeping grows with the
square of the connections that are idle.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import cast

import httpcore
import httpx

from backends.errors import (
    AnswerBroken,
    AnswerMalformed,
    ConnectFailed,
    ConnectionDropped,
    ConnectTimeout,
    RequestUnsendable,
    UpstreamError,
)
from backends.tasks import OwnedTasks
from backends.upstream.base import AnswerHead, Headers, Origin, UpstreamRequest
from backends.upstream.h1_request import request_head
from backends.upstream.httpx_call import HttpxCall
from backends.upstream.httpx_network import Attempt, GivenUp, ObservedBackend
from backends.upstream.lost_peer import TO_WORKERS

# Engines close idle connections after 5 s; leaving earlier avoids most of the races with that.
IDLE_LIMIT_S = 3.0
# How long ended calls get to put their connections away when the client is closed.
CLOSE_GRACE_S = 1.0
# What httpx raises, and what reaches us through it from sockets, TLS and name resolution.
FAILURES = (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError)


class _Transport(httpx.AsyncHTTPTransport):
    """The default transport, with a network layer that can be watched."""

    def __init__(self, tls: ssl.SSLContext, idle_limit_s: float) -> None:
        super().__init__(verify=tls, trust_env=False)
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=idle_limit_s,
            socket_options=TO_WORKERS,
            network_backend=ObservedBackend(),
        )

    @property
    def has_connections(self) -> bool:
        """True while any connection is open."""
        return any(not connection.is_closed() for connection in self._pool.connections)

    @property
    def idle_connections(self) -> int:
        """Connections that would be reused now."""
        connections = self._pool.connections
        return sum(one.is_idle() and not one.is_closed() and not one.has_expired() for one in connections)

    async def close_idle(self, origin: Origin | None = None) -> None:
        """Close idle connections: all to ``origin``, or of all origins those that must not be used any more."""
        wanted = None if origin is None else _httpcore_origin(origin)
        for connection in self._pool.connections:
            if connection.is_closed() or not connection.is_idle():
                continue
            if connection.has_expired() if wanted is None else connection.can_handle_request(wanted):
                await connection.aclose()


class _Body(httpx.AsyncByteStream):
    """A body in pieces. Its iterator is no generator, since nothing would close one that is left half-way."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Pieces(self._pieces)


class _Pieces(AsyncIterator[bytes]):
    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._rest = iter(pieces)

    async def __anext__(self) -> bytes:
        for piece in self._rest:
            return cast(bytes, piece)  # only ever joined and measured
        raise StopAsyncIteration


class HttpxClient:
    """Connections to all workers, kept by httpx; see ``UpstreamClient``.

    Args:
        connect_timeout_s: Limit of one connection attempt, name resolution and TLS included.
        idle_limit_s: Idle connections are closed after this time.
        tls: Context for ``https`` origins; ``None`` makes a default one when first needed.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float = 5.0,
        idle_limit_s: float = IDLE_LIMIT_S,
        tls: ssl.SSLContext | None = None,
        resends_stale: bool = True,
    ) -> None:
        self._resends_stale = resends_stale
        self._loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        self._idle_limit_s = idle_limit_s
        # httpx wants its context now, but loading authorities takes long and most workers speak plain HTTP.
        self._tls = tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._has_authorities = tls is not None
        self._transport = _Transport(self._tls, idle_limit_s)
        self._http = httpx.AsyncClient(
            transport=self._transport,
            trust_env=False,
            timeout=None,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        )
        self._calls: set[HttpxCall] = set()
        self._tasks = OwnedTasks("httpx")
        self._chores = OwnedTasks("httpx-idle")
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def active_connections(self) -> int:
        """Connections that carry a call now, connecting ones and those still being closed included."""
        return len(self._tasks)

    @property
    def connecting(self) -> int:
        """Connection attempts under way."""
        return sum(call.attempt.is_connecting for call in self._calls)

    @property
    def idle_connections(self) -> int:
        """Connections kept for reuse."""
        return self._transport.idle_connections

    def send(self, origin: Origin, request: UpstreamRequest) -> HttpxCall:
        """Start ``request`` in an owned task; see ``UpstreamClient.send``."""
        call = HttpxCall(self._loop, origin, request, self._connect_timeout_s)
        try:
            request_head(origin, request)
        except RequestUnsendable as exc:
            call.fail(exc)
            return call
        if self._is_closed:
            call.fail(ConnectFailed("this client is closed"))
            return call
        if origin.scheme == "https" and not self._has_authorities:
            self._has_authorities = True
            self._tls.load_default_certs()
        self._calls.add(call)
        task = self._tasks.spawn(self._carry(call), origin.authority)
        task.add_done_callback(lambda _: self._ended(call))
        return call

    def _ended(self, call: HttpxCall) -> None:
        self._calls.discard(call)
        call.on_task_end()
        if self._sweeper is None and not self._is_closed:
            self._sweeper = self._loop.call_later(self._idle_limit_s, self._sweep)

    async def _carry(self, call: HttpxCall) -> None:
        """Feed ``call`` until its answer has ended; a stale pooled connection is replaced once."""
        while not call.is_over:
            attempt = call.begin_attempt()
            try:
                await self._attempt(call)
            except GivenUp:
                return
            except UpstreamError as exc:
                call.fail(exc)
            except FAILURES as exc:
                is_stale = _was_stale(exc, attempt) and not call.has_resent
                if is_stale:
                    call.has_resent = True
                    # What else is idle there is as old, and the next request must not meet a second stale one.
                    await self._transport.close_idle(call.origin)
                    if self._resends_stale:
                        continue
                error = _failure(exc, attempt, call)
                if isinstance(error, ConnectionDropped):
                    error.was_reused = is_stale
                error.__cause__ = exc
                call.fail(error)

    async def _attempt(self, call: HttpxCall) -> None:
        response = await self._http.send(_httpx_request(call), stream=True)
        try:
            call.on_head(_answer_head(response, call.attempt))
            # Raw bytes. After a call was given up the next read from the network ends this.
            async for data in cast(httpx.AsyncByteStream, response.stream):
                await call.put(data)
            call.on_end()
        finally:
            await response.aclose()

    def _sweep(self) -> None:
        """Close what is idle for too long or was closed by its worker; httpx does so only before a new request."""
        self._sweeper = None
        self._chores.spawn(self._transport.close_idle(), "sweep")
        if self._transport.has_connections:
            self._sweeper = self._loop.call_later(self._idle_limit_s, self._sweep)

    async def aclose(self) -> None:
        """Close every connection; calls still running end with an error."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for call in list(self._calls):
            call.shut_down()
        await self._tasks.aclose(CLOSE_GRACE_S)
        await self._chores.aclose()
        await self._http.aclose()


def _httpcore_origin(origin: Origin) -> httpcore.Origin:
    url = _base_url(origin)
    return httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=b"/").origin


def _base_url(origin: Origin) -> httpx.URL:
    return httpx.URL(scheme=origin.scheme, host=origin.host, port=origin.port, path="/")


def _httpx_request(call: HttpxCall) -> httpx.Request:
    """The request with its own headers and nothing else; its target goes out as it is, whatever the URL shows."""
    origin, request = call.origin, call.request
    target = f"{origin.path_prefix}{request.path}".encode()
    url = _base_url(origin)
    try:
        url = url.copy_with(raw_path=target)
    except httpx.InvalidURL:
        pass  # the target is what counts
    headers = [(b"host", origin.authority.encode())]
    headers += [(name, value.strip(b" \t")) for name, value in request.headers]
    length = sum(map(len, request.body))
    if length or request.method != "GET":
        headers.append((b"content-length", b"%d" % length))
    return httpx.Request(
        request.method, url, headers=headers, stream=_Body(request.body), extensions={"target": target}
    )


def _answer_head(response: httpx.Response, attempt: Attempt) -> AnswerHead:
    """Take the head over.

    Raises:
        AnswerMalformed: It is none that the request can have.
    """
    if attempt.has_written and not attempt.has_received:
        # Bytes behind the previous answer on this connection, which the library took for this one's.
        raise AnswerMalformed("an answer that nobody asked for")
    headers: Headers = [(name.lower(), value) for name, value in response.headers.raw]
    content_type, length, is_chunked = "", None, False
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            is_chunked = b"chunked" in value.lower()
        elif name == b"content-type":
            content_type = value.split(b";", 1)[0].strip().lower().decode("latin-1")
    if response.status_code == 101:
        raise AnswerMalformed("a protocol switch that nobody asked for")
    if is_chunked and length is not None:
        raise AnswerMalformed("an answer with two framings")
    return AnswerHead(response.status_code, headers, length, content_type)


def _was_stale(exc: Exception, attempt: Attempt) -> bool:
    """Whether a pooled connection had been closed by the worker, who then has read nothing of the request."""
    is_end = isinstance(exc, httpx.NetworkError | OSError) or attempt.has_seen_end
    return is_end and attempt.has_written and not attempt.has_connected and not attempt.has_received


def _failure(exc: Exception, attempt: Attempt, call: HttpxCall) -> UpstreamError:
    """Name a failure of the library by how far the request got, since its own names do not tell."""
    authority, reason = call.origin.authority, _reason(exc)
    has_begun = attempt.has_written or call.has_head
    if isinstance(exc, httpx.LocalProtocolError):
        return RequestUnsendable(f"not a valid HTTP request: {reason}")
    if isinstance(exc, httpx.ConnectTimeout):
        return ConnectTimeout(f"no connection to {authority} in time")
    if isinstance(exc, httpx.ConnectError) or not (has_begun or isinstance(exc, httpx.TransportError)):
        return ConnectFailed(f"cannot connect to {authority}: {reason}")
    if isinstance(exc, httpx.RemoteProtocolError) and attempt.has_written and not attempt.has_seen_end:
        return AnswerMalformed(f"not a valid HTTP answer: {reason}")
    if attempt.has_received or call.has_head:
        return AnswerBroken(f"the connection ended inside the answer: {reason}")
    return ConnectionDropped(f"the connection ended before any byte of an answer: {reason}")


def _reason(exc: Exception) -> str:
    """What the system said, if it did; the layers above it only say that something failed."""
    reason = str(exc) or type(exc).__name__
    link: BaseException | None = exc
    while link is not None:
        if isinstance(link, OSError) and str(link):
            reason = str(link)
        link = link.__cause__ or link.__context__
    return reason

"""The raw ASGI application in front of everything: generation routes here, all other paths to FastAPI."""

import socket
import struct
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, cast

from starlette.exceptions import HTTPException

from backends.upstream.base import Headers
from gateway.auth import Keys
from gateway.downstream import ClientRequest
from gateway.envelope import read_headers
from gateway.errors import (
    SHUTTING_DOWN,
    ErrorReport,
    GatewayError,
    InvalidRequest,
    too_large,
    unauthorized,
    wrong_method,
)
from gateway.exchange import Exchange
from gateway.protocol import ConnectionProtocol, connection_of
from gateway.quick_writes import takes_whole, write_piece, write_whole
from gateway.routes import ROUTES, Route
from gateway.services import Services

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_EVENT_STREAM: Final = b"text/event-stream"
# A socket that is closed with this setting is reset.
_RESETS: Final = struct.pack("ii", 1, 0)
_POST_TARGETS = {path.encode(): route for path, route in ROUTES.items() if "POST" in route.methods}


class ClientLeft(Exception):
    """The body will never be complete; ``args[0]`` is the number of bytes that had come."""


class AsgiDownstream:
    """``Downstream`` over ASGI messages and the server's connection.

    Args:
        send: Takes ASGI messages.
        connection: Its ``running`` request is the one that is answered.
        services: Have the clock, and count the time between events.
    """

    __slots__ = (
        "_clock",
        "_connection",
        "_cycle",
        "_event_at",
        "_has_no_framing",
        "_on_gap",
        "_on_gone",
        "_send",
        "is_gone",
    )

    def __init__(self, send: Send, connection: ConnectionProtocol, services: Services) -> None:
        self._send = send
        self._clock = services.clock
        self._on_gap = services.metrics.event_gap
        self._event_at: float | None = None  # of streams only, 0 before the first
        self._connection = connection
        self._cycle = connection.running
        self._on_gone: Callable[[], None] | None = None
        self.is_gone = connection.is_gone
        self._has_no_framing = False

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """See ``Downstream.watch``."""
        self._on_gone = on_gone
        self._connection.watch(None if on_gone is None else self._gone)

    @property
    def refusal(self) -> ErrorReport | None:
        """See ``Downstream.refusal``."""
        return self._connection.refusal

    def _gone(self) -> None:
        self.is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    async def start(self, status: int, headers: Headers) -> None:
        """See ``Downstream.start``."""
        if self._connection.holds_back_body:  # what it sends next could be the body or another request
            headers = [*headers, (b"connection", b"close")]
        cycle = self._cycle
        if cycle is not None and cycle.scope.get("http_version") == "1.0":
            self._has_no_framing = all(name != b"content-length" for name, _ in headers)
            if self._has_no_framing:
                # Clients of HTTP/1.0 know no chunks: the body ends with the connection, which the server then closes.
                cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        if any(name == b"content-type" and value.startswith(_EVENT_STREAM) for name, value in headers):
            self._event_at = 0.0
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def takes_now(self) -> bool:
        """See ``Downstream.takes_now``."""
        return self._cycle is not None and takes_whole(self._cycle)

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        """See ``Downstream.answer_now``."""
        defaults = self._connection.server_state.default_headers
        return self._cycle is not None and write_whole(self._cycle, defaults, status, headers, body)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``Downstream.answer``."""
        if not self.answer_now(status, headers, body):
            await self.start(status, headers)
            await self.finish(body)

    def write_now(self, data: bytes) -> bool:
        """See ``Downstream.write_now``."""
        if self._cycle is None or self.is_gone or not write_piece(self._cycle, data):
            return False
        if self._event_at is not None:
            self._note_event(data)
        return True

    async def write(self, data: bytes) -> None:
        """See ``Downstream.write``."""
        if not self.is_gone and not self.write_now(data):
            self._note_event(data)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def _note_event(self, data: bytes) -> None:
        """Count the time since the piece before, if both are of events."""
        before = self._event_at
        if before is None or not data or data.startswith(b":"):
            return
        now = self._event_at = self._clock()
        if before:
            self._on_gap(now - before)

    async def finish(self, data: bytes = b"") -> None:
        """See ``Downstream.finish``."""
        if not self.is_gone:
            self._note_event(data)
            if self._has_no_framing and self._cycle is not None:
                self._cycle.expected_content_length = len(data)
            await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def abort(self) -> None:
        """See ``Downstream.abort``."""
        self._connection.watch(None)
        was_gone, self.is_gone = self.is_gone, True
        if self._has_no_framing and not was_gone:  # an orderly close would pass for the end of the body
            self._connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
        self._connection.abort()


class DataPlane:
    """Serves the generation routes.

    Args:
        services: What exchanges need.
        keys: Credentials.
        rest: The application for every other path, and for the lifespan.

    Attributes:
        client_timeout_s: What connections give a client to send a request, 0 for no limit; see ``slow_clients``.
    """

    def __init__(self, services: Services, keys: Keys, rest: ASGIApp) -> None:
        self._services = services
        self._keys = keys
        self._rest = rest
        self.client_timeout_s = services.limits.client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        route = ROUTES.get(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await self._rest(scope, self._bounded(receive), send)
            return
        connection = connection_of(scope)
        if connection is None:
            raise RuntimeError("the data plane needs gateway.protocol.ConnectionProtocol as the server's protocol")
        client = scope.get("client")
        request = self._request(scope["method"], route, scope["headers"], client[0] if client else None)
        exchange = Exchange(self._services, route, request, AsgiDownstream(send, connection, self._services))
        refusal = self._refusal(request, route.methods)
        if refusal is not None:
            await exchange.refuse(refusal)
            return
        try:
            body = await self._read_body(request.by_name, receive)
        except GatewayError as exc:
            await exchange.refuse(exc.report)
        except ClientLeft as exc:
            await exchange.abandon(exc.args[0])
        else:
            await exchange.run(body)

    def accept(self, target: bytes, headers: Headers, connection: ConnectionProtocol) -> Exchange | None:
        """Take a request past ASGI if it can only be served; see ``DirectApplication``."""
        route, cycle = _POST_TARGETS.get(target), connection.running
        if route is None or cycle is None:
            return None
        request = self._request("POST", route, headers, connection.client[0] if connection.client else None)
        size = request.by_name.get(b"content-length", b"")
        if (
            b"transfer-encoding" in request.by_name
            or not size.isdigit()
            or int(size) > self._services.limits.max_body_bytes
            or self._refusal(request, route.methods) is not None
        ):
            return None
        downstream = AsgiDownstream(cast(Send, cycle.send), connection, self._services)
        return Exchange(self._services, route, request, downstream)

    def _request(self, method: str, route: Route, headers: Headers, client_host: str | None) -> ClientRequest:
        by_name = read_headers(headers)
        is_admin = b"x-forebay-worker" in by_name and self._keys.may_administer(by_name, client_host)
        return ClientRequest(method, route.path, headers, by_name, is_admin)

    def _bounded(self, receive: Receive) -> Receive:
        """``receive`` for the other routes, whose bodies have the same limit."""
        limit_bytes = self._services.limits.max_body_bytes
        size = 0

        async def receive_bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit_bytes:
                raise HTTPException(413, too_large(limit_bytes).message)  # the one that FastAPI lets through
            return message

        return receive_bounded

    def _refusal(self, request: ClientRequest, methods: tuple[str, ...]) -> ErrorReport | None:
        """Why the request is refused before its body is read."""
        if not self._keys.may_use(request.by_name):
            return unauthorized(is_admin=False)
        if request.method not in methods:
            return wrong_method(request.method, ", ".join(methods))
        if self._services.is_draining:
            return SHUTTING_DOWN
        return None

    async def _read_body(self, by_name: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body.

        Raises:
            GatewayError: It is above the limit.
            ClientLeft: It will never be complete.
        """
        limit_bytes = self._services.limits.max_body_bytes
        if by_name.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise InvalidRequest("the only transfer coding known here is chunked", param="transfer-encoding")
        announced = by_name.get(b"content-length", b"0")
        if not announced.isdigit():
            raise InvalidRequest("content-length is not a number")
        if int(announced) > limit_bytes:
            raise GatewayError(too_large(limit_bytes))
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientLeft(size)
            part = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise GatewayError(too_large(limit_bytes))
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

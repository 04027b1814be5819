"""Requests that are served past ASGI: nothing unusual about them, so that no message has to describe them.

The connection collects the body itself and starts the exchange when the request is whole. What has anything unusual
about it (pipelined, ``Expect``, an upgrade, chunked, HTTP/1.0, to be refused before its body is read) keeps the ASGI
way, which serves every request in the same manner.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from backends.upstream.base import Headers

Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


class Serving(Protocol):
    """What serves one request, once its body is here or will never be."""

    def begin(self, body: bytes, spawn: Spawn) -> None:
        """Serve it; ``spawn`` runs in a task what has to wait. Returns at once and never raises."""

    def abandon(self, bytes_in: int) -> Coroutine[Any, Any, None]:
        """Only so many bytes of the body have come, and no more will."""


class DirectCycle(RequestResponseCycle):
    """A request past ASGI, and its answer, in the place of uvicorn's object for a request.

    Only what differs between requests is set for each of them; uvicorn's constructor is not called.

    Args:
        transport: The connection's.
        flow: Whether it can be written to.
        default_headers: Headers of every answer.
        on_response: Told when the answer is complete.
        start: Starts a task with what serves the request.

    Attributes:
        serving: Serves it; let go of when it begins to, since it holds this object.
    """

    scope: Any = {"method": "POST"}  # noqa: RUF012 - never written to
    access_log = False
    keep_alive = True
    waiting_for_100_continue = False
    disconnected = False
    response_started = False
    response_complete = False
    chunked_encoding = None
    expected_content_length = 0
    serving: Serving

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        default_headers: Headers,
        on_response: Callable[..., None],
        start: "Callable[[DirectCycle, Any], None]",
    ) -> None:
        self.transport = transport
        self.flow = flow
        self.default_headers = default_headers
        self.on_response = on_response
        self._start = start
        self._parts: list[bytes] = []
        self._is_started = False

    @property
    def message_event(self) -> Any:  # type: ignore[override]
        """Whom uvicorn tells that the client has left: this object, which must not hold itself."""
        return self

    def add(self, part: bytes) -> None:
        """A piece of the body."""
        self._parts.append(part)

    def complete(self) -> None:
        """The body is here: serve the request."""
        self._is_started = True
        parts, self._parts = self._parts, []
        self._take_serving().begin(parts[0] if len(parts) == 1 else b"".join(parts), self._spawn)

    def set(self) -> None:
        """Take notice of the client's leaving; see ``asyncio.Event``, in whose place this stands."""
        if self.disconnected and not self._is_started:
            self._is_started = True
            self._start(self, self._abandon)

    def _spawn(self, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._start(self, lambda *_asgi: serve())

    def _abandon(self, *_asgi: object) -> Coroutine[Any, Any, None]:
        return self._take_serving().abandon(sum(map(len, self._parts)))

    def _take_serving(self) -> Serving:
        serving = self.serving
        del self.serving
        return serving

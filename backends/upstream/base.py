"""The interface that the gateway's request path has to HTTP clients.

``UpstreamClient.send`` is synchronous: the common case takes an idle connection and writes the request at once, so
nothing is awaited and no task is made between the choice of a worker and the write. Everything slow (connecting,
waiting) happens behind ``UpstreamCall``.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

Headers = list[tuple[bytes, bytes]]


class Origin(msgspec.Struct, frozen=True):
    """Where a worker's HTTP server is. A key of tables that are looked up for every request.

    Attributes:
        scheme: ``http`` or ``https``.
        host: Name or address, IPv6 without brackets.
        port: TCP port.
        path_prefix: Prefix of every path, without a trailing slash; mostly empty.
    """

    scheme: str
    host: str
    port: int
    path_prefix: str = ""

    @classmethod
    def from_url(cls, url: str) -> "Origin":
        """Take an absolute http or https URL apart; a missing port is the scheme's default."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"not an http(s) URL: {url!r}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"


class UpstreamRequest(msgspec.Struct, frozen=True):
    """One request as it goes to a worker.

    Attributes:
        method: Upper-case method.
        path: Path and query, without the origin's prefix.
        headers: Lower-case names; no ``host`` and no framing headers, which the client adds.
        body: The body in pieces that are sent one after the other, uncopied.
    """

    method: str
    path: str
    headers: Headers
    body: Sequence[bytes | memoryview]


class AnswerHead(msgspec.Struct, frozen=True):
    """Status and headers of a final answer (1xx are skipped).

    Attributes:
        status: HTTP status.
        headers: Lower-case names, in the order received.
        content_length: Value of ``Content-Length``, ``None`` when the body is chunked or ends with the connection.
        content_type: Lower-case media type without parameters, empty if absent.
    """

    status: int
    headers: Headers
    content_length: int | None
    content_type: str


class UpstreamCall(Protocol):
    """One request on its way and the answer that comes back.

    Used by one waiter at a time: ``head`` once, then ``read`` until it returns ``b""``. ``interrupt`` and ``close``
    may be called from anywhere on the loop, at any time and repeatedly.
    """

    @property
    def written_at(self) -> float | None:
        """Loop time at which the request was handed to the socket; ``None`` while nothing was sent."""

    @property
    def is_complete(self) -> bool:
        """True once the whole answer has arrived and been read."""

    @property
    def is_over(self) -> bool:
        """True once nothing more can arrive: the answer is here, read or not, or the call has failed or was closed."""

    async def head(self) -> AnswerHead:
        """Wait for the answer's head.

        Raises:
            UpstreamError: See ``backends.errors`` for the kinds.
            CallEnded: This side closed or interrupted the call.
        """

    async def read(self) -> bytes:
        """Return what has arrived since the last read, waiting for at least one byte; ``b""`` at the end.

        Small pieces come joined, large ones one by one.

        Reading lags behind the worker by a bounded amount: when nobody reads, the connection is paused.

        Raises:
            UpstreamError: The answer broke off.
            CallEnded: This side closed or interrupted the call.
        """

    async def pass_on(self, take: Callable[[bytes], bool]) -> None:
        """Hand over what arrives, as ``read`` would return it, until the answer's end or until ``take`` is not truthy.

        What arrives together with the end is left to be read. ``take`` must not wait, and may be called from outside of
        the waiting task.

        Raises:
            UpstreamError: As ``read`` does, but for an answer that breaks off, of which ``read`` tells.
            CallEnded: As ``read`` does.
            Exception: What ``take`` raises.
        """

    def call_when_ready(self, ready: Callable[[], None]) -> bool:
        """Call ``ready`` once, when next something has come or the call has ended in any way, interruptions included.

        For one who waits in no task; whoever reads in one comes after it. ``ready`` must not raise; it is called
        outside of the parser and of ``send``, and within ``close`` and ``interrupt``.

        Returns:
            Whether it will be called; not if there is something to see already, or this client cannot do it.
        """

    def whole(self) -> tuple[AnswerHead, bytes] | None:
        """The answer, if all of it is here, for one who has read nothing of it; it stays to be read. Else ``None``."""

    def drop_whole(self) -> None:
        """What ``whole`` has shown was taken: it counts as read."""

    def interrupt(self) -> None:
        """Make the present ``head`` or ``read`` (or the next, if there is none now) raise ``CallInterrupted``, once.

        Meant for the task that has waited last: another one can read on at once, also while the first is busy
        elsewhere and has not noticed yet.
        """

    def close(self) -> None:
        """Give the call up. A connection that is inside an answer is closed at once, a clean one goes back."""


class UpstreamClient(Protocol):
    """Sends requests to workers and keeps connections to them."""

    @property
    def active_connections(self) -> int:
        """Connections that carry a call now, connecting ones included."""

    @property
    def connecting(self) -> int:
        """Connection attempts under way."""

    @property
    def idle_connections(self) -> int:
        """Connections kept for reuse."""

    def send(self, origin: Origin, request: UpstreamRequest) -> UpstreamCall:
        """Start ``request``; never blocks and never raises, since every failure is the call's."""

    async def aclose(self) -> None:
        """Close every connection and wait for what is owned."""

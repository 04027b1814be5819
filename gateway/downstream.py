"""The client's side of an exchange, free of ASGI types."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from backends.upstream.base import Headers
from gateway.errors import ErrorReport


class ClientRequest(msgspec.Struct, frozen=True):
    """What came from the client besides the body.

    Attributes:
        method: Upper-case method.
        path: Path, decoded, without the query.
        headers: Lower-case names, in order.
        by_name: The same by name; of repeated ones the first.
        is_admin: The client may use admin features.
    """

    method: str
    path: str
    headers: Headers
    by_name: dict[bytes, bytes]
    is_admin: bool = False


class Downstream(Protocol):
    """Where an answer goes. Writes wait while the client reads more slowly than the engine answers."""

    @property
    def is_gone(self) -> bool:
        """The client has closed its side, or half of it."""

    @property
    def refusal(self) -> ErrorReport | None:
        """What the client was told in place of an answer when its request did not come as it should."""

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call ``on_gone`` once, at the moment the client goes; ``None`` ends the watch.

        Called at once if the client is gone already.
        """

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head. Without a ``content-length`` the body is chunked."""

    def takes_now(self) -> bool:
        """A whole answer needs no waiting."""

    def answer_now(self, status: int, headers: Headers, body: bytes) -> bool:
        """Send a whole answer if that needs no waiting; ``False`` leaves all of it to ``answer``."""

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer; ``headers`` hold its ``content-length``."""

    def write_now(self, data: bytes) -> bool:
        """Send a piece of the body if that needs no waiting; ``False`` leaves all of it to ``write``."""

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; does nothing once the client is gone."""

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece."""

    def abort(self) -> None:
        """End the connection abruptly, so that nobody takes what was sent for a whole answer."""

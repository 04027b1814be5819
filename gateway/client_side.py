"""What those who answer a client ask of its side of an exchange; ``AnswerRelay`` is that side."""

from typing import Protocol

from backends.upstream.base import AnswerHead, Headers


class ClientSide(Protocol):
    """Where the answer goes; see ``AnswerRelay``."""

    status: int
    events_seen: int
    silent_since: float | None

    @property
    def keepalive_s(self) -> float:
        """Silence after which the client gets a sign of life, 0 for never."""

    @property
    def end_after_error(self) -> bytes:
        """What ends a stream behind an error event."""

    async def begin_stream(self, head: AnswerHead) -> None:
        """Send the head of a stream, if that has not been done."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of an answer whose body follows."""

    async def write(self, data: bytes) -> None:
        """Send a piece."""

    async def finish(self, data: bytes) -> None:
        """Send the last piece."""

    async def comment(self) -> None:
        """Send a sign of life."""

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""

    def abort(self) -> None:
        """End the connection abruptly."""

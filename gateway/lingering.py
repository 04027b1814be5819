"""Answers that end their connection."""

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus

from gateway.errors import ErrorReport


class ClosesWhenRead:
    """Closes as soon as nothing unread is left.

    Closing with unread input makes the kernel reset the connection, and the reset overtakes the answer.

    Args:
        transport: The connection's.
        close_when_read: Closes it.
    """

    __slots__ = ("_transport", "close")

    def __init__(self, transport: asyncio.Transport, close_when_read: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close_when_read

    def write(self, data: bytes) -> None:
        """Write; see ``asyncio.Transport``."""
        self._transport.write(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        """Write several; see ``asyncio.Transport``."""
        self._transport.writelines(pieces)

    def is_closing(self) -> bool:
        """See ``asyncio.Transport``."""
        return self._transport.is_closing()


def last_answer(report: ErrorReport) -> bytes:
    """An error as the bytes of a whole answer, for what is refused without ASGI."""
    body = report.body(None)
    lines = [*report.headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (report.status, HTTPStatus(report.status).phrase.encode(), head, body)

"""Answers that end their connection."""

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Iterable
from http import HTTPStatus

from backends.upstream.base import Headers
from gateway.envelope import header_value, read_headers
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


def told(report: ErrorReport, headers: Headers) -> ErrorReport:
    """The report under the public id of what it refuses: the client's, or a fresh one.

    Args:
        report: What is wrong.
        headers: Those that have come.
    """
    given = read_headers(headers).get(b"x-request-id", b"")[:256].decode("latin-1")
    public_id = given if given and given.isprintable() else uuid.uuid4().hex
    return dataclasses.replace(report, request_id=public_id)


def last_answer(report: ErrorReport) -> bytes:
    """An error as the bytes of a whole answer, for what is refused without ASGI."""
    body = report.body(report.request_id)
    lines = [*report.headers, (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
    if report.request_id is not None:
        lines.append((b"x-request-id", header_value(report.request_id)))
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (report.status, HTTPStatus(report.status).phrase.encode(), head, body)

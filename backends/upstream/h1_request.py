"""The head of an HTTP/1.1 request as bytes. Pure."""

import functools

from backends.errors import RequestUnsendable
from backends.upstream.base import Origin, UpstreamRequest


def request_head(origin: Origin, request: UpstreamRequest) -> bytes:
    """Request line and headers, ``host`` and framing included.

    Values that came from clients or key files pass through here last, so this is where nothing may end a line early.

    Raises:
        RequestUnsendable: A line break or NUL in a header, or anything but visible ASCII in the request line.
    """
    length = sum(map(len, request.body))
    lines = [_first_lines(origin, request.method, request.path), *map(b": ".join, request.headers)]
    if length or request.method != "GET":
        lines.append(b"content-length: %d" % length)
    head = b"\r\n".join(lines)
    breaks = len(lines)  # the first of them is two lines
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or head.find(b"\0") >= 0:
        raise RequestUnsendable("a header holds a line break or NUL")
    return head + b"\r\n\r\n"


@functools.lru_cache(maxsize=1024)
def _first_lines(origin: Origin, method: str, path: str) -> bytes:
    """The request line and ``host``: a few for each worker, since the data plane has few paths."""
    line = f"{method} {origin.path_prefix}{path} HTTP/1.1"
    if not line.isascii() or not line.isprintable() or line.count(" ") != 2:
        raise RequestUnsendable("the request line holds a space or a character that is not visible ASCII")
    return f"{line}\r\nhost: {origin.authority}".encode()

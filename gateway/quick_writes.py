"""The two writes that nearly all answers are made of.

uvicorn's own take two messages for a whole answer and look at every header and every state again; whatever is unusual
is left to them.
"""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from backends.upstream.base import Headers
from backends.upstream.h1_request import header_lines

# Larger bodies are not copied into one buffer with the head.
JOIN_BODY_BELOW_BYTES = 64 * 1024


def takes_whole(cycle: RequestResponseCycle) -> bool:
    """Whether a usual answer to ``cycle`` can be written at once."""
    return not (
        cycle.response_started
        or cycle.disconnected
        or not cycle.keep_alive
        or cycle.waiting_for_100_continue
        or cycle.access_log
        or cycle.flow.write_paused
        or cycle.scope["method"] == "HEAD"
    )


def write_whole(
    cycle: RequestResponseCycle, default_headers: Headers, status: int, headers: Headers, body: bytes
) -> bool:
    """Answer ``cycle`` at once.

    Args:
        cycle: The request.
        default_headers: Headers of every answer, as they stand now.
        status: The status.
        headers: Its own headers, ``content-length`` among them.
        body: The body.

    Returns:
        Whether that was done; ``False`` if it is for uvicorn to do.
    """
    if status in (204, 304) or not takes_whole(cycle):
        return False
    lines = header_lines([*default_headers, *headers])
    if lines is None:
        return False  # uvicorn raises
    cycle.response_started = cycle.response_complete = True
    if len(body) < JOIN_BODY_BELOW_BYTES:
        cycle.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[status], lines, body))
    else:
        cycle.transport.writelines([STATUS_LINE[status], lines, b"\r\n", body])
    cycle.message_event.set()
    cycle.on_response()
    return True


def write_piece(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Write a piece of a body that has begun and goes on; ``False`` if that is for uvicorn to do."""
    size = len(data)
    if not size or cycle.response_complete or cycle.disconnected or cycle.flow.write_paused:
        return False
    if cycle.chunked_encoding:  # never true of an answer to HEAD
        cycle.transport.write(b"%x\r\n%b\r\n" % (size, data))
        return True
    if size > cycle.expected_content_length or cycle.scope["method"] == "HEAD":
        return False
    cycle.expected_content_length -= size
    cycle.transport.write(data)
    return True

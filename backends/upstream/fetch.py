"""Small control calls: one request, one bounded body."""

from backends.errors import AnswerTooLarge
from backends.upstream.base import AnswerHead, Origin, UpstreamClient, UpstreamRequest

MAX_CONTROL_BODY_BYTES = 16 * 1024 * 1024


async def fetch(
    client: UpstreamClient, origin: Origin, request: UpstreamRequest, *, max_bytes: int = MAX_CONTROL_BODY_BYTES
) -> tuple[int, bytes]:
    """``fetch_answer`` with nothing but the status of the head."""
    head, body = await fetch_answer(client, origin, request, max_bytes=max_bytes)
    return head.status, body


async def fetch_answer(
    client: UpstreamClient, origin: Origin, request: UpstreamRequest, *, max_bytes: int = MAX_CONTROL_BODY_BYTES
) -> tuple[AnswerHead, bytes]:
    """Send ``request`` and return head and body. The caller sets the time limit; leaving early closes the call.

    Raises:
        UpstreamError: No answer, or one above ``max_bytes``.
    """
    call = client.send(origin, request)
    try:
        head = await call.head()
        parts: list[bytes] = []
        size = 0
        while data := await call.read():
            size += len(data)
            if size > max_bytes:
                raise AnswerTooLarge(max_bytes)
            parts.append(data)
        return head, b"".join(parts)
    finally:
        call.close()

"""Answers that are one document: sent on in one piece, or while they are read, where they are too long to be kept."""

from collections.abc import Callable
from typing import Protocol

from backends.errors import AnswerTooLarge, UpstreamError
from backends.upstream.base import AnswerHead
from gateway.answer import BodyAnswer, Usage, Verdict, passed_headers, unary_verdict
from gateway.client_side import ClientSide
from gateway.outcome import Outcome
from gateway.placement import Placed
from gateway.routes import Dialect

# A longer answer is sent on while it is read, so that its size does not become memory.
BUFFER_BYTES = 1024 * 1024


class _ClientSide(ClientSide, Protocol):
    """The same, where an engine names the rank that it ran on."""

    def with_rank(self, placed: Placed, verdict: Verdict, data: bytes) -> Verdict:
        """The verdict with the rank that the engine says it ran on."""


async def forward_document(
    client: _ClientSide,
    placed: Placed,
    head: AnswerHead,
    dialect: Dialect,
    limit_bytes: int,
    clock: Callable[[], float],
) -> Verdict:
    """Send on an answer of which only the head was read.

    Args:
        client: Where it goes; nothing was sent yet.
        placed: Who answers.
        head: The answer's head.
        dialect: Of the route.
        limit_bytes: Bound of the answer.
        clock: Monotonic seconds.

    Raises:
        AnswerTooLarge: It is, or says that it will be, above the limit; nothing was sent.
        UpstreamError: It broke off before anything was sent.
        CallEnded: This side ended the call.
    """
    if head.content_length is not None and head.content_length > limit_bytes:
        raise AnswerTooLarge(limit_bytes)
    buffer_bytes = min(BUFFER_BYTES, limit_bytes)
    call = placed.leg.call
    parts = [await call.read()]
    size = len(parts[0])
    while not call.is_complete and parts[-1] and size <= buffer_bytes:
        client.silent_since = clock()
        parts.append(await call.read())
        size += len(parts[-1])
    placed.leg.first_token()
    placed.member.last_byte_at = clock()
    if size <= buffer_bytes or (call.is_complete and size <= limit_bytes):
        body = placed.ids.apply(b"".join(parts))
        await client.send_whole(head.status, passed_headers(head), body)
        return client.with_rank(placed, unary_verdict(body, dialect), body)
    if size > limit_bytes:
        raise AnswerTooLarge(limit_bytes)
    return await _forward_long(client, placed, head, parts, limit_bytes, clock)


async def _forward_long(
    client: ClientSide,
    placed: Placed,
    head: AnswerHead,
    begun: list[bytes],
    limit_bytes: int,
    clock: Callable[[], float],
) -> Verdict:
    """Send on an answer of which a part was read.

    Args:
        client: Where it goes; nothing was sent yet.
        placed: Who answers.
        head: The answer's head.
        begun: What was read; taken over.
        limit_bytes: Bound of the answer; one that passes it is cut off, which the client sees.
        clock: Monotonic seconds.
    """
    call = placed.leg.call
    headers = passed_headers(head)
    if head.content_length is not None and placed.ids.keeps_length:
        headers.append((b"content-length", b"%d" % head.content_length))
    answer = BodyAnswer(placed.ids)
    await client.start(head.status, headers)
    try:
        for data in begun:
            if ready := answer.feed(data):
                await client.write(ready)
        begun.clear()
        while data := await call.read():
            placed.member.last_byte_at = client.silent_since = clock()
            ready = answer.feed(data)
            if answer.bytes_in > limit_bytes:
                raise AnswerTooLarge(limit_bytes)
            if ready:
                await client.write(ready)
    except UpstreamError as exc:
        client.abort()
        return Verdict(Outcome.TRUNCATED, False, Usage(), str(exc))
    await client.finish(answer.end())
    return answer.verdict()

"""Unary answers that are too long to be kept: sent on while they are read."""

from collections.abc import Callable

from backends.errors import AnswerTooLarge, UpstreamError
from backends.upstream.base import AnswerHead
from gateway.answer import BodyAnswer, Usage, Verdict, passed_headers
from gateway.client_side import ClientSide
from gateway.outcome import Outcome
from gateway.placement import Placed


async def forward_long(
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

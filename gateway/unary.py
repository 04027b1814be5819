"""Reading answers that are one document, or the refusal of a request."""

from backends.errors import AnswerTooLarge
from backends.upstream.base import AnswerHead, UpstreamCall
from backends.vllm.native_request import lacks_token_route
from gateway.answer import passed_headers
from gateway.engine_errors import engine_message
from gateway.errors import (
    BACKEND_AUTH,
    NO_TOKEN_ROUTE,
    EngineRefused,
    ErrorReport,
    GatewayError,
    WorkerUnfit,
    engine_failure,
)
from gateway.ids import IdMap
from gateway.outcome import Outcome


async def read_whole(call: UpstreamCall, head: AnswerHead, limit_bytes: int) -> bytes:
    """The body of an answer.

    Raises:
        AnswerTooLarge: It is, or says that it will be, above the limit.
        UpstreamError: It broke off.
        CallEnded: This side ended the call.
    """
    if head.content_length is not None and head.content_length > limit_bytes:
        raise AnswerTooLarge(limit_bytes)
    parts: list[bytes] = []
    size = 0
    while data := await call.read():
        size += len(data)
        if size > limit_bytes:
            raise AnswerTooLarge(limit_bytes)
        parts.append(data)
    return b"".join(parts)


async def refusal_of(call: UpstreamCall, ids: IdMap, head: AnswerHead, limit_bytes: int) -> GatewayError:
    """The engine's error answer as an exception; its 4xx bodies are the client's.

    Raises:
        UpstreamError: It could not be read.
        CallEnded: This side ended the call.
    """
    body = ids.apply(await read_whole(call, head, limit_bytes))
    message = engine_message(body)
    if lacks_token_route(head.status, body):
        return WorkerUnfit(NO_TOKEN_ROUTE)
    if head.status in (401, 403):
        return GatewayError(BACKEND_AUTH)
    if not 400 <= head.status < 500:
        return EngineRefused(engine_failure(head.status, message))
    outcome = Outcome.OVERLOADED if head.status == 429 else Outcome.REJECTED
    report = ErrorReport(head.status, "invalid_request", message, outcome)
    return EngineRefused(report, body=body, headers=passed_headers(head))

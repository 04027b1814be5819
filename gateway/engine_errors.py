"""What engines say when they refuse or fail, in whichever of their shapes. Pure."""

import msgspec

from gateway.errors import MAX_ENGINE_TEXT_CHARS, EngineRefused, ErrorReport, engine_failure
from gateway.outcome import Outcome


class _FinishReason(msgspec.Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason | None = None


class _Error(msgspec.Struct):
    message: str | None = None
    code: int | str | None = None


class _Event(msgspec.Struct):
    error: _Error | str | None = None
    meta_info: _MetaInfo | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str | None = None
    detail: str | None = None


_event = msgspec.json.Decoder(_Event)
_error_body = msgspec.json.Decoder(_ErrorBody)


def refusal_in(event_data: bytes) -> EngineRefused | None:
    """The engine's error, if an event that came first holds one.

    Engines answer many bad requests with status 200 and an error event, or with an abort that carries a status.
    While nothing has been sent to the client, the true status can still be given.

    Args:
        event_data: Payload of the first event.
    """
    if event_data.find(b'"error"') < 0 and event_data.find(b'"status_code":') < 0:
        return None
    try:
        event = _event.decode(event_data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if isinstance(event.error, str):
        return refused(500, event.error, body=event_data)
    if event.error is not None:
        code = str(event.error.code)
        status = int(code) if code.isdecimal() and len(code) == 3 else 500
        return refused(status, event.error.message or "", body=event_data)
    reason = event.meta_info.finish_reason if event.meta_info else None
    if reason is None or reason.type != "abort" or reason.status_code is None:
        return None
    return refused(reason.status_code, reason.message or "", body=None)


def refused(status: int, message: str, *, body: bytes | None) -> EngineRefused:
    """An engine's error by the status that it gave inside of an answer.

    Args:
        status: As given; what is no error status counts as 500.
        message: The engine's words.
        body: Its error's JSON, which the client gets where the request is at fault; ``None`` for our own form.
    """
    if not 400 <= status <= 599:
        status = 500
    if status >= 500:
        return EngineRefused(engine_failure(status, message))
    outcome = Outcome.OVERLOADED if status == 429 else Outcome.REJECTED
    report = ErrorReport(status, "invalid_request", message[:MAX_ENGINE_TEXT_CHARS], outcome)
    return EngineRefused(report, body=body, headers=[(b"content-type", b"application/json")])


def engine_message(body: bytes) -> str:
    """The text in an engine's error body, whichever of its shapes that has."""
    try:
        parsed = _error_body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:MAX_ENGINE_TEXT_CHARS].decode("utf-8", "replace")
    nested = parsed.error.message if isinstance(parsed.error, _Error) else parsed.error
    return (nested or parsed.message or parsed.detail or "")[:MAX_ENGINE_TEXT_CHARS]

"""Errors as the client sees them: one table from exception to status and body. Pure.

The shape is ``{"error": {"message", "type", "code", "param", "request_id"}}`` everywhere. An engine's own 4xx passes
through with its own body and never comes here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from backends.errors import (
    AnswerBroken,
    AnswerMalformed,
    AnswerTooLarge,
    ConnectFailed,
    ConnectionDropped,
    ConnectTimeout,
    UpstreamError,
)
from gateway.outcome import Outcome
from gateway.routes import Dialect
from routers.errors import ModelRequired, NoReadyWorker, NoRoom, NoSuchRank, QueueFull, RoutingError, UnknownModel

MAX_ENGINE_TEXT_CHARS = 8192
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """One error, ready to be told.

    Attributes:
        status: HTTP status, used while nothing has been sent.
        type: Short machine-readable name.
        message: For people; never holds credentials or worker addresses.
        outcome: How the request is counted.
        param: The request's field at fault.
        retry_after_s: Seconds for ``Retry-After``, ``None`` for none.
        allow: Methods for ``Allow``, ``None`` for none.
        request_id: The public id that it was told under, where that was before anybody served the request.
    """

    status: int
    type: str
    message: str
    outcome: Outcome
    param: str | None = None
    retry_after_s: int | None = None
    allow: str | None = None
    request_id: str | None = None

    def body(self, request_id: str | None) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": self.type,
            "code": self.status,
            "param": self.param,
            "request_id": request_id,
        }
        return orjson.dumps({"error": error})

    def event(self, request_id: str | None, dialect: Dialect = Dialect.NATIVE) -> bytes:
        """The same as one server-sent event, in the shape of the route's own error events."""
        if dialect is Dialect.MESSAGES:
            error = {"type": self.type, "message": self.message}
            body = orjson.dumps({"type": "error", "error": error, "request_id": request_id})
            return b"event: error\ndata: " + body + b"\n\n"
        if dialect is Dialect.RESPONSES:
            body = orjson.dumps({"type": "error", "code": self.type, "message": self.message, "param": self.param})
            return b"event: error\ndata: " + body + b"\n\n"
        return b"data: " + self.body(request_id) + b"\n\n"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers beside the body's own."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        return headers


class GatewayError(Exception):
    """Root of what this package raises on purpose; carries its report."""

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report.message)
        self.report = report


class InvalidRequest(GatewayError):
    """The request cannot be served as it is; no worker has seen it."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, type: str | None = None) -> None:
        super().__init__(ErrorReport(status, type or "invalid_request", message, Outcome.REJECTED, param))


class WorkerUnfit(GatewayError):
    """The worker lacks something that the request took for granted, as is known from now on."""


class EngineRefused(GatewayError):
    """The engine answered with an error of its own.

    Attributes:
        status: What the client gets.
        body: The engine's body for the client, ``None`` where the report's own is sent.
        headers: The engine's headers for the client.
    """

    def __init__(
        self, report: ErrorReport, *, body: bytes | None = None, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        super().__init__(report)
        self.body = body
        self.headers = headers


def too_large(limit_bytes: int) -> ErrorReport:
    """A request body above the limit."""
    message = f"the request body is larger than {limit_bytes} bytes"
    return ErrorReport(413, "request_too_large", message, Outcome.REJECTED)


def headers_too_large(limit_bytes: int) -> ErrorReport:
    """A request's line and headers above the limit."""
    return ErrorReport(431, "headers_too_large", f"request headers above {limit_bytes} bytes", Outcome.REJECTED)


def too_slow(what: str) -> ErrorReport:
    """A client that does not send what it has begun; ``what`` was missing."""
    return ErrorReport(408, "timeout", what, Outcome.TIMEOUT)


def unauthorized(*, is_admin: bool) -> ErrorReport:
    """A missing or wrong key."""
    kind = "admin API key" if is_admin else "API key"
    return ErrorReport(401, "unauthorized", f"a valid {kind} is needed: Authorization: Bearer KEY", Outcome.REJECTED)


def forbidden() -> ErrorReport:
    """An admin route, no admin key configured, and a client outside the allowed networks."""
    message = "admin routes are open to local clients only while no admin key is configured"
    return ErrorReport(403, "forbidden", message, Outcome.REJECTED)


def not_found(path: str, hint: str = "") -> ErrorReport:
    """A path that nothing serves; ``hint`` says what is served."""
    return ErrorReport(404, "not_found", f"there is no route {path[:200]!r}{hint}", Outcome.REJECTED)


def wrong_method(method: str, allowed: str) -> ErrorReport:
    """A route that exists, asked with another method."""
    message = f"{method[:20]} is not allowed here, use {allowed}"
    return ErrorReport(405, "method_not_allowed", message, Outcome.REJECTED, allow=allowed)


SHUTTING_DOWN = ErrorReport(
    503, "engine_shutdown", "the gateway is shutting down, try again", Outcome.SHUTDOWN, retry_after_s=RETRY_AFTER_S
)
INTERNAL = ErrorReport(500, "internal", "internal error, see the gateway's log", Outcome.ENGINE_ERROR)
BACKEND_AUTH = ErrorReport(
    502, "backend_auth", "the engine refused the gateway's own credentials", Outcome.ENGINE_ERROR
)
ABORTED = ErrorReport(499, "aborted", "the request was aborted", Outcome.ABORTED)
WORKER_REMOVED = ErrorReport(
    503, "unavailable", "the worker was removed", Outcome.SHUTDOWN, retry_after_s=RETRY_AFTER_S
)
TIMED_OUT = ErrorReport(504, "timeout", "the request took too long", Outcome.TIMEOUT)
ENGINE_DIED = ErrorReport(
    502, "engine_died", "two engines died under this request, so it is not tried again", Outcome.ENGINE_ERROR
)
NO_TOKEN_ROUTE = ErrorReport(
    501,
    "not_implemented",
    "the vLLM worker does not serve token ids, which /generate needs; start it with --enable-scale-out",
    Outcome.REJECTED,
)
CLIENT_GONE = ErrorReport(499, "client_closed", "the client closed the connection", Outcome.CLIENT_CLOSED)

_UPSTREAM: Mapping[type[UpstreamError], tuple[int, str, str]] = {
    ConnectTimeout: (504, "engine_timeout", "the engine took no connection in time"),
    ConnectFailed: (503, "unavailable", "the engine cannot be reached"),
    ConnectionDropped: (503, "unavailable", "the engine closed the connection before it answered"),
    AnswerBroken: (502, "engine_error", "the engine's answer broke off"),
    AnswerMalformed: (502, "engine_protocol", "the engine's answer is not as expected"),
    AnswerTooLarge: (502, "response_too_large", "the engine's answer is too large"),
}
_ROUTING: Mapping[type[RoutingError], tuple[int, str, Outcome, str | None]] = {
    ModelRequired: (400, "invalid_request", Outcome.REJECTED, "model"),
    UnknownModel: (404, "model_not_found", Outcome.REJECTED, "model"),
    NoReadyWorker: (503, "unavailable", Outcome.OVERLOADED, None),
    NoRoom: (429, "overloaded", Outcome.OVERLOADED, None),
    QueueFull: (429, "overloaded", Outcome.OVERLOADED, None),
    NoSuchRank: (400, "invalid_request", Outcome.REJECTED, None),
}


def report_of(error: Exception) -> ErrorReport:
    """The report for any exception that reaches the edge of a request; unknown ones are internal errors."""
    if isinstance(error, GatewayError):
        return error.report
    if isinstance(error, RoutingError):
        status, kind, outcome, param = _ROUTING.get(type(error), _ROUTING[NoReadyWorker])
        if isinstance(error, NoSuchRank):
            param = error.header
        return ErrorReport(status, kind, str(error), outcome, param, RETRY_AFTER_S if status in (429, 503) else None)
    if isinstance(error, UpstreamError):
        status, kind, message = _UPSTREAM.get(type(error), (502, "engine_error", "the engine could not be used"))
        if isinstance(error, AnswerTooLarge):
            message = f"the engine's answer is larger than {error.limit_bytes} bytes"
        retry_after_s = RETRY_AFTER_S if status == 503 else None
        return ErrorReport(status, kind, message, Outcome.ENGINE_ERROR, retry_after_s=retry_after_s)
    return INTERNAL


def engine_failure(status: int, engine_message: str) -> ErrorReport:
    """The report for an engine's 5xx, by the status that it gave."""
    text = engine_message[:MAX_ENGINE_TEXT_CHARS] or f"the engine answered with status {status}"
    if status in (502, 503, 504):
        is_full = "queue is full" in text
        kind, outcome = ("overloaded", Outcome.OVERLOADED) if is_full else ("unavailable", Outcome.ENGINE_ERROR)
        return ErrorReport(503, kind, text, outcome, retry_after_s=RETRY_AFTER_S)
    return ErrorReport(502, "engine_error", text, Outcome.ENGINE_ERROR)

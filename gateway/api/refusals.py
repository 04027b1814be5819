"""The gateway's error shape on the routes that FastAPI serves, and the two guards in front of them."""

import logging
import uuid
from collections.abc import Callable, Iterable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from gateway.auth import Keys
from gateway.envelope import MAX_ID_CHARS, header_value, read_headers
from gateway.errors import (
    INTERNAL,
    ErrorReport,
    GatewayError,
    InvalidRequest,
    forbidden,
    not_found,
    report_of,
    unauthorized,
    wrong_method,
)
from gateway.outcome import Outcome
from routers.errors import RoutingError

logger = logging.getLogger("forebay.api")


def refusal(report: ErrorReport, request: Request) -> Response:
    """The answer that tells ``report``."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in report.headers}
    given = request.headers.get("x-request-id", "")[:MAX_ID_CHARS]
    request_id = given if given and given.isprintable() else uuid.uuid4().hex
    headers["x-request-id"] = header_value(request_id).decode()
    return Response(report.body(request_id), report.status, headers)


def install_error_shape(app: FastAPI, engine_routes: Iterable[str] = ()) -> None:
    """Make every error of ``app`` look like those of the data plane.

    Args:
        app: The application.
        engine_routes: Control routes of engines, which are told to those who ask for one that is not here.
    """
    hint = (
        f"; of engines' control routes {', '.join(engine_routes)} go to all workers, and any other is called on one as "
        "/workers/{id}/call/ROUTE"
    )

    async def on_http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        if exc.status_code == 404:
            return refusal(not_found(request.url.path, hint), request)
        if exc.status_code == 405:
            return refusal(wrong_method(request.method, (exc.headers or {}).get("Allow", "")), request)
        kind = "request_too_large" if exc.status_code == 413 else "invalid_request"
        report = ErrorReport(exc.status_code, kind, str(exc.detail), Outcome.REJECTED)
        return refusal(report, request)

    async def on_invalid(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        # The first part says body or query; of a body that is no JSON the second is a position.
        names = [part for part in first["loc"][1:] if isinstance(part, str)]
        param = ".".join(names) or None
        return refusal(InvalidRequest(f"{where}: {first['msg']}", param=param).report, request)

    async def on_known(request: Request, exc: Exception) -> Response:
        return refusal(report_of(exc), request)

    async def on_unknown(request: Request, exc: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
        return refusal(INTERNAL, request)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(GatewayError, on_known)
    app.add_exception_handler(RoutingError, on_known)
    app.add_exception_handler(Exception, on_unknown)


def client_guard(keys: Keys) -> Callable[[Request], None]:
    """A dependency that lets only clients with a key through, if keys are configured."""

    def check(request: Request) -> None:
        if not keys.may_use(read_headers(request.headers.raw)):
            raise GatewayError(unauthorized(is_admin=False))

    return check


def may_administer(keys: Keys, request: Request) -> bool:
    """Whether the client may use admin features."""
    return keys.may_administer(read_headers(request.headers.raw), request.client.host if request.client else None)


def admin_guard(keys: Keys) -> Callable[[Request], None]:
    """A dependency that lets only administrators through."""

    def check(request: Request) -> None:
        if not may_administer(keys, request):
            raise GatewayError(unauthorized(is_admin=True) if keys.has_admin_keys else forbidden())

    return check

"""The error table: every exception to one status, type, outcome and body."""

import json

import pytest

from backends import errors as upstream
from gateway import errors
from gateway.errors import ErrorReport, GatewayError, InvalidRequest, engine_failure, report_of
from gateway.outcome import Outcome
from routers import errors as routing

ALL_UPSTREAM = [
    error for error in vars(upstream).values() if isinstance(error, type) and issubclass(error, upstream.UpstreamError)
]


class NewRoutingError(routing.RoutingError):
    """One that the table does not know."""


@pytest.mark.parametrize(
    ("error", "status", "kind", "outcome"),
    [
        pytest.param(InvalidRequest("no"), 400, "invalid_request", Outcome.REJECTED, id="refused here"),
        pytest.param(InvalidRequest("no", status=403, type="forbidden"), 403, "forbidden", Outcome.REJECTED, id="403"),
        pytest.param(upstream.ConnectTimeout("x"), 504, "engine_timeout", Outcome.ENGINE_ERROR, id="connect timeout"),
        pytest.param(upstream.ConnectFailed("x"), 503, "unavailable", Outcome.ENGINE_ERROR, id="refused"),
        pytest.param(upstream.ConnectionDropped("x"), 503, "unavailable", Outcome.ENGINE_ERROR, id="dropped"),
        pytest.param(upstream.AnswerBroken("x"), 502, "engine_error", Outcome.ENGINE_ERROR, id="broken"),
        pytest.param(upstream.AnswerMalformed("x"), 502, "engine_protocol", Outcome.ENGINE_ERROR, id="malformed"),
        pytest.param(upstream.AnswerTooLarge(5), 502, "response_too_large", Outcome.ENGINE_ERROR, id="too large"),
        pytest.param(upstream.RequestUnsendable("x"), 502, "engine_error", Outcome.ENGINE_ERROR, id="unsendable"),
        pytest.param(upstream.UpstreamError("x"), 502, "engine_error", Outcome.ENGINE_ERROR, id="any other"),
        pytest.param(routing.ModelRequired("x"), 400, "invalid_request", Outcome.REJECTED, id="g_2 model required"),
        pytest.param(routing.UnknownModel("x"), 404, "model_not_found", Outcome.REJECTED, id="a2_17 unknown model"),
        pytest.param(routing.NoReadyWorker("x"), 503, "unavailable", Outcome.OVERLOADED, id="a2_17 workerless"),
        pytest.param(routing.NoSuchRank("x", "h"), 400, "invalid_request", Outcome.REJECTED, id="g_4 no such rank"),
        pytest.param(NewRoutingError("x"), 503, "unavailable", Outcome.OVERLOADED, id="unknown routing error"),
        pytest.param(ValueError("secret"), 500, "internal", Outcome.ENGINE_ERROR, id="anything else"),
    ],
)
def test_the_table(error: Exception, status: int, kind: str, outcome: Outcome) -> None:
    report = report_of(error)
    assert (report.status, report.type, report.outcome) == (status, kind, outcome)
    assert report.retry_after_s == (1 if status == 503 else None)
    assert "secret" not in report.message


@pytest.mark.parametrize("error", ALL_UPSTREAM, ids=lambda error: str(error.__name__))
def test_no_upstream_error_tells_addresses(error: type[upstream.UpstreamError]) -> None:
    made = error(5) if error is upstream.AnswerTooLarge else error("10.0.0.5:30000 refused")
    assert "10.0.0.5" not in report_of(made).message


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (InvalidRequest("x", param="rid"), "rid"),
        (InvalidRequest("x"), None),
        (routing.UnknownModel("x"), "model"),
        (routing.ModelRequired("x"), "model"),
        (routing.NoReadyWorker("x"), None),
        (routing.NoSuchRank("x", "x-forebay-worker"), "x-forebay-worker"),
        (routing.NoSuchRank("x", "x-data-parallel-rank"), "x-data-parallel-rank"),
    ],
)
def test_the_field_at_fault_is_named(error: Exception, param: str | None) -> None:
    assert report_of(error).param == param


def test_the_one_shape() -> None:
    report = ErrorReport(503, "unavailable", 'a "b" é', Outcome.OVERLOADED, "model", 7)
    body = {
        "error": {
            "message": 'a "b" é',
            "type": "unavailable",
            "code": 503,
            "param": "model",
            "request_id": "r",
        }
    }
    assert json.loads(report.body("r")) == body
    assert report.event("r") == b"data: " + report.body("r") + b"\n\n"
    assert json.loads(report.body(None))["error"]["request_id"] is None
    assert report.headers == [(b"content-type", b"application/json"), (b"retry-after", b"7")]
    assert ErrorReport(400, "x", "y", Outcome.REJECTED).headers == [(b"content-type", b"application/json")]


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        pytest.param(500, "boom", (502, "engine_error", "boom", Outcome.ENGINE_ERROR), id="500"),
        pytest.param(501, "", (502, "engine_error", "the engine answered with status 501", Outcome.ENGINE_ERROR),
                     id="silent"),
        pytest.param(503, "The request queue is full.",
                     (503, "overloaded", "The request queue is full.", Outcome.OVERLOADED), id="queue full"),
        pytest.param(503, "warming up", (503, "unavailable", "warming up", Outcome.ENGINE_ERROR), id="503"),
        pytest.param(502, "x", (503, "unavailable", "x", Outcome.ENGINE_ERROR), id="502"),
        pytest.param(504, "x", (503, "unavailable", "x", Outcome.ENGINE_ERROR), id="504"),
        pytest.param(302, "x", (502, "engine_error", "x", Outcome.ENGINE_ERROR), id="a redirect"),
    ],
)  # fmt: skip
def test_engine_failures(status: int, message: str, expected: tuple[int, str, str, Outcome]) -> None:
    report = engine_failure(status, message)
    assert (report.status, report.type, report.message, report.outcome) == expected
    assert report.retry_after_s == (1 if expected[0] == 503 else None)


def test_engine_texts_are_bounded() -> None:
    assert len(engine_failure(500, "x" * 100_000).message) == errors.MAX_ENGINE_TEXT_CHARS == 8192


@pytest.mark.parametrize(
    ("report", "status", "says"),
    [
        (errors.too_large(10), 413, "larger than 10 bytes"),
        (errors.unauthorized(is_admin=False), 401, "valid API key"),
        (errors.unauthorized(is_admin=True), 401, "admin API key"),
        (errors.forbidden(), 403, "local clients"),
        (errors.not_found("/x" * 1000), 404, "'/x/x"),
        (errors.wrong_method("PATCH" * 100, "POST"), 405, "use POST"),
        (errors.SHUTTING_DOWN, 503, "shutting down"),
        (errors.CLIENT_GONE, 499, "client closed"),
    ],
)
def test_reports_of_the_edge(report: ErrorReport, status: int, says: str) -> None:
    assert report.status == status
    assert says in report.message
    assert len(report.message) < 300


def test_a_405_names_the_methods() -> None:
    assert (b"allow", b"POST, PUT") in errors.wrong_method("GET", "POST, PUT").headers


def test_gateway_errors_carry_their_report() -> None:
    report = errors.BACKEND_AUTH
    assert report_of(GatewayError(report)) is report
    assert str(GatewayError(report)) == report.message

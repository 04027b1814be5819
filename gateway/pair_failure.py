"""Failures of a request over a pair: from what was raised to what the pair's machine knows, and back. Pure."""

from dataclasses import replace

from backends.errors import AnswerBroken, ConnectFailed, ConnectionDropped
from backends.pair_types import PREFILL_PROTOCOL, Failure, Part
from backends.prefill_events import PrefillRefused
from backends.vllm.pd import HandoffUnusable
from gateway.answer import Verdict
from gateway.engine_errors import refused
from gateway.errors import RETRY_AFTER_S, EngineRefused, ErrorReport, GatewayError, report_of
from gateway.outcome import Outcome

# What ends with these has not been served, through no fault of the request.
_TRY_AGAIN = (ConnectFailed, ConnectionDropped, AnswerBroken)


class EndedByEngine(Exception):
    """The decode worker ended its answer by itself, with an error or an abort, after it had begun.

    Attributes:
        block: What it said, for the client.
        verdict: How that counts.
    """

    def __init__(self, block: bytes, verdict: Verdict) -> None:
        super().__init__(verdict.message or "the decode worker ended the request")
        self.block = block
        self.verdict = verdict


class PairFailed(GatewayError):
    """An attempt over a pair has failed.

    Attributes:
        failure: How, and on which side.
    """

    def __init__(self, failure: Failure) -> None:
        retry_after_s = RETRY_AFTER_S if failure.status in (429, 503) else None
        outcome = Outcome(failure.outcome)
        super().__init__(
            ErrorReport(failure.status, failure.type, failure.message, outcome, retry_after_s=retry_after_s)
        )
        self.failure = failure


def failure_of(error: Exception, part: Part) -> Failure:
    """What was raised while a leg was read, as a failure of that leg.

    Args:
        error: An ``UpstreamError``, ``GatewayError``, or ``EndedByEngine``.
        part: The leg.
    """
    if isinstance(error, HandoffUnusable):
        return replace(PREFILL_PROTOCOL, message=str(error), error=error)
    if isinstance(error, EndedByEngine):
        status, outcome = 502, error.verdict.outcome
        return Failure(status, "engine_error", str(outcome), str(error), part=part, error=error)
    cause = error
    if isinstance(error, PrefillRefused):
        cause = refused(error.status, str(error), body=error.body or None)
    report = report_of(cause)
    is_engines = isinstance(cause, EngineRefused) and report.status >= 500
    return Failure(
        status=report.status,
        type=report.type,
        outcome=str(report.outcome),
        message=report.message,
        is_retryable=isinstance(error, _TRY_AGAIN) or is_engines,
        part=part,
        error=cause,
    )


def raised(failure: Failure) -> Exception:
    """What the exchange is to see of a failure: an engine's refusal of the request as it is, for its body's sake."""
    error = failure.error
    if isinstance(error, EngineRefused) and error.report.status < 500:
        # Another one: that itself would hold the frames that it passes, and these the failure.
        return EngineRefused(error.report, body=error.body, headers=error.headers)
    if isinstance(error, GatewayError) and error.report.status < 500:
        return error
    return PairFailed(failure)

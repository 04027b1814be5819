"""Where one request goes, and where next when that fails."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from backends.errors import (
    AnswerBroken,
    AnswerTooLarge,
    CallClosed,
    ConnectFailed,
    ConnectionDropped,
    RequestUnsendable,
)
from backends.types import EngineKind
from gateway.answer import Verdict
from gateway.attempts import Attempts, Failure
from gateway.downstream import ClientRequest
from gateway.envelope import Envelope
from gateway.errors import ENGINE_DIED, RETRY_AFTER_S, EngineRefused, ErrorReport, GatewayError, WorkerUnfit, report_of
from gateway.native_prompts import ready_for_vllm
from gateway.outcome import Outcome
from gateway.pair_failure import PairFailed
from gateway.pair_placement import needs_one_worker
from gateway.placement import Attempt, place
from gateway.prompts import Prompt, prompt_of
from gateway.routes import Route
from gateway.services import Services
from gateway.waiting_room import Wanted
from routers.errors import NoReadyWorker
from routers.fleet import Member
from routers.types import Candidate

logger = logging.getLogger("forebay.exchange")

# What a request brings upon itself on any worker, and what a worker was never made for.
_REQUESTS_FAULT = (AnswerTooLarge, RequestUnsendable, WorkerUnfit)

_COMPLETE = Outcome.COMPLETE


class Dispatch:
    """Places one request, again and again until a worker has answered it or no other is left.

    Args:
        services: What all exchanges share.
        request: What came besides the body.
        route: The route.
        envelope: The request.
        model: Pool that serves it.
        is_stopped: Whether the request was stopped from this side meanwhile.

    Attributes:
        attempts: Those begun.
        needs_prompt: Something about the prompt must be found out before the request is placed.
    """

    __slots__ = (
        "_envelope",
        "_is_stopped",
        "_model",
        "_needs_tokens",
        "_prompt",
        "_request",
        "_route",
        "_services",
        "attempts",
        "needs_prompt",
    )

    def __init__(
        self,
        services: Services,
        request: ClientRequest,
        route: Route,
        envelope: Envelope,
        model: str,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._services = services
        self._request = request
        self._route = route
        self._envelope = envelope
        self._model = model
        self._is_stopped = is_stopped
        self._prompt: Prompt | None = None
        self._needs_tokens = services.fleet.has_vllm and route.path == "/generate"
        self.needs_prompt = self._needs_tokens or services.prefixes.are_wanted
        self.attempts = Attempts(services.limits.max_attempts)

    @property
    def wanted(self) -> Wanted:
        """What the request wants a rank for, where it has to wait for one."""
        is_alone = self._services.fleet.has_pairs(self._model) and needs_one_worker(
            self._services, self._route, self._envelope, self._model
        )
        return Wanted(self._request, self._route, self._envelope, self._model, self.attempts, needs_one_worker=is_alone)

    async def read_prompt(self) -> None:
        """Find out the prompt, for engines that take ids alone, and for a policy that looks at it.

        One that cannot be told costs a policy the overlap alone.

        Raises:
            CallClosed: The request was stopped meanwhile.
            GatewayError: It could not be tokenized now, and nobody can be given it as it is.
        """
        if self._needs_tokens:
            self._envelope = await ready_for_vllm(self._services, self._envelope, self._model)
            if self._is_stopped():
                raise CallClosed
        if self._services.prefixes.are_wanted:
            await self._read_prefix()

    async def _read_prefix(self) -> None:
        prefixes = self._services.prefixes
        native = self._envelope.native
        if native is not None and native.prompt_ids:
            self._prompt = prompt_of(self._envelope, self._model, dict.fromkeys(EngineKind, native.prompt_ids))
            return
        self._prompt = prefixes.known(self._route, self._envelope, self._model)
        if self._prompt is None:
            try:
                candidates = self._candidates()
            except NoReadyWorker:
                return  # it may wait for a paused one, and is placed by load then
            self._prompt = await prefixes.look_up(self._route, self._envelope, self._model, candidates)
            if self._is_stopped():
                raise CallClosed

    def _candidates(self) -> Sequence[Candidate]:
        fleet = self._services.fleet
        if not fleet.has_pairs(self._model):
            return fleet.candidates(self._model)
        pools = fleet.pools(self._model)
        return [*pools.prefill, *pools.regular, *pools.decode]

    def place(self) -> Attempt:
        """Begin an attempt: choose, book and send.

        Raises:
            RoutingError: Nothing can take the request.
            GatewayError: Nothing that is there ever could.
        """
        services = self._services
        started = services.clock()
        placed = place(
            services, self._route, self._envelope, self._model, self.attempts.failed, self._prompt, self.attempts.waited
        )
        services.metrics.route_seconds(services.clock() - started)
        if self._prompt is not None and placed.overlap_blocks is not None:
            services.kv_metrics.overlap(placed.overlap_blocks)
        self.attempts.begin()
        return placed

    def answered(self, placed: Attempt, verdict: Verdict) -> None:
        """An attempt has ended with an answer, whatever that says; its legs are the exchange's to end."""
        services, outcome = self._services, verdict.outcome
        services.metrics.attempt(placed.worker_id, outcome)
        is_complete = outcome is _COMPLETE
        # A stream that ends as it should, but for a finish reason, was ended by somebody else at the engine.
        is_cut = not is_complete and outcome is Outcome.TRUNCATED and not verdict.is_terminated
        self._judge(placed, placed.member, failed=is_cut or (not is_complete and outcome is Outcome.ENGINE_ERROR))
        if verdict.dp_rank is not None and verdict.dp_rank != placed.dp_rank:
            self._elsewhere(placed, verdict.dp_rank)
        if self._prompt is not None and is_complete:
            services.prefixes.finished(self._prompt, placed.choice)

    async def failed(self, placed: Attempt, error: Exception, public_id: str, *, has_begun: bool) -> bool:
        """An attempt has failed: settle it, and say whether the request goes to another worker.

        Args:
            placed: The attempt.
            error: Why.
            public_id: For the log.
            has_begun: The client has got something, so that nothing can be tried again.

        Raises:
            GatewayError: Two workers died under it, or the only one that there was.
        """
        member = placed.blamed(error)
        worker = member.worker
        report = report_of(error)
        cause = cause_of(error)
        self._services.metrics.attempt(worker.id, str(report.outcome))
        logger.info("request %s on %s: %s", public_id, worker.id, error)
        is_busy = report.type == "overloaded" or isinstance(cause, _REQUESTS_FAULT)
        is_stale = isinstance(cause, ConnectionDropped) and cause.was_reused
        self._judge(placed, member, failed=report.status >= 500 and not is_busy and not is_stale)
        if isinstance(cause, WorkerUnfit):
            self._services.native_workers.lacks(member, cause)
        if not any(leg.has_output for leg in placed.legs):
            self._services.prefixes.failed(placed.sent)
        placed.end()
        failure = await self._failure(member, error, report)
        if failure in (Failure.UNREACHABLE, Failure.DIED):
            member.lost_contact(str(cause))
        may_retry = self.attempts.may_retry(worker.id, failure)
        if self.attempts.deaths > 1:
            raise GatewayError(ENGINE_DIED) from error
        is_wanted = not self._is_stopped() and not any(leg.was_called_off for leg in placed.legs)
        is_open = is_wanted and not has_begun and not self._services.is_draining
        if may_retry and is_open and self._services.waiting.is_hopeful(self.wanted):
            return True
        if failure is Failure.DIED and not has_begun and report.status == 502:  # a pair whose answer broke off
            raise GatewayError(replace(report, status=503, type="unavailable", retry_after_s=RETRY_AFTER_S)) from error
        return False

    async def _failure(self, member: Member, error: Exception, report: ErrorReport) -> Failure:
        cause = cause_of(error)
        if isinstance(error, PairFailed) and not error.failure.is_retryable:
            return Failure.FINAL
        if isinstance(cause, ConnectFailed):
            return Failure.UNREACHABLE
        if isinstance(cause, WorkerUnfit):
            return Failure.UNFIT
        # Of a pair's answer the client has got nothing, even if it broke off.
        dropped = (ConnectionDropped, AnswerBroken) if isinstance(error, PairFailed) else ConnectionDropped
        if isinstance(cause, dropped) and not self._is_stopped():
            # Whether the worker is still there decides if another one may be risked for this request.
            if not await self._services.is_alive(member.worker):
                return Failure.DIED
            is_stale = isinstance(cause, ConnectionDropped) and cause.was_reused
            return Failure.STALE if is_stale else Failure.DROPPED
        if isinstance(cause, EngineRefused) and (report.status == 503 or isinstance(error, PairFailed)):
            return Failure.BUSY
        return Failure.FINAL

    def _elsewhere(self, placed: Attempt, dp_rank: int) -> None:
        """The engine ran the request on another rank than the chosen one; told once a worker, counted always."""
        if self._services.metrics.rank_mismatch(placed.worker_id) == 1:
            logger.warning(
                "worker %s ran a request on rank %d that was sent to rank %s: its ranks' loads and caches are not what "
                "they seem; is a proxy between that drops routed_dp_rank, or does the engine run without DP attention?",
                placed.worker_id,
                dp_rank,
                placed.dp_rank,
            )

    def _judge(self, placed: Attempt, member: Member, *, failed: bool) -> None:
        """Tell the breaker of one of the workers; what a client did wrong, or its leaving, is not its fault."""
        if self._is_stopped():
            member.breaker.released()
        elif failed:
            self._services.fleet.failed(member, self._services.clock())
        else:
            self._services.fleet.succeeded(member)
        for other in placed.members:
            if other is not member:
                if placed.has_done_its_part(other):
                    self._services.fleet.succeeded(other)
                else:
                    other.breaker.released()


def cause_of(error: Exception) -> Exception:
    """What is behind a pair's failure."""
    return (error.failure.error or error) if isinstance(error, PairFailed) else error

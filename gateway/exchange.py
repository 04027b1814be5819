"""One client's request from its body to its end: the only path on which requests are served.

Knows neither ASGI nor an engine's field names. Ends in exactly one outcome, whatever goes wrong.
"""

import functools
import logging

from backends.errors import CallEnded, UpstreamError
from backends.leg_events import Cause
from gateway.access_log import AccessRecord
from gateway.answer import Usage, Verdict
from gateway.deadlines import Deadlines
from gateway.direct import Spawn
from gateway.dispatch import Dispatch
from gateway.downstream import ClientRequest, Downstream
from gateway.envelope import Envelope, header_value, parse_envelope
from gateway.errors import (
    ABORTED,
    CLIENT_GONE,
    INTERNAL,
    EngineRefused,
    ErrorReport,
    GatewayError,
    InvalidRequest,
    report_of,
)
from gateway.outcome import Outcome
from gateway.placement import Attempt, Placed
from gateway.relay import AnswerRelay
from gateway.routes import Route
from gateway.screening import refuse_engine_state
from gateway.services import Services
from gateway.stopping import Stop
from routers.errors import RoutingError

logger = logging.getLogger("forebay.exchange")

_NO_USAGE = Usage()
_CLIENT_CLOSED = Outcome.CLIENT_CLOSED


class Exchange:
    """Serves one request.

    Args:
        services: What all exchanges share.
        route: The route that was asked for.
        request: What came besides the body.
        downstream: Where the answer goes.
    """

    __slots__ = (
        "_bytes_in",
        "_deadlines",
        "_dispatch",
        "_downstream",
        "_engine_ids",
        "_envelope",
        "_error",
        "_model",
        "_outcome",
        "_placed",
        "_public_id",
        "_relay",
        "_report",
        "_request",
        "_route",
        "_sample_ids",
        "_services",
        "_started_at",
        "_stop",
        "_usage",
    )

    def __init__(self, services: Services, route: Route, request: ClientRequest, downstream: Downstream) -> None:
        self._services = services
        self._route = route
        self._request = request
        self._downstream = downstream
        self._relay = AnswerRelay(downstream, services.limits, services.clock, route.dialect)
        self._started_at = services.clock()
        self._envelope: Envelope | None = None
        self._public_id = ""
        self._model = ""
        self._placed: Attempt | None = None
        self._engine_ids: list[str] = []
        self._sample_ids: tuple[str, ...] = ()
        self._dispatch: Dispatch | None = None
        self._bytes_in = 0
        self._error: Exception | None = None
        self._stop: Stop | None = None
        self._deadlines: Deadlines | None = None
        self._outcome: Outcome | None = None
        self._report: ErrorReport | None = None
        self._usage = _NO_USAGE
        services.live.add(self)

    async def run(self, body: bytes) -> None:
        """Serve the request whose whole body is ``body``; returns when the client has its answer or is gone."""
        self._send(body)
        await self._complete()

    def begin(self, body: bytes, spawn: Spawn) -> None:
        """Serve the request whose whole body is ``body``; see ``Serving``.

        The usual request for one document needs no task: it is placed here, and answered as its answer comes.
        """
        self._send(body)
        placed = self._placed
        if not (
            isinstance(placed, Placed)
            and placed.is_plain
            and placed.leg.call.call_when_ready(functools.partial(self._answer_or_spawn, placed, spawn))
        ):
            spawn(self._complete)

    def _answer_or_spawn(self, placed: Placed, spawn: Spawn) -> None:
        """Something has come of the only leg: its whole answer, most often, or it has ended otherwise."""
        try:
            is_over = self._stop is None and self._answer(placed)
        except Exception as exc:  # noqa: BLE001 -- raised again in the task
            self._error = exc
            is_over = False
        if not is_over:
            spawn(self._complete)

    def _answer(self, placed: Placed) -> bool:
        """Send the answer and be done, if that needs no waiting."""
        verdict, dispatch = self._relay.answer_now(placed), self._dispatch
        if verdict is None:
            return False
        assert dispatch is not None
        dispatch.answered(placed, verdict)
        self._settle(verdict)
        self._let_go()
        self._close()
        return True

    async def _complete(self) -> None:
        """Serve what was begun to its end."""
        try:
            if self._stop is None:
                self._settle(await self._serve())
        except CallEnded:
            if self._stop is None:  # else the cause says why
                await self._fail(ABORTED, None)
        except (GatewayError, RoutingError, UpstreamError) as exc:
            await self._fail(report_of(exc), exc)
        except Exception:
            logger.exception("request %s failed", self._public_id)
            await self._fail(INTERNAL, None)
        finally:
            await self._finish()

    async def refuse(self, report: ErrorReport, *, bytes_in: int = 0) -> None:
        """Answer with an error without serving; for what is found out before the body is complete."""
        self._bytes_in = bytes_in
        self._downstream.watch(self._client_gone)
        try:
            await self._fail(report, None)
        finally:
            await self._finish()

    async def abandon(self, bytes_in: int) -> None:
        """End a request whose body will never be complete: its client left, or was refused by the connection."""
        self._bytes_in = bytes_in
        refusal, relay = self._downstream.refusal, self._relay
        if refusal is None:
            self._stop = self._stop or Stop(Cause.CLIENT_GONE)
        else:
            self._report, self._outcome = refusal, refusal.outcome
            self._public_id = refusal.request_id or ""
            relay.status, relay.bytes_out = refusal.status, len(refusal.body(refusal.request_id))
            relay.first_byte_at = self._services.clock()
        self._known_id()
        await self._finish()

    # From outside, at any time.

    def stop(self, cause: Cause, report: ErrorReport | None = None) -> None:
        """Stop the request for good, and say ``report`` rather than what the cause does; see ``LiveRequest.stop``."""
        if self._outcome is not None or self._stop is not None:
            return
        self._stop = stop = Stop(cause, report)
        self._services.waiting.leave(self)
        if self._placed is not None:
            self._placed.cancel(cause)
        if cause is not Cause.CLIENT_GONE:
            stop.cut_later(self._downstream.abort)

    @property
    def awaits_output(self) -> bool:
        """No output yet of what will show some before its end; see ``deadlines.Watched``."""
        return self._placed is None or self._placed.awaits_output

    @property
    def silent_since(self) -> float | None:
        """Since when the engine has been silent inside an answer; see ``deadlines.Watched``."""
        return self._relay.silent_since

    def is_on(self, worker_id: str) -> bool:
        """Whether that worker serves the request now; see ``LiveRequest.is_on``."""
        return self._placed is not None and self._placed.is_on(worker_id)

    def abort(self, item_id: str | None) -> str | None:
        """Have the engine stop the request or an item of it; see ``LiveRequest.abort``."""
        placed, envelope = self._placed, self._envelope
        if placed is None or envelope is None:
            if self not in self._services.waiting:
                return None
            self.stop(Cause.CLIENT_ABORT)
            return ""
        if not placed.is_live:
            if self._outcome is not None or self._stop is not None:
                return None
            self.stop(Cause.CLIENT_ABORT)  # between two attempts: there is to be no other one
        elif not placed.can_be_called_off(is_item=bool(item_id)):
            self.stop(Cause.CLIENT_ABORT)  # closing is all there is, or the engine knows nothing of it yet
        elif not placed.call_off(envelope, item_id):
            return None
        return placed.worker_id

    def _client_gone(self) -> None:
        self.stop(Cause.CLIENT_GONE)

    # Serving.

    def _send(self, body: bytes) -> None:
        """Read the request, and send it if that needs no waiting; what goes wrong is for ``_serve`` to raise."""
        self._bytes_in = len(body)
        self._downstream.watch(self._client_gone)
        if not (limits := self._services.limits.time).are_off:
            self._deadlines = Deadlines(
                limits, self, self._services.clock, functools.partial(self.stop, Cause.DEADLINE)
            )
        try:
            if self._stop is None:
                self._dispatch = dispatch = self._read(body)
                if not dispatch.needs_prompt:
                    self._services.waiting.place_now(self._place)
        except Exception as exc:  # noqa: BLE001 -- raised again in the task
            self._error = exc

    def _read(self, body: bytes) -> Dispatch:
        services, request = self._services, self._request
        self._envelope = envelope = parse_envelope(
            self._route,
            body,
            request.headers,
            request.by_name,
            fallback_id=services.new_id(),
            max_response_bytes=services.limits.max_response_bytes,
        )
        self._public_id = envelope.public_id
        self._relay.identity = lambda: [(b"x-request-id", envelope.header_id)]  # until it is placed
        services.live.name(self, envelope.public_id, envelope.item_ids)
        if envelope.worker_id is not None and not request.is_admin:
            raise InvalidRequest("x-forebay-worker needs the admin API key", param="x-forebay-worker", status=403)
        self._model = services.fleet.model_of(envelope.model)
        refuse_engine_state(envelope.body, services.fleet.engines_serving(self._model))
        return Dispatch(services, request, self._route, envelope, self._model, self._is_stopped)

    async def _serve(self) -> Verdict:
        if self._error is not None:
            raise self._error
        services, dispatch, placed = self._services, self._dispatch, self._placed
        assert dispatch is not None
        if placed is None and dispatch.needs_prompt:
            await dispatch.read_prompt()
        while True:
            if placed is None:
                if not services.waiting.place_now(self._place):
                    await services.waiting.wait(self, dispatch.wanted, self._place)
                placed = self._placed
                assert placed is not None
            try:
                verdict = await self._relay.forward(placed)
            except (UpstreamError, GatewayError) as exc:
                has_begun = bool(self._relay.status)
                if not await dispatch.failed(placed, exc, self._public_id, has_begun=has_begun):
                    raise
                placed = None
            else:
                dispatch.answered(placed, verdict)
                return verdict

    def _place(self) -> None:
        """Choose a rank and send; called as the request comes, or when it is its turn."""
        envelope, dispatch = self._envelope, self._dispatch
        assert envelope is not None
        assert dispatch is not None
        placed, before = dispatch.place(), self._placed
        if before is not None:
            self._engine_ids += before.sent_ids
        self._placed = placed
        if placed.sample_ids and not self._sample_ids:
            self._sample_ids = placed.sample_ids
            self._services.live.name_items(self, self._sample_ids)
        self._relay.identify(envelope, placed, dispatch.attempts.count)

    def _is_stopped(self) -> bool:
        return self._stop is not None

    def _settle(self, verdict: Verdict) -> None:
        self._usage = verdict.usage
        if self._stop is not None and self._stop.is_cut:
            return  # the client did not get what its engine has completed
        self._outcome = verdict.outcome
        if verdict.message:
            self._report = ErrorReport(self._relay.status, "engine_error", verdict.message, verdict.outcome)

    async def _fail(self, report: ErrorReport, error: Exception | None) -> None:
        """Tell the client, in the way that is still open: a status, an error event, or a cut connection."""
        if self._stop is not None:
            return
        self._report = report
        self._outcome = report.outcome
        if isinstance(error, EngineRefused) and error.body is not None:
            await self._relay.pass_refusal(error)
        else:
            self._outcome = await self._relay.fail(report, self._known_id())

    def _known_id(self) -> str:
        """The public id, also for requests that could not be read far enough to know it."""
        if not self._public_id:
            header = self._request.by_name.get(b"x-request-id", b"")[:256].decode("latin-1")
            self._public_id = header if header and header.isprintable() else self._services.new_id()
            name = header_value(self._public_id)
            self._relay.identity = lambda: [(b"x-request-id", name)]
        return self._public_id

    async def _finish(self) -> None:
        """End what is left and tell the client of a stop; runs exactly once, on every way out of a task."""
        self._let_go()
        report = self._stop.report if self._stop is not None else None
        if self._outcome is None and report is not None:
            self._report = report
            self._outcome = report.outcome
            await self._relay.fail(report, self._known_id())
        elif self._outcome is None:
            self._report = CLIENT_GONE
            self._outcome = Outcome.CLIENT_CLOSED
        self._close()

    def _let_go(self) -> None:
        """End what is left."""
        self._downstream.watch(None)
        if self._deadlines is not None:
            self._deadlines.cancel()
        if self._placed is not None:
            self._placed.end()

    def _close(self) -> None:
        """Write the one record of the request."""
        if self._stop is not None:
            self._stop.over()
        ids = {self._public_id, *self._envelope.item_ids, *self._sample_ids} if self._envelope else ()
        self._services.live.remove(self, ids)
        self._record(self._outcome or Outcome.ENGINE_ERROR)
        # Cycles would be the garbage collector's, at a sixth of all time.
        self._dispatch = self._deadlines = self._error = None

    def _record(self, outcome: Outcome) -> None:
        services, relay, placed, envelope = self._services, self._relay, self._placed, self._envelope
        request, usage, path = self._request, self._usage, self._route.path
        duration_s = services.clock() - self._started_at
        status = CLIENT_GONE.status if outcome is _CLIENT_CLOSED else relay.status
        first_byte_s = relay.first_byte_at - self._started_at if relay.first_byte_at is not None else None
        services.metrics.request_finished(path, self._model, outcome, status, duration_s, first_byte_s)
        prefill = placed.prefill if placed is not None else None
        services.log_access(
            AccessRecord(
                time=services.wall_clock(),
                method=request.method,
                route=path,
                path=request.path,
                status=status,
                outcome=outcome,
                request_id=self._public_id or None,
                engine_ids=(*self._engine_ids, *(placed.sent_ids if placed else ())),
                worker=placed.worker_id if placed else None,
                dp_rank=placed.dp_rank if placed else None,
                prefill_worker=prefill.member.worker.id if prefill else None,
                prefill_dp_rank=prefill.dp_rank if prefill else None,
                attempts=self._dispatch.attempts.count if self._dispatch else 0,
                stream=envelope.is_stream if envelope else False,
                model=self._model or None,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                tokens_seen=relay.events_seen or None,
                bytes_in=self._bytes_in,
                bytes_out=relay.bytes_out,
                duration_s=duration_s,
                first_byte_s=first_byte_s,
                queue_s=self._dispatch.attempts.queue_s if self._dispatch else None,
                error=self._report.message if self._report else None,
            )
        )

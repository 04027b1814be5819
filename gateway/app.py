"""Composition root: builds the parts and wires them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network

from fastapi import FastAPI

from backends.abort_supervisor import AbortSupervisor
from backends.control import get_status
from backends.errors import UpstreamError
from backends.leg_events import Cause, LegTimes
from backends.pair_types import Overlap, PairTimes
from backends.sglang.backend import SGLangBackend
from backends.types import EngineKind, Worker
from backends.upstream.base import UpstreamClient
from backends.upstream.h1 import H1Client
from backends.upstream.httpx_client import HttpxClient
from backends.upstream.tls import client_context
from backends.vllm.backend import VLLMBackend
from backends.worker_spec import WorkerSpec
from gateway.access_log import AccessLog
from gateway.api.control import control_router
from gateway.api.explain import explain_router
from gateway.api.fan_out import LIMITS_S, FanOuts
from gateway.api.fleet import fleet_router
from gateway.api.health import health_router
from gateway.api.kv_relays import kv_relays_router
from gateway.api.models import models_router
from gateway.api.refusals import install_error_shape
from gateway.api.workers import workers_router
from gateway.auth import Keys
from gateway.coalescing import Coalescer
from gateway.data_plane import DataPlane
from gateway.deadlines import TimeLimits
from gateway.fleet_control import FleetControl
from gateway.ids import fresh_ids
from gateway.key_files import read_key_file, resolve_worker_keys
from gateway.kv_listen import KvListener
from gateway.kv_listen_options import listen_for_relays
from gateway.kv_metrics import KvMetrics
from gateway.kv_view import KvView
from gateway.lifespan import WatchTimes
from gateway.live import LiveLegs, LiveRequests
from gateway.metrics import Metrics
from gateway.pair_metrics import PairMetrics
from gateway.prefill_tails import PrefillTails
from gateway.prefixes import Prefixes
from gateway.services import Limits, Services
from gateway.settings import Settings, SettingsError, read_config_workers
from gateway.tasks import OwnedTasks
from gateway.tokens.option import parse_tokenizer_options
from gateway.tokens.service import PromptTokenizers
from gateway.waiting_room import WaitingRoom
from routers.admission import AdmissionQueue
from routers.cost import CostParameters
from routers.fleet import Fleet, Member, WorkerState
from routers.kv_aware import KvOptions
from routers.registry import make_pairs, make_policy

logger = logging.getLogger("forebay")

# How long legs get to end after their requests were stopped at the drain's deadline.
STOP_GRACE_S = 1.0
# Bodies of requests that wait for a worker, all together.
QUEUE_MAX_BYTES = 512 * 1024 * 1024


class Gateway:
    """A gateway: its parts, its life, and the ASGI application. Made on a running loop.

    Args:
        settings: The effective settings.
        access_log: Takes the access lines.

    Attributes:
        services: What requests are served with.
        workers: Adds and removes workers.
        fan_outs: Sends control routes to all workers.
        asgi: The ASGI application.
        drained: Set when the drain after ``begin_drain`` is over.
        failed: Name of the service loop whose end made the gateway unusable, ``None`` while all run.
    """

    def __init__(self, settings: Settings, access_log: AccessLog) -> None:
        self.settings = settings
        self._access_log = access_log
        uses_tls = any(spec.url.startswith("https:") for spec in settings.workers)
        tls = client_context(None, insecure=False) if uses_tls else None  # reading all authorities takes a while
        self._client: UpstreamClient
        if settings.upstream_client == "httpx":
            self._client = HttpxClient(connect_timeout_s=settings.connect_timeout_s, tls=tls, resends_stale=False)
        else:
            self._client = H1Client(connect_timeout_s=settings.connect_timeout_s, tls=tls, resends_stale=False)
        # Probes and aborts keep to their own connections: they must not wait behind traffic, nor be counted as it.
        self._control = H1Client(connect_timeout_s=settings.connect_timeout_s, tls=tls)
        # Calls of control routes may change an engine, so none is sent twice: each has a connection of its own, which
        # cannot turn out to be stale.
        self._commands = H1Client(
            connect_timeout_s=settings.connect_timeout_s, idle_limit_s=0.0, tls=tls, resends_stale=False
        )
        self._drains = OwnedTasks("drain")
        self.drained = asyncio.Event()
        self.failed: str | None = None
        for spec in settings.workers:
            resolve_worker_keys(spec)  # a missing variable is told at once
        self.kv_metrics = KvMetrics(lambda worker, dp_rank: self.kv.blocks(worker, dp_rank))
        self.kv = KvView(self.kv_metrics, lambda worker_id: self.workers.kv_setting(worker_id))
        self.services = self._make_services(settings)
        self.fan_outs = FanOuts(self.services, self._commands)
        self.keys = Keys(
            read_key_file(settings.api_key_file) if settings.api_key_file else (),
            read_key_file(settings.admin_api_key_file) if settings.admin_api_key_file else (),
            [ip_network(network) for network in settings.admin_allow],
        )
        self.workers = FleetControl(
            fleet=self.services.fleet,
            backends=self.services.backends,
            times=WatchTimes(
                interval_s=settings.health_interval_s,
                timeout_s=settings.health_timeout_s,
                backoff_max_s=settings.identify_backoff_max_s,
            ),
            live=self.services.live,
            legs=self.services.legs,
            metrics=self.services.metrics,
            keys_of=resolve_worker_keys,
            on_fatal=self._loop_failed,
            unhealthy_after=settings.unhealthy_after,
            healthy_after=settings.healthy_after,
            breaker_failures=settings.breaker_failures,
            breaker_open_s=settings.breaker_open_s,
            max_in_flight=settings.max_in_flight_per_worker,
        )
        self.kv_listener: KvListener | None = listen_for_relays(settings, self.kv, self.services.fleet, self.workers)
        self._file_workers = self._read_file_workers(settings)
        self.asgi = DataPlane(self.services, self.keys, self._make_fastapi())

    def _make_services(self, settings: Settings) -> Services:
        live = LiveRequests()
        fleet = Fleet(
            self._worker_changed,
            lambda: self.services.waiting.wake(),
            time.monotonic if settings.kv_prefill_load_model == "observed" else None,
        )
        metrics = Metrics(
            in_flight=lambda: len(live),
            knows_model=lambda model: model in fleet.models,
            access_log_dropped=lambda: self._access_log.dropped_total,
            queued=lambda: len(self.services.waiting),
        )
        metrics.add(self.kv_metrics.families)
        tails = PrefillTails()
        pair_metrics = PairMetrics(lambda: len(tails))
        metrics.add(pair_metrics.families)
        aborter = AbortSupervisor(
            self._control,
            metrics,
            times=LegTimes(delay_s=settings.abort_delay_s, handoff_drain_s=settings.handoff_drain_timeout_s),
        )
        cost = CostParameters(
            prefill_load_scale=settings.kv_prefill_load_scale,
            recompute_weight=settings.kv_recompute_weight,
            decode_active_request_weight=settings.kv_request_weight,
        )
        options = KvOptions(
            temperature=settings.kv_temperature,
            guard=settings.kv_guard,
            max_wait_tokens=settings.kv_max_wait_tokens,
            max_wait_ratio=settings.kv_max_wait_ratio,
            recompute=settings.kv_recompute,
        )
        policy = make_policy(settings.policy, settings.seed, cost, **options)
        prefixes = Prefixes(
            policy.name,
            self.kv,
            fleet,
            _tokenizers(settings),
            self._control,
            time.monotonic,
            self.kv_metrics.mismatch,
        )
        coalescer = Coalescer(settings.kv_coalesce_tokens, prefixes, metrics.queue_seconds, time.monotonic)
        self.kv.on_stored = coalescer.stored
        metrics.add(coalescer.families)
        return Services(
            limits=Limits(
                max_body_bytes=settings.max_body_bytes,
                max_response_bytes=settings.max_response_bytes,
                max_attempts=settings.max_attempts,
                sse_done_after_error=settings.sse_done_after_error,
                sse_keepalive_s=settings.sse_keepalive_s,
                folds_unary=settings.upstream_mode == "incremental",
                native_n=settings.native_n,
                native_increments=settings.native_increments,
                client_timeout_s=settings.client_timeout_s,
                time=TimeLimits(
                    settings.request_timeout_s or 0.0,
                    settings.first_token_timeout_s or 0.0,
                    settings.stall_timeout_s or 0.0,
                ),
                pair_times=PairTimes(
                    header_timeout_s=settings.prefill_header_timeout_s,
                    hold_s=settings.prefill_hold_timeout_s,
                    max_handoff_age_s=settings.handoff_max_age_s,
                ),
                overlap=Overlap(settings.prefill_overlap),
            ),
            fleet=fleet,
            policy=policy,
            pairs=make_pairs(settings.policy, settings.seed, settings.short_prompt_tokens, cost, **options),
            client=self._client,
            backends={
                EngineKind.SGLANG: SGLangBackend(self._control),
                EngineKind.VLLM: VLLMBackend(self._control),
            },
            aborter=aborter,
            waiting=_waiting_room(settings, fleet, metrics),
            live=live,
            legs=LiveLegs(),
            kv=self.kv,
            kv_metrics=self.kv_metrics,
            prefixes=prefixes,
            coalescer=coalescer,
            metrics=metrics,
            log_access=self._access_log.write,
            clock=time.monotonic,
            wall_clock=time.time,
            is_alive=self._is_alive,
            new_id=fresh_ids(),
            tails=tails,
            pair_metrics=pair_metrics,
        )

    async def _is_alive(self, worker: Worker) -> bool:
        """Ask a worker that has just dropped a connection; a dying engine refuses, or drops this one too."""
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await get_status(self._control, worker, "/ping")
        except (UpstreamError, TimeoutError):
            return False
        return True

    def _worker_changed(self, member: Member) -> None:
        metrics, prefixes = self.services.metrics, self.services.prefixes
        metrics.worker_ready(member.worker.id, member.state is WorkerState.READY)
        metrics.worker_weights(member.worker.id, member.weight_number)
        is_gone = self.services.fleet.get(member.worker.id) is None
        if is_gone:
            self.kv.forget(member.worker.id)
        elif member.facts is not None:
            prefixes.weights_are(member.worker.id, member.facts.weight_version)
        if is_gone or self.kv.changed(member):
            self.services.pairs.health.forget(member.worker.id)
            prefixes.parity.forget(member.worker.id)
            prefixes.forget(member.worker.id)
        if member.is_paused:
            self.services.aborter.paused(member.worker.id)
        else:
            self.services.aborter.resumed(member.worker.id)
        self.services.waiting.wake()

    def _make_fastapi(self) -> FastAPI:
        app = FastAPI(title="Forebay", docs_url=None, redoc_url=None, openapi_url=None, lifespan=self._lifespan)
        install_error_shape(app, LIMITS_S)
        app.include_router(health_router(self.services))
        app.include_router(models_router(self.services, self.keys))
        app.include_router(control_router(self.services, self.keys))
        app.include_router(explain_router(self.services, self.keys))
        app.include_router(kv_relays_router(self.kv, self.kv_listener, self.keys))
        app.include_router(workers_router(self.services, self.keys, self.drain_tasks))
        drain_s = self.settings.drain_timeout_s
        app.include_router(fleet_router(self.services, self.keys, self.workers, self._commands, self.fan_outs, drain_s))
        return app

    def drain_tasks(self) -> int:
        """Number of drains under way, the gateway's own and those of workers."""
        return len(self._drains) + self.workers.drain_tasks

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        for spec in self.settings.workers:
            self.workers.add(spec)
        try:
            yield
        finally:
            await self._close()

    def _loop_failed(self, name: str) -> None:
        self.failed = name
        self.services.is_draining = True
        self.drained.set()

    @staticmethod
    def _read_file_workers(settings: Settings) -> tuple[WorkerSpec, ...] | None:
        """The file's workers, ``None`` where those of the command line or the environment stand in their place."""
        if settings.config is None:
            return None
        from_file = read_config_workers(settings.config)
        return from_file if from_file == settings.workers else None

    def reload(self) -> None:
        """Read the configuration file's workers again: new ones are added, missing ones drained and removed."""
        if self.settings.config is None:
            logger.warning("nothing to read again: no --config file was given")
            return
        if self._file_workers is None:
            logger.warning("the file's workers are not read: others were given by --worker or FOREBAY_WORKER")
            return
        try:
            wanted = read_config_workers(self.settings.config)
            for spec in wanted:
                resolve_worker_keys(spec)
        except SettingsError as exc:
            logger.error("the configuration was not read again, everything stays as it is: %s", exc)
            return
        self.workers.replace_all(self._file_workers, wanted, self.settings.drain_timeout_s)
        self._file_workers = wanted

    def begin_drain(self) -> None:
        """Admit nothing more, let requests end, stop what is left at the deadline; then ``drained`` is set."""
        if not self.services.is_draining:
            self.services.is_draining = True
            self.services.waiting.close()
            self._drains.spawn(self._drain(), "drain")

    async def _drain(self) -> None:
        live, tails = self.services.live, self.services.tails
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout_s
        logger.info("draining: %d request(s) in flight, %d prefill(s) that go on alone", len(live), len(tails))
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await live.wait_empty()
                await tails.wait_empty()
        except TimeoutError:
            text = "drain deadline: %d request(s) and %d prefill(s) that go on alone are stopped"
            logger.warning(text, len(live), len(tails))
            await tails.stop()
            for request in live:
                request.stop(Cause.SHUTDOWN)
            try:
                async with asyncio.timeout(STOP_GRACE_S):
                    await live.wait_empty()
            except TimeoutError:
                logger.warning("%d request(s) did not end in time", len(live))
        await self.fan_outs.aclose(max(deadline - asyncio.get_running_loop().time(), 0.0))
        await tails.stop()
        await self.services.aborter.aclose(STOP_GRACE_S)
        self.drained.set()

    async def _close(self) -> None:
        await self.workers.aclose()
        await self._drains.aclose()
        await self.fan_outs.aclose()
        await self.services.tails.stop()
        await self.services.aborter.aclose()
        await self.services.tails.aclose()
        self.services.prefixes.close()
        if self.kv_listener is not None:
            self.kv_listener.close()
        self.kv.close()
        await self._client.aclose()
        await self._control.aclose()
        await self._commands.aclose()
        await self._access_log.close()


def _tokenizers(settings: Settings) -> PromptTokenizers:
    try:
        return PromptTokenizers.load(parse_tokenizer_options(settings.tokenizer))
    except ValueError as exc:
        raise SettingsError(str(exc)) from exc


def _waiting_room(settings: Settings, fleet: Fleet, metrics: Metrics) -> WaitingRoom:
    return WaitingRoom(
        AdmissionQueue(
            max_requests=settings.queue_max_requests,
            max_bytes=QUEUE_MAX_BYTES,
            max_crowded_s=settings.queue_max_age_s,
            max_paused_s=settings.pause_hold_s,
        ),
        fleet,
        time.monotonic,
        metrics,
        holds_paused=settings.pause_hold_s > 0,
    )

"""Workers that come and go while the gateway runs: by admin routes, and by re-reading the configuration file."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from backends.base import Backend
from backends.leg_events import Cause
from backends.types import EngineKind, Role, Worker
from backends.upstream.base import Origin
from backends.worker_spec import WorkerSpec, worker_id
from gateway.lifespan import WatchTimes, WorkerWatch
from gateway.live import LiveLegs, LiveRequests
from gateway.metrics import Metrics
from gateway.tasks import OwnedTasks, supervise
from routers.breaker import Breaker
from routers.fleet import Fleet, Member

logger = logging.getLogger("forebay.workers")

# How long requests get to end after they were stopped at the end of a worker's drain.
STOP_GRACE_S = 1.0


class FleetControl:
    """Adds and removes workers, and owns the watch over each one.

    Args:
        fleet: The workers.
        backends: One for each engine kind.
        times: Durations of the watch.
        live: The requests being served.
        legs: Their upstream requests.
        metrics: Forgets removed workers.
        keys_of: Reads a SPEC's credentials: API key, admin API key.
        on_fatal: Told when a watch ends for a reason that nobody expected.
        unhealthy_after: Failed probes in a row that take a worker out.
        healthy_after: Good probes in a row that bring it back.
        breaker_failures: Failed requests in a row after which a worker is left alone.
        breaker_open_s: For how long.
        max_in_flight: Requests that one worker gets at once, ``None`` to go by its engine's limit.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        backends: dict[EngineKind, Backend],
        times: WatchTimes,
        live: LiveRequests,
        legs: LiveLegs,
        metrics: Metrics,
        keys_of: Callable[[WorkerSpec], tuple[str | None, str | None]],
        on_fatal: Callable[[str], None],
        unhealthy_after: int,
        healthy_after: int,
        breaker_failures: int,
        breaker_open_s: float,
        max_in_flight: int | None,
    ) -> None:
        self._fleet = fleet
        self._backends = backends
        self._times = times
        self._live = live
        self._legs = legs
        self._metrics = metrics
        self._keys_of = keys_of
        self._on_fatal = on_fatal
        self._unhealthy_after = unhealthy_after
        self._healthy_after = healthy_after
        self._breaker_failures = breaker_failures
        self._breaker_open_s = breaker_open_s
        self._max_in_flight = max_in_flight
        self._specs: dict[str, WorkerSpec] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._removals: dict[str, asyncio.Task[None]] = {}
        self._loops = OwnedTasks("watch")
        self._drains = OwnedTasks("remove")

    @property
    def drain_tasks(self) -> int:
        """Removals under way."""
        return len(self._drains)

    def add(self, spec: WorkerSpec, *, api_key: str | None = None) -> Member:
        """Add a worker, or return the one that has this URL; a removal under way is called off.

        Args:
            spec: What the operator says of it.
            api_key: Credential given directly rather than by the name of a variable.

        Raises:
            SettingsError: A variable that the SPEC names holds no key.
        """
        known = self._fleet.get(worker_id(spec))
        if known is not None:
            self._call_removal_off(known)
            return known
        file_key, admin_key = self._keys_of(spec)
        origin = Origin.from_url(spec.url)
        worker = Worker(worker_id(spec), spec.url, origin, api_key or file_key, admin_key, spec.bootstrap_port)
        member = Member(
            worker,
            engine=None if spec.engine == "auto" else EngineKind(spec.engine),
            pinned_model=spec.model,
            pinned_role=None if spec.role == "auto" else Role(spec.role),
            unhealthy_after=self._unhealthy_after,
            healthy_after=self._healthy_after,
            breaker=Breaker(threshold=self._breaker_failures, open_s=self._breaker_open_s),
            max_in_flight=self._max_in_flight,
        )
        self._specs[worker.id] = spec
        self._fleet.add(member)
        watch = WorkerWatch(member, self._backends, self._times, self._fleet.restarted)
        name = f"watch {worker.id}"
        self._watches[worker.id] = self._loops.spawn(supervise(name, watch.run, self._on_fatal), name)
        logger.info("worker %s added", worker.id)
        return member

    def kv_setting(self, worker_id: str) -> str:
        """What the operator says of a worker's KV events: ``auto``, ``off``, or an endpoint."""
        spec = self._specs.get(worker_id)
        return spec.kv_events if spec else "off"

    def _call_removal_off(self, member: Member) -> None:
        removal = self._removals.pop(member.worker.id, None)
        if removal is not None:
            removal.cancel()
            member.is_draining = False

    def remove(self, member: Member, drain_timeout_s: float) -> None:
        """Give the worker no more requests, let its own end, stop them at the deadline, and forget it. Returns at once.

        Args:
            member: The worker.
            drain_timeout_s: What its requests get from now on, also where a removal with another limit is under way.
        """
        removal = self._removals.pop(member.worker.id, None)
        if removal is not None:
            removal.cancel()
        member.is_draining = True
        self._removals[member.worker.id] = self._drains.spawn(
            self._remove(member, drain_timeout_s), f"remove {member.worker.id}"
        )

    async def _remove(self, member: Member, drain_timeout_s: float) -> None:
        worker = member.worker
        logger.info("worker %s is removed after its %d request(s)", worker.id, member.in_flight)
        try:
            async with asyncio.timeout(drain_timeout_s):
                await self._legs.wait_none(worker.id)
        except TimeoutError:
            for request in self._live:
                if request.is_on(worker.id):
                    request.stop(Cause.WORKER_REMOVED)
            try:
                async with asyncio.timeout(STOP_GRACE_S):
                    await self._legs.wait_none(worker.id)
            except TimeoutError:
                logger.warning("worker %s is removed with requests that did not end", worker.id)
        self._watches.pop(worker.id).cancel()
        self._specs.pop(worker.id)
        self._removals.pop(worker.id, None)
        self._fleet.remove(worker.id)
        self._metrics.forget_worker(worker.id)
        logger.info("worker %s removed", worker.id)

    def replace_all(self, known: Sequence[WorkerSpec], wanted: Sequence[WorkerSpec], drain_timeout_s: float) -> None:
        """Bring the workers that came from a file in line with the file as it is now.

        Args:
            known: What the file said before; workers from elsewhere are left alone.
            wanted: What it says now. A worker whose options have changed keeps its old ones until it is removed and
                added again, which is logged.
            drain_timeout_s: What the requests of removed workers get.
        """
        kept = {worker_id(spec) for spec in wanted}
        for spec in known:
            member = self._fleet.get(worker_id(spec))
            if member is not None and member.worker.id not in kept and not member.is_draining:
                self.remove(member, drain_timeout_s)
        for spec in wanted:
            member = self.add(spec)
            if self._specs[member.worker.id] != spec:
                logger.warning("worker %s: changed options take effect after its removal", member.worker.id)

    async def aclose(self) -> None:
        """End every watch and removal."""
        await self._drains.aclose()
        await self._loops.aclose()

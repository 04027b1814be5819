"""Watching the workers: identify each one, probe it, notice when it goes, comes back, or is another process."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Backend
from backends.errors import IdentifyFailed
from backends.types import EngineFacts, EngineKind, ProbeResult
from routers.fleet import Member

logger = logging.getLogger("forebay.workers")

FIRST_BACKOFF_S = 0.1
# A restart between two probes leaves no other trace, so the metadata is read again now and then.
REREAD_EVERY_PROBES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTimes:
    """Durations of the watch, in seconds.

    Attributes:
        interval_s: Between two probes.
        timeout_s: Of one probe or metadata request.
        backoff_max_s: Between two attempts to identify.
    """

    interval_s: float
    timeout_s: float
    backoff_max_s: float


async def read_weights(backend: Backend, member: Member, timeout_s: float) -> None:
    """Ask a worker for the version of its weights; without an answer what is known stays."""
    asked = member.asks_weights()
    try:
        version = await backend.weight_version(member.worker, timeout_s)
    except IdentifyFailed as exc:
        logger.debug("worker %s: the version of its weights could not be read: %s", member.worker.id, exc)
        return
    member.weights_are(version, asked)


class WorkerWatch:
    """Keeps one member's state true; ``run`` is a service loop.

    Args:
        member: The worker.
        backends: One for each engine kind.
        times: Durations.
        on_restart: Told when the worker is found to be another process than before.
    """

    def __init__(
        self,
        member: Member,
        backends: dict[EngineKind, Backend],
        times: WatchTimes,
        on_restart: Callable[[Member], None] = lambda member: None,
    ) -> None:
        self._member = member
        self._backends = backends
        self._times = times
        self._on_restart = on_restart
        self._backoff_s = FIRST_BACKOFF_S

    async def run(self) -> None:
        """Watch for ever."""
        while True:
            if not self._member.is_identified:
                await self._identify()
            else:
                await self._probe_until_lost()

    async def _identify(self) -> None:
        member = self._member
        try:
            asked = member.asks_weights()
            facts = member.with_weights(await self._ask(), asked)
        except IdentifyFailed as exc:
            if str(exc) != member.detail:
                logger.warning("worker %s is not usable yet: %s", member.worker.id, exc)
            member.identify_failed(str(exc))
            await asyncio.sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, self._times.backoff_max_s)
            return
        self._backoff_s = FIRST_BACKOFF_S
        self._note_restart(facts.boot_id)
        member.identified(facts)
        logger.info(
            "worker %s: %s %s, model %s, role %s, %d rank(s), page size %d, context %s, %s output",
            member.worker.id,
            facts.engine,
            facts.version_text or "of unknown version",
            member.model_id,
            member.role,
            facts.dp_size,
            facts.page_size,
            facts.context_tokens,
            "incremental" if facts.incremental_output else "cumulative",
        )
        if member.role_conflict:
            logger.warning("worker %s: %s", member.worker.id, member.role_conflict)

    async def _ask(self) -> EngineFacts:
        """Ask as the engine kind that was given, or as each kind in turn."""
        member = self._member
        kinds = [member.engine] if member.engine is not None else list(self._backends)
        reasons: list[str] = []
        for kind in kinds:
            try:
                return await self._backends[kind].identify(member.worker, self._times.timeout_s)
            except IdentifyFailed as exc:
                if str(exc) not in reasons:
                    reasons.append(str(exc))
        raise IdentifyFailed("; ".join(reasons))

    def _note_restart(self, boot_id: str) -> None:
        known = self._member.facts
        if known is not None and known.boot_id != boot_id:
            logger.warning("worker %s has restarted", self._member.worker.id)
            self._on_restart(self._member)

    async def _probe_until_lost(self) -> None:
        """Probe until the member has to be identified again."""
        member, times = self._member, self._times
        assert member.facts is not None
        backend = self._backends[member.facts.engine]
        had_trouble = False
        probes = 0
        while member.is_identified:
            started = time.monotonic()
            await asyncio.sleep(times.interval_s)
            pauses_told = member.pauses_told
            result = await backend.probe(member.worker, times.timeout_s)
            if result is not ProbeResult.FAILED and member.pauses_told != pauses_told:
                result = ProbeResult.PAUSED if member.is_paused else ProbeResult.UP  # what was asked before is old news
            was_ready = member.is_up
            member.probed(result, is_busy=member.last_byte_at >= started)
            if was_ready and not member.is_up:
                logger.warning("worker %s leaves rotation: %s", member.worker.id, member.detail)
            if result is ProbeResult.FAILED:
                had_trouble = True
                continue
            probes += 1
            if member.is_up and (had_trouble or probes % REREAD_EVERY_PROBES == 0):
                had_trouble = False
                await self._reread(backend)
            elif member.is_up:
                await read_weights(backend, member, times.timeout_s)

    async def _reread(self, backend: Backend) -> None:
        member = self._member
        try:
            asked = member.asks_weights()
            facts = member.with_weights(await backend.identify(member.worker, self._times.timeout_s), asked)
        except IdentifyFailed as exc:
            logger.info("worker %s: metadata could not be read again: %s", member.worker.id, exc)
            return
        if member.facts is not None and facts != member.facts:
            self._note_restart(facts.boot_id)
            member.identified(facts)

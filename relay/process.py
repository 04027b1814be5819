"""The relay of one engine node, from its first question to its end: executes what the machine decides. Shell."""

import asyncio
import functools
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import zmq

from backends.tasks import OwnedTasks
from kv_events.errors import SourceMisconfigured
from kv_events.publisher import SubscriberLimits
from relay.directory import GatewayDirectory, GatewayUnavailable
from relay.engine import Engine, EngineUnavailable
from relay.errors import GroupUnresolved, MetadataRefused, SettingsRefused
from relay.feed import Feed
from relay.follower import Leader
from relay.identity import GroupIdentity
from relay.machine import AskEngine, AskGateways, Command, End, Limits, Phase, Relay, RelayMachine, Remap, Resolve, Warn
from relay.metadata import NodeMetadata
from relay.source import SourceReader
from relay.threads import Lookup, resolve_group, system_lookup

logger = logging.getLogger("forebay.relay")

TICK_S: Final = 0.25
# A look-up that takes longer is begun anew.
LOOKUP_S: Final = 30.0
CLOSE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class FeedSpec:
    """What is relayed, and to whom.

    Attributes:
        gateways: HTTP addresses, as the operator gave them.
        worker_url: Address of the worker, as gateways know it.
        node: Role, sources with their block sizes, and the size of the engine.
        group: Of an engine that spans nodes; ``None`` for one node.
        publisher: Name of this process, random.
    """

    gateways: tuple[str, ...]
    worker_url: str
    node: NodeMetadata
    group: GroupIdentity | None
    publisher: str


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """What the operator wants.

    Attributes:
        gateways: HTTP addresses.
        worker_url: The leader's address as gateways know it; ``None`` is the engine's own.
        engine_url: The engine's address.
        registers: A leader adds its worker to the gateways.
        engine_key: The engine's API key, which gateways need too; ``None`` if it has none.
        limits: Deadlines.
        source_limits: Times of the sources; ``None`` for the usual ones.
    """

    gateways: tuple[str, ...]
    worker_url: str | None
    engine_url: str
    registers: bool = False
    engine_key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    source_limits: SubscriberLimits | None = None


class RelayProcess:
    """One relay; ``run`` once.

    Attributes:
        readers: Of the sources, by rank; empty until they are relayed.
        feed: Where their events go; ``None`` until then.
    """

    def __init__(
        self,
        config: RelayConfig,
        engine: Engine,
        directories: Mapping[str, GatewayDirectory],
        make_feed: Callable[[FeedSpec], Feed],
        lookup: Lookup = system_lookup,
    ) -> None:
        """Prepare; the engine and the directories, one for each gateway, stay their owner's."""
        self.readers: dict[int, SourceReader] = {}
        self.feed: Feed | None = None
        self._config = config
        self._engine = engine
        self._directories = directories
        self._make_feed = make_feed
        self._lookup = lookup
        self._loop = asyncio.get_running_loop()
        self._machine = RelayMachine(config.limits, self._loop.time())
        self._tasks = OwnedTasks("relay")
        self._ended = asyncio.Event()
        self._reason = ""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._told = ""

    @property
    def phase(self) -> Phase:
        """How far it has come."""
        return self._machine.phase

    def not_ready(self) -> str:
        """Why it is not ready at this moment; empty if it is."""
        self._look_at_gateways()
        return self._machine.not_ready

    def stop(self) -> None:
        """End ``run`` as wanted."""
        self._ended.set()

    async def run(self) -> str:
        """Relay until ``stop``, or until it cannot go on.

        Returns:
            The reason of its end, for people; empty if it was stopped.
        """
        try:
            self._execute(self._machine.start())
            self._spawn("time", self._watch_time)
            await self._ended.wait()
            return self._reason
        finally:
            with anyio.move_on_after(2 * CLOSE_S, shield=True):
                await self._close()

    async def _close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        await self._tasks.aclose()
        if self.feed is not None:
            with anyio.move_on_after(CLOSE_S):
                await self.feed.aclose()
        self._context.destroy(linger=0)

    def _spawn(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.spawn(self._guarded(name, work), name)

    async def _guarded(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Whatever happens in a part of the process that nobody expected ends the process."""
        try:
            await work()  # begun here: one that is cancelled before it begins was never made
        except Exception as exc:
            logger.exception("the relay's %s failed", name)
            self._execute(self._machine.on_lost(f"the relay's {name} failed: {exc or type(exc).__name__}"))

    # Commands

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, AskEngine):
                self._spawn("question to the engine", functools.partial(self._ask_engine, command))
            elif isinstance(command, Resolve):
                self._spawn("look-up of the group", functools.partial(self._resolve, command))
            elif isinstance(command, AskGateways):
                self._spawn("question to the gateways", functools.partial(self._ask_gateways, command))
            elif isinstance(command, Relay):
                self._relay(command)
            elif isinstance(command, Remap):
                self._remap(command.worker_url)
            elif isinstance(command, Warn):
                logger.warning("%s", command.text)
            elif isinstance(command, End):
                self._reason = command.reason
                self._ended.set()

    async def _ask_engine(self, command: AskEngine) -> None:
        await asyncio.sleep(command.after_s)
        try:
            node = await self._engine.metadata()
        except EngineUnavailable as exc:
            self._execute(self._machine.on_engine_failed(str(exc)))
        except MetadataRefused as exc:
            self._execute(self._machine.on_metadata_refused(str(exc)))
        else:
            self._execute(self._machine.on_metadata(self._loop.time(), node))
            for reader in self.readers.values():
                reader.on_boot(node.boot_id)

    async def _resolve(self, command: Resolve) -> None:
        await asyncio.sleep(command.after_s)
        try:
            group = await resolve_group(command.address, LOOKUP_S, self._lookup)
        except GroupUnresolved as exc:
            self._execute(self._machine.on_group_failed(str(exc)))
        else:
            self._execute(self._machine.on_group(self._loop.time(), group))

    async def _ask_gateways(self, command: AskGateways) -> None:
        await asyncio.sleep(command.after_s)
        views: dict[str, tuple[Leader, ...] | None] = dict.fromkeys(self._directories)
        problems: list[str] = []

        async def ask(url: str, directory: GatewayDirectory) -> None:
            try:
                views[url] = await directory.leaders()
            except GatewayUnavailable as exc:
                problems.append(f"gateway {url}: {exc}")

        async with asyncio.TaskGroup() as group:
            for url, directory in self._directories.items():
                group.create_task(ask(url, directory))
        self._execute(self._machine.on_leaders(self._loop.time(), views, "; ".join(sorted(problems))))

    def _relay(self, command: Relay) -> None:
        worker_url = command.worker_url or self._config.worker_url
        if worker_url is None:
            worker_url = self._config.engine_url
            if _is_loopback(worker_url) and not all(map(_is_loopback, self._config.gateways)):
                why = (
                    f"no gateway on another machine can reach {worker_url}; give the worker's address with --worker-url"
                )
                self._execute(self._machine.on_lost(why))
                return
        node = command.node
        spec = FeedSpec(self._config.gateways, worker_url, node, command.group, uuid.uuid4().hex)
        try:
            self.feed = self._make_feed(spec)
            for source in node.sources:
                reader = SourceReader(self._context, source, self.feed, self._on_source, self._config.source_limits)
                self.readers[source.dp_rank] = reader
                reader.start()
        except (SettingsRefused, SourceMisconfigured) as exc:
            self._execute(self._machine.on_lost(str(exc)))
            return
        listed = ", ".join(map(str, node.ranks)) or "none"
        if not node.sources:
            logger.warning("the engine publishes no KV events (--kv-events-config): there is nothing to relay")
        logger.info("relays ranks %s of %s as its %s", listed, worker_url, "leader" if node.is_leader else "follower")
        self._spawn("event wire", functools.partial(self._run_feed, self.feed))
        if node.is_leader and self._config.registers:
            self._spawn("registration", functools.partial(self._register, worker_url, node))

    def _remap(self, worker_url: str) -> None:
        logger.warning("the leader is back under another address, %s", worker_url)
        if self.feed is not None:
            self.feed.remap(worker_url)

    async def _run_feed(self, feed: Feed) -> None:
        await feed.run()
        self._execute(self._machine.on_lost("the relay's event wire has ended"))

    # What goes on

    def _on_source(self, rank: int, is_connected: bool) -> None:
        self._machine.on_source(self._loop.time(), rank, is_connected)
        self._tell_readiness()

    def _look_at_gateways(self) -> None:
        if self.feed is not None:
            self._execute(self._machine.on_gateways(self.feed.gateways()))

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._execute(self._machine.on_time(self._loop.time()))
            self._look_at_gateways()
            self._tell_readiness()

    def _tell_readiness(self) -> None:
        now = self._machine.not_ready
        if now != self._told and not self._ended.is_set():
            self._told = now
            logger.log(logging.WARNING if now else logging.INFO, "%s", f"not ready: {now}" if now else "ready")

    async def _register(self, worker_url: str, node: NodeMetadata) -> None:
        """Keep the worker added at every gateway: one that was away may have forgotten it."""
        added: set[str] = set()
        told: dict[str, str] = {}
        while self.feed is not None:
            states = self.feed.gateways()
            for url, directory in self._directories.items():
                if url in added and (state := states.get(url)) is not None and state.is_connected:
                    continue
                try:
                    await directory.register(worker_url, node, self._config.engine_key)
                except GatewayUnavailable as exc:
                    added.discard(url)
                    if told.get(url) != str(exc):
                        again_s = self._config.limits.retry_s
                        logger.warning("gateway %s has not added the worker, next try in %g s: %s", url, again_s, exc)
                    told[url] = str(exc)
                else:
                    if url not in added:
                        logger.info("gateway %s has added the worker %s", url, worker_url)
                    added.add(url)
                    told.pop(url, None)
            limits = self._config.limits
            await asyncio.sleep(limits.poll_s if len(added) == len(self._directories) else limits.retry_s)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")

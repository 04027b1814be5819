"""``forebay relay``: from settings to a running relay, and from its end to an exit code."""

import asyncio
import contextlib
import importlib.metadata
import logging
import signal
import sys
from collections.abc import AsyncIterator

from backends.upstream.base import UpstreamClient
from backends.upstream.h1 import H1Client
from kv_events.errors import KeyFileRefused
from kv_events.relay_keys import write_key_file
from kv_events.relay_wire import Group, RankOffer
from relay.directory import GatewayDirectory
from relay.engine import Engine, GrpcEngine, HttpEngine
from relay.errors import RelayEnded, SettingsRefused
from relay.feed import Feed
from relay.health import HealthServer
from relay.machine import Limits
from relay.process import FeedSpec, RelayConfig, RelayProcess
from relay.publisher import RelayIdentity, RelayPublisher
from relay.settings import RelaySettings, load_settings
from relay.status import status_pages
from relay.threads import DaemonExecutor

logger = logging.getLogger("forebay.relay")

__all__ = ["load_settings", "run"]


def run(settings: RelaySettings) -> int:
    """Relay until a signal, or make a key pair; logging is set up before.

    Returns:
        Exit code: 0 stopped, 1 refused or lost; the reason is the last line of stderr.

    Raises:
        SettingsRefused: A file cannot be written, or something that was asked for is not installed.
    """
    if settings.keygen is not None:
        try:
            keys = write_key_file(settings.keygen)
        except KeyFileRefused as exc:
            raise SettingsRefused(f"--keygen: {exc}") from exc
        sys.stdout.write(keys.public_key.decode() + "\n")
        return 0
    # One line a request says less than ours.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with asyncio.Runner() as runner:
        reason = runner.run(_relay(settings))
    if reason:
        sys.stderr.write(f"forebay: {_one_line(reason)}\n")
    return 1 if reason else 0


async def _relay(settings: RelaySettings) -> str:
    loop = asyncio.get_running_loop()
    # Whatever looks up a name does it in a thread that is not waited for.
    loop.set_default_executor(DaemonExecutor())
    try:
        async with _engine(settings) as engine, _directories(settings) as directories, _client() as client:

            def make_feed(spec: FeedSpec) -> Feed:
                return _publisher(spec, settings, client)

            process = RelayProcess(_config(settings), engine, directories, make_feed)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, process.stop)
            return await _with_health(settings, process)
    except RelayEnded as exc:
        return str(exc)


async def _with_health(settings: RelaySettings, process: RelayProcess) -> str:
    if settings.health_port is None:
        return await process.run()
    health = HealthServer(status_pages(process))
    port = health.bind(settings.health_host, settings.health_port)
    logger.info("status at http://%s:%d/ready", settings.health_host, port)
    async with asyncio.TaskGroup() as group:
        group.create_task(health.run(), name="health")
        try:
            return await process.run()
        finally:
            health.stop()


def _config(settings: RelaySettings) -> RelayConfig:
    limits = Limits(
        phase_s=settings.startup_deadline_s,
        overall_s=settings.overall_deadline_s,
        failure_s=settings.failure_limit_s,
    )
    return RelayConfig(
        gateways=settings.gateways,
        worker_url=settings.worker_url,
        engine_url=settings.engine_url,
        registers=settings.registers,
        engine_key=settings.engine_key,
        limits=limits,
    )


def _publisher(spec: FeedSpec, settings: RelaySettings, client: UpstreamClient) -> Feed:
    node, group = spec.node, spec.group
    identity = RelayIdentity(
        worker_url=spec.worker_url,
        role="leader" if node.is_leader else "follower",
        ranks=tuple(RankOffer(source.dp_rank, source.block_size) for source in node.sources),
        dp_size=node.dp_size,
        capacity_blocks=node.kv_blocks,
        group=None if group is None else Group(group.literal, group.addresses),
        relay_version=importlib.metadata.version("forebay"),
    )
    return RelayPublisher(
        identity,
        spec.gateways,
        client=client,
        keys=settings.keys,
        admin_key=settings.admin_key,
        publisher=spec.publisher,
    )


@contextlib.asynccontextmanager
async def _engine(settings: RelaySettings) -> AsyncIterator[Engine]:
    engine: Engine
    if settings.engine_target:
        engine = GrpcEngine(settings.engine_target)
    else:
        engine = HttpEngine(settings.engine_url, settings.engine_key)
    try:
        yield engine
    finally:
        await engine.aclose()


@contextlib.asynccontextmanager
async def _directories(settings: RelaySettings) -> AsyncIterator[dict[str, GatewayDirectory]]:
    directories = {url: GatewayDirectory(url, settings.admin_key) for url in settings.gateways}
    try:
        yield directories
    finally:
        for directory in directories.values():
            await directory.aclose()


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[UpstreamClient]:
    client = H1Client()
    try:
        yield client
    finally:
        await client.aclose()


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)

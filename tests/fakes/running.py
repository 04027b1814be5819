"""A whole gateway on a real socket, in the test's own loop."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from backends.worker_spec import WorkerSpec, parse_worker_spec
from gateway.access_log import AccessLog, AccessRecord
from gateway.api.workers import inner_state
from gateway.app import Gateway
from gateway.server import GatewayServer, base_url, bind
from gateway.settings import Settings
from routers.fleet import WorkerState

TIME_SCALE = float(os.environ.get("TEST_TIME_SCALE", "1"))
# Any wait in a test ends by then, at the latest.
PATIENCE_S = 10.0 * TIME_SCALE
# Fast enough for tests; slow enough not to fill the log.
# The breaker has tests of its own; elsewhere one worker fails on purpose, again and again.
QUICK: dict[str, Any] = {
    "health_interval_s": 0.05 * TIME_SCALE,
    "identify_backoff_max_s": 0.2 * TIME_SCALE,
    "breaker_failures": 1_000_000,
    "upstream_client": os.environ.get("TEST_UPSTREAM_CLIENT", "httptools"),
}


async def until(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait until ``condition`` holds; for things that give no event of their own."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 -- what is waited for here has no event
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None


@dataclass
class RunningGateway:
    """A gateway that serves.

    Attributes:
        gateway: Its parts.
        server: The server around it.
        url: Base URL.
        client: HTTP client for simple calls; its connections close with the gateway.
        records: One access record for each request that has ended.
    """

    gateway: Gateway
    server: GatewayServer
    url: str
    client: httpx.AsyncClient
    records: list[AccessRecord] = field(default_factory=list)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def state(self) -> dict[str, int]:
        """The counters of ``/internal/state``."""
        return inner_state(self.gateway.services, self.gateway.drain_tasks())

    def busy(self) -> dict[str, int]:
        """The counters that are not zero."""
        return {name: value for name, value in self.state().items() if value}

    async def settle(self, within_s: float = PATIENCE_S) -> None:
        """Wait until nothing is left of any request."""
        await until(lambda: not self.busy(), f"counters at zero, left: {self.busy()}", within_s)

    async def ready(self, workers: int) -> None:
        """Wait until that many workers are ready."""
        fleet = self.gateway.services.fleet
        await until(
            lambda: sum(member.state is WorkerState.READY for member in fleet) >= workers,
            f"{workers} ready worker(s), states: {[(m.worker.id, str(m.state), m.detail) for m in fleet]}",
        )

    async def record(self, count: int = 1) -> AccessRecord:
        """The ``count``-th access record, once it is written."""
        await until(lambda: len(self.records) >= count, f"{count} access record(s)")
        return self.records[count - 1]


class _RecordingLog(AccessLog):
    """An access log that also keeps its records."""

    def __init__(self, records: list[AccessRecord]) -> None:
        super().__init__(fd=_null_fd())
        self._records = records

    def write(self, record: AccessRecord) -> None:
        self._records.append(record)
        super().write(record)


def _null_fd() -> int:
    with open(os.devnull, "wb") as null:
        return os.dup(null.fileno())


@asynccontextmanager
async def running_gateway(
    *workers: str | WorkerSpec, wait_ready: int | None = None, expect_idle: bool = True, **options: Any
) -> AsyncIterator[RunningGateway]:
    """Run a gateway in front of ``workers`` (URLs or SPECs) for the length of the block.

    Args:
        workers: SPECs as on the command line.
        wait_ready: Workers that must be ready before the block begins; all by default.
        expect_idle: At the end every counter must come to zero.
        options: Fields of ``Settings``.
    """
    specs = tuple(parse_worker_spec(worker) if isinstance(worker, str) else worker for worker in workers)
    settings = Settings(workers=specs, **{**QUICK, "port": 0, **options})
    sock: socket.socket = bind(settings.host, settings.port)
    records: list[AccessRecord] = []
    gateway = Gateway(settings, _RecordingLog(records))
    started = asyncio.Event()
    server = GatewayServer(gateway, started.set)
    url = base_url(sock, is_tls=settings.tls_cert_file is not None)
    # Reading all authorities takes 50 ms, and the certificate of these tests is signed by none.
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE_S, verify=False) as client:
        running = RunningGateway(gateway, server, url, client, records)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server._serve([sock]))  # without signal handlers
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await started.wait()
                await running.ready(len(specs) if wait_ready is None else wait_ready)
                yield running
                if expect_idle:
                    await running.settle()
            finally:
                server.should_exit = True
                server.force_exit = True
                if not serving.done():
                    await client.aclose()
                    async with asyncio.timeout(PATIENCE_S):
                        await asyncio.wait([serving])
                    await server.lifespan.shutdown()
                sock.close()

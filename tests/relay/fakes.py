"""An engine, gateways and an event wire for a relay's process, all on 127.0.0.1 and all doing as they are told."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from relay.directory import GatewayDirectory
from relay.engine import HttpEngine
from relay.errors import SettingsRefused
from relay.feed import GatewayState
from relay.process import FeedSpec, RelayConfig, RelayProcess
from relay.threads import Lookup, system_lookup

ACKNOWLEDGED = GatewayState(is_connected=True, is_acknowledged=True)


class FakeServer:
    """Answers HTTP from a table; ``None`` closes the connection without an answer.

    Attributes:
        pages: Status and body by ``METHOD path``; others are 404.
        asked: How often each was asked for.
        bodies: What was posted, by ``METHOD path``, in order.
        headers: Of the last request, in lower case.
    """

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, bytes] | None] = {}
        self.asked: Counter[str] = Counter()
        self.bodies: dict[str, list[bytes]] = {}
        self.headers: dict[str, str] = {}
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            self.headers = {
                line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines[1:] if line
            }
            name = " ".join(lines[0].split()[:2])
            body = await reader.readexactly(int(self.headers.get("content-length", "0")))
            self.asked[name] += 1
            self.bodies.setdefault(name, []).append(body)
            page = self.pages.get(name, (404, b"{}"))
            if page is not None:
                status, content = page
                top = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
                writer.write(top.encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def fake_server() -> AsyncIterator[FakeServer]:
    """One such server, on a free port."""
    made = FakeServer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await server.wait_closed()


def leaders(*listed: Mapping[str, object]) -> tuple[int, bytes]:
    """What a gateway answers about the leaders that it knows."""
    return 200, json.dumps({"endpoint": "tcp://127.0.0.1:1", "leaders": listed}).encode()


def leader(worker_id: str, address: str, **changes: object) -> dict[str, object]:
    """One of them."""
    return {
        "worker_id": worker_id,
        "worker_url": f"http://{worker_id}:30000",
        "group": {"literal": f"tcp://{address}", "addresses": [f"tcp://{address}"]},
        "dp_size": 4,
        "block_size": 16,
        "local_dp_ranks": [0, 1],
        **changes,
    }


class FakeFeed:
    """Keeps what the process tells it; its gateways are in the state that the test says.

    Attributes:
        spec: What the process made it for.
        frames: Rank, number and payload.
        told: Everything else, in order.
        states: Of the gateways.
        worker_urls: What the leader was mapped to since.
        ending: Set to have ``run`` end.
    """

    def __init__(self, spec: FeedSpec) -> None:
        self.spec = spec
        self.frames: list[tuple[int, int, bytes]] = []
        self.told: list[tuple[str, int]] = []
        self.connected: dict[int, bool] = {}
        self.worker_urls: list[str] = []
        self.states: dict[str, GatewayState] = dict.fromkeys(spec.gateways, GatewayState())
        self.ending = asyncio.Event()
        self.is_running = False
        self.is_closed = False

    def source_frame(self, rank: int, seq: int, payload: bytes) -> None:
        """See ``Feed``."""
        self.frames.append((rank, seq, payload))

    def source_restarted(self, rank: int) -> None:
        """See ``Feed``."""
        self.told.append(("restarted", rank))

    def source_gap(self, rank: int) -> None:
        """See ``Feed``."""
        self.told.append(("gap", rank))

    def source_state(self, rank: int, is_connected: bool) -> None:
        """See ``Feed``."""
        self.connected[rank] = is_connected

    def remap(self, worker_url: str) -> None:
        """See ``Feed``."""
        self.worker_urls.append(worker_url)

    def gateways(self) -> Mapping[str, GatewayState]:
        """See ``Feed``."""
        return self.states

    async def run(self) -> None:
        """See ``Feed``."""
        self.is_running = True
        try:
            await self.ending.wait()
        finally:
            self.is_running = False

    async def aclose(self) -> None:
        """See ``Feed``."""
        self.is_closed = True


class RunningRelay:
    """A relay's process in a task of the test.

    Attributes:
        process: The process.
        feeds: The feeds that it made: none or one.
    """

    def __init__(
        self,
        config: RelayConfig,
        directories: Mapping[str, GatewayDirectory],
        engine: HttpEngine,
        lookup: Lookup = system_lookup,
        refusal: str = "",
    ) -> None:
        self.feeds: list[FakeFeed] = []
        self._refusal = refusal
        self.process = RelayProcess(config, engine, directories, self._make, lookup)
        self.reason: str | None = None

    @property
    def feed(self) -> FakeFeed:
        """The one feed."""
        (only,) = self.feeds
        return only

    def _make(self, spec: FeedSpec) -> FakeFeed:
        if self._refusal:
            raise SettingsRefused(self._refusal)
        self.feeds.append(FakeFeed(spec))
        return self.feeds[-1]

    async def run(self) -> None:
        """Run it to its end."""
        self.reason = await self.process.run()


@asynccontextmanager
async def running_relay(
    config: RelayConfig, lookup: Lookup = system_lookup, refusal: str = ""
) -> AsyncIterator[RunningRelay]:
    """A relay that runs until the block ends, or by itself."""
    engine = HttpEngine(config.engine_url, config.engine_key)
    directories = {url: GatewayDirectory(url, "admin") for url in config.gateways}
    relay = RunningRelay(config, directories, engine, lookup, refusal)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(relay.run())
            yield relay
            relay.process.stop()
    finally:
        for directory in directories.values():
            await directory.aclose()
        await engine.aclose()


def urls(servers: Sequence[FakeServer]) -> tuple[str, ...]:
    """Their addresses."""
    return tuple(server.url for server in servers)

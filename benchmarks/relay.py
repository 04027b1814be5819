"""``python -m benchmarks.relay``: what a relay costs, and what it adds, on this machine.

One relay and one gateway's listener in one process, on real sockets. Three figures: CPU of the relay for a batch of
events (sending it and mirroring it) and of the gateway; the delay from the relay's taking a batch to its being in the
gateway's index, at a rate far below the limit; and a snapshot of a large cache for a gateway that comes late: time,
size, and the longest piece of work on the loop. CPU is that of the loop's thread, so that what else runs on the
machine counts only by the caches that it takes away; the delay and the snapshot's time are those of the clock, and
mean something on a quiet machine only.
"""

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np

from backends.types import EngineFacts, EngineKind, Worker
from backends.upstream.base import Origin
from backends.upstream.h1 import H1Client
from benchmarks.kv_index import BLOCKS_A_BATCH, PAGE_TOKENS, chains
from gateway.kv_listen import KvListener
from gateway.kv_metrics import KvMetrics
from gateway.kv_view import KvView
from kv_events.relay_wire import PROTOCOL, RankOffer
from kv_events.sequence import SourceState
from kv_events.types import BASE, Tier
from relay.publisher import RelayIdentity, RelayPublisher
from routers.fleet import Member

URL = "http://127.0.0.1:1"
WORKER = "127.0.0.1:1"
CAPACITY_BLOCKS = 4_000_000


class Work:
    """CPU of one side's work on the loop.

    Attributes:
        total_s: All of it.
        longest_s: Its longest piece.
    """

    def __init__(self, side: RelayPublisher | KvListener) -> None:
        self.total_s = self.longest_s = 0.0
        self._tick = side._tick
        side._tick = self._measured  # type: ignore[method-assign]

    def _measured(self) -> None:
        begin = time.thread_time()
        self._tick()
        spent_s = time.thread_time() - begin
        self.total_s += spent_s
        self.longest_s = max(self.longest_s, spent_s)


class Gateway:
    """As much of a gateway as a relay sees: the listener, and the HTTP route that tells where it is."""

    def __init__(self) -> None:
        self.metrics = KvMetrics(lambda worker, dp_rank: self.kv.blocks(worker, dp_rank))
        self.kv = KvView(self.metrics, lambda worker_id: "auto")
        worker = Worker(WORKER, URL, Origin.from_url(URL), None, None)
        self.member = Member(worker, engine=EngineKind.SGLANG)
        facts = EngineFacts(
            EngineKind.SGLANG, (0, 5, 23), "0.5.23", "m", page_size=PAGE_TOKENS, kv_blocks=CAPACITY_BLOCKS
        )
        self.member.identified(facts)
        self.kv.changed(self.member)
        self.listener = KvListener(
            "tcp://127.0.0.1:0",
            keys=None,
            authorized=(),
            kv=self.kv,
            member_of=lambda worker_id: self.member if worker_id == WORKER else None,
            setting_of=lambda worker_id: "auto",
        )
        self._server: asyncio.Server | None = None
        self.url = ""

    async def open(self) -> None:
        """Begin to answer."""
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = f'{{"endpoint":"{self.listener.endpoint}","public_key":null,"protocol":{PROTOCOL}}}'.encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    def last_seq(self) -> int | None:
        """Newest batch that is in the index."""
        return self.kv.position(WORKER, 0)[1]

    def has(self, seq: int) -> bool:
        """A batch is in the index."""
        return self.last_seq() == seq and self.is_settled()

    def is_settled(self) -> bool:
        """The rank is followed, and nothing is missing."""
        return self.kv.state(WORKER, 0) in (SourceState.LIVE, SourceState.COLD)

    def close(self) -> None:
        """End everything."""
        if self._server is not None:
            self._server.close()
        self.listener.close()
        self.kv.close()


@asynccontextmanager
async def relay_to(*gateways: Gateway) -> AsyncIterator[RelayPublisher]:
    """A relay of one rank."""
    client = H1Client()
    identity = RelayIdentity(worker_url=URL, role="follower", ranks=(RankOffer(0, PAGE_TOKENS),), dp_size=1)
    relay = RelayPublisher(identity, [gateway.url for gateway in gateways], client=client)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(relay.run())
        relay.source_state(0, True)
        try:
            yield relay
        finally:
            await relay.aclose()
            running.cancel()
    await client.aclose()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something, looking at every turn of the loop."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 -- what is waited for has no event, and its time is measured
            await asyncio.sleep(0)


async def cost(batches: int) -> None:
    """CPU for each batch, of the relay and of the gateway."""
    payloads = chains(random.Random(1), batches)
    gateway = Gateway()
    await gateway.open()
    async with relay_to(gateway) as relay:
        relay.source_frame(0, 0, payloads[0])
        await until(lambda: gateway.has(0))
        relays, gateways = Work(relay), Work(gateway.listener)
        for seq in range(1, batches):
            relay.source_frame(0, seq, payloads[seq])
            if seq % 16 == 0:
                await asyncio.sleep(0)
        await until(lambda: gateway.has(batches - 1) and relay.held_blocks(0) == batches * BLOCKS_A_BATCH)
        for side, work in (("relay", relays), ("gateway", gateways)):
            spent_us = work.total_s / batches * 1e6
            print(f"{side}: {spent_us:.0f} µs of CPU for a batch of {BLOCKS_A_BATCH} blocks")
    gateway.close()


async def delay(batches: int, batches_per_s: int) -> None:
    """From the relay's taking a batch to its being in the gateway's index."""
    payloads = chains(random.Random(2), batches)
    gateway = Gateway()
    await gateway.open()
    async with relay_to(gateway) as relay:
        relay.source_frame(0, 0, payloads[0])
        await until(lambda: gateway.has(0))
        delays_ms = []
        for seq in range(1, batches):
            begin = time.perf_counter()
            relay.source_frame(0, seq, payloads[seq])
            await until(partial(gateway.has, seq))
            delays_ms.append((time.perf_counter() - begin) * 1e3)
            await asyncio.sleep(max(0.0, 1 / batches_per_s - (time.perf_counter() - begin)))
        p50, p99 = np.percentile(delays_ms, [50, 99])
        print(
            f"delay at {batches_per_s} batches/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms, longest {max(delays_ms):.2f} ms"
        )
    gateway.close()


async def snapshot(blocks: int) -> None:
    """A gateway that comes late to a large cache."""
    gateway = Gateway()
    await gateway.open()
    async with relay_to(gateway) as relay:
        rng = np.random.default_rng(3)
        names = rng.integers(0, 2**63, size=(2, blocks), dtype=np.uint64).tolist()
        relay._index.restore((URL, 0), Tier.DEVICE, BASE, names[0], names[1])
        del names
        relays, gateways = Work(relay), Work(gateway.listener)
        begin = time.perf_counter()
        await until(lambda: gateway.kv.blocks(WORKER, 0) == blocks and gateway.is_settled())
        took_s, counts = time.perf_counter() - begin, relay.counts()[gateway.url]
        print(
            f"snapshot of {blocks:,} blocks: {took_s:.2f} s by the clock, {counts.sent_bytes / 1e6:.1f} MB; CPU of the "
            f"relay {relays.total_s:.2f} s (longest piece {relays.longest_s * 1e3:.0f} ms), of the gateway "
            f"{gateways.total_s:.2f} s ({gateways.longest_s * 1e3:.0f} ms)"
        )
    gateway.close()


async def run(is_quick: bool) -> None:
    """Measure everything."""
    await cost(500 if is_quick else 5_000)
    await delay(100 if is_quick else 2_000, 500)
    await snapshot(20_000 if is_quick else 1_000_000)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small figures, to see that it runs")
    asyncio.run(run(parser.parse_args().quick))


if __name__ == "__main__":
    main()

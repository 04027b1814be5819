"""Brings the events of this node's ranks to every gateway; see ``Feed``. Shell.

All work happens in ``_tick``, which whatever is new wakes, and which ends after some milliseconds.
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq

from backends.upstream.base import UpstreamClient
from kv_events.index import PrefixIndex
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec
from kv_events.relay_keys import KeyPair
from kv_events.relay_wire import PROTOCOL, Group, Hello, RankOffer
from kv_events.sequence import SourceState
from kv_events.sources import Source
from kv_events.zmq_reader import Context
from relay.buffer import MAX_BUFFERED_BYTES
from relay.feed import GatewayState
from relay.lanes import LinkCounts
from relay.link import GatewayLink
from relay.mirror import SourceMirror

logger = logging.getLogger("forebay.relay")

TICK_S: Final = 0.005
EXPIRY_CHECK_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayIdentity:
    """Who a relay is, as it tells gateways.

    Attributes:
        worker_url: The leader's address as gateways know it.
        role: ``leader`` or ``follower``.
        ranks: Global ranks that this node publishes, and their block sizes.
        dp_size: Ranks of the whole engine.
        group: Of an engine that spans nodes, ``None`` for any other.
        capacity_blocks: Blocks that the cache of one rank holds; ``None`` if unknown.
        max_copies: Copies of a block that the engine counts: 2 for vLLM, 1 for SGLang.
        relay_version: Release.
    """

    worker_url: str
    role: str
    ranks: tuple[RankOffer, ...]
    dp_size: int
    group: Group | None = None
    capacity_blocks: int | None = None
    max_copies: int = 1
    relay_version: str = ""


class RelayPublisher:
    """The ``Feed`` over ZMQ. Made on a running loop.

    Args:
        identity: Who this relay is.
        gateways: HTTP addresses.
        client: Carries the HTTP requests; stays its owner's.
        keys: CURVE keys, ``None`` to connect inside this machine only.
        admin_key: The gateways' admin key, ``None`` if they have none.
        publisher: Random name of this process; ``None`` makes one.
        max_buffered_bytes: What is kept of the batches of each rank.

    Attributes:
        publisher: That name.
        dropped: What could not be mirrored, by reason; gateways get it all the same.
    """

    def __init__(
        self,
        identity: RelayIdentity,
        gateways: Sequence[str],
        *,
        client: UpstreamClient,
        keys: KeyPair | None = None,
        admin_key: str | None = None,
        publisher: str | None = None,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        self.publisher = publisher or uuid.uuid4().hex
        self.dropped: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._context: Context = zmq.Context()
        self._index = PrefixIndex()
        self._sweeper = IndexSweeper(self._index)
        self._next_tick: asyncio.Handle | None = None
        self._is_closed = False
        self._mirrors = {offer.dp_rank: self._mirror(identity, offer, max_buffered_bytes) for offer in identity.ranks}
        self._hello = Hello(
            protocol=PROTOCOL,
            publisher=self.publisher,
            worker_url=identity.worker_url,
            role=identity.role,
            ranks=identity.ranks,
            dp_size=identity.dp_size,
            relay_version=identity.relay_version,
            group=identity.group,
        )
        self._links = {
            url: GatewayLink(
                url,
                self._hello,
                list(self._mirrors.values()),
                context=self._context,
                client=client,
                keys=keys,
                admin_key=admin_key,
                wake=self._wake,
            )
            for url in gateways
        }

    def _mirror(self, identity: RelayIdentity, offer: RankOffer, max_bytes: int) -> SourceMirror:
        source = Source(offer.dp_rank, "", block_size=offer.block_size)
        spec = PublisherSpec(
            identity.worker_url,
            source,
            dp_size=identity.dp_size,
            capacity_blocks=identity.capacity_blocks,
            max_copies=identity.max_copies,
        )
        return SourceMirror(spec, self._index, self, max_bytes)

    # The sources; see ``Feed``.

    def source_frame(self, rank: int, seq: int, payload: bytes) -> None:
        """Take a batch."""
        self._mirrors[rank].take(seq, payload)
        self._wake()

    def source_restarted(self, rank: int) -> None:
        """Another publisher: everything of the rank is forgotten."""
        self._begin_epoch(rank, "restart")

    def source_gap(self, rank: int) -> None:
        """Batches are lost: everything of the rank is forgotten."""
        self._begin_epoch(rank, "gap")

    def source_state(self, rank: int, is_connected: bool) -> None:
        """The connection to a publisher was made or lost; gateways are told at once."""
        mirror = self._mirrors[rank]
        if mirror.is_connected is not is_connected:
            mirror.is_connected = is_connected
            for link in self._links.values():
                link.beat()

    def _begin_epoch(self, rank: int, reason: str) -> None:
        self._mirrors[rank].begin_epoch(reason)
        self._sweeper.wake()
        self._wake()

    # The gateways

    def remap(self, worker_url: str) -> None:
        """The ranks are another worker's from now on."""
        self._hello = msgspec.structs.replace(self._hello, worker_url=worker_url)
        for link in self._links.values():
            link.remap(self._hello)

    def gateways(self) -> Mapping[str, GatewayState]:
        """State of each gateway, by URL."""
        return {url: link.state() for url, link in self._links.items()}

    def counts(self) -> Mapping[str, LinkCounts]:
        """What each gateway was sent, by URL."""
        return {url: link.counts for url, link in self._links.items()}

    def held_blocks(self, rank: int) -> int:
        """Blocks that the mirror has of a rank's device."""
        return sum(self._index.rank_blocks(key) for key in self._index.ranks() if key[1] == rank)

    async def run(self) -> None:
        """Hold the connections until cancelled."""
        async with asyncio.TaskGroup() as group:
            for url, link in self._links.items():
                group.create_task(link.run(), name=f"gateway {url}")
            group.create_task(self._expire(), name="orphans")

    async def aclose(self) -> None:
        """Give the ranks back and close everything, before or after ``run`` is cancelled. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._next_tick is not None:
            self._next_tick.cancel()
        for link in self._links.values():
            link.close()
        self._sweeper.close()
        self._context.destroy(linger=0)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_CHECK_S)
            for mirror in self._mirrors.values():
                mirror.expire(self._loop.time())

    def _wake(self) -> None:
        if self._next_tick is None and not self._is_closed:
            self._next_tick = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        """Send first, since gateways wait for it; then mirror what was sent."""
        self._next_tick = None
        until_s = self._loop.time() + TICK_S
        is_busy = True
        while is_busy and self._loop.time() < until_s:
            is_busy = False
            for link in self._links.values():
                is_busy |= link.pump()
            for mirror in self._mirrors.values():
                is_busy |= mirror.step(self._loop.time())
        if is_busy:
            self._wake()

    # What mirrors tell; see ``SourceObserver``.

    def kv_event(self, worker: str, kind: str) -> None:
        """One event was mirrored."""
        if kind == "cleared":
            self._sweeper.wake()

    def kv_dropped(self, reason: str, count: int) -> None:
        """Something was left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def kv_reset(self, worker: str, reason: str) -> None:
        """Not told by mirrors."""

    def kv_state(self, worker: str, dp_rank: int, state: SourceState) -> None:
        """Not told by mirrors."""

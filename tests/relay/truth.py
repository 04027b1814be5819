"""A rank whose true cache is known, which feeds a relay; and a relay that runs."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from backends.upstream.h1 import H1Client
from kv_events.index import PrefixIndex
from kv_events.relay_wire import RankOffer
from kv_events.types import AllBlocksCleared, KVEvent
from relay.feed import Feed
from relay.publisher import RelayIdentity, RelayPublisher
from tests.fakes.kv_publisher import payload
from tests.kv_events.blocks import BLOCK_SIZE, names, query, removed, stored

LETTERS = "abc"
DEPTH = 5


class Cache:
    """The cache of one rank: what it holds is what it tells.

    Attributes:
        held: Prompts whose last block is held; every prefix of one is too.
        seq: Number of the next batch.
    """

    def __init__(self, feed: Feed, dp_rank: int = 0, seed: int = 0) -> None:
        """Begin empty; tells of it first, as engines do."""
        self.feed = feed
        self.dp_rank = dp_rank
        self.held: set[str] = set()
        self.seq = 0
        self._random = random.Random(seed)
        feed.source_state(dp_rank, True)
        self.tell(AllBlocksCleared())

    def tell(self, *events: KVEvent) -> None:
        """Publish a batch."""
        self.feed.source_frame(self.dp_rank, self.seq, payload(events, float(self.seq), self.dp_rank))
        self.seq += 1

    def store(self, prompt: str) -> None:
        """Hold all blocks of a prompt."""
        known = next((n for n in range(len(prompt), 0, -1) if prompt[:n] in self.held), 0)
        if known < len(prompt):
            self.tell(stored(prompt, known))
            self.held |= {prompt[: n + 1] for n in range(known, len(prompt))}

    def evict(self, prompt: str) -> None:
        """Give up the last block of a prompt, a leaf."""
        if prompt in self.held and not any(other != prompt and other.startswith(prompt) for other in self.held):
            self.held.discard(prompt)
            self.tell(removed(prompt, [len(prompt) - 1]))

    def clear(self) -> None:
        """Give up everything."""
        self.held.clear()
        self.tell(AllBlocksCleared())

    def restart(self) -> None:
        """Be another process on the same address."""
        self.held.clear()
        self.seq = 0
        self.feed.source_restarted(self.dp_rank)
        self.tell(AllBlocksCleared())

    def lose(self) -> None:
        """Lose a batch on the way to the relay, for good: what is held is then unknown to everybody."""
        self.seq += 1
        self.held.clear()
        self.feed.source_gap(self.dp_rank)

    def work(self, steps: int) -> None:
        """Do something, by chance."""
        for _ in range(steps):
            prompt = "".join(self._random.choices(LETTERS, k=self._random.randint(1, DEPTH)))
            (self.evict if self._random.random() < 0.4 else self.store)(prompt)

    def is_known_to(self, index: PrefixIndex, worker_id: str) -> bool:
        """Whether an index has just what the cache holds."""
        rank = (worker_id, self.dp_rank)
        if rank not in index.ranks() or index.rank_blocks(rank) != len(self.held):
            return False
        return all(index.overlap(query(prompt)).device.get(rank, 0) == len(prompt) for prompt in self.held)


def identity(worker_url: str, ranks: Sequence[int] = (0,), **changes: Any) -> RelayIdentity:
    """A follower of an engine of one rank, with changes."""
    offers = tuple(RankOffer(rank, BLOCK_SIZE) for rank in ranks)
    return RelayIdentity(**{"worker_url": worker_url, "role": "follower", "ranks": offers, "dp_size": 1, **changes})


@asynccontextmanager
async def running_relay(
    who: RelayIdentity, *gateways: str, is_killed: bool = False, **options: Any
) -> AsyncIterator[RelayPublisher]:
    """A relay that holds its gateways; at the end it says goodbye, or, killed, does not."""
    client = H1Client(connect_timeout_s=1.0)
    publisher = RelayPublisher(who, gateways, client=client, **options)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(publisher.run())
        try:
            yield publisher
        finally:
            if is_killed:
                for link in publisher._links.values():
                    link.close(is_silent=True)
            await publisher.aclose()
            running.cancel()
    await client.aclose()


__all__ = ["BLOCK_SIZE", "Cache", "identity", "names", "running_relay"]

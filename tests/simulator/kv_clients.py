"""Subscribers, replay clients and a naive index: the other side of the simulated engine's KV events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from simulator.options import parse_endpoint
from simulator.server import SimulatedEngine
from tests.simulator.wire import ask

ANY = "tcp://127.0.0.1:0"
END = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as received."""

    topic: bytes
    sequence: int
    payload: bytes

    @property
    def decoded(self) -> list[Any]:
        """The payload: time, events, rank."""
        found: list[Any] = msgspec.msgpack.decode(self.payload)
        return found

    @property
    def events(self) -> list[Any]:
        """The events."""
        events: list[Any] = self.decoded[1]
        return events

    @property
    def types(self) -> list[str]:
        """The events' types."""
        return [event["type"] for event in self.events]


def at_rank(endpoint: str | None, rank: int) -> str:
    """Return the address of ``rank``."""
    assert endpoint is not None
    host, port = parse_endpoint(endpoint)
    return f"tcp://{host}:{port + rank}"


class Subscriber:
    """A SUB socket at one rank."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def next(self, timeout_s: float = 10.0) -> Batch:
        """Return the next batch."""
        async with asyncio.timeout(timeout_s):
            topic, sequence, payload = await self._socket.recv_multipart()
        return Batch(topic, int.from_bytes(sequence, "big"), payload)

    async def take(self, count: int) -> list[Batch]:
        """Return the next ``count`` batches."""
        return [await self.next() for _ in range(count)]

    async def is_quiet(self) -> bool:
        """Return whether nothing more has been sent; looks for a moment only."""
        return not await self._socket.poll(100)

    async def until(self, sequence: int) -> list[Batch]:
        """Return everything up to and with the batch of this number."""
        found = [await self.next()]
        while found[-1].sequence != sequence:
            found.append(await self.next())
        return found


@contextmanager
def sockets() -> Iterator[zmq.asyncio.Context]:
    """Give a context whose sockets are closed at the end."""
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


async def subscribe(context: zmq.asyncio.Context, engine: SimulatedEngine, rank: int = 0) -> Subscriber:
    """Subscribe to a rank; its next batch, whatever it is, will arrive.

    A subscription takes effect some time after connecting, so batches are provoked until one comes.
    """
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(at_rank(engine.options.kv_events, rank))
    publisher = engine.core.publisher
    assert publisher is not None
    ranked = publisher.ranks[rank]
    subscriber = Subscriber(socket)
    for _ in range(1000):
        ranked.journal.all_cleared()
        ranked.flush()
        if await socket.poll(20):
            await subscriber.until(ranked.next_sequence - 1)
            return subscriber
    raise AssertionError("the subscription never took effect")


async def replay(
    context: zmq.asyncio.Context, engine: SimulatedEngine, start: int, rank: int = 0, timeout_s: float = 10.0
) -> list[list[bytes]]:
    """Ask for past batches and return all replies, the end marker included."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(at_rank(engine.options.replay, rank))
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        replies: list[list[bytes]] = []
        async with asyncio.timeout(timeout_s):
            while not replies or END not in replies[-1]:
                replies.append(await socket.recv_multipart())
        return replies
    finally:
        socket.close(linger=0)


async def replayed(context: zmq.asyncio.Context, engine: SimulatedEngine, start: int = 0, rank: int = 0) -> list[Batch]:
    """Return past batches."""
    replies = await replay(context, engine, start, rank)
    return [Batch(topic, int.from_bytes(number, "big"), payload) for _, topic, number, payload in replies[:-1]]


Key = tuple[Any, ...]


@dataclass(slots=True)
class NaiveIndex:
    """What a rank's cache holds according to its events: block name to (parent, tokens), and copies of it."""

    blocks: dict[Any, Key] = field(default_factory=dict)
    copies: dict[Any, int] = field(default_factory=dict)

    def apply(self, batch: Batch) -> None:
        """Take over the events of a batch; a removal of an unknown block is an error."""
        for event in batch.events:
            match event["type"]:
                case "AllBlocksCleared":
                    self.blocks.clear()
                    self.copies.clear()
                case "BlockRemoved":
                    for name in map(shown, event["block_hashes"]):
                        self.copies[name] -= 1
                        if not self.copies[name]:
                            del self.copies[name], self.blocks[name]
                case "BlockStored":
                    self._store(event)

    def _store(self, event: dict[str, Any]) -> None:
        size, tokens, parent = event["block_size"], event["token_ids"], shown(event["parent_block_hash"])
        assert parent is None or parent in self.blocks
        names = [shown(name) for name in event["block_hashes"]]
        assert len(tokens) == size * len(names)
        for index, name in enumerate(names):
            self.blocks[name] = (parent, *tokens[index * size : (index + 1) * size])
            self.copies[name] = self.copies.get(name, 0) + 1
            parent = name


def shown(name: Any) -> Any:
    """Return a block's name as ``GET /_cache`` shows it."""
    return name.hex() if isinstance(name, bytes) else name


async def true_index(engine: SimulatedEngine, rank: int = 0) -> tuple[NaiveIndex, int]:
    """Return what ``GET /_cache`` says of a rank, and the number of its next batch."""
    found = json.loads((await ask(engine.port, "/_cache", method="GET")).body)["ranks"][rank]
    assert found["dp_rank"] == rank
    index = NaiveIndex()
    for block in found["blocks"]:
        index.blocks[block["hash"]] = (block["parent_hash"], *block["tokens"])
        index.copies[block["hash"]] = block["copies"]
    assert found["stored_blocks"] == sum(index.copies.values()) <= found["num_blocks"]
    return index, found["next_sequence"]

"""A publisher of KV events on real sockets, which loses, repeats and restarts as it is told."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import zmq

from kv_events.types import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Tier
from tests.fakes.running import PATIENCE_S

END = (2**64 - 1).to_bytes(8, "big")
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}


def payload(events: Sequence[KVEvent], timestamp_s: float, dp_rank: int | None = 0) -> bytes:
    """Encode events as SGLang 0.5.23 does."""
    return msgspec.msgpack.encode([timestamp_s, [_as_map(event) for event in events], dp_rank])


def _as_map(event: KVEvent) -> dict[str, object]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": MEDIA[event.tier]}
    assert isinstance(event, BlockStored)
    view = memoryview(event.token_bytes).cast("I")
    return {
        "type": "BlockStored",
        "block_hashes": event.block_hashes,
        "parent_block_hash": event.parent_hash,
        "token_ids": view.tolist(),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": MEDIA[event.tier],
    }


class KvPublisher:
    """PUB and ROUTER sockets on ports that stay the same over restarts. Its user closes it.

    Attributes:
        asked: Starts of the replays that were asked for, in order.
        sent: Messages of this life, for replays.
        keeps: How many of them a replay can give.
        is_deaf: Replays are not answered.
        has_no_end: Replays bring their first message again and again.
        subscriptions: How many there have been, over all lives.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, has_replay: bool = True, is_old: bool = False
    ) -> None:
        """Listen on two free ports of 127.0.0.1; ``is_old`` answers replays without a topic."""
        self._context = context
        self._is_old = is_old
        self._has_replay = has_replay
        self._loop = asyncio.get_running_loop()
        self._clock = 0
        self.asked: list[int] = []
        self.sent: list[bytes] = []
        self.keeps = 10_000
        self.is_deaf = False
        self.subscriptions = 0
        self.has_no_end = False
        self._pub = self._bind(zmq.XPUB, "tcp://127.0.0.1:*")
        self._router = self._bind(zmq.ROUTER, "tcp://127.0.0.1:*")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT) if has_replay else None
        self._watch()

    def publish(self, *events: KVEvent, dp_rank: int | None = 0, is_lost: bool = False) -> int:
        """Send one batch, or lose it on the way; returns its number."""
        self._clock += 1
        return self.publish_payload(payload(events, float(self._clock), dp_rank), is_lost=is_lost)

    def publish_payload(self, data: bytes, *, is_lost: bool = False) -> int:
        """Send any payload under the next number."""
        self.sent.append(data)
        if not is_lost:
            self.repeat(len(self.sent) - 1)
        return len(self.sent) - 1

    def repeat(self, seq: int) -> None:
        """Send a message once more."""
        self.send([b"kv", seq.to_bytes(8, "big"), self.sent[seq]])

    def send(self, frames: Sequence[bytes]) -> None:
        """Send any frames."""
        self._pub.send_multipart(frames)
        # Sending may take in what the descriptor would have told of.
        self._count()

    async def drop_connections(self) -> None:
        """Close the sockets and listen again: the same publisher, behind a network that failed."""
        self.stop()
        await self.listen()

    async def restart(self) -> None:
        """Be a new process on the same ports: numbers from 0, nothing to replay."""
        self.sent = []
        await self.drop_connections()

    async def listen(self) -> None:
        """Listen on the same ports as before."""
        self._pub = await self._bind_again(zmq.XPUB, self.endpoint)
        self._router = await self._bind_again(zmq.ROUTER, self.replay_endpoint or "tcp://127.0.0.1:*")
        self._watch()

    def stop(self) -> None:
        """Close the sockets. May be called again."""
        if not self._router.closed:
            for socket in (self._pub, self._router):
                self._loop.remove_reader(int(socket.getsockopt(zmq.FD)))
        for socket in (self._pub, self._router):
            socket.close(0)

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.XPUB:
            # Unlike PUB it tells who subscribes.
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(0)
            raise
        return socket

    async def _bind_again(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """Bind where another socket was, which is closed by a thread of its own."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    return self._bind(kind, endpoint)
                except zmq.ZMQError:
                    await asyncio.sleep(0.005)

    def _watch(self) -> None:
        for socket, serve in ((self._pub, self._count), (self._router, self._serve)):
            self._loop.add_reader(int(socket.getsockopt(zmq.FD)), serve)
            self._loop.call_soon(serve)

    def _count(self) -> None:
        while (frames := _received(self._pub)) is not None:
            self.subscriptions += frames[0].startswith(b"\x01")

    def _serve(self) -> None:
        while (frames := _received(self._router)) is not None:
            identity, _, start = frames
            self.asked.append(int.from_bytes(start, "big"))
            if not self.is_deaf:
                self._answer(identity, self.asked[-1])

    def _answer(self, identity: bytes, start: int) -> None:
        first = max(start, len(self.sent) - self.keeps)
        topic = [] if self._is_old else [b"kv"]
        if self.has_no_end:
            if not self._router.closed:
                self._router.send_multipart([identity, b"", *topic, bytes(8), self.sent[0]])
                self._loop.call_later(0.02, self._answer, identity, start)
            return
        for seq in range(first, len(self.sent)):
            self._router.send_multipart([identity, b"", *topic, seq.to_bytes(8, "big"), self.sent[seq]])
        self._router.send_multipart([identity, b"", *([] if self._is_old else [b""]), END, b""])


def _received(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return None if socket.closed else socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


@asynccontextmanager
async def kv_publisher(
    context: zmq.Context[zmq.Socket[bytes]], *, has_replay: bool = True, is_old: bool = False
) -> AsyncIterator[KvPublisher]:
    """A publisher that is closed at the end."""
    publisher = KvPublisher(context, has_replay=has_replay, is_old=is_old)
    try:
        yield publisher
    finally:
        publisher.stop()

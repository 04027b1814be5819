"""Engines of several nodes: the first node computes everything, the others publish the events of their ranks.

The nodes meet at ``dist_init_addr``: the first listens there, and sends each of the others the batches of its ranks,
those so far and then each as it is made. Who comes back, first node or other, gets or sends all of it again.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from dataclasses import replace

import zmq

from simulator.faults import FaultTable
from simulator.kv_batches import RankPublisher
from simulator.kv_encoding import Frames, sequence_bytes
from simulator.kv_replay import ReplayDesk
from simulator.kv_sockets import Context, Sockets, bind_run
from simulator.options import EngineOptions

# A node says so often that it is there; the first node may have come back meanwhile.
_HELLO_S = 0.2


class GroupPort:
    """The first node's side: bound when made, until ``close``.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, context: Context, options: EngineOptions, boot: bytes, loop: asyncio.AbstractEventLoop) -> None:
        assert options.dist_init_addr is not None
        self._loop = loop
        self._boot = boot
        self._nodes = options.nnodes
        self._dp_size = options.dp_size
        self._known: dict[bytes, range] = {}
        self._publishers: dict[int, RankPublisher] = {}
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(f"tcp://{_numeric(options.dist_init_addr.removeprefix('tcp://'))}")
        except zmq.ZMQError as exc:
            raise OSError(exc.errno, f"{options.dist_init_addr}: {exc.strerror}") from exc
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._wake)

    def serve(self, publishers: list[RankPublisher]) -> None:
        """Send what these publish to the nodes that have their ranks."""
        self._publishers = {publisher.rank: publisher for publisher in publishers}
        self._wake()

    def send(self, rank: int, frames: Frames) -> None:
        """Send one batch to the node that has the rank, if it is there."""
        for node, ranks in self._known.items():
            if rank in ranks:
                self._socket.send_multipart([node, self._boot, rank.to_bytes(4, "big"), *frames], zmq.NOBLOCK)
        self._loop.call_soon(self._wake)

    def close(self) -> None:
        """Listen no more; whoever made the context closes the socket."""
        self._loop.remove_reader(self._descriptor)

    def _wake(self) -> None:
        while not self._socket.closed:
            try:
                node, number = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if node not in self._known:
                self._welcome(node, int.from_bytes(number, "big"))

    def _welcome(self, node: bytes, number: int) -> None:
        ranks = ranks_of(self._dp_size, self._nodes, number)
        self._known[node] = ranks
        for rank in ranks:
            publisher = self._publishers[rank]
            for sequence, payload in publisher.buffer:
                head = [node, self._boot, rank.to_bytes(4, "big")]
                self._socket.send_multipart([*head, publisher.topic, sequence_bytes(sequence), payload], zmq.NOBLOCK)


class RemoteSocket:
    """Stands for the PUB socket of a rank that another node has."""

    def __init__(self, port: GroupPort, rank: int) -> None:
        self._port = port
        self._rank = rank

    def send_multipart(self, frames: Frames, flags: int, /) -> None:
        """Send one batch."""
        self._port.send(self._rank, frames)


class _RemoteRank:
    """One rank of a node that computes nothing: what the first node sent, for subscribers and for replays."""

    def __init__(self, rank: int, options: EngineOptions, socket: zmq.Socket[bytes]) -> None:
        self.rank = rank
        self.topic = options.kv_topic.encode()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=options.kv_buffer_batches)
        self.is_silent = False
        self._socket = socket

    def take(self, frames: Frames) -> None:
        """Keep a batch, and publish it."""
        _, sequence, payload = frames
        self.buffer.append((int.from_bytes(sequence, "big"), payload))
        self._socket.send_multipart(frames, zmq.NOBLOCK)


class NodePublisher:
    """The publishers of a node that is not the first; bound when made, until ``close``.

    Raises:
        OSError: An address cannot be bound.
    """

    def __init__(self, options: EngineOptions, loop: asyncio.AbstractEventLoop, faults: FaultTable) -> None:
        assert options.dist_init_addr is not None
        assert options.kv_events is not None
        self._loop = loop
        self._context: Context = zmq.Context()
        self._hello: asyncio.TimerHandle | None = None
        self._boot = b""
        self._node_rank = options.node_rank
        publishing: Sockets = []
        answering: Sockets = []
        ranks = ranks_of(options.dp_size, options.nnodes, options.node_rank)
        try:
            endpoint = bind_run(self._context, zmq.PUB, options.kv_events, ranks, options.kv_hwm, publishing)
            replay = None
            if options.replay is not None:
                replay = bind_run(self._context, zmq.ROUTER, options.replay, ranks, 0, answering)
        except OSError:
            self._context.destroy(linger=0)
            raise
        self.options = replace(options, kv_events=endpoint, replay=replay)
        """The given options with the ports that are bound."""
        self._ranks = {
            rank: _RemoteRank(rank, self.options, socket) for rank, socket in zip(ranks, publishing, strict=True)
        }
        has_topic = options.kv_replay_framing == "new"
        self._desks = [
            ReplayDesk(self._ranks[rank], socket, loop, faults, has_topic=has_topic)
            for rank, socket in zip(ranks, answering, strict=bool(answering))
        ]
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"n" + os.urandom(8))
        self._socket.setsockopt(zmq.SNDHWM, 4)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(f"tcp://{options.dist_init_addr.removeprefix('tcp://')}")
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._wake)
        self._say_hello()

    def announce_start(self) -> None:
        """Publish nothing: the first node does."""

    def reset(self) -> None:
        """Change nothing: faults act at the first node."""

    def close(self) -> None:
        """Close all sockets; their ports are free when this returns. May be called twice."""
        if self._context.closed:
            return
        self._loop.remove_reader(self._descriptor)
        if self._hello is not None:
            self._hello.cancel()
        for desk in self._desks:
            desk.close()
        self._context.destroy(linger=0)

    def _say_hello(self) -> None:
        try:
            self._socket.send(self._node_rank.to_bytes(4, "big"), zmq.NOBLOCK)
        except zmq.Again:
            pass  # the first node is not there, and enough of these wait for it
        self._hello = self._loop.call_later(_HELLO_S, self._say_hello)
        self._wake()

    def _wake(self) -> None:
        while not self._socket.closed:
            try:
                boot, rank, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if boot != self._boot:
                self._boot = boot
                for one in self._ranks.values():
                    one.buffer.clear()
            if (known := self._ranks.get(int.from_bytes(rank, "big"))) is not None:
                known.take(frames)


def _numeric(address: str) -> str:
    """Resolve the host of an address, since sockets are bound to numbers only; ``OSError`` if that is not possible."""
    host, _, port = address.rpartition(":")
    if host.startswith("["):
        return address
    return f"{socket.gethostbyname(host)}:{port}"


def ranks_of(dp_size: int, nnodes: int, node_rank: int) -> range:
    """Return the global ranks of a node: spread evenly, and of a rank on several nodes the first one has it."""
    mine = [rank for rank in range(dp_size) if rank * nnodes // dp_size == node_rank]
    return range(mine[0], mine[-1] + 1) if mine else range(0)

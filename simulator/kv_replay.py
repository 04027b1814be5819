"""Answers requests for past batches of one rank.

A request is an empty frame and the number to begin with, 8 bytes big-endian; the answers are the
batches from there on that are still in memory, then an end marker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

import zmq

from simulator.faults import FaultTable
from simulator.kv_encoding import END_OF_REPLAY, Frames, sequence_bytes

# Replies of one turn of the loop: a long replay must not hold up generation.
_REPLIES_PER_TURN = 128


class PastBatches(Protocol):
    """The batches of one rank."""

    rank: int
    topic: bytes
    buffer: deque[tuple[int, bytes]]
    is_silent: bool


class ReplayDesk:
    """The ROUTER socket of one rank; requests are served one after the other.

    Older SGLang leaves the topic out of its replies: ``has_topic`` is false then.
    """

    def __init__(
        self,
        publisher: PastBatches,
        socket: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        faults: FaultTable,
        *,
        has_topic: bool,
    ) -> None:
        self._publisher = publisher
        self._socket = socket
        self._loop = loop
        self._faults = faults
        self._has_topic = has_topic
        self._replies: deque[Frames] = deque()
        self._handle: asyncio.Handle | None = None
        self._descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._descriptor, self._wake)
        self._wake()

    def close(self) -> None:
        """Look at the socket no more; whoever made it closes it."""
        self._loop.remove_reader(self._descriptor)
        if self._handle is not None:
            self._handle.cancel()
        self._replies.clear()

    def _wake(self) -> None:
        # The descriptor tells of changes only: whatever is there must be read now.
        while True:
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(request)
        if self._replies and self._handle is None:
            self._handle = self._loop.call_soon(self._turn)

    def _take(self, request: Frames) -> None:
        if len(request) != 3 or self._publisher.is_silent:
            return
        if self._faults.take_for_rank("replay", self._publisher.rank) is not None:
            return
        caller, _, start = request
        first = int.from_bytes(start, "big")
        topic = [self._publisher.topic] if self._has_topic else []
        for sequence, payload in self._publisher.buffer:
            if sequence >= first:
                self._replies.append([caller, b"", *topic, sequence_bytes(sequence), payload])
        end = [b""] if self._has_topic else []
        self._replies.append([caller, b"", *end, END_OF_REPLAY, b""])

    def _turn(self) -> None:
        self._handle = None
        for _ in range(min(len(self._replies), _REPLIES_PER_TURN)):
            self._socket.send_multipart(self._replies.popleft(), zmq.NOBLOCK)
        # Sending may have swallowed the news of a request.
        self._wake()

"""Publishes every rank's KV events over ZMQ and answers requests for past ones; ranks of other nodes through these.

Each rank has a PUB socket at the endpoint's port plus its rank and, if wanted, a ROUTER socket for
replays likewise. Both live on the event loop: publishing never waits, what a slow subscriber cannot
take is dropped at the high-water mark, as the engines do it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace

import zmq

from simulator.faults import FaultTable
from simulator.group import GroupPort, RemoteSocket, ranks_of
from simulator.kv_batches import PubSocket, RankPublisher, Wire
from simulator.kv_encoding import format_of
from simulator.kv_replay import ReplayDesk
from simulator.kv_sockets import Sockets, bind_run
from simulator.log import EngineLog
from simulator.options import EngineOptions
from simulator.timers import Timers


class KvPublisher:
    """All ranks' publishers of one boot; bound when made, until ``close``.

    Args:
        options: Endpoints and sizes; port 0 lets the system choose a run of ports.
        loop: Where everything happens.
        faults: Source of the faults at ``kv`` and ``replay``.
        log: Hears of every batch.
        restart: Reboots the engine, for the fault of that name.

    Raises:
        OSError: An address cannot be bound.
    """

    def __init__(
        self,
        options: EngineOptions,
        loop: asyncio.AbstractEventLoop,
        faults: FaultTable,
        log: EngineLog,
        restart: Callable[[], None],
    ) -> None:
        assert options.kv_events is not None
        self.form = format_of(options)
        self._timers = Timers(loop)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._is_closed = False
        self._group: GroupPort | None = None
        publishing: Sockets = []
        answering: Sockets = []
        ranks = ranks_of(options.dp_size, options.nnodes, 0)
        try:
            endpoint = bind_run(self._context, zmq.PUB, options.kv_events, ranks, options.kv_hwm, publishing)
            replay = None
            if options.replay is not None:
                # No limit here; the engines' own sockets may drop replies to a slow reader.
                replay = bind_run(self._context, zmq.ROUTER, options.replay, ranks, 0, answering)
            if options.nnodes > 1:
                self._group = GroupPort(self._context, options, os.urandom(8), loop)
        except OSError:
            self._context.destroy(linger=0)
            raise
        self.options = replace(options, kv_events=endpoint, replay=replay)
        """The given options with the ports that are bound."""

        def restart_soon() -> None:
            self._timers.after(0, restart)

        sockets: list[PubSocket] = [*publishing]
        if self._group is not None:
            sockets += [RemoteSocket(self._group, rank) for rank in range(len(ranks), options.dp_size)]
        self.ranks = [
            RankPublisher(rank, self.options, self.form, Wire(socket, self._timers), faults, log, restart_soon)
            for rank, socket in enumerate(sockets)
        ]
        if self._group is not None:
            self._group.serve(self.ranks)
        has_topic = options.kv_replay_framing == "new"
        self._desks = [
            ReplayDesk(self.ranks[rank], socket, loop, faults, has_topic=has_topic)
            for rank, socket in enumerate(answering)
        ]

    def announce_start(self) -> None:
        """Publish what the engine publishes before its first request."""
        if self.form.clears_at_start:
            for rank in self.ranks:
                rank.journal.all_cleared()
                rank.flush()

    def cleared(self) -> None:
        """Publish that the caches were emptied, if the engine does so at once."""
        if self.form.tells_clear_at_once:
            for rank in self.ranks:
                rank.flush()

    def reset(self) -> None:
        """End silence, and send what faults have held back."""
        if self._is_closed:
            return
        for rank in self.ranks:
            rank.reset()

    def close(self) -> None:
        """Close all sockets; their ports are free when this returns. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timers.close()
        if self._group is not None:
            self._group.close()
        for desk in self._desks:
            desk.close()
        for rank in self.ranks:
            rank.is_closed = True
        self._context.destroy(linger=0)

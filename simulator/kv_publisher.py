"""Publishes every rank's KV events over ZMQ and answers requests for past ones.

Each rank has a PUB socket at the endpoint's port plus its rank and, if wanted, a ROUTER socket for
replays likewise. Both live on the event loop: publishing never waits, what a slow subscriber cannot
take is dropped at the high-water mark, as the engines do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import zmq

from simulator.faults import FaultTable
from simulator.kv_batches import RankPublisher, Wire
from simulator.kv_encoding import format_of
from simulator.kv_replay import ReplayDesk
from simulator.log import EngineLog
from simulator.options import EngineOptions, parse_endpoint
from simulator.timers import Timers

# How often a run of free ports is looked for when the system may choose.
_PORT_ATTEMPTS = 50

Sockets = list[zmq.Socket[bytes]]


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
        publishing: Sockets = []
        answering: Sockets = []
        try:
            endpoint = self._bind_run(zmq.PUB, options.kv_events, options.dp_size, options.kv_hwm, publishing)
            replay = None
            if options.replay is not None:
                # No limit here; the engines' own sockets may drop replies to a slow reader.
                replay = self._bind_run(zmq.ROUTER, options.replay, options.dp_size, 0, answering)
        except OSError:
            self._context.destroy(linger=0)
            raise
        self.options = replace(options, kv_events=endpoint, replay=replay)
        """The given options with the ports that are bound."""

        def restart_soon() -> None:
            self._timers.after(0, restart)

        self.ranks = [
            RankPublisher(rank, self.options, self.form, Wire(socket, self._timers), faults, log, restart_soon)
            for rank, socket in enumerate(publishing)
        ]
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
        for desk in self._desks:
            desk.close()
        for rank in self.ranks:
            rank.is_closed = True
        self._context.destroy(linger=0)

    def _bind_run(self, kind: int, endpoint: str, size: int, hwm: int, sockets: Sockets) -> str:
        """Bind one socket for each rank, at ports in a row; returns the endpoint of the first.

        Raises:
            OSError: Not possible.
        """
        host, port = parse_endpoint(endpoint)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            first = port
            try:
                for rank in range(size):
                    socket = self._context.socket(kind)
                    sockets.append(socket)
                    socket.set_hwm(hwm)
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.setsockopt(zmq.IPV6, ":" in host)
                    socket.bind(f"tcp://{host}:{first + rank if first else '*'}")
                    if not first:
                        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                        first = int(bound.rpartition(":")[2])
            except zmq.ZMQError as exc:
                for socket in sockets:
                    socket.close(linger=0)
                sockets.clear()
                # Only a run that the system began may be tried elsewhere: its neighbours can be taken.
                if port or first == 0 or attempt == _PORT_ATTEMPTS:
                    raise OSError(exc.errno, exc.strerror) from exc
                continue
            return f"tcp://{host}:{first}"
        raise AssertionError("every attempt ends in a return or a raise")

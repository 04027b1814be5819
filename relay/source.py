"""Reads one publisher of the local engine, puts its batches in order, and hands them to the feed. Shell.

What a gateway's own subscriber does, without the index behind it: see ``kv_events.sequence`` for gaps and restarts.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import zmq

from kv_events.errors import BatchUndecodable, SourceMisconfigured
from kv_events.publisher import SubscriberLimits
from kv_events.replay import ReplayRequest
from kv_events.replay_frames import parse_message
from kv_events.sequence import Command, Deliver, RequestReplay, Reset, SequenceMachine
from kv_events.sources import Source
from kv_events.zmq_reader import ConnectionMonitor, Context, ZmqReader, quiet_socket
from relay.feed import Feed

logger = logging.getLogger("forebay.relay")

BURST_MESSAGES = 32


class SourceReader:
    """Follows one publisher from ``start`` to ``close``. Its replays and resets never touch other ranks.

    Attributes:
        source: The publisher.
        frames: Batches handed on.
        resets: How often all that was known was forgotten, by reason.
        dropped: Messages that cannot be, by reason.
    """

    def __init__(
        self,
        context: Context,
        source: Source,
        feed: Feed,
        on_state: Callable[[int, bool], None],
        limits: SubscriberLimits | None = None,
    ) -> None:
        """Prepare to follow ``source``; the context stays its owner's, ``on_state`` hears what the feed hears."""
        self.source = source
        self.frames = 0
        self.resets: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._machine = SequenceMachine(has_replay=source.replay_endpoint is not None)
        self._context = context
        self._feed = feed
        self._on_state = on_state
        self._limits = limits or SubscriberLimits()
        self._loop = asyncio.get_running_loop()
        self._reader: ZmqReader | None = None
        self._monitor: ConnectionMonitor | None = None
        self._replay: ReplayRequest | None = None
        self._replay_until_s = self._replay_end_s = 0.0
        self._unreachable_at_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_tick: asyncio.Handle | None = None
        self._epoch = self._machine.epoch

    def start(self) -> None:
        """Connect, in the background, and again whenever the connection is lost.

        Raises:
            SourceMisconfigured: The endpoint is no address.
        """
        socket = quiet_socket(self._context, zmq.SUB)
        self._monitor = ConnectionMonitor(socket, self._wake)
        self._reader = ZmqReader(socket, self._wake)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
            socket.connect(self.source.endpoint)
        except zmq.ZMQError as exc:
            self.close()
            raise SourceMisconfigured(f"{self.source.endpoint}: {exc.strerror}") from exc

    def close(self) -> None:
        """Close the sockets; the feed is told nothing more. May be called again."""
        self._end_replay()
        for handle in (self._timer, self._next_tick):
            if handle is not None:
                handle.cancel()
        if self._monitor is not None:
            self._monitor.close()
        if self._reader is not None:
            self._reader.close()
        self._timer = self._next_tick = self._monitor = self._reader = None

    def on_boot(self, identity: str) -> None:
        """Take note of the identity of the engine's process, as the engine tells it."""
        if identity and self._reader is not None:
            self._execute(self._machine.on_boot(identity))
            self._wake()

    def _wake(self) -> None:
        if self._next_tick is None and self._reader is not None:
            self._next_tick = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._next_tick = None
        until_s = self._loop.time() + self._limits.tick_s
        while self._receive():
            if self._loop.time() >= until_s:
                self._wake()
                break
        self._set_timer()

    def _receive(self) -> bool:
        """Read from the sockets; false if all of them are empty."""
        if self._reader is None or self._monitor is None:
            return False
        messages: list[list[bytes]] = []
        while len(messages) < BURST_MESSAGES and (frames := self._reader.receive()) is not None:
            messages.append(frames)
        # Asked after the reading: what a new publisher sends comes later than the news that the old one is gone.
        connections = self._monitor.events()
        if False in connections:
            # Nobody knows which of the two these are from; a replay brings them again.
            while self._reader.receive() is not None:
                pass
            messages = []
        for is_connected in connections:
            self._connection_changed(is_connected)
        for frames in messages:
            try:
                message = parse_message(frames)
            except BatchUndecodable as exc:
                self.dropped[str(exc.args[0])] += 1
                continue
            self._execute(self._machine.on_message(message.sequence, message.payload))
        return bool(messages or connections) or self._receive_replay()

    def _connection_changed(self, is_connected: bool) -> None:
        rank = self.source.dp_rank
        logger.info("%s the publisher of rank %d", "reached" if is_connected else "lost", rank)
        self._feed.source_state(rank, is_connected)
        self._on_state(rank, is_connected)
        if is_connected:
            self._unreachable_at_s = None
            self._execute(self._machine.on_connected())
            return
        if self._unreachable_at_s is None:
            self._unreachable_at_s = self._loop.time() + self._limits.stale_grace_s
        self._end_replay()
        self._execute(self._machine.on_disconnected())

    def _receive_replay(self) -> bool:
        if self._replay is None:
            return False
        try:
            reply = self._replay.receive()
        except BatchUndecodable as exc:
            self.dropped[str(exc.args[0])] += 1
            return True
        if reply is False:
            return False
        self._replay_until_s = min(self._loop.time() + self._limits.replay_idle_s, self._replay_end_s)
        if reply is True:
            self._end_replay()
            self._execute(self._machine.on_replay_end())
        else:
            self._execute(self._machine.on_replayed(reply.sequence, reply.payload))
        return True

    def _execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self.frames += 1
                self._feed.source_frame(self.source.dp_rank, command.seq, command.payload)
            elif isinstance(command, Reset):
                self._reset(command.reason)
            else:
                self._ask(command)

    def _reset(self, reason: str) -> None:
        rank = self.source.dp_rank
        self.resets[reason] += 1
        logger.info("rank %d starts anew: %s", rank, reason)
        if self._epoch == self._machine.epoch:
            self._feed.source_gap(rank)
        else:
            self._epoch = self._machine.epoch
            self._feed.source_restarted(rank)

    def _ask(self, command: RequestReplay) -> None:
        self._end_replay()
        assert self.source.replay_endpoint is not None
        self._replay_end_s = self._loop.time() + self._limits.replay_total_s
        self._replay_until_s = self._loop.time() + self._limits.replay_idle_s
        try:
            self._replay = ReplayRequest(self._context, self.source.replay_endpoint, command.start, self._wake)
        except zmq.ZMQError as exc:
            # Fails at its deadline like one that is never answered.
            logger.error("no replay from %s: %s", self.source.replay_endpoint, exc.strerror)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        replay_s = self._replay_until_s if self._machine.is_waiting_for_replay else None
        due_s = min((time for time in (replay_s, self._unreachable_at_s) if time is not None), default=None)
        if due_s is not None and self._reader is not None:
            self._timer = self._loop.call_at(due_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        if self._unreachable_at_s is not None and self._unreachable_at_s <= now_s:
            self._unreachable_at_s = None
            self._execute(self._machine.on_unreachable())
        if self._machine.is_waiting_for_replay and self._replay_until_s <= now_s:
            self._end_replay()
            self._execute(self._machine.on_replay_failed())
        self._wake()

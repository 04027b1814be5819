"""Follows one publisher: sockets on the loop, and the sequence machine between them and who takes the batches. Shell.

All of it happens in ``_tick``, which every descriptor wakes, and which ends after two milliseconds or when there is
nothing left to do. What is received is dealt with before more is received, so that the bounds of the sockets hold.
"""

import asyncio
import logging

import zmq

from kv_events.errors import BatchUndecodable, SourceMisconfigured
from kv_events.publisher import SubscriberLimits
from kv_events.replay import ReplayRequest
from kv_events.replay_frames import parse_message
from kv_events.sequence import REPLAY_WINDOW, Command, Deliver, RequestReplay, Reset, SequenceMachine
from kv_events.sources import Source
from kv_events.zmq_reader import ConnectionMonitor, Context, ZmqReader, quiet_socket

logger = logging.getLogger("forebay.kv_events")

BURST_MESSAGES = 32


class PublisherFollower:
    """Reads one publisher from ``start`` to ``close`` and puts its batches in order; subclasses take them.

    Attributes:
        source: The publisher.
        machine: What is known of its messages; not to be changed by others.
    """

    def __init__(
        self, context: Context, source: Source, limits: SubscriberLimits | None, replay_window: int = REPLAY_WINDOW
    ) -> None:
        """Prepare to follow ``source``, which keeps ``replay_window`` messages; the context stays its owner's."""
        self.source = source
        self.machine = SequenceMachine(has_replay=source.replay_endpoint is not None, replay_window=replay_window)
        self._context = context
        self._limits = limits or SubscriberLimits()
        self._loop = asyncio.get_running_loop()
        self._reader: ZmqReader | None = None
        self._monitor: ConnectionMonitor | None = None
        self._replay: ReplayRequest | None = None
        self._replay_until_s = 0.0
        self._replay_end_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._unreachable_at_s: float | None = None
        self._next_tick: asyncio.Handle | None = None
        self._epoch = self.machine.epoch

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
            self._close()
            raise SourceMisconfigured(f"{self.source.endpoint}: {exc.strerror}") from exc

    def on_boot(self, identity: str) -> None:
        """Take note of the identity of the engine's process, as the engine tells it."""
        self._execute(self.machine.on_boot(identity))
        self._wake()

    # What subclasses do with it

    def _deliver(self, command: Deliver) -> None:
        """Take the next batch."""
        raise NotImplementedError

    def _forget(self, reason: str, *, is_new_epoch: bool, keeps_queue: bool) -> None:
        """Forget what came before; ``keeps_queue`` spares batches that were taken and not dealt with."""
        raise NotImplementedError

    def _dropped(self, reason: str) -> None:
        """Count a message that cannot be."""
        raise NotImplementedError

    def _connected(self, is_connected: bool) -> None:
        """Take note of a connection, or of its loss; before the machine does."""

    def _work(self) -> bool:
        """Deal with a part of what was taken; false if nothing is left, and more can be received."""
        return False

    def _is_behind(self) -> bool:
        """Whether something taken is not dealt with."""
        return False

    def _worked(self) -> None:
        """The tick is over."""

    def _due_s(self) -> float | None:
        """Time of the loop at which ``_on_due`` wants to be called."""
        return None

    def _on_due(self, now_s: float) -> None:
        """Some timer has come."""

    # The one place where things happen

    def _wake(self) -> None:
        if self._next_tick is None and self._reader is not None:
            self._next_tick = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._next_tick = None
        until_s = self._loop.time() + self._limits.tick_s
        while self._reader is not None and (self._work() or self._receive()):
            if self._loop.time() >= until_s:
                self._wake()
                break
        self._worked()
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
            self._message(frames)
        return bool(messages or connections) or self._receive_replay()

    def _connection_changed(self, is_connected: bool) -> None:
        self._connected(is_connected)
        if is_connected:
            self._unreachable_at_s = None
            self._execute(self.machine.on_connected())
        else:
            if self._unreachable_at_s is None:
                self._unreachable_at_s = self._loop.time() + self._limits.stale_grace_s
            self._end_replay()
            self._execute(self.machine.on_disconnected())

    def _message(self, frames: list[bytes]) -> None:
        try:
            message = parse_message(frames)
        except BatchUndecodable as exc:
            self._dropped(str(exc.args[0]))
            return
        self._execute(self.machine.on_message(message.sequence, message.payload))

    def _receive_replay(self) -> bool:
        if self._replay is None:
            return False
        try:
            reply = self._replay.receive()
        except BatchUndecodable as exc:
            self._dropped(str(exc.args[0]))
            return True
        if reply is False:
            return False
        self._replay_until_s = min(self._loop.time() + self._limits.replay_idle_s, self._replay_end_s)
        if reply is True:
            self._end_replay()
            self._execute(self.machine.on_replay_end())
        else:
            self._execute(self.machine.on_replayed(reply.sequence, reply.payload))
        return True

    # Commands

    def _execute(self, commands: list[Command], *, keeps_queue: bool = False) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self._deliver(command)
            elif isinstance(command, Reset):
                is_new_epoch = self._epoch != self.machine.epoch
                self._epoch = self.machine.epoch
                self._forget(command.reason, is_new_epoch=is_new_epoch, keeps_queue=keeps_queue)
            else:
                self._ask(command)

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

    def _close(self) -> None:
        """Close the sockets. May be called again."""
        self._end_replay()
        for handle in (self._timer, self._next_tick):
            if handle is not None:
                handle.cancel()
        if self._monitor is not None:
            self._monitor.close()
        if self._reader is not None:
            self._reader.close()
        self._timer = self._next_tick = self._monitor = self._reader = None

    # Time

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [self._due_s(), self._unreachable_at_s]
        if self.machine.is_waiting_for_replay:
            times.append(self._replay_until_s)
        due_s = min((time for time in times if time is not None), default=None)
        if due_s is not None and self._reader is not None:
            self._timer = self._loop.call_at(due_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        if self._unreachable_at_s is not None and self._unreachable_at_s <= now_s:
            self._unreachable_at_s = None
            self._execute(self.machine.on_unreachable())
        if self.machine.is_waiting_for_replay and self._replay_until_s <= now_s and not self._is_behind():
            self._end_replay()
            self._execute(self.machine.on_replay_failed())
        self._on_due(now_s)
        self._wake()

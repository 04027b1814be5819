"""Follows one publisher: sockets on the loop, the sequence machine between them and the index. Shell.

All of it happens in ``_tick``, which every descriptor wakes, and which ends after two milliseconds or when there is
nothing left to do. What is received is applied before more is received, so that the bounds of the sockets hold.
"""

import asyncio
import logging

import zmq

from kv_events.delivery import DeliveryQueue
from kv_events.errors import BatchUndecodable, DeliverySuspect, SourceMisconfigured
from kv_events.index import PrefixIndex
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec, SourceObserver, SubscriberLimits
from kv_events.replay import ReplayRequest
from kv_events.replay_frames import parse_message
from kv_events.sequence import Command, Deliver, RequestReplay, Reset, SequenceMachine, SourceState
from kv_events.snapshot import SnapshotPosition, dump_rank, load_rank
from kv_events.zmq_reader import ConnectionMonitor, Context, ZmqReader, quiet_socket

logger = logging.getLogger("forebay.kv_events")

BURST_MESSAGES = 32


class KvSubscriber:
    """Keeps the index in step with one publisher, from ``start`` to ``aclose``.

    Attributes:
        spec: The publisher.
        machine: What is known of its messages; not to be changed by others.
        problem: Why it cannot be its worker's; empty if it can.
    """

    def __init__(
        self,
        context: Context,
        spec: PublisherSpec,
        index: PrefixIndex,
        sweeper: IndexSweeper,
        observer: SourceObserver,
        limits: SubscriberLimits | None = None,
    ) -> None:
        """Prepare to follow ``spec``; context, index and sweeper stay their owner's."""
        self.spec = spec
        self.problem = ""
        self.machine = SequenceMachine(
            has_replay=spec.source.replay_endpoint is not None, replay_window=spec.replay_window
        )
        self._context = context
        self._index = index
        self._sweeper = sweeper
        self._observer = observer
        self._limits = limits or SubscriberLimits()
        self._loop = asyncio.get_running_loop()
        self._queue = DeliveryQueue(spec, index, observer)
        self._reader: ZmqReader | None = None
        self._monitor: ConnectionMonitor | None = None
        self._replay: ReplayRequest | None = None
        self._replay_until_s = 0.0
        self._replay_end_s = 0.0
        self._next_resync_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._unreachable_at_s: float | None = None
        self._next_tick: asyncio.Handle | None = None
        self._reported: SourceState | None = None
        self._epoch = self.machine.epoch

    @property
    def blocks(self) -> int:
        """Blocks that the index has of the source's ranks, on the device."""
        return sum(self._index.rank_blocks(rank) for rank in self.spec.ranks())

    @property
    def endpoint(self) -> str:
        """Where the events come from."""
        return self.spec.source.endpoint

    @property
    def position(self) -> tuple[str, int | None]:
        """Epoch, and number of the newest message; ``None`` if unknown."""
        return str(self.machine.epoch), self.machine.last_seq

    def start(self) -> None:
        """Connect, in the background, and again whenever the connection is lost.

        Raises:
            SourceMisconfigured: The endpoint is no address.
        """
        socket = quiet_socket(self._context, zmq.SUB)
        self._monitor = ConnectionMonitor(socket, self._wake)
        self._reader = ZmqReader(socket, self._wake)
        try:
            socket.setsockopt(zmq.SUBSCRIBE, self.spec.source.topic.encode())
            socket.connect(self.spec.source.endpoint)
        except zmq.ZMQError as exc:
            self._close()
            raise SourceMisconfigured(f"{self.spec.source.endpoint}: {exc.strerror}") from exc
        self._report()

    async def aclose(self) -> None:
        """Close the sockets and forget the ranks. May be called again."""
        self.close()

    def close(self) -> None:
        """Close the sockets and forget the ranks, here and now. May be called again."""
        if self._reader is not None:
            for rank in self.spec.ranks():
                self._index.remove_rank(rank)
            self._sweeper.wake()
        self._close()

    def on_boot(self, identity: str) -> None:
        """Take note of the identity of the engine's process, as the engine tells it."""
        self._execute(self.machine.on_boot(identity))
        self._wake()

    def dump(self) -> list[bytes] | None:
        """Write down what is known, a snapshot for each rank; ``None`` while it is not settled: try again later."""
        machine = self.machine
        if machine.state not in (SourceState.LIVE, SourceState.COLD) or len(self._queue):
            return None
        position = SnapshotPosition(
            machine.epoch, machine.last_seq, machine.last_digest, machine.state is SourceState.LIVE
        )
        return [dump_rank(self._index, rank, position) for rank in self.spec.ranks()]

    def load(self, snapshots: list[bytes]) -> None:
        """Begin from a dump, to be called before ``start``; the publisher is asked whether it still holds.

        Raises:
            BatchUndecodable: One of them is no snapshot; nothing is known then.
            KeyError: One is of another rank; nothing is known then.
        """
        try:
            positions = {load_rank(self._index, snapshot)[1] for snapshot in snapshots}
            if len(positions) > 1:
                raise BatchUndecodable("snapshot")
        except (BatchUndecodable, KeyError):
            self._queue.reset()
            raise
        for position in positions:
            if position.last_seq is not None:
                self.machine.resume(
                    position.epoch, position.last_seq, position.last_digest, is_complete=position.is_complete
                )
                self._epoch = position.epoch

    def _close(self) -> None:
        self._end_replay()
        for handle in (self._timer, self._next_tick):
            if handle is not None:
                handle.cancel()
        if self._monitor is not None:
            self._monitor.close()
        if self._reader is not None:
            self._reader.close()
        self._timer = self._next_tick = self._monitor = self._reader = None

    # The one place where things happen

    def _wake(self) -> None:
        if self._next_tick is None and self._reader is not None:
            self._next_tick = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._next_tick = None
        until_s = self._loop.time() + self._limits.tick_s
        while self._reader is not None:
            if len(self._queue):
                self._apply()
            elif not self._receive():
                break
            if self._loop.time() >= until_s:
                self._wake()
                break
        self._report()
        self._set_timer()

    def _apply(self) -> None:
        try:
            self._queue.step(self._loop.time())
        except SourceMisconfigured as exc:
            self._misconfigured(exc)
        except DeliverySuspect as exc:
            # What is queued behind it can still be applied, to what is then an empty rank.
            self._execute(self.machine.on_suspect(str(exc)), keeps_queue=True)
        except Exception:
            # Whatever a payload brings about must not stop the reading of the next one.
            logger.exception("a batch of %s could not be applied", self.spec.source.endpoint)
            self._observer.kv_dropped("internal", 1)
            self._execute(self.machine.on_suspect("internal"), keeps_queue=True)
        if self._queue.is_complete:
            self.machine.on_complete()

    def _misconfigured(self, exc: Exception) -> None:
        logger.error("KV events of %s rank %d: %s", self.spec.worker_id, self.spec.source.dp_rank, exc)
        self.problem = str(exc)
        self._execute(self.machine.on_misconfigured())
        self._end_replay()

    def _receive(self) -> bool:
        """Read from the sockets; false if all of them are empty."""
        assert self._reader is not None
        assert self._monitor is not None
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
            self._observer.kv_dropped(str(exc.args[0]), 1)
            return
        self._execute(self.machine.on_message(message.sequence, message.payload))

    def _receive_replay(self) -> bool:
        if self._replay is None:
            return False
        try:
            reply = self._replay.receive()
        except BatchUndecodable as exc:
            self._observer.kv_dropped(str(exc.args[0]), 1)
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
                self._queue.add(command.payload)
            elif isinstance(command, Reset):
                self._reset(command.reason, keeps_queue=keeps_queue)
            else:
                self._ask(command)

    def _reset(self, reason: str, *, keeps_queue: bool) -> None:
        self._queue.reset(keeps_queue=keeps_queue)
        if self._epoch != self.machine.epoch:
            self._epoch = self.machine.epoch
            self._queue.new_life()
        self._sweeper.wake()
        self._observer.kv_reset(self.spec.worker_id, reason)
        logger.info("KV events of %s rank %d start anew: %s", self.spec.worker_id, self.spec.source.dp_rank, reason)

    def _ask(self, command: RequestReplay) -> None:
        self._end_replay()
        assert self.spec.source.replay_endpoint is not None
        self._replay_end_s = self._loop.time() + self._limits.replay_total_s
        self._replay_until_s = self._loop.time() + self._limits.replay_idle_s
        try:
            self._replay = ReplayRequest(self._context, self.spec.source.replay_endpoint, command.start, self._wake)
        except zmq.ZMQError as exc:
            # Fails at its deadline like one that is never answered.
            logger.error("no replay from %s: %s", self.spec.source.replay_endpoint, exc.strerror)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    # Time

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [self._queue.next_expiry_s(), self._unreachable_at_s]
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
        if self.machine.is_waiting_for_replay and self._replay_until_s <= now_s and not len(self._queue):
            self._end_replay()
            self._execute(self.machine.on_replay_failed())
        if self._queue.expire(now_s) and now_s >= self._next_resync_s:
            self._next_resync_s = now_s + self._limits.orphan_resync_s
            self._execute(self.machine.on_history_wanted("orphans"))
        self._wake()

    def _report(self) -> None:
        state = self.machine.state
        if state is not self._reported and not len(self._queue):
            self._reported = state
            self._observer.kv_state(self.spec.worker_id, self.spec.source.dp_rank, state)

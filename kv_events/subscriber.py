"""Keeps the index in step with one publisher. Shell; how a publisher is followed is in ``kv_events.follower``."""

import logging

from kv_events.delivery import DeliveryQueue
from kv_events.errors import BatchUndecodable, DeliverySuspect, SourceMisconfigured
from kv_events.follower import PublisherFollower
from kv_events.index import PrefixIndex
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec, SourceObserver, SubscriberLimits
from kv_events.sequence import Deliver, SourceState
from kv_events.snapshot import SnapshotPosition, dump_rank, load_rank
from kv_events.zmq_reader import Context

logger = logging.getLogger("forebay.kv_events")


class KvSubscriber(PublisherFollower):
    """Keeps the index in step with one publisher, from ``start`` to ``close``.

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
        super().__init__(context, spec.source, limits, spec.replay_window)
        self.spec = spec
        self.problem = ""
        self._index = index
        self._sweeper = sweeper
        self._observer = observer
        self._queue = DeliveryQueue(spec, index, observer)
        self._next_resync_s = 0.0
        self._reported: SourceState | None = None

    @property
    def blocks(self) -> int:
        """Blocks that the index has of the source's ranks, on the device."""
        return sum(self._index.rank_blocks(rank) for rank in self.spec.ranks())

    @property
    def endpoint(self) -> str:
        """Where the events come from."""
        return self.source.endpoint

    @property
    def position(self) -> tuple[str, int | None]:
        """Epoch, and number of the newest message; ``None`` if unknown."""
        return str(self.machine.epoch), self.machine.last_seq

    def start(self) -> None:
        """Connect, in the background, and again whenever the connection is lost.

        Raises:
            SourceMisconfigured: The endpoint is no address.
        """
        super().start()
        self._report()

    def close(self) -> None:
        """Close the sockets and forget the ranks. May be called again."""
        if self._reader is not None:
            for rank in self.spec.ranks():
                self._index.remove_rank(rank)
            self._sweeper.wake()
        self._close()

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

    # What is done with what comes

    def _work(self) -> bool:
        if not len(self._queue):
            return False
        self._apply()
        return True

    def _is_behind(self) -> bool:
        return bool(len(self._queue))

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
            logger.exception("a batch of %s could not be applied", self.source.endpoint)
            self._observer.kv_dropped("internal", 1)
            self._execute(self.machine.on_suspect("internal"), keeps_queue=True)
        if self._queue.is_complete:
            self.machine.on_complete()

    def _misconfigured(self, exc: Exception) -> None:
        logger.error("KV events of %s rank %d: %s", self.spec.worker_id, self.source.dp_rank, exc)
        self.problem = str(exc)
        self._execute(self.machine.on_misconfigured())
        self._end_replay()

    def _deliver(self, command: Deliver) -> None:
        self._queue.add(command.payload)

    def _forget(self, reason: str, *, is_new_epoch: bool, keeps_queue: bool) -> None:
        self._queue.reset(keeps_queue=keeps_queue)
        if is_new_epoch:
            self._queue.new_life()
        self._sweeper.wake()
        self._observer.kv_reset(self.spec.worker_id, reason)
        logger.info("KV events of %s rank %d start anew: %s", self.spec.worker_id, self.source.dp_rank, reason)

    def _dropped(self, reason: str) -> None:
        self._observer.kv_dropped(reason, 1)

    def _due_s(self) -> float | None:
        return self._queue.next_expiry_s()

    def _on_due(self, now_s: float) -> None:
        if self._queue.expire(now_s) and now_s >= self._next_resync_s:
            self._next_resync_s = now_s + self._limits.orphan_resync_s
            self._execute(self.machine.on_history_wanted("orphans"))

    def _worked(self) -> None:
        self._report()

    def _report(self) -> None:
        state = self.machine.state
        if state is not self._reported and not len(self._queue):
            self._reported = state
            self._observer.kv_state(self.spec.worker_id, self.source.dp_rank, state)

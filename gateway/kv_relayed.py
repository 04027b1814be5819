"""One rank whose events come over a relay: from messages to the index, in order, in pieces.

The relay has put the engine's batches in order. What is left to tell here: where they begin, whether all of the cache
is known, and whether what is known may be out of date.
"""

import logging
from collections import deque
from collections.abc import Callable

from kv_events.delivery import DeliveryQueue
from kv_events.errors import DeliverySuspect, SourceMisconfigured
from kv_events.index import PrefixIndex
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec, SourceObserver
from kv_events.relay_snapshot import restore_part, restore_shape
from kv_events.relay_wire import Begin, Clear, Cursor, End, Events, Part, Reset, Resume, Resync
from kv_events.sequence import SourceState

logger = logging.getLogger("forebay.kv_events")

RankMessage = Events | Reset | Resume | Begin | Part | End
_Work = tuple[Events | Part | End, bytes, int]


class RelayedRank:
    """Keeps the index in step with one rank of one relay, until ``close``.

    Args:
        spec: The rank, as a publisher.
        publisher: Name of the relay's process.
        index: Where its blocks go; it gives them back at the end.
        sweeper: Of the index.
        observer: Counts and shows what happens.
        tell: Sends the relay a message.

    Attributes:
        spec: The rank, with the limits of its engine.
        rank: Worker id and global rank.
        publisher: Name of the relay's process.
        problem: Why it cannot be its worker's; empty if it can.
        is_closed: It is followed no more.
        done_bytes: Cost of the messages that are done with; the owner takes it and sets it to 0.
    """

    def __init__(
        self,
        spec: PublisherSpec,
        publisher: str,
        index: PrefixIndex,
        sweeper: IndexSweeper,
        observer: SourceObserver,
        tell: Callable[[Resync | Clear], None],
    ) -> None:
        self.spec = spec
        self.publisher = publisher
        self.problem = ""
        self.is_closed = False
        self.done_bytes = 0
        self.rank = (spec.worker_id, spec.source.dp_rank)
        self._index = index
        self._sweeper = sweeper
        self._observer = observer
        self._tell = tell
        self._queue = DeliveryQueue(spec, index, observer)
        self._work: deque[_Work] = deque()
        self._boot: str | None = None
        self._epoch = 0
        # Newest batch that was received, and that the rank's blocks include.
        self._received: int | None = None
        self._applied: int | None = None
        self._cost_bytes = 0
        self._is_complete = False
        self._snapshot_seq: int | None = None
        # The relay has said where it goes on, and, if that is a snapshot, all of it has been applied.
        self._is_synced = False
        self._is_loading = False
        # The cache was emptied while nobody knew what the relay would send first.
        self._owes_clear = False
        self._has_session = False
        self._is_connected = False
        self._reported: SourceState | None = None

    # What others ask

    @property
    def endpoint(self) -> str:
        """Where the events come from, for people."""
        return f"the relay {self.publisher[:8]}"

    @property
    def position(self) -> tuple[str, int | None]:
        """Epoch, which is never that of another relay, and number of the newest batch that was applied."""
        return f"{self.publisher[:8]}:{self._epoch}", self._applied

    @property
    def state(self) -> SourceState:
        """How far the index can be trusted for the rank."""
        if self.problem:
            return SourceState.MISCONFIGURED
        if not self._has_session:
            return SourceState.GAP
        if not self._is_synced:
            return SourceState.REPLAYING
        if not self._is_connected:
            return SourceState.GAP
        return SourceState.LIVE if self._is_complete else SourceState.COLD

    def cursor(self) -> Cursor | None:
        """Where a new session may go on; ``None`` if it must begin with a snapshot."""
        if self.problem or not self._is_synced:
            return None
        return Cursor(self.spec.source.dp_rank, self._epoch, self._received)

    # What happens to it

    def on_boot(self, identity: str) -> None:
        """Take note of the identity of the engine's process: the blocks of another one are gone."""
        known, self._boot = self._boot, identity
        if known not in (None, identity):
            self._forget("boot")
            self._resync("boot")

    def on_cleared(self) -> None:
        """The engine's cache was emptied: what has come is worthless, here and at the relay, whose snapshots have it.

        The engine tells so itself as a rule, a little later; then this changes nothing.
        """
        if not (self._is_synced or self._is_loading):
            self._owes_clear = True
            return
        received, is_complete = self._received, self._is_complete
        self._drop()
        self._is_complete = is_complete
        if received is not None:
            self._tell(Clear(self.spec.source.dp_rank, self._epoch, received))
        if self._is_loading:
            self._resync("cleared")
        else:
            self._applied = received
            self.report()

    def on_session(self) -> None:
        """A session with the relay has begun; it will say where it goes on."""
        self._has_session = True
        # Told anew for this session, whose window knows nothing of what is still to be applied.
        self._is_connected = False
        self._work = deque((message, body, 0) for message, body, _ in self._work)
        self._cost_bytes = self.done_bytes = 0

    def on_session_lost(self) -> None:
        """The relay is gone; what is known stays, and is not used."""
        self._has_session = False
        self.report()

    def on_session_back(self) -> None:
        """The relay was silent, and is still the same, on the same connection."""
        self._has_session = True
        self.report()

    def on_health(self, is_connected: bool) -> None:
        """The relay told whether it reaches the rank's publisher."""
        self._is_connected = is_connected
        self.report()

    def take(self, message: RankMessage, body: bytes, cost_bytes: int) -> None:
        """Take a message of this rank, which costs so much of the session's window until it is done with."""
        if isinstance(message, Reset | Begin):
            self._start_anew(message)
        elif isinstance(message, Resume):
            self._is_synced = message.epoch == self._epoch
            if not self._is_synced:
                self._resync("epoch")
            elif self._owes_clear:
                self._owes_clear = False
                self.on_cleared()
        elif self._is_wanted(message):
            self._work.append((message, body, cost_bytes))
            return
        self.done_bytes += cost_bytes
        self.report()

    def _is_wanted(self, message: Events | Part | End) -> bool:
        if self.problem:
            return False
        return self._follows(message) if isinstance(message, Events) else self._is_loading

    def _start_anew(self, message: Reset | Begin) -> None:
        self._epoch = message.epoch
        self._received = self._applied = None
        if isinstance(message, Begin):
            self._forget("snapshot")
            self._queue.new_life()
            self._queue.group_kinds.update(message.group_kinds)
            restore_shape(self._index, self.rank, is_eagle=message.is_eagle)
            self._received = self._snapshot_seq = message.last_seq
            self._is_complete = message.is_complete
            self._is_loading, self._is_synced = True, False
            if self._owes_clear:
                self._owes_clear = False
                self.on_cleared()
            return
        self._owes_clear = False
        self._forget(message.reason)
        if message.reason == "restart":
            self._queue.new_life()
            self.problem = ""
        self._is_loading, self._is_synced = False, True

    def _follows(self, message: Events) -> bool:
        """Whether a batch is the next one; asks for a snapshot if one is missing."""
        if message.epoch != self._epoch or (self._received is not None and message.seq <= self._received):
            return False
        if self._received is not None and message.seq != self._received + 1:
            self._resync("sequence")
            return False
        if self._received is None and message.seq == 0:
            self._is_complete = True
        self._received = message.seq
        return True

    def _resync(self, reason: str) -> None:
        self._received = None
        self._is_synced = self._is_loading = False
        self._epoch = -1  # nothing that is on its way belongs to what comes next
        self._tell(Resync(self.spec.source.dp_rank, reason))
        self.report()

    # Work in pieces

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._work) or len(self._queue) > 0

    def step(self, now_s: float) -> None:
        """Do about a millisecond of work."""
        if len(self._queue):
            self._apply(now_s)
        else:
            message, body, self._cost_bytes = self._work.popleft()
            if isinstance(message, Events):
                self._applied = message.seq
                self._queue.add(body)
                self._apply(now_s)
            elif isinstance(message, Part):
                if dropped := restore_part(self._index, self.rank, message, body):
                    self._observer.kv_dropped("over_capacity", dropped)
                    self._is_complete = False
            else:
                self._is_loading, self._is_synced = False, True
                self._applied = self._snapshot_seq
        if not len(self._queue):
            self.done_bytes += self._cost_bytes
            self._cost_bytes = 0
            if not self._work:
                self.report()

    def _apply(self, now_s: float) -> None:
        try:
            self._queue.step(now_s)
        except SourceMisconfigured as exc:
            logger.error("KV events of %s rank %d: %s", *self.rank, exc)
            self.problem = str(exc)
            self._forget("misconfigured")
        except DeliverySuspect as exc:
            self._suspect(str(exc))
        except Exception:
            logger.exception("a batch of %s rank %d could not be applied", *self.rank)
            self._observer.kv_dropped("internal", 1)
            self._suspect("internal")
        self._is_complete |= self._queue.is_complete

    def _suspect(self, reason: str) -> None:
        """Forget what was applied, as the relay's mirror does, and go on with what comes next."""
        self._queue.reset(keeps_queue=True)
        self._told_reset(reason)

    def _forget(self, reason: str) -> None:
        self._drop()
        self._told_reset(reason)

    def _drop(self) -> None:
        self.done_bytes += self._cost_bytes + sum(cost for _, _, cost in self._work)
        self._work.clear()
        self._cost_bytes = 0
        self._queue.reset()
        self._sweeper.wake()

    def _told_reset(self, reason: str) -> None:
        self._is_complete = False
        self._sweeper.wake()
        self._observer.kv_reset(self.spec.worker_id, reason)

    def expire(self, now_s: float) -> None:
        """Drop blocks that have waited for too long for their parents."""
        if self._queue.expire(now_s):
            self._is_complete = False
            self.report()

    def report(self) -> None:
        """Tell the observer of the state, if it is another one than before."""
        state = self.state
        if state is not self._reported and not self.is_closed:
            self._reported = state
            self._observer.kv_state(self.spec.worker_id, self.spec.source.dp_rank, state)

    def close(self) -> None:
        """Give the rank's blocks back. May be called again."""
        if not self.is_closed:
            self.is_closed = True
            self._work.clear()
            self._index.remove_rank(self.rank)
            self._sweeper.wake()

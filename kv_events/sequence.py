"""Gaps, restarts and late joins of one source, told from the numbers of its messages. Pure.

The rule behind all of it: the index may know less than the engine's cache, never more. So whenever messages may be
missing, they are asked for again, and where they cannot be had the rank starts from nothing.

A number alone does not tell a publisher that has restarted from one that repeats itself. Payloads do, since they carry
a time: the digests of the last ones are kept and compared.
"""

import enum
from collections import deque
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

MAX_BUFFERED = 4096
MAX_BUFFERED_BYTES = 32 << 20
# Batches that publishers keep for replays, unless configured otherwise.
REPLAY_WINDOW = 10_000
KEPT_DIGESTS = 256
# What was published between the end of a replay and the first live message is asked for again so many times.
MAX_REPLAYS_IN_A_ROW = 3


class SourceState(enum.StrEnum):
    """How far the index can be trusted for a source."""

    LIVE = "live"
    """All that the cache holds is known."""
    REPLAYING = "replaying"
    """The history is being read; what is known may be out of date until then."""
    COLD = "cold"
    """Part of the history is lost, or nothing has come yet; what is known is right."""
    GAP = "gap"
    """Messages are missing and asked for; what is known may be wrong until then."""
    MISCONFIGURED = "misconfigured"
    """The source cannot belong to its rank; nothing of it is used."""


@dataclass(slots=True)
class Deliver:
    """Apply a payload, after those delivered before. Not changed, but one comes with each message: see ``types``."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget all that is known of the rank, and deliveries that were not yet applied."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask for all messages from ``start`` on; a replay that still runs is given up."""

    start: int


Command = Deliver | Reset | RequestReplay


class SequenceMachine:
    """State of one source: facts come in as calls, commands go out, to be executed in order.

    Attributes:
        epoch: Counts the lives of the publisher, from 0.
        last_seq: Newest number delivered in this epoch, -1 before the first, ``None`` if unknown.
        duplicates: Messages that were ignored since they were known.
        replays: Replays asked for.
    """

    def __init__(self, *, has_replay: bool, replay_window: int = REPLAY_WINDOW) -> None:
        """Begin a source that nothing is known of.

        Args:
            has_replay: It has an endpoint for replays.
            replay_window: Messages that it keeps; numbers that fall by more than this are a restart.
        """
        self._has_replay = has_replay
        self._replay_window = replay_window
        self._state = SourceState.COLD
        self._digests: dict[int, int] = {}
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered_bytes = 0
        self._is_complete = False
        self._was_connected = False
        # Whether the publisher may be another one than that of ``last_seq``.
        self._is_in_doubt = False
        self._is_verifying = False
        self._is_asked = False
        # Whether the replay that runs has brought what was asked for, at least its beginning.
        self._has_begun = False
        self._replays_in_a_row = 0
        self._boot: str | None = None
        self.epoch = 0
        self.last_seq: int | None = None
        self.duplicates = 0
        self.replays = 0

    @property
    def state(self) -> SourceState:
        """The state now."""
        return self._state

    @property
    def last_digest(self) -> int | None:
        """Digest of the newest payload, ``None`` if unknown."""
        return None if self.last_seq is None else self._digests.get(self.last_seq)

    @property
    def is_waiting_for_replay(self) -> bool:
        """Whether a replay was asked for and is neither complete nor given up."""
        return self._is_waiting() and self._is_asked

    def resume(self, epoch: int, last_seq: int, last_digest: int | None, *, is_complete: bool) -> None:
        """Go on from a dump that has been loaded, before the first connection."""
        self.epoch, self.last_seq, self._is_complete = epoch, last_seq, is_complete
        self._is_in_doubt = True
        if last_digest is not None:
            self._digests[last_seq] = last_digest
        if self._has_replay:
            self._set(SourceState.GAP)
        else:
            self._settle()

    # Facts from the connection

    def on_connected(self) -> list[Command]:
        """The socket reached the publisher, for the first time or again."""
        self._was_connected = True
        if self._state is SourceState.MISCONFIGURED or not self._has_replay:
            return []
        self._replays_in_a_row = 0
        return [self._ask()]

    def on_disconnected(self) -> list[Command]:
        """The connection was lost: behind the same address another publisher may answer next.

        Nothing that was received but not yet passed on here may be passed on afterwards: it may be from either.
        """
        if self._state is SourceState.MISCONFIGURED:
            return []
        if not self._has_replay:
            # Nothing could ever prove that it is the same one.
            return self._restart("reconnect") if self.last_seq is not None else []
        self._is_in_doubt = True
        self._is_asked = self._is_verifying = False
        # Of the publisher that has gone; whoever comes can send them again if it is the same.
        self._drop_buffer()
        if self._state in (SourceState.LIVE, SourceState.COLD) and self.last_seq is not None:
            self._set(SourceState.GAP)
        return []

    def on_unreachable(self) -> list[Command]:
        """The publisher has been away for too long."""
        if self._state is SourceState.MISCONFIGURED or self.last_seq is None:
            return []
        return self._restart("unreachable")

    def on_boot(self, identity: str) -> list[Command]:
        """The engine told the identity of its process; another one than before is a restart."""
        known, self._boot = self._boot, identity
        if known is None or known == identity or self._state is SourceState.MISCONFIGURED:
            return []
        self._drop_buffer()
        commands = self._restart("boot")
        if self._has_replay and self._was_connected:
            commands.append(self._ask())
        return commands

    def on_misconfigured(self) -> list[Command]:
        """The source cannot belong to its rank. Final."""
        self._set(SourceState.MISCONFIGURED)
        self._drop_buffer()
        return [Reset("misconfigured")]

    # Facts from messages

    def on_message(self, seq: int, payload: bytes) -> list[Command]:
        """A live message arrived."""
        if self._state is SourceState.MISCONFIGURED:
            return []
        if self._is_waiting():
            return self._keep(seq, payload)
        if self.last_seq is None:
            return self._first(seq, payload)
        if seq == self.last_seq + 1:
            return [self._deliver(seq, payload)]
        if seq <= self.last_seq:
            return self._known_or_restarted(seq, payload)
        if self._has_replay:
            self._set(SourceState.GAP)
            return [*self._keep(seq, payload), self._ask()]
        return [*self._lose("gap"), self._deliver(seq, payload)]

    def on_replayed(self, seq: int, payload: bytes) -> list[Command]:
        """A message of the replay that was asked for last arrived."""
        if not self.is_waiting_for_replay:
            return []
        if self._is_verifying:
            self._is_verifying = False
            if self._digests.get(seq) == xxh3_64_intdigest(payload):
                self._is_in_doubt = False
                return []
            if seq == self.last_seq:
                return [*self._restart("restart"), *self._replay_all()]
            if seq <= (self.last_seq or 0):
                self._is_verifying = True
                return []
            return [*self._restart("history_lost"), self._deliver(seq, payload)]
        expected = 0 if self.last_seq is None else self.last_seq + 1
        if seq < expected:
            return []
        commands: list[Command] = []
        if seq > expected and self._has_begun:
            # Replies were lost on the way; the publisher still has them.
            return [self._ask()]
        if seq > expected:
            commands = self._lose("history_lost")
        elif self.last_seq is None:
            self._is_complete = True
        self._replays_in_a_row = 0
        self._has_begun = True
        return [*commands, self._deliver(seq, payload)]

    def on_replay_end(self) -> list[Command]:
        """The replay told that it is complete."""
        if not self.is_waiting_for_replay:
            return []
        self._is_asked = False
        if self._is_verifying:
            # The publisher does not have what we know from it.
            return [*self._restart("restart"), *self._replay_all()]
        if self.last_seq is None:
            self.last_seq, self._is_complete = -1, True
        return self._go_on()

    def on_replay_failed(self) -> list[Command]:
        """The replay did not end in time, or not at all."""
        return self._give_up() if self.is_waiting_for_replay else []

    def on_suspect(self, reason: str) -> list[Command]:
        """What was delivered may have been wrong in part: forget it, and go on with what comes next."""
        if self._state is SourceState.MISCONFIGURED:
            return []
        return self._lose(reason)

    def on_history_wanted(self, reason: str) -> list[Command]:
        """What is known is worth being read anew from the start; without replays it stays as it is."""
        if not self._has_replay or self._state is not SourceState.LIVE:
            return []
        return [*self._restart(reason, is_new_epoch=False), *self._replay_all()]

    def on_complete(self) -> None:
        """The cache is known to be empty, or all of it has been replaced since the history was lost."""
        self._is_complete = True
        if self._state is SourceState.COLD:
            self._settle()

    # Parts

    def _set(self, state: SourceState) -> None:
        if self._state is SourceState.MISCONFIGURED and state is not SourceState.MISCONFIGURED:
            raise ValueError("a misconfigured source stays so")
        self._state = state

    def _settle(self) -> None:
        self._replays_in_a_row = 0
        self._set(SourceState.LIVE if self._is_complete else SourceState.COLD)

    def _is_waiting(self) -> bool:
        return self._state in (SourceState.GAP, SourceState.REPLAYING)

    def _first(self, seq: int, payload: bytes) -> list[Command]:
        if seq == 0:
            self._is_complete = True
            self._set(SourceState.LIVE)
        elif self._has_replay:
            self._set(SourceState.REPLAYING)
            return [*self._keep(seq, payload), self._ask()]
        return [self._deliver(seq, payload)]

    def _known_or_restarted(self, seq: int, payload: bytes) -> list[Command]:
        known = self._digests.get(seq)
        assert self.last_seq is not None
        is_far = seq == 0 or self.last_seq - seq > self._replay_window
        if known == xxh3_64_intdigest(payload) or (known is None and not is_far):
            self.duplicates += 1
            return []
        return [*self._restart("restart"), *self.on_message(seq, payload)]

    def _deliver(self, seq: int, payload: bytes) -> Deliver:
        self.last_seq = seq
        self._digests[seq] = xxh3_64_intdigest(payload)
        if len(self._digests) > KEPT_DIGESTS:
            del self._digests[next(iter(self._digests))]
        return Deliver(seq, payload)

    def _keep(self, seq: int, payload: bytes) -> list[Command]:
        self._buffer.append((seq, payload))
        self._buffered_bytes += len(payload)
        if len(self._buffer) <= MAX_BUFFERED and self._buffered_bytes <= MAX_BUFFERED_BYTES:
            return []
        # The replay is too slow: what it would bring is given up.
        return self._give_up()

    def _give_up(self) -> list[Command]:
        """Go on without what was asked for."""
        self._is_asked = False
        commands: list[Command] = []
        if self._is_in_doubt:
            commands = self._restart("replay_failed")
        elif self.last_seq is not None and self.last_seq >= 0:
            # Also a first replay that was cut short: what it would have removed is still there.
            commands = self._lose("replay_failed")
        else:
            self.last_seq, self._is_complete = None, False
        self._replays_in_a_row = MAX_REPLAYS_IN_A_ROW
        return [*commands, *self._go_on()]

    def _drop_buffer(self) -> None:
        self._buffer.clear()
        self._buffered_bytes = 0

    def _ask(self) -> RequestReplay:
        self.replays += 1
        self._replays_in_a_row += 1
        last = self.last_seq
        self._is_asked, self._has_begun = True, False
        # Where nothing is known, nothing can be wrong.
        self._is_in_doubt = self._is_verifying = self._is_in_doubt and last is not None and last >= 0
        if self._state is not SourceState.GAP:
            self._set(SourceState.GAP if self._is_verifying else SourceState.REPLAYING)
        if last is None:
            return RequestReplay(0)
        return RequestReplay(last if self._is_verifying else last + 1)

    def _replay_all(self) -> list[Command]:
        self._set(SourceState.REPLAYING)
        return [self._ask()]

    def _lose(self, reason: str) -> list[Command]:
        """Forget the past, and go on in the same life of the publisher."""
        self._is_complete = False
        if self._state in (SourceState.LIVE, SourceState.GAP):
            self._set(SourceState.COLD if self._state is SourceState.LIVE else SourceState.REPLAYING)
        return [Reset(reason)]

    def _restart(self, reason: str, *, is_new_epoch: bool = True) -> list[Command]:
        """Forget the past together with the numbers."""
        self.epoch += is_new_epoch
        self.last_seq = None
        self._digests.clear()
        self._is_complete = self._is_in_doubt = self._is_verifying = False
        self._set(SourceState.REPLAYING if self._is_waiting() else SourceState.COLD)
        return [Reset(reason)]

    def _go_on(self) -> list[Command]:
        """The replay is over: deliver what came meanwhile."""
        kept, self._buffer = self._buffer, deque()
        self._buffered_bytes = 0
        if kept and self.last_seq is not None and kept[0][0] > self.last_seq + 1:
            if self._replays_in_a_row < MAX_REPLAYS_IN_A_ROW:
                self._buffer, self._buffered_bytes = kept, sum(len(payload) for _, payload in kept)
                return [self._ask()]
            commands = self._lose("gap")
            self.last_seq = kept[0][0] - 1
        else:
            commands = []
        self._settle()
        for seq, payload in kept:
            if self.last_seq is None:
                self._is_complete |= seq == 0
                self._settle()
                commands.append(self._deliver(seq, payload))
            else:
                commands += self.on_message(seq, payload)
        return commands

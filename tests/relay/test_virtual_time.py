"""Half an hour of virtual time in which everything fails by chance; the pure parts of relay and gateway, put together.

What a gateway believes is never more than the truth once things have calmed down, and all of it where it says so. The
sockets and processes between the parts are queues here, which lose what real ones lose; real ones have their own tests.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping
from itertools import product

import pytest

from gateway.kv_leases import LeaseTable, OfferRefused
from gateway.kv_metrics import KvMetrics
from gateway.kv_relayed import RelayedRank
from kv_events.index import PrefixIndex
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec
from kv_events.relay_wire import PROTOCOL, Clear, Hello, RankOffer, Resync, cost_bytes, decode_from_relay
from kv_events.sequence import Command, Deliver, RequestReplay, Reset, SequenceMachine, SourceState
from kv_events.sources import Source
from relay.feed import GatewayState
from relay.lanes import Lanes, LinkCounts
from relay.mirror import SourceMirror
from tests.kv_events.blocks import BLOCK_SIZE, query
from tests.relay.truth import DEPTH, LETTERS, Cache

TICK_S = 0.1
VIRTUAL_S = 1800.0
CALM_EVERY_S = 180.0
CALM_S = 60.0
GRACE_S = 10.0
SPEC = PublisherSpec("w", Source(0, "", block_size=BLOCK_SIZE))
RANK = ("w", 0)
PROMPTS = ["".join(letters) for depth in range(1, DEPTH + 1) for letters in product(LETTERS, repeat=depth)]


class Engine:
    """The publisher of one rank, with a short memory; a ``Feed`` for the cache that it tells of."""

    def __init__(self) -> None:
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=60)
        self.live: deque[tuple[int, bytes]] = deque()
        self.boots = 0

    def source_frame(self, rank: int, seq: int, payload: bytes) -> None:
        self.kept.append((seq, payload))
        self.live.append((seq, payload))

    def source_restarted(self, rank: int) -> None:
        self.kept.clear()
        self.live.clear()
        self.boots += 1

    def source_gap(self, rank: int) -> None: ...

    def source_state(self, rank: int, is_connected: bool) -> None: ...

    def remap(self, worker_url: str) -> None: ...

    def gateways(self) -> Mapping[str, GatewayState]:
        return {}

    async def run(self) -> None: ...

    async def aclose(self) -> None: ...


class Relay:
    """A relay's process, from its start to its death."""

    def __init__(self, name: str, engine: Engine, max_bytes: int) -> None:
        observer = KvMetrics(lambda worker, dp_rank: 0)
        self.hello = Hello(PROTOCOL, name, "http://w", "follower", (RankOffer(0, BLOCK_SIZE),), 1)
        self.mirror = SourceMirror(SPEC, PrefixIndex(), observer, max_bytes)
        self._engine = engine
        self._machine = SequenceMachine(has_replay=True)
        self._epoch = 0
        self._replies: deque[tuple[int, bytes] | None] = deque()
        self._lost_at_s: float | None = None
        self._replay_until_s = 0.0

    def connect(self) -> None:
        self.mirror.is_connected = True
        self._lost_at_s = None
        self._execute(self._machine.on_connected(), 0.0)

    def disconnect(self, now_s: float) -> None:
        self.mirror.is_connected = False
        self._engine.live.clear()
        self._replies.clear()
        self._lost_at_s = now_s
        self._execute(self._machine.on_disconnected(), now_s)

    def step(self, now_s: float, loses: Callable[[], bool], answers: bool) -> None:
        """Take what has come; each message may be lost."""
        if not self.mirror.is_connected:
            self._engine.live.clear()
            if self._lost_at_s is not None and now_s - self._lost_at_s > GRACE_S:
                self._lost_at_s = None
                self._execute(self._machine.on_unreachable(), now_s)
        while self._engine.live:
            seq, payload = self._engine.live.popleft()
            if not loses():
                self._execute(self._machine.on_message(seq, payload), now_s)
        while self._replies and answers:
            reply = self._replies.popleft()
            if reply is None:
                self._execute(self._machine.on_replay_end(), now_s)
            elif not loses():
                self._execute(self._machine.on_replayed(*reply), now_s)
        if self._machine.is_waiting_for_replay and now_s > self._replay_until_s:
            self._replies.clear()
            self._execute(self._machine.on_replay_failed(), now_s)
        for _ in range(20):
            self.mirror.step(now_s)
        self.mirror.expire(now_s)

    def _execute(self, commands: list[Command], now_s: float) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self.mirror.take(command.seq, command.payload)
            elif isinstance(command, Reset):
                is_restart, self._epoch = self._epoch != self._machine.epoch, self._machine.epoch
                self.mirror.begin_epoch("restart" if is_restart else "gap")
            else:
                assert isinstance(command, RequestReplay)
                kept = [batch for batch in self._engine.kept if batch[0] >= command.start]
                self._replies = deque([*kept, None])
                self._replay_until_s = now_s + 5.0


class Gateway:
    """A gateway's process, and its connection to a relay."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._sessions = 0
        self._lanes: Lanes | None = None
        self._relay: Relay | None = None
        self._messages: deque[list[bytes]] = deque()
        self._answers: deque[Resync | Clear] = deque()
        self.begin()

    def begin(self) -> None:
        """Be another process, which knows nothing."""
        self.cut()
        self.index = PrefixIndex()
        self._sweeper = IndexSweeper(self.index)
        self._table = LeaseTable(1.0, 10.0)
        self.rank: RelayedRank | None = None

    def cut(self) -> None:
        """Lose the connection, with all that is on its way."""
        self._lanes = self._relay = None
        self._messages.clear()
        self._answers.clear()

    def step(self, relay: Relay, now_s: float) -> None:
        if self._relay is not relay:
            self.cut()
        if self.is_stuck:
            self._fill()
            return
        for other in self._table.silent(now_s):
            if self.rank is not None and self.rank.publisher == other.hello.publisher:
                self.rank.on_session_lost()
        if self._lanes is None:
            self._connect(relay, now_s)
        self._fill()
        self._take(now_s)

    def _connect(self, relay: Relay, now_s: float) -> None:
        self._sessions += 1
        try:
            self._table.claim(b"%d" % self._sessions, relay.hello, "w", now_s)
        except OfferRefused:
            return  # until the lease of the one before it ends
        if self.rank is None or self.rank.publisher != relay.hello.publisher:
            if self.rank is not None:
                self.rank.close()
            observer = KvMetrics(lambda worker, dp_rank: 0)
            name = relay.hello.publisher
            self.rank = RelayedRank(SPEC, name, self.index, self._sweeper, observer, self._answers.append)
        cursor = self.rank.cursor()
        self.rank.on_session()
        self._relay = relay
        self._lanes = Lanes([relay.mirror], [] if cursor is None else [cursor], LinkCounts())

    def _fill(self) -> None:
        if self._lanes is not None:
            while (frames := self._lanes.next_message()) is not None:
                self._messages.append(frames)

    def _take(self, now_s: float) -> None:
        if self._lanes is None or self._relay is None or self.rank is None:
            return
        (holder,) = self._table.relays()
        holder.heard_s = now_s
        if holder.is_lost:
            holder.is_lost = False
            self.rank.on_session_back()
        self.rank.on_health(self._relay.mirror.is_connected)
        while self._messages:
            frames = self._messages.popleft()
            message, body = decode_from_relay(frames)
            assert message.dp_rank == 0  # type: ignore[union-attr]
            self.rank.take(message, body, cost_bytes(frames))  # type: ignore[arg-type]
        while self.rank.has_work:
            self.rank.step(now_s)
        self.rank.expire(now_s)
        self._lanes.taken_bytes += self.rank.done_bytes
        self.rank.done_bytes = 0
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, Clear):
                self._relay.mirror.clear(answer.epoch, answer.last_seq)
            else:
                self._lanes.resync(answer.dp_rank)

    def flushed(self) -> None:
        """A flush was called for through this gateway."""
        if self.rank is not None and not self.rank.is_closed:
            self.index.clear_rank(RANK)
            self.rank.on_cleared()

    def close(self) -> None:
        if self.rank is not None:
            self.rank.close()
        self._sweeper.close()


class World:
    """All of it, and the faults."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self.engine = Engine()
        self.cache = Cache(self.engine, seed=seed)
        self.lives = 0
        self.gateways = [Gateway(), Gateway()]
        self.loss = 0.0
        self.answers = True
        self.back_at_s: float | None = None
        self.counts: dict[str, int] = {}
        self.relay = self._new_relay()

    def _new_relay(self) -> Relay:
        self.lives += 1
        relay = Relay(f"relay{self.lives}", self.engine, self.chance.choice([4_000, 1 << 20]))
        self.engine.live.clear()
        relay.connect()
        self.back_at_s = None
        return relay

    def fault(self) -> None:
        """Something happens."""
        chance = self.chance
        faults: list[Callable[[], None]] = [
            self._restart_engine,
            self._kill_relay,
            self._lose_source,
            self._lose_messages,
            lambda: setattr(self, "answers", not self.answers),
            lambda: chance.choice(self.gateways).begin(),
            lambda: chance.choice(self.gateways).cut(),
            self._stick,
            self._flush,
        ]
        what = chance.randrange(len(faults))
        self.counts[str(what)] = self.counts.get(str(what), 0) + 1
        faults[what]()

    def _restart_engine(self) -> None:
        self._lose_source()
        self.cache.restart()

    def _kill_relay(self) -> None:
        self.relay = self._new_relay()

    def _lose_source(self) -> None:
        self.relay.disconnect(self.now_s)
        self.back_at_s = self.now_s + self.chance.choice([0.1, 3.0, 20.0])

    def _lose_messages(self) -> None:
        self.loss = self.chance.choice([0.0, 0.05, 0.5])

    def _stick(self) -> None:
        gateway = self.chance.choice(self.gateways)
        gateway.is_stuck = not gateway.is_stuck

    def _flush(self) -> None:
        self.cache.clear()
        if self.chance.random() < 0.5:
            self.chance.choice(self.gateways).flushed()

    def tick(self) -> None:
        self.now_s += TICK_S
        if self.back_at_s is not None and self.now_s >= self.back_at_s:
            self.back_at_s = None
            self.relay.connect()
        if self.chance.random() < 0.5:
            self.cache.work(self.chance.randint(1, 4))
        self.relay.step(self.now_s, lambda: self.chance.random() < self.loss, self.answers)
        for gateway in self.gateways:
            gateway.step(self.relay, self.now_s)

    def calm(self) -> None:
        """All faults end, and everything has time to come to an end."""
        self.loss, self.answers = 0.0, True
        for gateway in self.gateways:
            gateway.is_stuck = False
        for _ in range(round(CALM_S / TICK_S)):
            self.tick()

    def check(self) -> list[SourceState]:
        """What the gateways believe is true, and all of the truth where they say so."""
        states = []
        for gateway in self.gateways:
            assert gateway.rank is not None
            states.append(gateway.rank.state)
            if gateway.rank.state is SourceState.LIVE:
                assert self.cache.is_known_to(gateway.index, "w")
                continue
            assert gateway.rank.state is SourceState.COLD
            for prompt in PROMPTS:
                overlap = gateway.index.overlap(query(prompt)).device.get(RANK, 0)
                assert overlap == 0 or prompt[:overlap] in self.cache.held
            assert gateway.index.rank_blocks(RANK) <= len(self.cache.held)
        return states


async def live_through(seed: int, virtual_s: float) -> None:
    world = World(seed)
    calm_at_s = CALM_EVERY_S
    seen: list[SourceState] = []
    while world.now_s < virtual_s:
        world.tick()
        if world.chance.random() < TICK_S / 5.0:
            world.fault()
        if world.now_s >= calm_at_s:
            world.calm()
            seen += world.check()
            calm_at_s = world.now_s + CALM_EVERY_S
            await asyncio.sleep(0)
    world.calm()
    world.check()
    # An engine that empties its cache, as at the next flush, makes up for all that was lost for good.
    world.cache.clear()
    world.calm()
    assert world.check() == [SourceState.LIVE] * 2
    assert len(world.counts) == 9
    for gateway in world.gateways:
        gateway.close()


@pytest.mark.parametrize("seed", [1, 2])
async def test_half_an_hour_of_faults_ends_with_the_truth(seed: int) -> None:
    await live_through(seed, VIRTUAL_S)


@pytest.mark.soak
async def test_many_half_hours_of_faults_end_with_the_truth() -> None:
    for seed in range(100, 160):
        await live_through(seed, VIRTUAL_S)

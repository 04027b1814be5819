"""The subscriber on real sockets: gaps, restarts, replays, bad input, and what is left at the end."""

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import zmq
from blockbuster import BlockBuster

from kv_events.errors import BatchUndecodable, SourceMisconfigured
from kv_events.index import PrefixIndex, RankId
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec, SubscriberLimits
from kv_events.sequence import SourceState
from kv_events.sources import Source
from kv_events.subscriber import KvSubscriber
from kv_events.types import AllBlocksCleared, BlockStored
from tests.conftest import TIME_SCALE
from tests.fakes.kv_publisher import KvPublisher, kv_publisher, payload
from tests.fakes.running import until
from tests.kv_events.blocks import BLOCK_SIZE, names, query, removed, stored, tokens

RANK: RankId = ("w", 0)
LIMITS = SubscriberLimits(replay_idle_s=0.3 * TIME_SCALE, stale_grace_s=30.0)


class Observed:
    """Keeps what a subscriber tells."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.resets: list[str] = []
        self.states: list[SourceState] = []

    def kv_event(self, worker: str, kind: str) -> None:
        self.events[kind] += 1

    def kv_dropped(self, reason: str, count: int) -> None:
        self.dropped[reason] += count

    def kv_reset(self, worker: str, reason: str) -> None:
        self.resets.append(reason)

    def kv_state(self, worker: str, dp_rank: int, state: SourceState) -> None:
        self.states.append(state)


class Followed:
    """A subscriber, its index, and what it told."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: PublisherSpec, limits: SubscriberLimits) -> None:
        self.index = PrefixIndex()
        self.sweeper = IndexSweeper(self.index)
        self.observed = Observed()
        self.subscriber = KvSubscriber(context, spec, self.index, self.sweeper, self.observed, limits)

    def matched(self, prompt: str, rank: RankId = RANK) -> int:
        return self.index.overlap(query(prompt)).device.get(rank, 0)

    async def state(self, state: str) -> None:
        await until(lambda: bool(self.observed.states) and self.observed.states[-1] == state, f"state {state}")

    async def match(self, prompt: str, blocks: int) -> None:
        await until(lambda: self.matched(prompt) == blocks, f"{blocks} blocks of {prompt}")


@pytest.fixture
def context(blockbuster: BlockBuster) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A ZMQ context; whatever socket is left open at its end is an error."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    assert made._sockets is None or not [socket for socket in made._sockets if not socket.closed]
    made.term()


@asynccontextmanager
async def followed(
    context: zmq.Context[zmq.Socket[bytes]],
    publisher: KvPublisher,
    limits: SubscriberLimits = LIMITS,
    block_size: int | None = BLOCK_SIZE,
    **spec: object,
) -> AsyncIterator[Followed]:
    """A subscriber that has found its publisher; at the end nothing of it may be left."""
    source = Source(0, publisher.endpoint, publisher.replay_endpoint, block_size=block_size)
    made = Followed(context, PublisherSpec("w", source, **spec), limits)  # type: ignore[arg-type]
    before = publisher.subscriptions
    made.subscriber.start()
    try:
        await until(lambda: publisher.subscriptions > before, "the subscription")
        if publisher.replay_endpoint is not None:
            await until(lambda: made.subscriber.machine.last_seq is not None, "the first replay")
        yield made
    finally:
        made.subscriber.close()
        made.sweeper.close()


@pytest.mark.parametrize(
    "anyio_backend",
    [
        pytest.param(("asyncio", {"debug": True}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    ],
)
async def test_events_reach_the_index(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        await made.state("live")
        publisher.publish(stored("abcd"))
        await made.match("abcd", 4)
        publisher.publish(removed("abcd", [3]))
        await made.match("abcd", 3)
        publisher.publish(AllBlocksCleared())
        await made.match("abcd", 0)
        assert made.observed.events == {"stored": 1, "removed": 1, "cleared": 1}
        assert (made.subscriber.blocks, made.subscriber.machine.last_seq, made.subscriber.machine.epoch) == (0, 2, 0)


@pytest.mark.parametrize("is_old", [pytest.param(False, id="with topics"), pytest.param(True, id="without topics")])
async def test_a8_4_late_join_reads_the_history(context: zmq.Context[zmq.Socket[bytes]], is_old: bool) -> None:
    async with kv_publisher(context, is_old=is_old) as publisher:
        publisher.publish(stored("ab"))
        publisher.publish(stored("abcd", 2))
        async with followed(context, publisher) as made:
            await made.match("abcd", 4)
            await made.state("live")
            assert publisher.asked == [0]
            assert made.observed.resets == []


async def test_a8_4_a_gap_is_filled_by_a_replay(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        publisher.publish(stored("abcd"))
        await made.match("abcd", 4)
        publisher.publish(removed("abcd", [1]), is_lost=True)
        publisher.publish(stored("x"))
        await made.match("x", 1)
        await made.match("abcd", 1)
        await made.state("live")
        assert publisher.asked == [0, 1]
        assert made.observed.resets == []


@pytest.mark.parametrize(
    ("has_replay", "keeps", "is_deaf", "reason"),
    [
        pytest.param(False, 0, False, "gap", id="no replay"),
        pytest.param(True, 1, False, "history_lost", id="the replay begins too late"),
        pytest.param(True, 0, True, "replay_failed", id="the replay is not answered"),
    ],
)
async def test_a8_4_a_gap_that_stays_clears_the_rank(
    context: zmq.Context[zmq.Socket[bytes]], has_replay: bool, keeps: int, is_deaf: bool, reason: str
) -> None:
    async with kv_publisher(context, has_replay=has_replay) as publisher, followed(context, publisher) as made:
        publisher.publish(stored("abcd"))
        await made.match("abcd", 4)
        publisher.keeps, publisher.is_deaf = keeps, is_deaf
        publisher.publish(removed("abcd", [3]), is_lost=True)
        publisher.publish(stored("xy"))
        await made.match("xy", 2)
        assert made.matched("abcd") == 0
        await made.state("cold")
        assert reason in made.observed.resets
        publisher.publish(AllBlocksCleared())
        await made.state("live")


async def test_a8_4_duplicates_are_ignored(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        publisher.publish(stored("abcd"))
        publisher.publish(removed("abcd", [3]))
        publisher.repeat(0)
        publisher.repeat(1)
        publisher.publish(stored("x"))
        await made.match("x", 1)
        assert made.matched("abcd") == 3
        assert made.subscriber.machine.duplicates == 2


@pytest.mark.parametrize("has_replay", [True, False])
@pytest.mark.parametrize("messages", [1, 3, 6])
async def test_a8_4_a_restart_clears_the_rank(
    context: zmq.Context[zmq.Socket[bytes]], has_replay: bool, messages: int
) -> None:
    """Whatever number the new publisher is at when it is found."""
    async with kv_publisher(context, has_replay=has_replay) as publisher, followed(context, publisher) as made:
        for letters in ("ab", "cd", "ef"):
            publisher.publish(stored(letters))
        await made.match("ef", 2)
        await publisher.restart()
        for number in range(messages):
            publisher.publish(stored(f"{number}"))
        await until(lambda: made.matched("ab") + made.matched("cd") + made.matched("ef") == 0, "the old blocks gone")
        await until(lambda: _publishes_until_seen(publisher, made), "the new publisher")
        assert made.subscriber.machine.epoch == 1
        assert (made.matched("ab"), made.matched("cd"), made.matched("ef")) == (0, 0, 0)
        if has_replay:
            await made.state("live")
            assert [made.matched(f"{number}") for number in range(messages)] == [1] * messages


def _publishes_until_seen(publisher: KvPublisher, made: Followed) -> bool:
    publisher.publish(stored("new"))
    return made.matched("new") == 3


async def test_the_same_publisher_after_a_broken_connection_keeps_its_blocks(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        publisher.publish(stored("abcd"))
        await made.match("abcd", 4)
        await publisher.drop_connections()
        publisher.publish(removed("abcd", [3]))
        await made.match("abcd", 3)
        await made.state("live")
        assert made.observed.resets == []
        assert SourceState.GAP in made.observed.states


async def test_a_publisher_that_stays_away_is_forgotten(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    limits = SubscriberLimits(replay_idle_s=30.0, stale_grace_s=0.05)
    async with kv_publisher(context) as publisher, followed(context, publisher, limits) as made:
        publisher.publish(stored("abcd"))
        await made.match("abcd", 4)
        publisher.stop()
        await made.match("abcd", 0)
        assert made.observed.resets == ["unreachable"]
        await publisher.listen()
        await made.match("abcd", 4)


async def test_another_process_clears_the_rank(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        made.subscriber.on_boot("one")
        publisher.publish(stored("abcd"))
        await made.match("abcd", 4)
        made.subscriber.on_boot("two")
        assert made.matched("abcd") == 0
        await made.match("abcd", 4)
        assert made.observed.resets == ["boot"]


@pytest.mark.parametrize(
    ("dp_rank", "spec", "reason"),
    [
        pytest.param(1, {"dp_size": 2}, "other_rank", id="another rank"),
        pytest.param(2, {"dp_size": 2, "is_multi_rank": True}, "rank_out_of_range", id="no such rank"),
        pytest.param(None, {}, None, id="no rank is the source's"),
        pytest.param(1, {"dp_size": 2, "is_multi_rank": True}, None, id="one of several"),
    ],
)
async def test_ranks_are_checked(
    context: zmq.Context[zmq.Socket[bytes]], dp_rank: int | None, spec: dict[str, object], reason: str | None
) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher, **spec) as made:  # type: ignore[arg-type]
        publisher.publish(stored("ab"), dp_rank=dp_rank)
        await until(lambda: bool(made.observed.dropped or made.observed.events), "the batch")
        assert dict(made.observed.dropped) == ({reason: 1} if reason else {})
        assert made.matched("ab", ("w", dp_rank or 0)) == (0 if reason else 2)


async def test_another_block_size_is_a_misconfiguration(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher, block_size=2) as made:
        publisher.publish(stored("ab"))
        await made.state("misconfigured")
        publisher.publish(stored("abcd"))
        await publisher.restart()
        assert (made.matched("abcd"), made.observed.resets) == (0, ["misconfigured"])


async def test_blocks_that_are_not_full_are_left_out(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        publisher.publish(stored("ab"))
        small = BlockStored(names("c"), None, tokens("c")[:12], BLOCK_SIZE - 1)
        for _ in range(100):
            publisher.publish(small)
        publisher.publish(stored("abcd", 2))
        await made.match("abcd", 4)
        assert made.observed.dropped == {"small_block": 100}


async def test_only_small_blocks_are_a_misconfiguration(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        for _ in range(100):
            publisher.publish(BlockStored(names("c"), None, tokens("c")[:12], BLOCK_SIZE - 1))
        await made.state("misconfigured")


async def test_a_batch_that_cannot_be_read_clears_the_rank(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        publisher.publish(stored("abcd"))
        await made.match("abcd", 4)
        publisher.publish_payload(b"\xc1")
        publisher.publish(stored("xy"))
        await made.match("xy", 2)
        assert made.matched("abcd") == 0
        assert made.observed.resets == ["undecodable"]
        await made.state("cold")


async def test_more_blocks_than_fit_clear_the_rank(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher, capacity_blocks=4) as made:
        publisher.publish(stored("abcdefgh"))
        await until(lambda: made.observed.resets == ["over_capacity"], "the reset")
        assert made.matched("abcdefgh") == 0


async def test_a_cache_that_was_replaced_is_known_again(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with (
        kv_publisher(context, has_replay=False) as publisher,
        followed(context, publisher, capacity_blocks=4) as made,
    ):
        publisher.publish(stored("a"), is_lost=True)
        publisher.publish(stored("bc"))
        await made.match("bc", 2)
        assert made.observed.states == ["cold"]
        publisher.publish(stored("de"))
        await made.state("live")


async def test_orphans_that_expire_ask_for_the_history(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        made.subscriber._queue._intakes[0].orphans._max_age_s = 0.02
        publisher.publish(stored("abcd", 2))
        await until(lambda: made.observed.dropped["orphan_expired"] > 1, "two expiries")
        # The second finds that everything was read anew only just before.
        assert made.observed.resets == ["orphans"]
        assert publisher.asked == [0, 0]


async def test_a8_5_random_frames_never_stop_the_reader(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    rng = random.Random(11)
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        good = payload([stored("abcd"), removed("abcd", [0])], 1.0)
        for _ in range(400):
            kind = rng.randrange(4)
            if kind == 0:
                publisher.send([rng.randbytes(rng.randrange(20)) for _ in range(rng.randint(1, 6))])
            elif kind == 1:
                publisher.send([b"", rng.randbytes(8), rng.randbytes(rng.randrange(50))])
            elif kind == 2:
                publisher.publish_payload(good[: rng.randrange(len(good))])
            else:
                at = rng.randrange(len(good))
                publisher.publish_payload(good[:at] + rng.randbytes(1) + good[at + 1 :])
        await until(lambda: _publishes_until_seen(publisher, made), "events after the noise")
        assert "internal" not in made.observed.dropped
        assert made.observed.dropped["frames"] > 0


async def test_an_error_in_the_work_does_not_stop_the_reader(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        right, made.index.store = made.index.store, lambda *args: 1 // 0  # type: ignore[method-assign,assignment]
        publisher.publish(stored("ab"))
        await until(lambda: made.observed.resets == ["internal"], "the reset")
        made.index.store = right  # type: ignore[method-assign]
        publisher.publish(stored("xy"))
        await made.match("xy", 2)


async def test_a_large_batch_is_applied_in_pieces(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        steps: list[float] = []
        step = made.subscriber._queue.step

        def counted(now_s: float) -> None:
            steps.append(now_s)
            step(now_s)

        made.subscriber._queue.step = counted  # type: ignore[method-assign]
        publisher.publish(*(stored("abcdefgh", engine=str(number)) for number in range(200)))
        await until(lambda: made.observed.events["stored"] == 200, "all of it")
        assert len(steps) >= 4


async def test_a_replay_without_end_is_given_up(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    limits = SubscriberLimits(replay_idle_s=0.2 * TIME_SCALE, replay_total_s=0.4 * TIME_SCALE)
    async with kv_publisher(context) as publisher, followed(context, publisher, limits) as made:
        publisher.has_no_end = True
        publisher.publish(stored("ab"), is_lost=True)
        publisher.publish(stored("cd"))
        await made.match("cd", 2)
        assert "replay_failed" in made.observed.resets


async def test_many_messages_leave_the_loop_to_others(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """While 400 messages are applied, other callbacks have their turn many times."""
    limits = SubscriberLimits(tick_s=0.0, replay_idle_s=30.0)
    async with kv_publisher(context) as publisher:
        for number in range(400):
            publisher.publish(stored("abcdefgh", engine=str(number)))
        turns = 0
        source = Source(0, publisher.endpoint, publisher.replay_endpoint, block_size=BLOCK_SIZE)
        made = Followed(context, PublisherSpec("w", source), limits)
        made.subscriber.start()
        while made.subscriber.machine.last_seq != 399:
            turns += 1
            async with asyncio.timeout(10 * TIME_SCALE):
                await asyncio.sleep(0)
        assert turns > 400
        made.subscriber.close()
        made.sweeper.close()


async def test_closing_leaves_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher:
        async with followed(context, publisher):
            pass
        before = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks()))
        for _ in range(20):
            async with followed(context, publisher) as made:
                await made.state("live")
                publisher.is_deaf = True
                publisher.publish(stored("ab"), is_lost=True)
                publisher.publish(stored("cd"))
                await until(lambda: made.subscriber.machine.state == "gap", "a replay that is not answered")
                publisher.is_deaf = False
            made.subscriber.close()
            assert made.index.ranks() == ()
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before[0] + 2, "descriptors closed")
        assert (threading.active_count(), len(asyncio.all_tasks())) == before[1:]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_new_gateway_goes_on_from_a_dump(context: zmq.Context[zmq.Socket[bytes]], is_restarted: bool) -> None:
    """The history is longer than the replay: without the dump nothing would be known of the first block."""
    async with kv_publisher(context) as publisher:
        async with followed(context, publisher) as first:
            publisher.publish(stored("ab"))
            await first.match("ab", 2)
            dump = first.subscriber.dump()
            assert dump is not None
        if is_restarted:
            await publisher.restart()
            publisher.publish(stored("xy"))
        publisher.publish(stored("abcd", 2))
        publisher.keeps = 2
        source = Source(0, publisher.endpoint, publisher.replay_endpoint)
        second = Followed(context, PublisherSpec("w", source), LIMITS)
        second.subscriber.load(dump)
        assert (second.matched("ab"), second.subscriber.machine.state) == (2, "gap")
        second.subscriber.start()
        await second.state("live")
        assert (second.matched("abcd"), second.matched("xy")) == ((0, 2) if is_restarted else (4, 0))
        assert publisher.asked[1:] == ([0, 0] if is_restarted else [0])
        second.subscriber.close()
        second.sweeper.close()


async def test_a_dump_waits_until_all_is_settled(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as made:
        await made.state("live")
        publisher.is_deaf = True
        publisher.publish(stored("ab"), is_lost=True)
        publisher.publish(stored("cd"))
        await made.state("gap")
        assert made.subscriber.dump() is None


async def test_a_dump_that_is_none_leaves_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context) as publisher, followed(context, publisher) as first:
        publisher.publish(stored("ab"))
        await first.match("ab", 2)
        dump = first.subscriber.dump()
        assert dump is not None
        other = Followed(context, PublisherSpec("x", first.subscriber.spec.source), LIMITS)
        for bad in ([b"junk"], dump, [*dump, b"junk"]):
            with pytest.raises((BatchUndecodable, KeyError)):
                other.subscriber.load(bad)
        assert other.index.overlap(query("ab")).device == {}


async def test_an_address_that_is_none_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    made = Followed(context, PublisherSpec("w", Source(0, "nonsense://x")), LIMITS)
    with pytest.raises(SourceMisconfigured, match="nonsense"):
        made.subscriber.start()
    made.subscriber.close()


async def test_a_replay_address_that_is_none_counts_as_one_that_fails(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with kv_publisher(context, has_replay=False) as publisher:
        source = Source(0, publisher.endpoint, "nonsense://x", block_size=BLOCK_SIZE)
        made = Followed(context, PublisherSpec("w", source), LIMITS)
        made.subscriber.start()
        await until(lambda: publisher.subscriptions > 0, "the subscription")
        publisher.publish(stored("a"), is_lost=True)
        publisher.publish(stored("bc"))
        await made.match("bc", 2)
        await made.state("cold")
        made.subscriber.close()
        made.sweeper.close()

"""What a relay keeps, and what each gateway gets of it: buffer, mirror and lanes, without any socket."""

import random
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.index import PrefixIndex
from kv_events.publisher import PublisherSpec
from kv_events.relay_wire import (
    WINDOW_BYTES,
    Begin,
    Cursor,
    End,
    Events,
    Part,
    Reset,
    Resume,
    ToGateway,
    cost_bytes,
    decode_from_relay,
)
from kv_events.sequence import SourceState
from kv_events.sources import Source
from relay.buffer import BATCH_COST_BYTES, BatchBuffer
from relay.feed import GatewayState
from relay.lanes import Lanes, LinkCounts
from relay.mirror import SourceMirror
from tests.kv_events.blocks import BLOCK_SIZE, stored
from tests.relay.truth import Cache

WORKER = "w"


class Observer:
    """Counts what was left out."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}

    def kv_event(self, worker: str, kind: str) -> None: ...

    def kv_dropped(self, reason: str, count: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def kv_reset(self, worker: str, reason: str) -> None: ...

    def kv_state(self, worker: str, dp_rank: int, state: SourceState) -> None: ...


class MirrorFeed:
    """A feed with a mirror, and nothing that sends."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.index = PrefixIndex()
        spec = PublisherSpec(WORKER, Source(0, "", block_size=BLOCK_SIZE))
        self.mirror = SourceMirror(spec, self.index, Observer(), max_bytes)

    def source_frame(self, rank: int, seq: int, payload: bytes) -> None:
        self.mirror.take(seq, payload)

    def source_restarted(self, rank: int) -> None:
        self.mirror.begin_epoch("restart")

    def source_gap(self, rank: int) -> None:
        self.mirror.begin_epoch("gap")

    def source_state(self, rank: int, is_connected: bool) -> None:
        self.mirror.is_connected = is_connected

    def remap(self, worker_url: str) -> None: ...

    def gateways(self) -> Mapping[str, GatewayState]:
        return {}

    async def run(self) -> None: ...

    async def aclose(self) -> None: ...

    def settle(self) -> None:
        while self.mirror.step(0.0):
            pass


def lanes_of(feed: MirrorFeed, *cursors: Cursor) -> Lanes:
    return Lanes([feed.mirror], cursors, LinkCounts())


def sent(feed: MirrorFeed, lanes: Lanes, *, is_taken: bool = True) -> list[ToGateway]:
    """All that is sent until nothing is left to do."""
    return list(_sent(feed, lanes, is_taken))


def _sent(feed: MirrorFeed, lanes: Lanes, is_taken: bool) -> Iterator[ToGateway]:
    while True:
        frames = lanes.next_message()
        if frames is not None:
            yield decode_from_relay(frames)[0]
            if is_taken:
                lanes.taken_bytes = lanes.sent_bytes
        elif not feed.mirror.step(0.0):
            return


def kinds(messages: list[ToGateway]) -> list[str]:
    return [type(message).__name__ for message in messages]


# Buffer


def test_the_newest_batches_are_kept() -> None:
    buffer = BatchBuffer(3 * (BATCH_COST_BYTES + 10))
    for seq in range(5, 10):
        buffer.add(seq, bytes(10))
    assert (buffer.first_seq, buffer.next_seq) == (7, 10)
    assert [buffer.get(seq) is not None for seq in range(5, 11)] == [False, False, True, True, True, False]
    with pytest.raises(ValueError, match="due"):
        buffer.add(11, b"")


def test_a_batch_beyond_all_room_is_not_kept() -> None:
    buffer = BatchBuffer(1000)
    buffer.add(0, bytes(10))
    buffer.add(1, bytes(2000))
    assert (buffer.first_seq, buffer.next_seq, buffer.size_bytes) == (2, 2, 0)
    buffer.clear()
    assert buffer.next_seq is buffer.first_seq is None


# Mirror


def test_the_mirror_holds_what_the_engine_holds() -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    cache.work(200)
    feed.settle()
    assert cache.held
    assert cache.is_known_to(feed.index, WORKER)
    cache.restart()
    cache.work(20)
    feed.settle()
    assert cache.is_known_to(feed.index, WORKER)


def test_a_number_that_does_not_follow_is_a_gap() -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    cache.store("ab")
    cache.seq += 1
    cache.held.clear()
    cache.store("ba")
    feed.settle()
    assert (feed.mirror.epoch, feed.mirror.reason) == (1, "gap")
    assert cache.is_known_to(feed.index, WORKER)


def test_a_mirror_that_falls_behind_begins_anew() -> None:
    feed = MirrorFeed(max_bytes=2_000)
    cache = Cache(feed)
    cache.work(200)
    feed.settle()
    assert (feed.mirror.epoch, feed.mirror.reason, feed.mirror.overflows) == (1, "overflow", 1)
    assert feed.index.rank_blocks((WORKER, 0)) == 0
    assert kinds(sent(feed, lanes_of(feed, Cursor(0, 0, 5)))) == ["Begin", "End"]


def test_what_cannot_be_mirrored_is_sent_all_the_same() -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    cache.store("ab")
    feed.settle()
    lanes = lanes_of(feed)
    sent(feed, lanes)
    feed.source_frame(0, cache.seq, b"\xc1")
    assert kinds(sent(feed, lanes)) == ["Events"]
    assert feed.index.rank_blocks((WORKER, 0)) == 0


@pytest.mark.parametrize("is_applied", [True, False], ids=["applied already", "not applied yet"])
@pytest.mark.parametrize("later", [0, 2])
def test_what_was_stored_before_a_flush_is_in_no_snapshot(is_applied: bool, later: int) -> None:
    """The engine does not tell of the flush; a gateway does, after it has seen some of the batches."""
    feed = MirrorFeed()
    cache = Cache(feed)
    cache.work(50)
    known = feed.mirror.snapshot()
    if is_applied:
        feed.settle()
    flushed, last_seq = set(cache.held), cache.seq - 1
    cache.held.clear()
    for prompt in ("abcab", "bcabc")[:later]:
        cache.store(prompt)
    if is_applied:
        feed.settle()
    feed.mirror.clear(feed.mirror.epoch, last_seq)
    feed.settle()
    assert flushed
    assert cache.is_known_to(feed.index, WORKER)
    assert feed.mirror.snapshot() is not known
    begin = next(iter(sent(feed, lanes_of(feed))))
    assert isinstance(begin, Begin)
    assert (begin.blocks, begin.last_seq, begin.is_complete) == (len(cache.held), cache.seq - 1, True)


@pytest.mark.parametrize(
    ("epoch", "last_seq"), [pytest.param(1, 3, id="another epoch"), pytest.param(0, 99, id="what is not yet there")]
)
def test_a_flush_of_what_is_not_there_is_nothing(epoch: int, last_seq: int) -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    cache.work(50)
    feed.mirror.clear(epoch, last_seq)
    feed.settle()
    feed.mirror.clear(epoch, last_seq)
    feed.settle()
    assert cache.held
    assert cache.is_known_to(feed.index, WORKER)


def test_a_flush_behind_what_is_kept_begins_anew() -> None:
    feed = MirrorFeed(max_bytes=2_000)
    cache = Cache(feed)
    for _ in range(20):
        cache.work(5)
        feed.settle()
    feed.mirror.clear(0, 1)
    feed.settle()
    assert (feed.mirror.epoch, feed.mirror.reason) == (1, "overflow")
    assert feed.index.rank_blocks((WORKER, 0)) == 0


# Lanes


def test_orphans_that_find_their_parent_after_a_snapshot_come_with_another() -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    cache.tell(stored("ab", 1))
    feed.settle()
    lanes = lanes_of(feed)
    first = sent(feed, lanes)
    assert kinds(first) == ["Begin", "End"]
    assert isinstance(first[0], Begin)
    assert not first[0].is_complete
    cache.tell(stored("a"))
    cache.held |= {"a", "ab"}
    feed.settle()
    assert cache.is_known_to(feed.index, WORKER)
    again = sent(feed, lanes)
    assert kinds(again) == ["Begin", "Part", "End"]
    assert isinstance(again[0], Begin)
    assert (again[0].blocks, again[0].is_complete) == (2, True)


def test_a_new_gateway_gets_a_snapshot_and_then_what_follows() -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    cache.work(50)
    feed.settle()
    lanes = lanes_of(feed)
    first = sent(feed, lanes)
    assert kinds(first) == ["Begin", "Part", "End"]
    begin, part, _ = first
    assert isinstance(begin, Begin)
    assert (begin.last_seq, begin.blocks, begin.is_complete) == (cache.seq - 1, len(cache.held), True)
    assert isinstance(part, Part)
    assert part.blocks == len(cache.held)
    cache.store("ccccc")
    assert kinds(sent(feed, lanes)) == ["Events"]


@pytest.mark.parametrize(
    ("cursor", "expected"),
    [
        pytest.param((0, 3), ["Resume", "Events", "Events"], id="two behind"),
        pytest.param((0, 5), ["Resume"], id="up to date"),
        pytest.param((0, None), ["Resume", *["Events"] * 6], id="nothing yet"),
        pytest.param((0, 6), ["Begin", "Part", "End"], id="ahead"),
        pytest.param((1, 3), ["Begin", "Part", "End"], id="another epoch"),
        pytest.param(None, ["Begin", "Part", "End"], id="unknown"),
    ],
)
def test_a_gateway_goes_on_where_it_was(cursor: tuple[int, int | None] | None, expected: list[str]) -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    for prompt in ("a", "b", "ca", "cb", "cc"):
        cache.store(prompt)
    feed.settle()
    assert feed.mirror.buffer.next_seq == 6
    known = [] if cursor is None else [Cursor(0, *cursor)]
    assert kinds(sent(feed, lanes_of(feed, *known))) == expected


def test_a_restart_is_told_before_what_follows_it() -> None:
    feed = MirrorFeed()
    cache = Cache(feed)
    lanes = lanes_of(feed)
    sent(feed, lanes)
    cache.work(10)
    cache.restart()
    messages = sent(feed, lanes)
    assert kinds(messages) == ["Reset", "Events"]
    assert messages[0] == Reset(0, 1, "restart")
    assert messages[1] == Events(0, 1, 0)


def test_nothing_is_sent_beyond_the_window() -> None:
    feed = MirrorFeed(max_bytes=1 << 30)
    cache = Cache(feed)
    lanes = lanes_of(feed)
    sent(feed, lanes)
    big = bytes(WINDOW_BYTES // 4)
    for _ in range(20):
        feed.source_frame(0, cache.seq, big)
        cache.seq += 1
    assert len(sent(feed, lanes, is_taken=False)) == 4
    assert not lanes.has_room
    lanes.taken_bytes = lanes.sent_bytes
    assert len(sent(feed, lanes, is_taken=False)) == 4


def test_a_gateway_that_falls_behind_gets_a_snapshot() -> None:
    """Its place in the batches is no longer there: what it missed is made good by all that there is now."""
    feed = MirrorFeed(max_bytes=10_000)
    cache = Cache(feed)
    lanes = lanes_of(feed)
    sent(feed, lanes)
    for _ in range(50):
        cache.work(10)
        feed.settle()
    assert feed.mirror.buffer.first_seq
    messages = sent(feed, lanes)
    assert kinds(messages) == ["Begin", "Part", "End"]
    begin = messages[0]
    assert isinstance(begin, Begin)
    assert (begin.last_seq, begin.blocks) == (cache.seq - 1, len(cache.held))


def test_gateways_share_a_snapshot() -> None:
    feed = MirrorFeed()
    Cache(feed).work(50)
    feed.settle()
    one, other = feed.mirror.snapshot(), feed.mirror.snapshot()
    assert one is other
    feed.settle()
    assert one.is_whole
    del one, other
    Cache(feed)  # begins a new epoch
    assert feed.mirror.snapshot().begin is None


def test_a_resync_is_a_snapshot() -> None:
    feed = MirrorFeed()
    Cache(feed)
    lanes = lanes_of(feed)
    sent(feed, lanes)
    lanes.resync(7)
    assert sent(feed, lanes) == []
    lanes.resync(0)
    assert kinds(sent(feed, lanes)) == ["Begin", "End"]


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_numbers_follow_each_other_whatever_happens(seed: int) -> None:
    """Slow and quick gateways at once: each sees batches without a hole, or a beginning."""
    chance = random.Random(seed)
    feed = MirrorFeed(max_bytes=chance.choice([3_000, 20_000, 1 << 20]))
    cache = Cache(feed, seed=seed)
    gateways = [lanes_of(feed) for _ in range(3)]
    seen: list[tuple[int, int | None] | None] = [None] * len(gateways)
    for _ in range(60):
        what = chance.random()
        if what < 0.05:
            chance.choice([cache.restart, cache.lose, cache.clear])()
        elif what < 0.6:
            cache.work(chance.randint(1, 5))
        for _ in range(chance.randint(0, 20)):
            feed.mirror.step(0.0)
        for number, lanes in enumerate(gateways):
            for _ in range(chance.choice([0, 1, 10])):
                frames = lanes.next_message()
                if frames is None:
                    break
                lanes.taken_bytes += cost_bytes(frames)
                seen[number] = _after(seen[number], decode_from_relay(frames)[0])
    assert feed.mirror.buffer.size_bytes <= 1 << 20


def _after(known: tuple[int, int | None] | None, message: ToGateway) -> tuple[int, int | None] | None:
    if isinstance(message, Reset):
        return message.epoch, None
    if isinstance(message, Begin):
        return message.epoch, message.last_seq
    if isinstance(message, Events):
        assert known is not None
        assert message.epoch == known[0]
        assert known[1] is None or message.seq == known[1] + 1
        return message.epoch, message.seq
    assert isinstance(message, Part | End | Resume)
    return known

"""One rank over a relay: what is believed, and when a snapshot is asked for."""

from collections.abc import AsyncIterator

import pytest

from gateway.kv_metrics import KvMetrics
from gateway.kv_relayed import RankMessage, RelayedRank
from kv_events.index import PrefixIndex
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec
from kv_events.relay_wire import Begin, Clear, Cursor, End, Events, Part, Reset, Resume, Resync
from kv_events.sequence import SourceState
from kv_events.sources import Source
from kv_events.types import AllBlocksCleared, Tier
from tests.fakes.kv_publisher import payload
from tests.kv_events.blocks import BLOCK_SIZE, stored

BEGIN = Begin(0, 3, 6, 0, True, False, {})


class Followed:
    """A rank, and what it asked for."""

    def __init__(self) -> None:
        self.told: list[Resync | Clear] = []
        self.index = PrefixIndex()
        self.sweeper = IndexSweeper(self.index)
        spec = PublisherSpec("w", Source(0, "", block_size=BLOCK_SIZE))
        observer = KvMetrics(lambda worker, dp_rank: 0)
        self.rank = RelayedRank(spec, "publisher", self.index, self.sweeper, observer, self.told.append)
        self.rank.on_session()
        self.rank.on_health(True)

    def take(self, *messages: RankMessage, body: bytes | None = None) -> None:
        """Take messages and apply them; those that have a body have this one, or a batch of two blocks."""
        for message in messages:
            data = payload([stored("ab")], 1.0) if body is None else body
            self.rank.take(message, data if isinstance(message, Events | Part) else b"", 100)
            while self.rank.has_work:
                self.rank.step(0.0)

    @property
    def asked(self) -> list[str]:
        """Reasons of the snapshots that it asked for."""
        return [message.reason for message in self.told if isinstance(message, Resync)]

    @property
    def blocks(self) -> int:
        return self.index.rank_blocks(("w", 0))


@pytest.fixture
async def followed() -> AsyncIterator[Followed]:
    one = Followed()
    yield one
    one.rank.close()
    one.sweeper.close()


async def test_a_snapshot_makes_it_whole(followed: Followed) -> None:
    assert (followed.rank.state, followed.rank.cursor()) == (SourceState.REPLAYING, None)
    followed.take(BEGIN)
    assert followed.rank.state is SourceState.REPLAYING
    followed.take(End(0), Events(0, 3, 7))
    assert (followed.rank.state, followed.blocks) == (SourceState.LIVE, 2)
    assert followed.rank.cursor() == Cursor(0, 3, 7)
    assert followed.rank.position == ("publishe:3", 7)
    assert followed.rank.done_bytes == 300


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        pytest.param(Events(0, 3, 9), ["sequence"], id="a batch is missing"),
        pytest.param(Events(0, 3, 6), [], id="known already"),
        pytest.param(Events(0, 2, 7), [], id="of an earlier epoch"),
        pytest.param(Resume(0, 4), ["epoch"], id="goes on elsewhere"),
        pytest.param(End(0), [], id="the end of no snapshot"),
    ],
)
async def test_what_does_not_follow_is_not_applied(followed: Followed, message: RankMessage, asked: list[str]) -> None:
    followed.take(BEGIN, End(0), message)
    assert (followed.asked, followed.blocks) == (asked, 0)
    assert followed.rank.state is (SourceState.REPLAYING if asked else SourceState.LIVE)
    assert followed.rank.done_bytes == 300
    if asked:
        # What is still on its way is of no use; the snapshot is.
        followed.take(Events(0, 3, 10))
        assert (followed.blocks, followed.rank.cursor()) == (0, None)
        followed.take(BEGIN, End(0))
        assert followed.rank.state is SourceState.LIVE


async def test_a_gap_is_believed_again_when_the_cache_is_known(followed: Followed) -> None:
    followed.take(BEGIN, End(0), Events(0, 3, 7), Reset(0, 4, "gap"))
    assert (followed.rank.state, followed.blocks) == (SourceState.COLD, 0)
    followed.take(Events(0, 4, 20))
    assert (followed.rank.state, followed.blocks) == (SourceState.COLD, 2)
    followed.take(Events(0, 4, 21), body=payload([AllBlocksCleared()], 2.0))
    assert (followed.rank.state, followed.blocks) == (SourceState.LIVE, 0)


async def test_what_cannot_be_the_workers_is_told_until_the_publisher_is_another(followed: Followed) -> None:
    wrong = stored("ab")
    wrong.block_size = 2 * BLOCK_SIZE
    wrong.block_hashes = wrong.block_hashes[:1]
    followed.take(BEGIN, End(0))
    followed.take(Events(0, 3, 7), body=payload([wrong], 1.0))
    assert followed.rank.state is SourceState.MISCONFIGURED
    assert followed.rank.problem
    followed.take(Events(0, 3, 8), BEGIN)
    assert (followed.rank.state, followed.blocks) == (SourceState.MISCONFIGURED, 0)
    assert followed.rank.cursor() is None
    followed.take(Reset(0, 4, "restart"), Events(0, 4, 0))
    assert (followed.rank.state, followed.blocks) == (SourceState.LIVE, 2)


async def test_nonsense_of_an_engine_makes_it_begin_anew(followed: Followed) -> None:
    followed.take(BEGIN, End(0), Events(0, 3, 7))
    followed.take(Events(0, 3, 8), body=b"\xc1")
    assert (followed.rank.state, followed.blocks) == (SourceState.COLD, 0)
    followed.take(Events(0, 3, 9))
    assert followed.blocks == 2


async def test_another_process_of_the_engine_holds_nothing(followed: Followed) -> None:
    followed.rank.on_boot("one")
    followed.take(BEGIN, End(0), Events(0, 3, 7))
    followed.rank.on_boot("one")
    assert followed.blocks == 2
    followed.rank.on_boot("two")
    assert (followed.asked, followed.blocks, followed.rank.state) == (["boot"], 0, SourceState.REPLAYING)


async def test_what_was_on_its_way_when_the_process_changed_is_not_taken(followed: Followed) -> None:
    followed.rank.on_boot("one")
    followed.take(BEGIN)
    followed.rank.on_boot("two")
    followed.take(Part(0, Tier.DEVICE, (None, None, None, None), 1, 0), End(0), Events(0, 3, 7), body=bytes(16))
    assert (followed.blocks, followed.rank.state) == (0, SourceState.REPLAYING)


# A flush that was called for through the gateway


async def test_a_flush_is_told_to_the_relay_with_what_came_before_it(followed: Followed) -> None:
    followed.take(BEGIN, End(0), Events(0, 3, 7))
    followed.rank.on_cleared()
    assert followed.told == [Clear(0, 3, 7)]
    assert (followed.blocks, followed.rank.state) == (0, SourceState.LIVE)
    followed.take(Events(0, 3, 8))
    assert (followed.blocks, followed.asked) == (2, [])


async def test_batches_that_wait_when_the_cache_is_flushed_are_worthless(followed: Followed) -> None:
    followed.take(BEGIN, End(0))
    followed.rank.take(Events(0, 3, 7), payload([stored("ab")], 1.0), 100)
    followed.rank.on_cleared()
    assert not followed.rank.has_work
    assert (followed.told, followed.rank.done_bytes) == ([Clear(0, 3, 7)], 300)
    assert followed.rank.position[1] == 7


@pytest.mark.parametrize("is_begun", [True, False], ids=["while a snapshot comes", "before it comes"])
async def test_a_snapshot_from_before_a_flush_is_not_taken(followed: Followed, is_begun: bool) -> None:
    if is_begun:
        followed.take(BEGIN)
    followed.rank.on_cleared()
    if not is_begun:
        assert followed.told == []
        followed.take(BEGIN)
    assert followed.told == [Clear(0, 3, 6), Resync(0, "cleared")]
    followed.take(Part(0, Tier.DEVICE, (None, None, None, None), 1, 0), End(0), Events(0, 3, 7), body=bytes(16))
    assert (followed.blocks, followed.rank.state) == (0, SourceState.REPLAYING)
    followed.take(BEGIN, End(0))
    assert followed.rank.state is SourceState.LIVE


async def test_a_flush_while_nobody_is_connected_is_told_later_or_not_at_all(followed: Followed) -> None:
    followed.rank.on_cleared()
    followed.take(Reset(0, 5, "restart"), Events(0, 5, 0), BEGIN)
    assert followed.told == []

"""One publisher of one worker: what is expected of it, and who is told of what it does. Pure."""

from dataclasses import dataclass
from typing import Protocol

from kv_events.index import RankId
from kv_events.sequence import REPLAY_WINDOW, SourceState
from kv_events.sources import Source


@dataclass(frozen=True, slots=True)
class PublisherSpec:
    """A publisher to subscribe to.

    Attributes:
        worker_id: Whose caches it announces.
        source: Where it is, and the rank that it is registered for.
        dp_size: Ranks of the worker; batches of others are refused.
        is_multi_rank: It announces several ranks of the worker, each batch its own.
        capacity_blocks: Blocks that the device of a rank holds; ``None`` if unknown.
        max_copies: Copies of one block that the engine counts: 2 for vLLM, 1 for SGLang.
        replay_window: Messages that it keeps for replays.
    """

    worker_id: str
    source: Source
    dp_size: int = 1
    is_multi_rank: bool = False
    capacity_blocks: int | None = None
    max_copies: int = 1
    replay_window: int = REPLAY_WINDOW

    def ranks(self) -> list[RankId]:
        """Name the ranks whose caches it announces."""
        numbers = range(self.dp_size) if self.is_multi_rank else (self.source.dp_rank,)
        return [(self.worker_id, number) for number in numbers]


class SourceObserver(Protocol):
    """Whoever counts and shows what sources do. Called on the loop; must not raise."""

    def kv_event(self, worker: str, kind: str) -> None:
        """One event was applied: ``stored``, ``removed``, ``cleared``."""

    def kv_dropped(self, reason: str, count: int) -> None:
        """Messages, events or blocks were left out."""

    def kv_reset(self, worker: str, reason: str) -> None:
        """All that was known of a source was forgotten."""

    def kv_state(self, worker: str, dp_rank: int, state: SourceState) -> None:
        """A source changed its state."""


@dataclass(frozen=True, slots=True)
class SubscriberLimits:
    """Times, all in seconds; tests shorten them.

    Attributes:
        tick_s: Work at one go, before the loop's other callbacks have their turn.
        replay_idle_s: A replay that brings nothing for so long has failed.
        replay_total_s: So has one that takes longer than this.
        stale_grace_s: What is known of a publisher is kept for so long after its connection is lost.
        orphan_resync_s: Least time between two replays of everything because parents were missing.
    """

    tick_s: float = 0.002
    replay_idle_s: float = 5.0
    replay_total_s: float = 60.0
    stale_grace_s: float = 10.0
    orphan_resync_s: float = 60.0

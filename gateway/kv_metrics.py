"""Counters of KV events and of the choices that rest on them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.metrics import Histogram
from kv_events.sequence import SourceState

_OVERLAP_BOUNDS_BLOCKS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_Labels = TypeVar("_Labels", bound=tuple[str, ...])


class KvMetrics:
    """What the sources of KV events do, and what routing makes of it; see ``KvCounters``.

    Args:
        blocks: Blocks in the index of a worker's rank; called on a scrape.
    """

    __slots__ = ("_blocks", "_dropped", "_events", "_mismatches", "_overlap", "_resets", "_states", "_zero")

    def __init__(self, blocks: Callable[[str, int], int]) -> None:
        self._blocks = blocks
        self._events: dict[tuple[str, str], int] = {}
        self._dropped: dict[str, int] = {}
        self._resets: dict[tuple[str, str], int] = {}
        self._states: dict[tuple[str, int], SourceState] = {}
        self._mismatches: dict[str, int] = {}
        self._overlap = Histogram(_OVERLAP_BOUNDS_BLOCKS)
        self._zero = 0

    def kv_event(self, worker: str, kind: str) -> None:
        """Count one event that was applied."""
        key = (worker, kind)
        self._events[key] = self._events.get(key, 0) + 1

    def kv_dropped(self, reason: str, count: int) -> None:
        """Count messages, events or blocks that were left out."""
        self._dropped[reason] = self._dropped.get(reason, 0) + count

    def kv_reset(self, worker: str, reason: str) -> None:
        """Count a source of which all was forgotten."""
        key = (worker, reason)
        self._resets[key] = self._resets.get(key, 0) + 1

    def kv_state(self, worker: str, dp_rank: int, state: SourceState) -> None:
        """Note the state of a source."""
        self._states[worker, dp_rank] = state

    def kv_forget(self, worker: str) -> None:
        """Drop every series of a worker."""
        for series in (self._events, self._resets):
            for pair in [pair for pair in series if pair[0] == worker]:
                del series[pair]
        for rank in [rank for rank in self._states if rank[0] == worker]:
            del self._states[rank]
        self._mismatches.pop(worker, None)

    def kv_forget_rank(self, worker: str, dp_rank: int) -> None:
        """Drop the series of one rank."""
        self._states.pop((worker, dp_rank), None)

    def mismatch(self, worker: str) -> None:
        """Count a prompt whose blocks the engine announced otherwise than they were hashed here."""
        self._mismatches[worker] = self._mismatches.get(worker, 0) + 1

    def overlap(self, blocks: int) -> None:
        """Count a choice by the leading blocks of the prompt that the chosen rank held."""
        self._overlap.observe(blocks)
        if not blocks:
            self._zero += 1

    def families(self) -> Iterator[Metric]:
        """Everything as Prometheus families."""
        states = GaugeMetricFamily(
            "forebay_kv_source_state", "1 for the state that a source is in.", labels=("worker", "dp_rank", "state")
        )
        blocks: dict[str, int] = {}
        for (worker, dp_rank), state in self._states.items():
            for one in SourceState:
                states.add_metric((worker, str(dp_rank), str(one)), float(one is state))
            blocks[worker] = blocks.get(worker, 0) + self._blocks(worker, dp_rank)
        yield states
        yield _counter("forebay_kv_events", "KV events applied.", ("worker", "kind"), self._events)
        yield _counter(
            "forebay_kv_events_dropped",
            "Messages, events and blocks left out.",
            ("reason",),
            {(reason,): count for reason, count in self._dropped.items()},
        )
        yield _counter("forebay_kv_resets", "Sources of which all was forgotten.", ("worker", "reason"), self._resets)
        gauge = GaugeMetricFamily("forebay_kv_index_blocks", "Blocks known of a worker's devices.", labels=("worker",))
        for worker, count in blocks.items():
            gauge.add_metric((worker,), float(count))
        yield gauge
        yield _counter(
            "forebay_kv_parity_mismatches",
            "Prompts whose blocks an engine announced otherwise than they were hashed here.",
            ("worker",),
            {(worker,): count for worker, count in self._mismatches.items()},
        )
        yield self._overlap.family("forebay_route_overlap_blocks", "Leading prompt blocks on the chosen rank.")
        yield CounterMetricFamily("forebay_route_zero_blocks", "Choices of a rank that held none.", self._zero)


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Mapping[_Labels, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in rows.items():
        family.add_metric(values, count)
    return family

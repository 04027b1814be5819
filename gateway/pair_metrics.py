"""Counters of requests over prefill and decode workers."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from gateway.metrics import Histogram

_HOLD_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 120.0)


class PairMetrics:
    """What the gateway counts about pairs.

    Args:
        background: Returns the prefills that nobody waits for; called on a scrape.
    """

    def __init__(self, background: Callable[[], int]) -> None:
        self._background = background
        self._failures: dict[tuple[str, str], int] = {}
        self._hold = Histogram(_HOLD_BOUNDS_S)

    def failed(self, part: str, kind: str) -> None:
        """Count an attempt that one of its legs has failed.

        Args:
            part: The leg.
            kind: The error's type, as clients are told it.
        """
        self._failures[part, kind] = self._failures.get((part, kind), 0) + 1

    def held(self, seconds: float) -> None:
        """Count the time for which decode's success had to wait for prefill's end."""
        self._hold.observe(seconds)

    def families(self) -> Iterator[Metric]:
        """The metrics for a scrape."""
        failures = CounterMetricFamily(
            "forebay_pair_failures", "Attempts over a pair that one leg has failed.", labels=("part", "type")
        )
        for labels, count in self._failures.items():
            failures.add_metric(labels, count)
        yield failures
        yield self._hold.family("forebay_prefill_hold_seconds", "Time that a whole answer waited for prefill's end.")
        yield GaugeMetricFamily(
            "forebay_prefill_background_tasks", "Prefills that nobody waits for.", value=self._background()
        )

"""Counters of the gateway: plain integers while requests run, Prometheus families on a scrape.

Single-threaded: everything is called on the event loop.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.outcome import Outcome

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

# Label values come from clients and from churning fleets, and every one of them costs memory here and at the
# scraper for ever, so that each label has a bound.
MAX_MODELS: Final = 100
MAX_WORKERS: Final = 1024
UNKNOWN: Final = "unknown"
OTHER: Final = "other"

# Up to ten minutes: long generations are normal.
_REQUEST_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_BYTE_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_EVENT_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_QUEUE_BOUNDS_S: Final = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROUTE_BOUNDS_S: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 0.1)


class Histogram:
    """Counts of observations per bucket, in seconds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value`` in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> Metric:
        """Return the cumulative buckets as a Prometheus family."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        family = HistogramMetricFamily(name, text)
        family.add_metric([], buckets, self._sum)
        return family


class Metrics:
    """What the gateway counts about requests, attempts, aborts and workers.

    Args:
        in_flight: Returns the requests that are admitted and not ended; called on a scrape.
        knows_model: Whether a worker serves the model; other names are counted as ``unknown``.
        access_log_dropped: Returns the access lines dropped so far; called on a scrape.
        queued: Returns the requests that wait for a worker; called on a scrape.
    """

    __slots__ = (
        "_abort_unconfirmed",
        "_aborts_confirmed",
        "_aborts_sent",
        "_access_log_dropped",
        "_attempts",
        "_first_byte",
        "_gaps",
        "_handoff_abandoned",
        "_in_flight",
        "_knows_model",
        "_models",
        "_queue",
        "_queued",
        "_rank_mismatches",
        "_ready",
        "_registry",
        "_request",
        "_requests",
        "_route",
        "_weights",
        "_workers",
    )

    def __init__(
        self,
        in_flight: Callable[[], int],
        knows_model: Callable[[str], bool],
        access_log_dropped: Callable[[], int] = lambda: 0,
        queued: Callable[[], int] = lambda: 0,
    ) -> None:
        self._in_flight = in_flight
        self._knows_model = knows_model
        self._access_log_dropped = access_log_dropped
        self._queued = queued
        self._requests: dict[tuple[str, str, str, int], int] = {}
        self._attempts: dict[tuple[str, str], int] = {}
        self._aborts_sent: dict[str, int] = {}
        self._rank_mismatches: dict[str, int] = {}
        self._ready: dict[str, bool] = {}
        self._weights: dict[str, int] = {}
        self._models: set[str] = set()
        self._workers: set[str] = set()
        self._aborts_confirmed = 0
        self._abort_unconfirmed = 0
        self._handoff_abandoned = 0
        self._request = Histogram(_REQUEST_BOUNDS_S)
        self._first_byte = Histogram(_FIRST_BYTE_BOUNDS_S)
        self._gaps = Histogram(_EVENT_BOUNDS_S)
        self._route = Histogram(_ROUTE_BOUNDS_S)
        self._queue = Histogram(_QUEUE_BOUNDS_S)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self._families))
        ProcessCollector(registry=self._registry)

    def request_finished(
        self, route: str, model: str, outcome: Outcome, status: int, duration_s: float, first_byte_s: float | None
    ) -> None:
        """Count one request, once, at its end.

        Args:
            route: The route's pattern from the gateway's own table, never the client's path.
            model: The model asked for; empty where the request names none.
            outcome: How it ended.
            status: The status sent; 499 when the client left first.
            duration_s: From the request's first byte to its end.
            first_byte_s: From the same moment to the answer's first byte; ``None`` if there was none.
        """
        key = (route, self._model_label(model), outcome, status)
        self._requests[key] = self._requests.get(key, 0) + 1
        self._request.observe(duration_s)
        if first_byte_s is not None:
            self._first_byte.observe(first_byte_s)

    def event_gap(self, seconds: float) -> None:
        """Count the time between two pieces of a stream, each an event, or several that came together."""
        self._gaps.observe(seconds)

    def attempt(self, worker_id: str, result: str) -> None:
        """Count one attempt at a worker; ``result`` is one of a few words of the caller's."""
        label = self._label_of(worker_id)
        if label is not None:
            self._attempts[label, result] = self._attempts.get((label, result), 0) + 1

    def abort_sent(self, worker_id: str) -> None:
        """Count an abort that was written to a worker."""
        label = self._label_of(worker_id)
        if label is not None:
            self._aborts_sent[label] = self._aborts_sent.get(label, 0) + 1

    def rank_mismatch(self, worker_id: str) -> int | None:
        """Count a request that ran on another rank than the chosen one.

        Returns:
            How many there were of the worker's so far, ``None`` if it has left the fleet.
        """
        label = self._label_of(worker_id)
        if label is None:
            return None
        count = self._rank_mismatches[label] = self._rank_mismatches.get(label, 0) + 1
        return count

    def abort_confirmed(self) -> None:
        """Count an aborted request whose end the engine showed."""
        self._aborts_confirmed += 1

    def abort_unconfirmed(self) -> None:
        """Count an aborted request that was given up without a sign of its end."""
        self._abort_unconfirmed += 1

    def handoff_abandoned(self) -> None:
        """Count a decode leg that was closed before it had taken its prompt's blocks over."""
        self._handoff_abandoned += 1

    def route_seconds(self, seconds: float) -> None:
        """Count the time that one placement took."""
        self._route.observe(seconds)

    def queue_seconds(self, seconds: float) -> None:
        """Count the time that one request waited for a worker, however the wait ended."""
        self._queue.observe(seconds)

    def worker_ready(self, worker_id: str, is_ready: bool) -> None:
        """Note whether a worker takes requests; from the first time on it has series of its own."""
        self._ready[_bounded(self._workers, worker_id, MAX_WORKERS)] = is_ready

    def worker_weights(self, worker_id: str, version: int | None) -> None:
        """Note the version of a worker's weights; ``None``, where it is no number, has no series."""
        self._weights.pop(worker_id, None)
        if version is not None and worker_id in self._workers:
            self._weights[worker_id] = version

    def forget_worker(self, worker_id: str) -> None:
        """Drop every series of a worker that left the fleet; what its last requests still do is not counted."""
        self._workers.discard(worker_id)
        self._ready.pop(worker_id, None)
        self._weights.pop(worker_id, None)
        self._aborts_sent.pop(worker_id, None)
        self._rank_mismatches.pop(worker_id, None)
        for key in [key for key in self._attempts if key[0] == worker_id]:
            del self._attempts[key]

    def add(self, families: Callable[[], Iterator[Metric]]) -> None:
        """Show further families with the others."""
        self._registry.register(_Collector(families))

    def render(self) -> bytes:
        """Return everything in Prometheus' text form, to be sent as ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def _model_label(self, model: str) -> str:
        if not model or not self._knows_model(model):
            return UNKNOWN
        return _bounded(self._models, model, MAX_MODELS)

    def _label_of(self, worker_id: str) -> str | None:
        """A worker's label, ``None`` if it has left the fleet: requests may end after that."""
        if worker_id in self._workers:
            return worker_id
        return OTHER if len(self._workers) >= MAX_WORKERS else None

    def _families(self) -> Iterator[Metric]:
        yield _counter(
            "forebay_requests",
            "Requests that ended.",
            ("route", "model", "outcome", "status"),
            (
                ((route, model, outcome, str(status)), n)
                for (route, model, outcome, status), n in self._requests.items()
            ),
        )
        yield GaugeMetricFamily(
            "forebay_in_flight_requests", "Requests admitted and not ended.", value=self._in_flight()
        )
        yield GaugeMetricFamily(
            "forebay_queued_requests", "Requests that wait for a worker with room.", value=self._queued()
        )
        yield self._request.family("forebay_request_duration_seconds", "Request duration.")
        yield self._first_byte.family("forebay_time_to_first_byte_seconds", "Time to an answer's first byte.")
        yield self._gaps.family("forebay_inter_event_seconds", "Time between the events of a stream.")
        yield _counter(
            "forebay_upstream_attempts", "Attempts at workers.", ("worker", "result"), self._attempts.items()
        )
        aborts = (((worker,), n) for worker, n in self._aborts_sent.items())
        yield _counter("forebay_aborts_sent", "Aborts written to workers.", ("worker",), aborts)
        elsewhere = (((worker,), n) for worker, n in self._rank_mismatches.items())
        yield _counter(
            "forebay_rank_mismatches", "Requests that ran on another rank than the chosen.", ("worker",), elsewhere
        )
        yield CounterMetricFamily(
            "forebay_aborts_confirmed", "Aborted requests whose end was seen.", self._aborts_confirmed
        )
        yield CounterMetricFamily(
            "forebay_abort_unconfirmed",
            "Aborted requests given up without a sign of their end.",
            self._abort_unconfirmed,
        )
        yield CounterMetricFamily(
            "forebay_handoff_abandoned",
            "Decode legs closed before they had taken their prompt's blocks over.",
            self._handoff_abandoned,
        )
        ready = GaugeMetricFamily("forebay_worker_ready", "Whether a worker takes requests.", labels=("worker",))
        for worker, is_ready in self._ready.items():
            ready.add_metric((worker,), float(is_ready))
        yield ready
        weights = GaugeMetricFamily(
            "forebay_worker_weight_version", "Version of a worker's weights, where it is a number.", labels=("worker",)
        )
        for worker, version in self._weights.items():
            weights.add_metric((worker,), float(version))
        yield weights
        yield self._route.family("forebay_route_seconds", "Time that one placement took.")
        yield self._queue.family("forebay_queue_seconds", "Time that requests waited for a worker, where they had to.")
        yield CounterMetricFamily(
            "forebay_access_log_dropped", "Access lines dropped as the sink was slow.", self._access_log_dropped()
        )


class _Collector:
    """Adapts a function to what the registry wants."""

    __slots__ = ("_families",)

    def __init__(self, families: Callable[[], Iterator[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families()


def _counter(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _bounded(seen: set[str], value: str, bound: int) -> str:
    if value in seen:
        return value
    if len(seen) >= bound:
        return OTHER
    seen.add(value)
    return value

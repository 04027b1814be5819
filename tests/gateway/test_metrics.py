"""Metrics: names and labels as published, counts that add up, labels that stay bounded."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import CONTENT_TYPE, MAX_MODELS, MAX_WORKERS, Histogram, Metrics
from gateway.outcome import Outcome


def make(in_flight: int = 0) -> Metrics:
    return Metrics(lambda: in_flight, lambda model: model.startswith("known"), lambda: 7)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def labels(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


def test_the_outcomes_are_the_published_ten() -> None:
    assert {outcome.value for outcome in Outcome} == {
        "complete", "engine_error", "truncated", "aborted", "client_closed", "rejected", "timeout", "overloaded",
        "shutdown", "prefill_failed",
    }  # fmt: skip


def test_a_finished_request_is_counted_with_its_labels() -> None:
    metrics = make(in_flight=3)
    metrics.request_finished("/generate", "known", Outcome.COMPLETE, 200, 0.2, 0.03)
    metrics.request_finished("/generate", "known", Outcome.COMPLETE, 200, 0.4, None)
    seen = samples(metrics)
    name = "forebay_requests_total"
    assert seen[name, labels(route="/generate", model="known", outcome="complete", status="200")] == 2
    assert seen["forebay_in_flight_requests", ()] == 3
    assert seen["forebay_request_duration_seconds_count", ()] == 2
    assert seen["forebay_request_duration_seconds_sum", ()] == pytest.approx(0.6)
    assert seen["forebay_request_duration_seconds_bucket", labels(le="0.25")] == 1
    assert seen["forebay_time_to_first_byte_seconds_count", ()] == 1
    assert seen["forebay_access_log_dropped_total", ()] == 7


def test_times_between_events_have_buckets() -> None:
    metrics = make()
    for seconds in (0.02, 0.03):
        metrics.event_gap(seconds)
    seen = samples(metrics)
    assert seen["forebay_inter_event_seconds_count", ()] == 2
    assert seen["forebay_inter_event_seconds_bucket", labels(le="0.025")] == 1


def test_attempts_aborts_and_readiness() -> None:
    metrics = make()
    metrics.worker_ready("w:1", True)
    metrics.attempt("w:1", "ok")
    metrics.attempt("w:1", "ok")
    metrics.attempt("w:1", "connect_failed")
    metrics.abort_sent("w:1")
    metrics.abort_confirmed()
    metrics.abort_unconfirmed()
    metrics.abort_unconfirmed()
    metrics.worker_ready("w:2", False)
    metrics.route_seconds(0.00002)
    seen = samples(metrics)
    assert seen["forebay_upstream_attempts_total", labels(worker="w:1", result="ok")] == 2
    assert seen["forebay_aborts_sent_total", labels(worker="w:1")] == 1
    assert seen["forebay_aborts_confirmed_total", ()] == 1
    assert seen["forebay_abort_unconfirmed_total", ()] == 2
    assert seen["forebay_worker_ready", labels(worker="w:1")] == 1
    assert seen["forebay_worker_ready", labels(worker="w:2")] == 0
    assert seen["forebay_route_seconds_bucket", labels(le="2.5e-05")] == 1


def test_a_forgotten_worker_leaves_no_series() -> None:
    metrics = make()
    for worker in ("w:1", "w:2"):
        metrics.worker_ready(worker, True)
        metrics.attempt(worker, "ok")
        metrics.abort_sent(worker)
    metrics.forget_worker("w:1")
    metrics.forget_worker("never seen")
    metrics.attempt("w:1", "truncated")  # the last requests may end after that
    metrics.abort_sent("w:1")
    assert b"w:1" not in metrics.render()
    assert b"w:2" in metrics.render()


def test_model_labels_are_bounded() -> None:
    metrics = make()
    for model in ["", "invented", *(f"known-{i}" for i in range(MAX_MODELS + 5))]:
        metrics.request_finished("/generate", model, Outcome.COMPLETE, 200, 0.1, None)
    models = {dict(key[1])["model"]: value for key, value in samples(metrics).items() if key[0].endswith("sts_total")}
    assert len(models) == MAX_MODELS + 2
    assert models["unknown"] == 2
    assert models["other"] == 5


def test_worker_labels_are_bounded() -> None:
    metrics = make()
    for i in range(MAX_WORKERS + 3):
        metrics.worker_ready(f"w:{i}", True)
        metrics.attempt(f"w:{i}", "ok")
    assert samples(metrics)["forebay_upstream_attempts_total", labels(worker="other", result="ok")] == 3


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    buckets = {s.labels["le"]: s.value for s in histogram.family("x", "x").samples if s.name == "x_bucket"}
    assert buckets == {"1.0": 1, "2.0": 3, "+Inf": 4}


def test_process_metrics_are_there_and_nothing_of_the_platform() -> None:
    text = make().render()
    assert b"process_resident_memory_bytes" in text
    assert b"python_" not in text
    assert CONTENT_TYPE.startswith("text/plain")


def test_gateways_in_one_process_do_not_share_counts() -> None:
    one, two = make(), make()
    one.worker_ready("w:1", True)
    one.attempt("w:1", "ok")
    assert b"w:1" in one.render()
    assert b"w:1" not in two.render()

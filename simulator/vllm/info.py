"""What the engine tells about itself: models, version, load, metrics."""

from __future__ import annotations

import time
from typing import Any

import orjson

from simulator.exchange import Exchange
from simulator.options import parse_endpoint
from simulator.scheduler import Scheduler
from simulator.sequence import FinishKind
from simulator.vllm.engine import VllmCore, fresh_id
from simulator.vllm.request import adapters, served_models

# Labels of cache_config_info that no gateway needs, as on a real server.
_CACHE_LABELS = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "is_attention_free": "False",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_caching_hash_algo": "sha256",
    "sliding_window": "None",
    "user_specified_block_size": "True",
}


def handle_models(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/v1/models``."""
    options = core.options
    cards = [_card(name, options.model, None, core.context_tokens) for name in served_models(options)]
    cards += [_card(name, name, options.model, None) for name in adapters(options)]
    exchange.respond(200, orjson.dumps({"object": "list", "data": cards}))


def _card(name: str, root: str, parent: str | None, context: int | None) -> dict[str, Any]:
    created = int(time.time())
    permission = {
        "id": f"modelperm-{fresh_id()}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": f"./{root}",
        "parent": parent,
        "max_model_len": context,
        "permission": [permission],
    }


def handle_version(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/version``."""
    exchange.respond(200, orjson.dumps({"version": core.options.version}))


def handle_load(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/load``: requests that have not been answered."""
    exchange.respond(200, orjson.dumps({"server_load": core.open_requests}))


def handle_health(core: VllmCore, exchange: Exchange) -> None:
    """Answer 200 without looking at anything but the engine's life."""
    exchange.respond(503 if core.is_dying else 200, b"", None)


def handle_event_sources(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/kv_event_sources``: every rank's own endpoints."""
    options = core.options
    if options.kv_events is None:
        exchange.respond(404, b'{"detail":"Not Found"}')
        return
    sources = {
        str(rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _at_rank(options.kv_events, rank),
            "replay_endpoint": None if options.replay is None else _at_rank(options.replay, rank),
            "buffer_steps": options.kv_buffer_batches,
            "hwm": options.kv_hwm,
            "max_queue_size": 100_000,
            "topic": options.kv_topic,
        }
        for rank in range(options.dp_size)
    }
    exchange.respond(200, orjson.dumps(sources))


def _at_rank(endpoint: str, rank: int) -> str:
    host, port = parse_endpoint(endpoint)
    return f"tcp://{host}:{port + rank}"


def handle_server_info(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/server_info``."""
    options = core.options
    config = {
        "model_config": {"model": options.model, "served_model_name": served_models(options)},
        "cache_config": {"block_size": options.page_size, "num_gpu_blocks": options.num_blocks},
        "parallel_config": {"data_parallel_size": options.dp_size},
        "scheduler_config": {"max_num_seqs": options.max_running, "max_model_len": core.context_tokens},
    }
    info = {"vllm_config": config, "vllm_env": {"VLLM_SERVER_DEV_MODE": options.dev_mode}, "system_env": {}}
    exchange.respond(200, orjson.dumps(info))


def handle_metrics(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/metrics``."""
    exchange.respond(200, metrics(core), "text/plain; version=1.0.0; charset=utf-8")


class _Page:
    """Prometheus text under construction."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, kind: str, samples: list[tuple[dict[str, str], float]], help_text: str = "") -> None:
        """Add one metric; counters get their suffix in the samples only, as the client library writes them."""
        self.lines.append(f"# HELP {name} {help_text or name}")
        self.lines.append(f"# TYPE {name} {kind}")
        for labels, value in samples:
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted(labels.items()))
            self.lines.append(f"{name}{{{shown}}} {float(value)!r}" if labels else f"{name} {float(value)!r}")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics(core: VllmCore) -> bytes:
    """Return the metrics that gateways and load generators read, by rank."""
    page = _Page()
    page.add("process_start_time_seconds", "gauge", [({}, core.started_s)], "Start time since unix epoch in seconds.")
    model = core.options.model
    ranks = [({"engine": str(s.rank), "model_name": model}, s) for s in core.schedulers]
    held = core.held
    deferred = [core.waiting_on(s.rank) - s.waiting for s in core.schedulers]
    queued = [s.waiting + (held if not s.rank else 0) for s in core.schedulers]
    page.add("vllm:num_requests_running", "gauge", [(labels, s.running) for labels, s in ranks])
    page.add("vllm:num_requests_waiting", "gauge", [(labels, queued[s.rank] + deferred[s.rank]) for labels, s in ranks])
    reasons = [({**labels, "reason": "capacity"}, float(queued[s.rank])) for labels, s in ranks]
    reasons += [({**labels, "reason": "deferred"}, float(deferred[s.rank])) for labels, s in ranks]
    page.add("vllm:num_requests_waiting_by_reason", "gauge", reasons)
    page.add(
        "vllm:kv_cache_usage_perc",
        "gauge",
        [(labels, s.cache.busy_blocks / core.options.num_blocks) for labels, s in ranks],
    )
    totals = [(labels, s.totals) for labels, s in ranks]
    page.add("vllm:prefix_cache_queries_total", "counter", [(labels, t.prompt_tokens) for labels, t in totals])
    page.add("vllm:prefix_cache_hits_total", "counter", [(labels, t.cached_tokens) for labels, t in totals])
    page.add("vllm:prompt_tokens_total", "counter", [(labels, t.prompt_tokens) for labels, t in totals])
    page.add("vllm:prompt_tokens_by_source_total", "counter", _by_source(ranks))
    if core.connector is not None:
        pins, labels = core.connector.pins, ranks[0][0]
        expired, late = (0, 0) if pins is None else (pins.expired_requests, pins.late_notifications)
        page.add("vllm:nixl_num_kv_expired_reqs_total", "counter", [(labels, expired)])
        page.add("vllm:nixl_num_notifications_after_expiry_total", "counter", [(labels, late)])
    page.add("vllm:generation_tokens_total", "counter", [(labels, t.generated_tokens) for labels, t in totals])
    page.add("vllm:num_preemptions_total", "counter", [(labels, 0.0) for labels, _ in ranks])
    # Aborts are not counted as such, on purpose: the real counter stayed 0 through aborts and disconnects.
    done = [({**labels, "finished_reason": "length"}, float(t.finished - t.aborted)) for labels, t in totals]
    done += [({**labels, "finished_reason": FinishKind.ABORT.value}, 0.0) for labels, _ in ranks]
    page.add("vllm:request_success_total", "counter", done)
    page.add("vllm:engine_sleep_state", "gauge", _sleep_states(core, ranks[0][0]))
    page.add("vllm:cache_config_info", "gauge", [(_cache_labels(core, s.rank), 1.0) for _, s in ranks])
    return ("\n".join(page.lines) + "\n").encode()


def _by_source(ranks: list[tuple[dict[str, str], Scheduler]]) -> list[tuple[dict[str, str], float]]:
    samples: list[tuple[dict[str, str], float]] = []
    for labels, scheduler in ranks:
        totals = scheduler.totals
        computed = totals.prompt_tokens - totals.cached_tokens - totals.transferred_tokens
        samples.append(({**labels, "source": "local_compute"}, computed))
        samples.append(({**labels, "source": "local_cache_hit"}, totals.cached_tokens))
        samples.append(({**labels, "source": "external_kv_transfer"}, totals.transferred_tokens))
    return samples


def _cache_labels(core: VllmCore, rank: int) -> dict[str, str]:
    options = core.options
    return {
        **_CACHE_LABELS,
        "engine": str(rank),
        "block_size": str(options.page_size),
        "effective_attention_block_size": str(options.page_size),
        "num_gpu_blocks": str(options.num_blocks),
        "kv_cache_size_tokens": str(options.pool_tokens),
    }


def _sleep_states(core: VllmCore, labels: dict[str, str]) -> list[tuple[dict[str, str], float]]:
    states = {"awake": not core.is_sleeping, "weights_offloaded": core.is_sleeping, "discard_all": False}
    return [({**labels, "sleep_state": state}, float(is_now)) for state, is_now in states.items()]

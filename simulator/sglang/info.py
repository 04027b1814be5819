"""Information routes: what the engine is and how busy it is."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import orjson

from simulator.core import Core
from simulator.exchange import Exchange
from simulator.group import ranks_of
from simulator.options import EngineOptions, parse_endpoint
from simulator.scheduler import Scheduler


def server_info(core: Core) -> dict[str, Any]:
    """Return the body of ``/server_info``: the keys that gateways read, with the real types."""
    arguments = _server_arguments(core)
    states = [
        {**arguments, "effective_max_running_requests_per_dp": core.options.max_running, "last_gen_throughput": 0.0}
        for _ in core.schedulers
    ]
    listed = {} if core.options.nnodes == 1 else {"kv_event_sources": _sources(core.options)}
    return {
        **arguments,
        **listed,
        "launch_command": f"--model-path {core.options.model} --port {core.options.port}",
        "status": "ready",
        "max_total_num_tokens": core.options.pool_tokens,
        "max_req_input_len": core.options.max_input_tokens,
        "startup_time": {"load_weight": 0.0, "scheduler_e2e": 0.0},
        "hicache_object_layout": {"enabled": False, "backend": None, "page_size": core.options.page_size},
        "kv_events": _publisher(core.options),
        "internal_states": states,
        "version": core.options.version,
        "frontend": "python",
    }


def _server_arguments(core: Core) -> dict[str, Any]:
    options = core.options
    return {
        "model_path": options.model,
        "tokenizer_path": options.model,
        "tokenizer_mode": "auto",
        "tokenizer_backend": "huggingface",
        "tokenizer_worker_num": 1,
        "skip_tokenizer_init": False,
        "load_format": "auto",
        "context_length": options.context_length,
        "is_embedding": options.is_embedding,
        "max_running_requests": options.max_running,
        "max_queued_requests": options.max_queued or None,
        "max_total_tokens": options.pool_tokens,
        "chunked_prefill_size": options.chunked_prefill_tokens,
        "schedule_policy": "fcfs",
        "page_size": options.page_size,
        "disable_radix_cache": options.role == "decode",
        "dist_init_addr": options.dist_init_addr,
        "nnodes": options.nnodes,
        "node_rank": options.node_rank,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "dp_size": options.dp_size,
        "attn_dp_size": 1,
        "load_balance_method": "round_robin",
        "enable_dp_attention": False,
        "device": "cpu",
        "random_seed": core.boot_id,
        "host": options.host,
        "port": options.port,
        "grpc_port": None,
        "enable_http2": False,
        "api_key": options.api_key,
        "admin_api_key": options.admin_api_key,
        "served_model_name": options.model,
        "weight_version": core.weight_version,
        "enable_cache_report": False,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "preferred_sampling_params": None,
        "stream_interval": 1,
        "incremental_streaming_output": options.incremental_streaming_output,
        "enable_metrics": True,
        "kv_events_config": _publisher_config(options),
        "load_publish_endpoint": None,
        "enable_lora": None,
        "disaggregation_mode": _mode(options),
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_bootstrap_port": options.bootstrap_port,
        "enable_dynamic_batch_tokenizer": options.dynamic_batch_tokenizer_ms > 0,
        "enable_return_hidden_states": False,
        "enable_pd_role_switch": False,
    }


def _mode(options: EngineOptions) -> str:
    return "null" if options.role == "regular" else options.role


def _publisher(options: EngineOptions) -> dict[str, Any] | None:
    if options.kv_events is None:
        return None
    host, port = parse_endpoint(options.kv_events)
    block: dict[str, Any] = {
        "publisher": "zmq",
        "endpoint_host": host.strip("[]"),
        "endpoint_port_base": port,
        "topic": options.kv_topic,
        "block_size": options.page_size,
        "dp_size": options.dp_size,
    }
    if options.replay is not None:
        block["replay_endpoint_port_base"] = parse_endpoint(options.replay)[1]
    return block


def _sources(options: EngineOptions) -> list[dict[str, Any]]:
    """List this node's publishers, at addresses that only this node can use."""
    if options.kv_events is None:
        return []
    _, port = parse_endpoint(options.kv_events)
    replay_port = None if options.replay is None else parse_endpoint(options.replay)[1]
    sources: list[dict[str, Any]] = []
    for rank in ranks_of(options.dp_size, options.nnodes, options.node_rank):
        source = {"dp_rank": rank, "endpoint": f"tcp://127.0.0.1:{port + rank}", "topic": options.kv_topic}
        source["block_size"] = options.page_size
        if replay_port is not None:
            source["replay_endpoint"] = f"tcp://127.0.0.1:{replay_port + rank}"
        sources.append(source)
    return sources


def _publisher_config(options: EngineOptions) -> str | None:
    if options.kv_events is None:
        return None
    config = {"publisher": "zmq", "topic": options.kv_topic, "endpoint": options.kv_events}
    if options.replay is not None:
        config["replay_endpoint"] = options.replay
    return orjson.dumps(config).decode()


def model_info(core: Core) -> dict[str, Any]:
    """Return the body of ``/model_info``."""
    model, is_decode = core.options.model, core.options.role == "decode"
    return {
        "model_path": model,
        "served_model_name": model,
        "tokenizer_path": model,
        "is_generation": not core.options.is_embedding,
        "preferred_sampling_params": None,
        "weight_version": core.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": _mode(core.options),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "embedding": {
            "family": "none",
            "enabled": core.options.is_embedding,
            "matryoshka_dimensions": [],
            "cache": {"kv_cache_disabled": False, "radix_cache_disabled": is_decode, "chunked_prefill_disabled": False},
        },
    }


def model_card(core: Core, created: int) -> dict[str, Any]:
    """Return one entry of ``/v1/models``."""
    model = core.options.model
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "sglang",
        "root": model,
        "parent": None,
        "max_model_len": core.options.context_length,
    }


def loads(core: Core, query: str) -> dict[str, Any]:
    """Return the body of ``/v1/loads``."""
    asked = parse_qs(query)
    sections = {part for value in asked.get("include", ["all"]) for part in value.split(",")}
    ranks: Seq[Scheduler] = core.schedulers
    if "dp_rank" in asked:
        ranks = [s for s in ranks if str(s.rank) == asked["dp_rank"][0]]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": core.options.version,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [_load(core, scheduler, sections) for scheduler in ranks],
    }


def _load(core: Core, scheduler: Scheduler, sections: set[str]) -> dict[str, Any]:
    options, totals = core.options, scheduler.totals
    pool = options.pool_tokens
    used = scheduler.running_tokens
    waiting_tokens = sum(len(s.prompt) + len(s.output) for s in scheduler.waiting_sequences)
    load: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": scheduler.rank,
        "num_running_reqs": scheduler.running,
        "num_waiting_reqs": core.waiting_on(scheduler.rank),
        "num_waiting_uncached_tokens": waiting_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used + waiting_tokens,
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": pool,
        "max_running_requests": options.max_running,
        "token_usage": used / pool,
        "gen_throughput": 0.0,
        "cache_hit_rate": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
        "utilization": scheduler.running / options.max_running,
        "total_prefill_uncached_tokens": totals.prefill_tokens,
        "total_prefill_busy_us": round(totals.prefill_busy_s * 1e6),
        "decode_moments": None
        if options.role == "prefill"
        else [float(totals.decode_steps), float(totals.generated_tokens), 0.0, 0.0, 0.0, 0.0],
    }
    if sections & {"all", "memory"}:
        load["memory"] = {"weight_gb": 0.001, "kv_cache_gb": 0.002, "graph_gb": 0.0, "token_capacity": pool}
    if sections & {"all", "disagg"}:
        queues = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer", "decode_retracted")
        lengths = {} if core.handoff is None else core.handoff.queues(scheduler.rank)
        load["disaggregation"] = {
            "mode": _mode(options),
            **{f"{name}_queue_reqs": lengths.get(name, 0) for name in queues},
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        }
    if sections & {"all", "queues"}:
        retracted = sum(1 for s in scheduler.waiting_sequences if s.retractions)
        load["queues"] = {
            "waiting": scheduler.waiting,
            "grammar": 0,
            "paused": 0,
            "retracted": retracted,
            "prealloc_ready": 0,
        }
    return load


def metrics(core: Core) -> bytes:
    """Return a few of SGLang's metrics as Prometheus text."""
    name = core.options.model
    lines: list[str] = []

    def add(metric: str, kind: str, values: list[tuple[str, float]]) -> None:
        lines.append(f"# TYPE sglang:{metric} {kind}")
        lines.extend(f'sglang:{metric}{{model_name="{name}"{labels}}} {value}' for labels, value in values)

    ranks = [(f',dp_rank="{s.rank}"', s) for s in core.schedulers]
    add("num_running_reqs", "gauge", [(label, float(s.running)) for label, s in ranks])
    add("num_queue_reqs", "gauge", [(label, float(s.waiting)) for label, s in ranks])
    add("num_used_tokens", "gauge", [(label, float(s.running_tokens)) for label, s in ranks])
    add("max_total_num_tokens", "gauge", [(label, float(core.options.pool_tokens)) for label, _ in ranks])
    add("page_size", "gauge", [(label, float(core.options.page_size)) for label, _ in ranks])
    totals = [s.totals for s in core.schedulers]
    add("num_requests_total", "counter", [("", float(core.requests_total))])
    add("num_aborted_requests_total", "counter", [("", float(core.aborts_accepted))])
    add("prompt_tokens_total", "counter", [("", float(sum(t.prompt_tokens for t in totals)))])
    add("cached_tokens_total", "counter", [("", float(sum(t.cached_tokens for t in totals)))])
    add("generation_tokens_total", "counter", [("", float(sum(t.generated_tokens for t in totals)))])
    return ("\n".join(lines) + "\n").encode()


def handle_server_info(core: Core, exchange: Exchange) -> None:
    """Answer ``/server_info``."""
    exchange.respond(200, orjson.dumps(server_info(core)))


def handle_model_info(core: Core, exchange: Exchange) -> None:
    """Answer ``/model_info``."""
    exchange.respond(200, orjson.dumps(model_info(core)))


def handle_loads(core: Core, exchange: Exchange) -> None:
    """Answer ``/v1/loads``."""
    exchange.respond(200, orjson.dumps(loads(core, exchange.request.query)))


def handle_metrics(core: Core, exchange: Exchange) -> None:
    """Answer ``/metrics``."""
    exchange.respond(200, metrics(core), "text/plain; version=1.0.0; charset=utf-8")


def handle_models(core: Core, exchange: Exchange) -> None:
    """Answer ``/v1/models`` and ``/v1/models/{id}``."""
    card = model_card(core, int(time.time()))
    name = exchange.request.path[len("/v1/models") :].lstrip("/")
    if not name:
        exchange.respond(200, orjson.dumps({"object": "list", "data": [card]}))
    elif name == core.options.model:
        exchange.respond(200, orjson.dumps(card))
    else:
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        exchange.respond(404, orjson.dumps({"error": error}))

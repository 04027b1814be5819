"""Comparing shapes: keys, their order, and JSON types, but not values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Keys whose value is null or something else depending on cache, timing or the tokens that came.
VARYING = {
    "cached_tokens_details": "null unless a prefix was cached",
    "dp_rank": "null on a single rank",
    "matched": "a token id or a string",
    "matched_stop": "null unless a stop matched",
    "accelerator": "depends on the machine",
    "context_length": "null when the model decides",
    "max_running_requests": "null when the engine decides",
    "max_queued_requests": "null when unlimited",
    "kv_events": "null without a publisher",
    "kv_events_config": "null without a publisher",
    "kv_event_sources": "only with a publisher",
    "load_publish_endpoint": "null without a publisher",
    "grpc_port": "null without gRPC",
    "prompt_logprobs": "keyed by token id, null for the first token",
    "top_logprobs": "keyed by token text on the completions route",
}
# Keys that may be missing on one side.
OPTIONAL = {
    "decode_throughput": "only after more than one token; 150 tokens with a late abort always have it",
}


def problems(expected: Any, actual: Any, path: str = "$") -> list[str]:
    """Return what is different between the shapes of two JSON values."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return _object_problems(expected, actual, path)
    if isinstance(expected, list) and isinstance(actual, list):
        found: list[str] = []
        for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
            found += problems(left, right, f"{path}[{index}]")
        return found
    if type(expected) is not type(actual):
        return [f"{path}: {type(expected).__name__} became {type(actual).__name__}"]
    return []


def _object_problems(expected: dict[str, Any], actual: dict[str, Any], path: str) -> list[str]:
    left = [key for key in expected if key not in OPTIONAL or key in actual]
    right = [key for key in actual if key not in OPTIONAL or key in expected]
    if left != right:
        return [f"{path}: keys {left} became {right}"]
    found: list[str] = []
    for key in left:
        if key not in VARYING:
            found += problems(expected[key], actual[key], f"{path}.{key}")
    return found


def event_problems(expected: Iterable[Any], actual: Iterable[Any]) -> list[str]:
    """Compare streams: every event of one side must have its like on the other."""
    wanted, got = list(expected), list(actual)
    found = []
    for name, ones, others in (("captured", wanted, got), ("simulated", got, wanted)):
        for index, event in enumerate(ones):
            differences = [
                problems(other, event) if name == "simulated" else problems(event, other) for other in others
            ]
            if not any(difference == [] for difference in differences):
                nearest = min(differences, key=len, default=["no events"])
                found.append(f"{name} event {index} has no like: {nearest[:3]}")
    return found

"""What the control routes that SGLang and this gateway share are called on vLLM. Pure."""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

import orjson

# Same meaning under another name, or under the same one.
_TARGETS: Final = {
    "/pause_generation": "/pause",
    "/continue_generation": "/resume",
    "/flush_cache": "/reset_prefix_cache",
    "/update_weight_version": "/update_weight_version",
    "/release_memory_occupation": "/sleep",
    "/resume_memory_occupation": "/wake_up",
    "/load_lora_adapter": "/v1/load_lora_adapter",
    "/unload_lora_adapter": "/v1/unload_lora_adapter",
}
# vLLM's retained requests keep their blocks, so SGLang's third mode, ``retract``, has no counterpart.
_PAUSE_MODES: Final = {"abort": "abort", "in_place": "keep"}
_ALL_MEMORY: Final = frozenset({"weights", "kv_cache"})


@dataclass(frozen=True, slots=True)
class NoCounterpart:
    """Why a call is not made.

    Attributes:
        status: 501 where vLLM has no such thing, 400 where the body cannot be understood.
        reason: For people.
    """

    status: int
    reason: str


def vllm_target(path: str, query: str, body: bytes) -> str | NoCounterpart:
    """Path and query of the call that means the same to vLLM; its method is POST, and the body may go with it.

    What SGLang takes in the body and vLLM in the query is put there: the pause's mode, and the tags of a resume.

    Args:
        path: One of SGLang's control routes.
        query: The client's query, which stays in front.
        body: The client's body.
    """
    target = _TARGETS.get(path)
    if target is None:
        return NoCounterpart(501, f"vLLM has no counterpart of {path}")
    if path not in ("/pause_generation", "/release_memory_occupation", "/resume_memory_occupation"):
        return _joined(target, query, "")
    fields = _fields(body)
    if fields is None:
        return NoCounterpart(400, "the body is not a JSON object")
    if path == "/pause_generation":
        return _pause(target, query, fields)
    tags = fields.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        return NoCounterpart(400, "'tags' is not a list of strings")
    if path == "/resume_memory_occupation":
        return _joined(target, query, urlencode([("tags", tag) for tag in tags]))
    if tags and not _ALL_MEMORY.issubset(tags):
        return NoCounterpart(501, "vLLM releases weights and KV cache together, not by 'tags'")
    return _joined(target, query, "")


def _pause(target: str, query: str, fields: dict[str, Any]) -> str | NoCounterpart:
    if "mode" in parse_qs(query):
        return _joined(target, query, "")
    mode = fields.get("mode", "abort")
    known = _PAUSE_MODES.get(mode) if isinstance(mode, str) else None
    if known is None:
        return NoCounterpart(501, f"vLLM has no counterpart of the pause mode {str(mode)[:40]!r}")
    return _joined(target, query, f"mode={known}")


def _fields(body: bytes) -> dict[str, Any] | None:
    try:
        fields = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def _joined(target: str, query: str, more: str) -> str:
    query = "&".join(filter(None, (query, more)))
    return f"{target}?{query}" if query else target

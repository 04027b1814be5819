"""vLLM's metadata: ``/v1/models``, ``/version`` and ``/metrics`` to ``EngineFacts``.

Pure. There is no route that states the engine's configuration, but ``vllm:cache_config_info`` has one sample for each
data-parallel rank, and the process's start time tells one life of it from the next.
"""

import re

import msgspec

from backends.types import EngineFacts, EngineKind
from backends.versions import parse_version

_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CONNECTOR = re.compile(r"^vllm:(nixl|mooncake)_", re.MULTILINE)  # which has counters of its own
_STARTED = re.compile(r"^process_start_time_seconds\s+(\S+)", re.MULTILINE)


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Version(msgspec.Struct):
    version: str = ""


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


def weight_version_from(weight_info: bytes) -> str | None:
    """The label of the weights in a body of ``/weight_info``.

    Raises:
        msgspec.DecodeError: Not JSON, or the label is no string.
    """
    return msgspec.json.decode(weight_info, type=_WeightInfo).weight_version


def facts_from(models: bytes, version: bytes, metrics: bytes, kv_event_sources: bytes = b"") -> EngineFacts:
    """Decode the bodies.

    Args:
        models: Of ``/v1/models``.
        version: Of ``/version``.
        metrics: Of ``/metrics``.
        kv_event_sources: Of the route by that name, empty where there is none; goes on as it is.

    Raises:
        msgspec.DecodeError: A body is not as the engine documents, or names no model.
        ValueError: The same.
    """
    served = msgspec.json.decode(models, type=_Models).data
    text = msgspec.json.decode(version, type=_Version).version
    if not served:
        raise msgspec.ValidationError("/v1/models lists no model")
    base = next((model for model in served if model.parent is None), served[0])
    page = metrics.decode("utf-8", "replace")
    ranks = [dict(_LABEL.findall(labels)) for labels in _CACHE_CONFIG.findall(page)]
    sizes = [int(labels["block_size"]) for labels in ranks if labels.get("block_size", "").strip("0").isdecimal()]
    blocks = [int(labels["num_gpu_blocks"]) for labels in ranks if labels.get("num_gpu_blocks", "").isdecimal()]
    started, connector = _STARTED.search(page), _CONNECTOR.search(page)
    return EngineFacts(
        engine=EngineKind.VLLM,
        version=parse_version(text),
        version_text=text,
        model_id=base.id,
        models=tuple(model.id for model in served),
        adapters=tuple(model.id for model in served if model.parent is not None),
        dp_size=max(len({labels.get("engine", "0") for labels in ranks}), 1),
        page_size=sizes[0] if sizes else 16,
        context_tokens=base.max_model_len,
        incremental_output=True,
        boot_id=started[1] if started else "",
        kv_blocks=min(blocks) if blocks else None,
        kv_announcement=kv_event_sources,
        kv_connector=connector[1] if connector else "",
    )

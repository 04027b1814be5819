"""SGLang's metadata: ``/model_info``, ``/server_info`` and ``/v1/models`` to ``EngineFacts``.

Pure. ``/server_info`` is the dump of every server argument and may hold the engine's keys: only the fields below
are decoded, and the body goes nowhere else.
"""

import msgspec

from backends.types import EngineFacts, EngineKind, Role
from backends.versions import parse_version


class _ModelInfo(msgspec.Struct):
    served_model_name: str | None = None
    model_path: str = ""
    weight_version: str | None = None


class _KvEvents(msgspec.Struct):
    block_size: int | None = None
    dp_size: int | None = None


class _Internal(msgspec.Struct):
    disaggregation_mode: str | None = None
    effective_max_running_requests_per_dp: int | None = None


class _ServerInfo(msgspec.Struct):
    version: str = ""
    served_model_name: str | None = None
    model_path: str = ""
    dp_size: int = 1
    page_size: int | None = None
    dcp_size: int | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    enable_dp_attention: bool = False
    incremental_streaming_output: bool = False
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    load_balance_method: str | None = None
    random_seed: int | None = None
    max_total_num_tokens: int | None = None
    kv_events: _KvEvents | None = None
    internal_states: list[_Internal] = []


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


# The fields that ``kv_events.sources`` reads.
_ANNOUNCED = ("kv_events", "kv_event_sources", "page_size", "dcp_size", "nnodes", "node_rank")
_ROLES = {
    None: Role.REGULAR,
    "": Role.REGULAR,
    "null": Role.REGULAR,
    "agg": Role.REGULAR,
    "aggregated": Role.REGULAR,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
}

# What prefill workers do unless they are told otherwise, which ``auto`` is not; releases that say nothing may do it.
_FOLLOWS_ROOMS = frozenset({None, "auto", "follow_bootstrap_room"})


def facts_from(model_info: bytes, server_info: bytes, models: bytes) -> EngineFacts:
    """Decode the three bodies.

    Raises:
        msgspec.DecodeError: Not JSON, a field is not of the type that the engine documents, no model is named, or
            the role is unknown.
    """
    model = msgspec.json.decode(model_info, type=_ModelInfo)
    server = msgspec.json.decode(server_info, type=_ServerInfo)
    served = msgspec.json.decode(models, type=_Models)
    base = next((item for item in served.data if item.parent is None), None)
    model_id = base.id if base else model.served_model_name or server.served_model_name or model.model_path
    if not model_id:
        raise msgspec.ValidationError("no model is named")
    # A role that was switched at run time shows in internal_states only.
    live = (state.disaggregation_mode for state in server.internal_states)
    mode = next((mode for mode in live if mode is not None), server.disaggregation_mode)
    if mode not in _ROLES:
        raise msgspec.ValidationError(f"unknown disaggregation_mode {mode!r}")
    kv = server.kv_events
    # The top-level dp_size of some releases predates attention DP; the descriptor of the event publishers does not.
    dp_size = max(kv.dp_size if kv and kv.dp_size else server.dp_size, 1)
    page_size = kv.block_size if kv and kv.block_size else (server.page_size or 1) * (server.dcp_size or 1)
    return EngineFacts(
        engine=EngineKind.SGLANG,
        version=parse_version(server.version),
        version_text=server.version,
        model_id=model_id,
        role=_ROLES[mode],
        dp_size=dp_size,
        page_size=page_size,
        context_tokens=server.context_length or (base.max_model_len if base else None),
        incremental_output=server.incremental_streaming_output,
        max_running_requests=_max_running(server, dp_size),
        boot_id="" if server.random_seed is None else str(server.random_seed),
        weight_version=model.weight_version,
        models=tuple(item.id for item in served.data),
        adapters=tuple(item.id for item in served.data if item.parent is not None),
        kv_blocks=server.max_total_num_tokens // page_size if server.max_total_num_tokens else None,
        kv_announcement=_announcement(server_info),
        bootstrap_port=server.disaggregation_bootstrap_port or None,
        follows_rooms=server.load_balance_method in _FOLLOWS_ROOMS,
    )


def weight_version_from(model_info: bytes) -> str | None:
    """The label of the weights in a body of ``/model_info``.

    Raises:
        msgspec.DecodeError: Not JSON, or the label is no string.
    """
    return msgspec.json.decode(model_info, type=_ModelInfo).weight_version


def _announcement(server_info: bytes) -> bytes:
    """What the body says of event publishers, and what these say depends on."""
    fields = msgspec.json.decode(server_info, type=dict[str, msgspec.Raw])
    if not any(bytes(fields.get(name, b"null")) != b"null" for name in ("kv_events", "kv_event_sources")):
        return b""
    return msgspec.json.encode({name: fields[name] for name in _ANNOUNCED if name in fields})


def _max_running(server: _ServerInfo, dp_size: int) -> int | None:
    """The limit over all ranks; the scheduler's own figure counts per rank and is there even when none was set.

    Releases that do not state it divide the option among the ranks with attention DP, and give it to each without.
    """
    per_rank = next((state.effective_max_running_requests_per_dp for state in server.internal_states), None)
    if per_rank:
        return per_rank * dp_size
    limit = server.max_running_requests
    return limit if limit is None or server.enable_dp_attention else limit * dp_size

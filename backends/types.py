"""What a worker is, and what its engine has told about itself."""

import enum
from dataclasses import dataclass, field

from backends.quick_enum import quick
from backends.upstream.base import Origin


@quick
class EngineKind(enum.StrEnum):
    """Engine software."""

    SGLANG = "sglang"
    VLLM = "vllm"


class Role(enum.StrEnum):
    """Part that a worker plays in serving a request."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"


class ProbeResult(enum.StrEnum):
    """Outcome of one health probe."""

    UP = "up"
    PAUSED = "paused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Worker:
    """One addressable engine instance.

    Attributes:
        id: Stable, readable, safe in a URL path.
        url: Address as configured, without trailing slash.
        origin: The same address taken apart.
        api_key: Credential for the engine's ordinary routes, ``None`` if it needs none.
        admin_api_key: Credential for its admin routes; falls back to ``api_key``.
        bootstrap_port: Where it hands prompts over, as the operator says; ``None`` asks the engine.
    """

    id: str
    url: str
    origin: Origin
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    bootstrap_port: int | None = None


@dataclass(slots=True)
class EngineIds:
    """Ids under which an engine runs one request.

    Not changed after it is made; not frozen, since making a frozen one takes several times as long.

    Attributes:
        sent: As they stand in the engine's answers, perhaps between a prefix and a suffix of the engine's: one, or
            one for each item of a batch.
        abortable: As the engine's abort route takes them: one, or one for each item of a batch; none where nothing
            but closing the connection stops the request.
        names_items: ``sent`` has one id for each item.
        has_children: The samples run under ids that the engine makes by itself and shows in its answer.
    """

    sent: tuple[str, ...]
    abortable: tuple[str, ...]
    names_items: bool = False
    has_children: bool = False


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine says about itself, read once per life of its process.

    Attributes:
        engine: Software.
        version: Release as a tuple of numbers, empty if it could not be read.
        version_text: Release as the engine spells it.
        model_id: Name under which the model is served.
        models: All names that requests may use: the model's, its aliases, its adapters.
        role: Part in disaggregation.
        dp_size: Number of data-parallel ranks, ``>= 1``.
        page_size: Tokens per block of the KV cache.
        context_tokens: Longest sequence, ``None`` if unknown.
        incremental_output: Streamed events hold deltas rather than everything so far.
        max_running_requests: The engine's own limit over all ranks, ``None`` if it states none.
        boot_id: Changes with every start of the engine's process.
        weight_version: The engine's label of its weights, ``None`` if it has none.
        adapters: Those of ``models`` that are LoRA adapters.
        kv_blocks: Blocks that the KV cache of one rank holds, ``None`` if unknown.
        kv_announcement: JSON in which the engine says where it publishes KV events; empty if it says nothing.
        bootstrap_port: Where SGLang hands prompts over if it is a prefill worker, ``None`` if it does not say.
        follows_rooms: SGLang takes the room modulo its ranks for the rank if it is a prefill worker.
        transfer_engine_ids: By rank, of a vLLM prefill worker that hands prompts over by Mooncake; else empty.
        kv_connector: How vLLM hands prompts over: ``nixl``, ``mooncake``, or empty if it does not say.
    """

    engine: EngineKind
    version: tuple[int, ...]
    version_text: str
    model_id: str
    role: Role = Role.REGULAR
    dp_size: int = 1
    page_size: int = 1
    context_tokens: int | None = None
    incremental_output: bool = False
    max_running_requests: int | None = None
    boot_id: str = ""
    weight_version: str | None = None
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    kv_blocks: int | None = None
    kv_announcement: bytes = field(default=b"", repr=False)
    bootstrap_port: int | None = None
    follows_rooms: bool = False
    kv_connector: str = ""
    transfer_engine_ids: tuple[str, ...] = ()

"""Options of one simulated engine, as the command line and the tests give them."""

from __future__ import annotations

import re
from dataclasses import dataclass

ROLES = ("regular", "prefill", "decode")
_VERSIONS = {"sglang": "0.5.23", "vllm": "0.32.0"}


class OptionError(ValueError):
    """An option has a value that the simulated engine cannot run with."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Everything that shapes one simulated engine.

    Times are seconds of simulated time unless a comment says otherwise; simulated durations are
    divided by ``speedup``. A rate or delay of ``0`` means "takes no time".
    """

    host: str = "127.0.0.1"
    port: int = 0
    """Port to listen on; ``0`` lets the system choose."""
    engine: str = "sglang"
    model: str = "model"
    role: str = "regular"
    """``regular``, ``prefill`` or ``decode``."""
    engine_version: str | None = None
    """``None``: the version that the simulation was made after."""
    dp_size: int = 1
    """Data-parallel ranks, each with its own scheduler and cache."""
    page_size: int = 16
    """Tokens per cache block."""
    num_blocks: int = 8192
    """Cache blocks per rank; the KV pool is ``num_blocks * page_size`` tokens."""
    max_running: int = 256
    """Sequences per rank that are computed at the same time."""
    max_queued: int = 0
    """Sequences per rank that may wait; ``0`` means no limit."""
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens computed per second, cached ones excluded; ``0`` means at once."""
    chunked_prefill_tokens: int = 4096
    """Prompt tokens computed in one scheduler step at most."""
    inter_token_ms: float = 0.0
    """Duration of one decode step in milliseconds; ``0`` means as fast as possible."""
    speedup: float = 1.0
    """Divides every simulated duration, health checks included."""
    context_length: int = 32768
    vocab_size: int = 1024
    seed: int = 0
    """Seed of the answers; the boot identity (``random_seed``) is independent of it."""
    api_key: str | None = None
    admin_api_key: str | None = None
    weight_version: str = "default"
    incremental_streaming_output: bool = False
    is_embedding: bool = False
    """Answer the embedding routes instead of refusing them like a generation model."""
    model_aliases: str = ""
    """vLLM: more served names of the model, with commas between them; answers always show the first one."""
    lora_names: str = ""
    """vLLM: adapters that a request may name as its model, with commas between them."""
    enable_scale_out: bool = True
    """vLLM: answer the routes under ``/inference`` instead of refusing them."""
    enable_request_id_headers: bool = True
    """vLLM: put ``x-request-id`` on every answer."""
    dev_mode: bool = False
    """vLLM: answer the routes of ``VLLM_SERVER_DEV_MODE=1``."""
    sse_keepalive_interval_s: float = 0.0
    """vLLM: real seconds of silence after which a stream gets a comment; ``0`` means never."""
    death_grace_s: float = 0.1
    """vLLM: real seconds from the engine's death to the end of the server process."""
    die_on_bad_input: bool = True
    """Die as the real engine does on a negative token id, an empty text or too many top log-probabilities."""
    dynamic_batch_tokenizer_ms: float = 0.0
    """Real milliseconds between registering and dispatching a request; ``0`` means no such window."""
    unary_disconnect_poll_s: float = 4.0
    """Real seconds between two looks at whether a unary caller has left."""
    late_abort_s: float = 2.0
    """Real seconds after a stream's end when its id is aborted once more, whoever uses it by then."""
    health_min_s: float = 1.0
    health_timeout_s: float = 20.0
    keep_alive_s: float = 5.0
    """Real seconds after which an idle connection is closed."""
    log_limit: int = 10_000
    """Log entries kept of each kind; the oldest are dropped."""
    log_body_bytes: int = 65_536
    """Request bodies up to this size stay readable in the log; longer ones leave their digest only."""
    kv_events: str | None = None
    """Where KV events are published, ``tcp://HOST:PORT``; rank r binds the port plus r, port 0 means any free ones."""
    replay: str | None = None
    """Where past batches can be asked for, likewise."""
    kv_topic: str = "kv-events"
    kv_buffer_batches: int = 10_000
    """Newest batches of a rank that a replay can bring back."""
    kv_hwm: int = 100_000
    """Batches that wait for a slow subscriber before more are dropped."""
    kv_replay_framing: str = "new"
    """``new``, or ``old`` for replies without the topic as older SGLang sends them."""
    kv_byte_hashes: bool = False
    """vLLM: name blocks by 32 bytes instead of a number (``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``)."""
    node_rank: int = 0
    nnodes: int = 1
    dist_init_addr: str | None = None
    bootstrap_port: int = 8998
    """Where a prefill engine waits for decode engines; ``0`` lets the system choose."""
    transfer_tokens_per_s: float = 0.0
    """Prompt tokens whose blocks are sent from prefill to decode per second; ``0`` means at once."""
    transfer_setup_ms: float = 5.0
    """vLLM: milliseconds from a request's arrival at decode to its first contact with prefill."""
    transfer_lease_s: float = 30.0
    """vLLM: seconds for which prefill keeps blocks that nobody fetches."""
    transfer_timeout_s: float = 300.0
    """SGLang: seconds for which one half of a pair waits for the other."""
    lost_prefill_s: float | None = None
    """Seconds until decode gives up a prefill engine that is dead; ``None``: as measured, see ``--help``."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work.

        Raises:
            OptionError: With a message that names the option.
        """
        _refuse_unfinished(self)
        _check_publishing(self)
        _check_nodes(self)
        for name in ("dp_size", "page_size", "num_blocks", "max_running", "chunked_prefill_tokens", "context_length"):
            if getattr(self, name) < 1:
                raise OptionError(f"{_flag(name)} must be at least 1")
        for name in (
            "max_queued",
            "prefill_tokens_per_s",
            "inter_token_ms",
            "dynamic_batch_tokenizer_ms",
            "sse_keepalive_interval_s",
            "death_grace_s",
            "transfer_tokens_per_s",
            "transfer_setup_ms",
            "transfer_lease_s",
            "transfer_timeout_s",
        ):
            if getattr(self, name) < 0:
                raise OptionError(f"{_flag(name)} must not be negative")
        for name in ("port", "bootstrap_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise OptionError(f"{_flag(name)} must be between 0 and 65535")
        if self.lost_prefill_s is not None and self.lost_prefill_s < 0:
            raise OptionError("--lost-prefill-s must not be negative")
        if self.vocab_size < 259:
            raise OptionError("--vocab-size must be at least 259: 3 special tokens and 256 bytes")
        if self.speedup <= 0:
            raise OptionError("--speedup must be above 0")

    @property
    def version(self) -> str:
        """Version that the engine claims."""
        return self.engine_version or _VERSIONS[self.engine]

    @property
    def pool_tokens(self) -> int:
        """Tokens that one rank's KV pool holds."""
        return self.num_blocks * self.page_size

    @property
    def max_input_tokens(self) -> int:
        """Longest prompt that fits into context and pool; SGLang keeps six slots back."""
        return min(self.context_length, self.pool_tokens) - 6


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of ``tcp://HOST:PORT``.

    Raises:
        OptionError: It is no such endpoint.
    """
    match = re.fullmatch(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[^\s\[\]:*/]+):(\d{1,5})", endpoint)
    if match is None or int(match[2]) > 65535:
        raise OptionError(f"{endpoint!r} is not of the form tcp://HOST:PORT")
    return match[1], int(match[2])


def _check_publishing(options: EngineOptions) -> None:
    if options.replay is not None and options.kv_events is None:
        raise OptionError("--replay needs --kv-events")
    for name, endpoint in (("kv_events", options.kv_events), ("replay", options.replay)):
        if endpoint is None:
            continue
        try:
            _, port = parse_endpoint(endpoint)
        except OptionError as exc:
            raise OptionError(f"{_flag(name)} {exc}") from exc
        if port + options.dp_size - 1 > 65535:
            raise OptionError(f"{_flag(name)} {endpoint}: no port is left for the last rank")
    if options.kv_buffer_batches < 1 or options.kv_hwm < 1:
        raise OptionError("--kv-buffer-batches and --kv-hwm must be at least 1")
    if options.kv_replay_framing not in ("new", "old"):
        raise OptionError("--kv-replay-framing is new or old")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_unfinished(options: EngineOptions) -> None:
    if options.engine not in _VERSIONS:
        raise OptionError(f"--engine {options.engine}: unknown, known are {', '.join(_VERSIONS)}")
    if options.role not in ROLES:
        raise OptionError(f"--role {options.role}: unknown, known are {', '.join(ROLES)}")


def _check_nodes(options: EngineOptions) -> None:
    if options.nnodes < 1:
        raise OptionError("--nnodes must be at least 1")
    if not 0 <= options.node_rank < options.nnodes:
        raise OptionError(f"--node-rank must be in 0 to {options.nnodes - 1}, since --nnodes is {options.nnodes}")
    if options.nnodes == 1:
        return
    if options.engine != "sglang":
        raise OptionError("--nnodes above 1 needs --engine sglang")
    if options.dist_init_addr is None:
        raise OptionError("--nnodes above 1 needs --dist-init-addr, where the first node listens for the others")
    try:
        parse_endpoint(f"tcp://{options.dist_init_addr.removeprefix('tcp://')}")
    except OptionError as exc:
        raise OptionError(f"--dist-init-addr {options.dist_init_addr!r} is not of the form HOST:PORT") from exc

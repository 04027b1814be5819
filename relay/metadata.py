"""What an engine's node says about itself: its place in a multi-node engine, and where its ranks publish. Pure.

The same JSON comes from ``/server_info``, ``/get_server_info``, and a follower's gRPC ``GetServerInfo``. It may hold
keys of the engine, so nothing of it gets into an error but numbers, addresses and names of fields.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from kv_events.errors import SourceMisconfigured
from kv_events.sources import Source, announced_by_sglang
from relay.errors import MetadataRefused

Role = Literal["regular", "prefill", "decode"]

_ROLES: Final[dict[str | None, Role]] = {
    None: "regular",
    "null": "regular",
    "agg": "regular",
    "aggregated": "regular",
    "prefill": "prefill",
    "decode": "decode",
}
_TCP: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/:?#@]+):(\d{1,5})", re.ASCII)
_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::", "[::]"})
_Text = Annotated[str, msgspec.Meta(max_length=4096)]
# Numbers come as text from engines that print their arguments.
_Number = int | _Text | None


@dataclass(frozen=True, slots=True)
class NodeMetadata:
    """One node of an engine, as it describes itself.

    Attributes:
        node_rank: Place of the node; 0 serves requests.
        nnodes: Nodes of the engine.
        dp_size: Data-parallel ranks of the whole engine.
        dist_init_addr: Where the nodes meet, as written; ``None`` for an engine of one node that names none.
        role: Part in disaggregation.
        bootstrap_port: Where a prefill engine waits for decode engines; ``None`` if unknown.
        sources: Publishers of this node, by global rank; empty if it publishes nothing.
        boot_id: Changes with every start of the engine; empty if unknown.
        kv_blocks: Blocks that the cache of one rank holds; ``None`` if unknown.
    """

    node_rank: int
    nnodes: int
    dp_size: int
    dist_init_addr: str | None
    role: Role
    bootstrap_port: int | None
    sources: tuple[Source, ...]
    boot_id: str
    kv_blocks: int | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this node serves the engine's requests."""
        return self.node_rank == 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that this node publishes."""
        return tuple(source.dp_rank for source in self.sources)

    @property
    def block_size(self) -> int:
        """Tokens in a block of every rank; 0 without sources."""
        return self.sources[0].block_size or 0 if self.sources else 0


class _Listed(msgspec.Struct):
    dp_rank: int
    endpoint: str
    topic: str | None = None
    block_size: int | None = None
    replay_endpoint: str | None = None


class _KvEvents(msgspec.Struct):
    dp_size: int | None = None
    block_size: int | None = None


class _Info(msgspec.Struct):
    node_rank: _Number = None
    nnodes: _Number = None
    dp_size: _Number = None
    dist_init_addr: str | None = None
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: _Number = None
    kv_events: _KvEvents | None = None
    kv_event_sources: list[_Listed] | msgspec.UnsetType | None = msgspec.UNSET
    page_size: _Number = None
    dcp_size: _Number = None
    random_seed: _Number = None
    max_total_num_tokens: _Number = None


def parse_metadata(body: bytes) -> NodeMetadata:
    """Read a node's description of itself.

    ``kv_event_sources`` is believed where it is there, also when it is empty; where it is not, the ranks' addresses are
    counted from ``kv_events`` as older releases have it.

    Raises:
        MetadataRefused: It cannot be read, or no relay can serve such a node; the text names the field.
    """
    try:
        info = msgspec.json.decode(body, type=_Info)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise MetadataRefused(f"the engine's metadata cannot be read: {exc}") from exc
    nnodes = _number("nnodes", info.nnodes, 1, default=1)
    if nnodes > 1 and info.node_rank is None:
        raise MetadataRefused(
            f"nnodes is {nnodes}, but node_rank is missing: every node would take itself for the first"
        )
    node_rank = _number("node_rank", info.node_rank, 0, default=0)
    if node_rank >= nnodes:
        raise MetadataRefused(f"node_rank is {node_rank}, but nnodes is {nnodes}")
    address = (info.dist_init_addr or "").strip() or None
    if nnodes > 1 and address is None:
        raise MetadataRefused("dist_init_addr is missing, and without it nobody knows which nodes belong together")
    # The count of ``kv_events`` knows attention data parallelism; the other one is older.
    counted = info.kv_events.dp_size if info.kv_events else None
    dp_size = _number("dp_size", info.dp_size if counted is None else counted, 1, default=1)
    if info.disaggregation_mode not in _ROLES:
        raise MetadataRefused("disaggregation_mode is neither aggregated nor prefill nor decode")
    port = info.disaggregation_bootstrap_port
    sources = _checked(_sources(info, body), dp_size)
    tokens = _number("max_total_num_tokens", info.max_total_num_tokens, 0, default=0)
    return NodeMetadata(
        node_rank,
        nnodes,
        dp_size,
        address,
        _ROLES[info.disaggregation_mode],
        None if port is None else _number("disaggregation_bootstrap_port", port, 0),
        sources,
        "" if info.random_seed is None else str(info.random_seed),
        tokens // (sources[0].block_size or 1) or None if sources else None,
    )


def difference(known: NodeMetadata, now: NodeMetadata) -> str:
    """Say in what a node is no longer what it was, for people; empty if nothing matters.

    Another ``boot_id`` is no difference: the sources start anew, and the relay with them.
    """
    for name in ("node_rank", "nnodes", "dp_size", "dist_init_addr", "role"):
        before, after = getattr(known, name), getattr(now, name)
        if before != after:
            return f"{name} was {before} and is now {after}"
    if known.ranks != now.ranks:
        return f"it published ranks {_listed(known)} and now publishes {_listed(now)}"
    for old, new in zip(known.sources, now.sources, strict=True):
        if old.block_size != new.block_size:
            return f"block_size of rank {old.dp_rank} was {old.block_size} and is now {new.block_size}"
        if old != new:
            return f"rank {old.dp_rank} published at {old.endpoint} and now elsewhere or otherwise, at {new.endpoint}"
    return ""


def check_endpoint(endpoint: str) -> None:
    """Check that a local publisher's address can be connected to, and means one publisher.

    Raises:
        MetadataRefused: It is no ``tcp://HOST:PORT`` of a host, and no absolute or abstract ``ipc://`` path.
    """
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if "\0" in path or not path.startswith(("/", "@")) or path in ("/", "@"):
            raise MetadataRefused(f"{endpoint!r}: the path of ipc:// must be absolute, or abstract as in ipc://@name")
        return
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise MetadataRefused(f"{endpoint!r} is no address to subscribe to; it must be tcp://HOST:PORT or ipc://PATH")
    if match[1] in _WILDCARDS:
        raise MetadataRefused(f"{endpoint!r} has a wildcard where the address of a host must be")
    if not 1 <= int(match[2]) <= 65_535:
        raise MetadataRefused(f"{endpoint!r}: the port is not in 1 to 65535")


def _sources(info: _Info, body: bytes) -> list[Source]:
    listed = info.kv_event_sources
    if listed is None:
        raise MetadataRefused("kv_event_sources is null: the engine does not know where it publishes")
    if listed is msgspec.UNSET:
        try:
            # The relay is on the engine's own machine.
            return announced_by_sglang(body, "127.0.0.1") or []
        except SourceMisconfigured as exc:
            raise MetadataRefused(f"kv_events cannot be used: {exc}") from exc
    pages = _number("page_size", info.page_size, 0, default=0) * _number("dcp_size", info.dcp_size, 1, default=1)
    size = (info.kv_events.block_size if info.kv_events else None) or pages or None
    sources = [
        Source(
            item.dp_rank,
            item.endpoint,
            item.replay_endpoint or None,
            item.topic or "",
            size if item.block_size is None else item.block_size,
        )
        for item in listed
    ]
    return sorted(sources, key=lambda source: source.dp_rank)


def _checked(sources: list[Source], dp_size: int) -> tuple[Source, ...]:
    sizes = {source.block_size for source in sources}
    for source in sources:
        if not 0 <= source.dp_rank < dp_size:
            raise MetadataRefused(f"kv_event_sources names rank {source.dp_rank}, but dp_size is {dp_size}")
        if source.block_size is None or source.block_size < 1:
            raise MetadataRefused(f"block_size of rank {source.dp_rank} is {source.block_size}")
        for endpoint in (source.endpoint, source.replay_endpoint):
            if endpoint is not None:
                check_endpoint(endpoint)
    if len({source.dp_rank for source in sources}) < len(sources):
        raise MetadataRefused("kv_event_sources names a rank twice")
    if len({source.endpoint for source in sources}) < len(sources):
        raise MetadataRefused("kv_event_sources names an address twice")
    if len(sizes) > 1:
        raise MetadataRefused("the ranks of this node have different block sizes")
    return tuple(sources)


def _number(name: str, value: _Number, least: int, default: int | None = None) -> int:
    if value is None and default is not None:
        return default
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
    if value is None or value < least:
        raise MetadataRefused(f"{name} is no number, or below {least}")
    return value


def _listed(node: NodeMetadata) -> str:
    return ", ".join(map(str, node.ranks)) or "none"

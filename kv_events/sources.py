"""Where the events of a worker are published: what engines announce, or what an operator says. Pure.

Hosts of announced addresses are seen from the engine: a wildcard or a loopback address becomes the worker's host.
A rank of another node, of which only such an address is known, is left out: its address would be a guess. Who asks
knows how many ranks there are, and which of them are missing here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from kv_events.errors import SourceMisconfigured

_MAX_RANK: Final = 65_535
_TCP: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/:]+|::|::1):(\d{1,5})")
_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})
_LOOPBACK: Final = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


@dataclass(frozen=True, slots=True)
class Source:
    """The publisher of one rank.

    Attributes:
        dp_rank: Rank as requests name it.
        endpoint: ZMQ address to subscribe to.
        replay_endpoint: ZMQ address that sends earlier batches again; ``None`` if there is none.
        topic: Prefix to subscribe to; empty for all.
        block_size: Tokens in a block; ``None`` where the announcement does not tell.
        first_rank: What the engine's events and ports call the worker's rank 0. vLLM with a server for each node, or
            each rank, counts ranks over all of them there, and its own only in requests.
    """

    dp_rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    block_size: int | None = None
    first_rank: int = 0


class _Announced(msgspec.Struct):
    """One entry of SGLang's ``kv_event_sources`` and ``publishers``."""

    dp_rank: int
    endpoint: str
    topic: str | None = None
    block_size: int | None = None
    replay_endpoint: str | None = None


class _Block(msgspec.Struct):
    """SGLang's ``kv_events``."""

    publisher: str | None = None
    endpoint_host: str | None = None
    endpoint_port_base: int | None = None
    topic: str | None = None
    block_size: int | None = None
    dp_size: int = 1
    replay_endpoint_port_base: int | None = None
    publishers: list[_Announced] | msgspec.UnsetType | None = msgspec.UNSET


class _ServerInfo(msgspec.Struct):
    kv_events: _Block | None = None
    kv_event_sources: list[_Announced] | msgspec.UnsetType | None = msgspec.UNSET
    page_size: int | None = None
    dcp_size: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None


class _VllmConfig(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str | None = None
    publisher: str | None = "zmq"
    enable_kv_cache_events: bool = True
    data_parallel_rank: int | None = None


def announced_by_sglang(server_info: bytes, worker_host: str) -> list[Source] | None:
    """Read the sources out of ``/server_info``.

    ``kv_event_sources`` names this node's ranks and is believed before anything else, also when it is empty.
    ``publishers`` adds the ranks of other nodes. Releases with neither give one host and the first port.

    Args:
        server_info: The body; it may hold secrets, and nothing of it gets into an error but addresses and numbers.
        worker_host: Host of the worker's URL, without brackets.

    Returns:
        Sources by rank, or ``None`` if the engine publishes no events.

    Raises:
        SourceMisconfigured: The announcement cannot be used; ``args[0]`` says why, for people.
    """
    try:
        info = msgspec.json.decode(server_info, type=_ServerInfo)
    except msgspec.DecodeError as exc:
        raise SourceMisconfigured(f"/server_info cannot be read: {exc}") from exc
    local, block = info.kv_event_sources, info.kv_events
    remote = block.publishers if block else msgspec.UNSET
    if local is None or remote is None:
        raise SourceMisconfigured("the engine lists its event sources as null: it does not know its own addresses")
    if local == []:
        return []
    if block is not None and block.publisher == "null":
        block = None
    if block is None and local is msgspec.UNSET:
        return None
    node = _Node(info, worker_host)
    found: dict[int, Source] = {}
    if local is not msgspec.UNSET:
        _add(found, (node.listed(item, is_here=True) for item in local))
    if remote is not msgspec.UNSET:
        others = [item for item in remote if item.dp_rank not in found]
        _add(found, (node.listed(item, is_here=node.has(item.dp_rank)) for item in others))
    if local is msgspec.UNSET and remote is msgspec.UNSET and block is not None:
        _add(found, (node.counted(block, rank) for rank in range(_rank(block.dp_size))))
    return _in_order(found)


def announced_by_vllm(body: bytes, worker_host: str, block_size: int | None = None) -> list[Source] | None:
    """Read the sources out of ``/kv_event_sources``: an object by rank, or a list.

    Args:
        body: The answer's body.
        worker_host: Host of the worker's URL, without brackets.
        block_size: From the engine's metrics, since the answer does not tell.

    Returns:
        Sources by rank, or ``None`` if the engine publishes no events.

    Raises:
        SourceMisconfigured: The announcement cannot be used; ``args[0]`` says why, for people.
    """
    try:
        by_rank = msgspec.json.decode(body, type=dict[int, _VllmConfig] | list[_VllmConfig] | None)
    except msgspec.DecodeError as exc:
        raise SourceMisconfigured(f"/kv_event_sources cannot be read: {exc}") from exc
    if not by_rank:
        return None
    items = by_rank.items() if isinstance(by_rank, dict) else [(item.data_parallel_rank or 0, item) for item in by_rank]
    found: dict[int, Source] = {}
    first = _rank(min(rank for rank, _ in items))
    for rank, item in items:
        if not item.enable_kv_cache_events or item.publisher in (None, "null"):
            continue
        if not item.endpoint:
            raise SourceMisconfigured(f"rank {rank} publishes events at no address")
        replay = _seen_from_here(item.replay_endpoint, worker_host) if item.replay_endpoint else None
        endpoint = _seen_from_here(item.endpoint, worker_host)
        _add(found, [Source(_rank(rank) - first, endpoint, replay, item.topic or "", _size(block_size), first)])
    return _in_order(found) or None


def set_by_operator(endpoint: str, worker_host: str, dp_size: int, block_size: int | None = None) -> list[Source]:
    """Make the sources of an address that an operator gave: rank r publishes at its port + r.

    A loopback address stays, since the operator may mean a tunnel; a wildcard becomes the worker's host.

    Raises:
        SourceMisconfigured: The address is none, or cannot serve so many ranks.
    """
    if not endpoint.startswith("tcp://"):
        if not endpoint.startswith("ipc://") or dp_size > 1:
            raise SourceMisconfigured(f"{endpoint} cannot be subscribed to for {dp_size} ranks; give tcp://HOST:PORT")
        return [Source(0, endpoint, block_size=_size(block_size))]
    host, port = _host_and_port(endpoint)
    if host in _WILDCARDS:
        host = worker_host
    return [Source(rank, _tcp(host, port + rank), block_size=_size(block_size)) for rank in range(dp_size)]


class _Node:
    """The node that announces: which ranks it runs, and how its addresses look from here."""

    def __init__(self, info: _ServerInfo, worker_host: str) -> None:
        self._info = info
        self._host = worker_host
        block = info.kv_events
        self._dp_size = block.dp_size if block else 1
        self._replay_port = block.replay_endpoint_port_base if block else None
        self._topic = (block.topic if block else None) or ""
        pages = (info.page_size or 0) * (info.dcp_size or 1)
        self._block_size = _size((block.block_size if block else None) or pages or None)

    def has(self, rank: int) -> bool:
        """Tell whether a rank publishes here: ranks are spread evenly, and a rank's first node publishes."""
        nodes = self._info.nnodes or 1
        return rank * nodes // max(self._dp_size, 1) == (self._info.node_rank or 0)

    def listed(self, item: _Announced, is_here: bool) -> Source | None:
        """Read a rank with an address of its own, ``None`` if it is elsewhere at an address that says nothing."""
        rank = _rank(item.dp_rank)
        if item.endpoint.startswith("tcp://"):
            host, _ = _host_and_port(item.endpoint)
            if not is_here and _is_relative(host):
                return None
            replay = item.replay_endpoint
            if replay is None and self._replay_port is not None:
                replay = _tcp(host, self._replay_port + rank)
        else:
            replay = item.replay_endpoint
        return Source(
            rank,
            _seen_from_here(item.endpoint, self._host),
            _seen_from_here(replay, self._host) if replay else None,
            self._topic if item.topic is None else item.topic,
            _size(self._block_size if item.block_size is None else item.block_size),
        )

    def counted(self, block: _Block, rank: int) -> Source | None:
        """Count a rank's port from the first one, ``None`` if the rank is on another node."""
        if block.endpoint_host is None or block.endpoint_port_base is None:
            raise SourceMisconfigured("the engine publishes events, but not at a TCP address that it names")
        host = block.endpoint_host.strip("[]")
        if _is_relative(host) and not self.has(rank):
            return None
        host = self._host if _is_relative(host) else host
        replay = None if self._replay_port is None else _tcp(host, self._replay_port + rank)
        return Source(rank, _tcp(host, block.endpoint_port_base + rank), replay, self._topic, self._block_size)


def _add(found: dict[int, Source], sources: Iterable[Source | None]) -> None:
    for source in sources:
        if source is None:
            continue
        if source.dp_rank in found:
            raise SourceMisconfigured(f"rank {source.dp_rank} is announced twice")
        found[source.dp_rank] = source


def _in_order(found: dict[int, Source]) -> list[Source]:
    sources = [found[rank] for rank in sorted(found)]
    if len({source.endpoint for source in sources}) < len(sources):
        raise SourceMisconfigured("two ranks are announced at one address")
    return sources


def _rank(value: int) -> int:
    if not 0 <= value <= _MAX_RANK:
        raise SourceMisconfigured(f"{value} is no rank and no number of ranks")
    return value


def _size(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise SourceMisconfigured(f"block_size is {value}")
    return value


def _is_relative(host: str) -> bool:
    """Tell whether a host means whoever says it."""
    return host in _WILDCARDS or _LOOPBACK.fullmatch(host) is not None


def _seen_from_here(endpoint: str, worker_host: str) -> str:
    if endpoint.startswith("ipc://"):
        return endpoint
    host, port = _host_and_port(endpoint)
    return _tcp(worker_host if _is_relative(host) else host, port)


def _host_and_port(endpoint: str) -> tuple[str, int]:
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise SourceMisconfigured(
            f"{endpoint!r} is no address to subscribe to; it must be tcp://HOST:PORT or ipc://PATH"
        )
    return match[1].strip("[]"), int(match[2])


def _tcp(host: str, port: int) -> str:
    if not 1 <= port <= 65_535:
        raise SourceMisconfigured(f"port {port} is not in 1 to 65535")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

"""What gateways are asked and told over HTTP: which leaders they know, and the worker that this node serves. Shell."""

from typing import Final

import httpx
import msgspec

from relay.engine import ANSWER_S, read_capped
from relay.errors import RelayError
from relay.follower import Leader
from relay.identity import identity_of, parse_address
from relay.metadata import NodeMetadata

LEADERS_PATH: Final = "/internal/kv_events"
_JSON: Final = {"content-type": "application/json"}


class GatewayUnavailable(RelayError):
    """A gateway does not answer, or not as one; it may the next time."""


class _Group(msgspec.Struct):
    literal: str
    addresses: list[str]


class _Leader(msgspec.Struct):
    worker_id: str
    worker_url: str
    group: _Group | None
    dp_size: int
    block_size: int | None
    local_dp_ranks: list[int]


class _Answer(msgspec.Struct):
    leaders: list[_Leader] = []


class GatewayDirectory:
    """One gateway's HTTP address."""

    def __init__(self, url: str, admin_key: str | None = None) -> None:
        """Prepare the connection; ``admin_key`` is the gateway's."""
        headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_S, trust_env=False)

    async def leaders(self) -> tuple[Leader, ...]:
        """Ask for the leaders whose relays are connected to the gateway.

        Raises:
            GatewayUnavailable: There is no answer, or none that can be read.
        """
        body = await self._ask("GET", LEADERS_PATH)
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise GatewayUnavailable(f"{LEADERS_PATH}: the answer cannot be read: {exc}") from exc
        return tuple(leader for item in answer.leaders if (leader := _leader(item)) is not None)

    async def register(self, worker_url: str, node: NodeMetadata, api_key: str | None) -> None:
        """Add the worker that this node serves; a worker that is there already stays as it is.

        Raises:
            GatewayUnavailable: The gateway did not take it.
        """
        worker: dict[str, object] = {"url": worker_url, "worker_type": node.role, "engine": "sglang"}
        if node.role == "prefill" and node.bootstrap_port is not None:
            worker["bootstrap_port"] = node.bootstrap_port
        if api_key is not None:
            worker["api_key"] = api_key
        await self._ask("POST", "/workers", msgspec.json.encode(worker))

    async def aclose(self) -> None:
        """Close the connections. May be called again."""
        await self._client.aclose()

    async def _ask(self, method: str, path: str, content: bytes = b"") -> bytes:
        try:
            status, body = await read_capped(self._client, method, path, _JSON if content else None, content)
        except httpx.HTTPError as exc:
            raise GatewayUnavailable(f"{path}: {exc or type(exc).__name__}") from exc
        if status in (401, 403):
            raise GatewayUnavailable(f"{path}: {status}, the gateway wants its admin key (--admin-api-key-file)")
        if not 200 <= status < 300:
            raise GatewayUnavailable(f"{path}: status {status}")
        return body


def _leader(item: _Leader) -> Leader | None:
    """Read one leader; ``None`` for an engine of one node, and for one whose group is none: it is nobody's leader."""
    if item.group is None:
        return None
    try:
        hosts = [parse_address(address)[0] for address in item.group.addresses]
        group = identity_of(item.group.literal, hosts)
    except (RelayError, ValueError):
        return None
    ranks = tuple(sorted(item.local_dp_ranks))
    return Leader(item.worker_id, item.worker_url, group, item.dp_size, item.block_size or 0, ranks)

"""``kv_transfer_params`` of vLLM's NIXL connector: what a request says, and what prefill answers.

Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Order(enum.Enum):
    """Requests that name no other engine."""

    KEEP = "keep"
    """Keep the blocks for a decode engine (``do_remote_decode``)."""
    DIE = "die"
    """An assertion in the engine's core: the whole process ends."""
    DIE_LATER = "die_later"
    """No answer; the process ends when the client has left."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks that prefill keeps: ``do_remote_prefill`` with everything else."""

    host: str
    port: int
    request_id: str


Transfer = Order | Fetch


def parse_transfer(params: Mapping[str, Any] | None) -> Transfer | None:
    """Return what ``params`` mean; ``None``: nothing is transferred."""
    if not params:
        return None
    if params.get("do_remote_prefill"):
        blocks = params.get("remote_block_ids")
        if not isinstance(blocks, list) or not all(isinstance(group, list) for group in blocks):
            return Order.DIE
        host, port, request_id = (params.get(f"remote_{name}") for name in ("host", "port", "request_id"))
        if not isinstance(host, str) or type(port) is not int or not isinstance(request_id, str):
            return Order.DIE_LATER
        return Fetch(host, port, request_id)
    return Order.KEEP if params.get("do_remote_decode") else None


def kept_params(
    request_id: str, block_ids: list[int], engine_id: str, address: tuple[str, int], tokens: int, cached_tokens: int
) -> dict[str, Any]:
    """Return what prefill answers for decode to be sent unchanged, in the real order."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": address[0],
        "remote_port": address[1],
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached_tokens,
    }

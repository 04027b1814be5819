"""Metadata of an engine of two nodes with four ranks, as its nodes tell it, and what is made of it."""

import json

from relay.identity import GroupIdentity, identity_of
from relay.metadata import NodeMetadata, parse_metadata

ADDRESS = "10.0.0.1:5000"


def source(rank: int, **changes: object) -> dict[str, object]:
    """One entry of ``kv_event_sources``."""
    return {"dp_rank": rank, "endpoint": f"tcp://127.0.0.1:{5557 + rank}", "topic": "", "block_size": 16, **changes}


def info(**changes: object) -> bytes:
    """What the second node answers; a change of ``...`` takes the field away."""
    fields: dict[str, object] = {
        "node_rank": 1,
        "nnodes": 2,
        "dp_size": 4,
        "dist_init_addr": ADDRESS,
        "disaggregation_mode": "null",
        "kv_event_sources": [source(2), source(3)],
        "random_seed": 7,
        **changes,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def node(**changes: object) -> NodeMetadata:
    """The second node, with changes."""
    return parse_metadata(info(**changes))


def leader_node(**changes: object) -> NodeMetadata:
    """The first node, with changes."""
    return node(**{"node_rank": 0, "kv_event_sources": [source(0), source(1)], **changes})


def group(address: str = ADDRESS, *ips: str) -> GroupIdentity:
    """The identity of a group at an address."""
    return identity_of(address, ips or (address.partition(":")[0],))

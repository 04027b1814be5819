"""Where relays connect, and which ones have: asked by relays and by administrators."""

from fastapi import APIRouter, Depends, Response

from gateway.api.json_response import json_response
from gateway.api.refusals import admin_guard
from gateway.auth import Keys
from gateway.kv_leases import Relay, describe
from gateway.kv_listen import KvListener
from gateway.kv_view import KvView
from kv_events.relay_wire import PROTOCOL


def kv_relays_router(kv: KvView, listener: KvListener | None, keys: Keys) -> APIRouter:
    """The route about relays.

    Args:
        kv: Knows the states of their ranks.
        listener: Takes relays; ``None`` where none may connect.
        keys: Credentials.
    """
    router = APIRouter(dependencies=[Depends(admin_guard(keys))])

    def shown(relay: Relay) -> dict[str, object]:
        return describe(relay, {rank: kv.state(relay.worker_id, rank) for rank in relay.ranks})

    @router.get("/internal/kv_events")
    async def kv_events() -> Response:
        relays = listener.relays() if listener else []
        body = {
            "endpoint": listener.endpoint if listener else None,
            "public_key": listener.public_key if listener else None,
            "protocol": PROTOCOL,
            "relays": [shown(relay) for relay in relays],
            "leaders": [_leader(relay) for relay in relays if relay.hello.role == "leader" and not relay.is_lost],
        }
        return json_response(body)

    return router


def _leader(relay: Relay) -> dict[str, object]:
    """A leader as followers look for it: who it is, and which ranks are its own."""
    group, offers = relay.hello.group, relay.hello.ranks
    return {
        "worker_id": relay.worker_id,
        "worker_url": relay.hello.worker_url,
        "group": {"literal": group.literal, "addresses": list(group.addresses)} if group else None,
        "dp_size": relay.hello.dp_size,
        "block_size": offers[0].block_size if offers else None,
        "local_dp_ranks": sorted(relay.ranks),
    }

"""Routes for whoever tests with the engine: faults, log, reset, restart. No key is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from simulator.cache_dump import dump_caches
from simulator.exchange import Exchange
from simulator.faults import FaultError

if TYPE_CHECKING:
    from simulator.server import SimulatedEngine


def handle_control(engine: SimulatedEngine, exchange: Exchange) -> None:
    """Answer ``/_fault``, ``/_log``, ``/_cache``, ``/_transfers``, ``/_reset``, ``/_die`` and ``/_restart``."""
    request = exchange.request
    key = (request.method, request.path)
    if key == ("GET", "/_log"):
        exchange.respond(200, orjson.dumps(engine.log.as_json()))
    elif key == ("GET", "/_cache"):
        exchange.respond(200, orjson.dumps(dump_caches(engine.core)))
    elif key == ("GET", "/_transfers"):
        exchange.respond(200, orjson.dumps(engine.transfers))
    elif key == ("GET", "/_fault"):
        exchange.respond(200, orjson.dumps({"faults": engine.fault_list}))
    elif key == ("POST", "/_fault"):
        _add_faults(engine, exchange)
    elif key == ("POST", "/_reset"):
        engine.reset()
        exchange.respond(200, b"{}")
    elif key == ("POST", "/_die"):
        exchange.respond(200, b"{}")
        engine.die()
    elif key == ("POST", "/_restart"):
        engine.restart(spare=exchange)
        exchange.respond(200, orjson.dumps({"random_seed": engine.boot_id}))
    else:
        exchange.respond(404, b'{"detail":"Not Found"}')


def _add_faults(engine: SimulatedEngine, exchange: Exchange) -> None:
    try:
        raw = orjson.loads(exchange.request.body)
        for item in raw if isinstance(raw, list) else [raw]:
            engine.add_fault(item)
    except (orjson.JSONDecodeError, FaultError) as exc:
        exchange.respond(400, orjson.dumps({"error": {"message": f"bad fault: {exc}"}}))
        return
    exchange.respond(200, orjson.dumps({"faults": engine.fault_list}))

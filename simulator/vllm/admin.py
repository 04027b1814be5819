"""Aborts, and the routes of the development mode: pause, sleep, cache, weights."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import orjson

from simulator.exchange import Exchange
from simulator.vllm import errors
from simulator.vllm.engine import VllmCore
from simulator.vllm.errors import invalid


def _object(exchange: Exchange) -> dict[str, Any] | None:
    """Return the body's object; answers 400 and returns ``None`` if there is none."""
    try:
        raw = orjson.loads(exchange.request.body)
    except orjson.JSONDecodeError:
        raw = None
    if not isinstance(raw, dict):
        exchange.respond(400, errors.body("Invalid JSON format", "Bad Request", None, 400))
        return None
    return raw


def handle_abort(core: VllmCore, exchange: Exchange) -> None:
    """Abort by engine-side ids and answer 200 whatever came of it."""
    raw = _object(exchange)
    if raw is None:
        return
    ids = raw.get("request_ids")
    if ids is None:
        message = "Missing 'request_ids' in request body"
        exchange.respond(400, errors.body(message, "Bad Request", None, 400))
        return
    for name in ids if isinstance(ids, list) else [ids]:
        core.abort(str(name))
    exchange.respond(200, b"", None)


def handle_dev_abort(core: VllmCore, exchange: Exchange) -> None:
    """Abort like ``handle_abort``, or everything if no id is named."""
    raw = _object(exchange)
    if raw is None:
        return
    ids = raw.get("request_ids")
    count = len(ids) if ids else len(core.live_rids)
    if ids:
        for name in ids:
            core.abort(str(name))
    else:
        core.abort("", abort_all=True)
    exchange.respond(200, orjson.dumps({"status": "aborted", "aborted": count}))


def handle_pause(core: VllmCore, exchange: Exchange) -> None:
    """Pause; modes ``abort`` and ``wait`` answer once nothing runs any more."""
    mode = parse_qs(exchange.request.query).get("mode", ["abort"])[0]
    if mode not in ("abort", "wait", "keep"):
        error = invalid("literal_error", "query.mode", "Input should be 'abort', 'wait' or 'keep'", mode)
        exchange.respond(400, error.body)
        return

    def done() -> None:
        if mode != "keep":
            core.clear_caches()
        if not exchange.is_over:
            exchange.respond(200, b'{"status":"paused"}')

    if mode == "wait":
        core.is_paused = True
        core.when_idle(done)
    else:
        core.pause("abort" if mode == "abort" else "in_place", done)


def handle_resume(core: VllmCore, exchange: Exchange) -> None:
    """End a pause."""
    core.resume()
    exchange.respond(200, b'{"status":"resumed"}')


def handle_is_paused(core: VllmCore, exchange: Exchange) -> None:
    """Tell whether the engine is paused."""
    exchange.respond(200, orjson.dumps({"is_paused": core.is_paused}))


def handle_weight_info(core: VllmCore, exchange: Exchange) -> None:
    """Tell the version of the weights."""
    exchange.respond(200, orjson.dumps({"weight_version": core.weight_version}))


def handle_update_weight_version(core: VllmCore, exchange: Exchange) -> None:
    """Take another version over."""
    raw = _object(exchange)
    if raw is None:
        return
    version = raw.get("new_version")
    if not isinstance(version, str):
        error = invalid("string_type", "body.new_version", "Input should be a valid string", str(version))
        exchange.respond(400, error.body)
        return
    core.weight_version = version
    exchange.respond(200, b'{"message":"Weight version updated"}')


_DONE = {
    "/init_weight_transfer_engine": "Weight transfer initialized",
    "/start_weight_update": "Weight update started",
    "/update_weights": "Weights updated",
    "/finish_weight_update": "Weight update finished",
}


def handle_weight_update(core: VllmCore, exchange: Exchange) -> None:
    """Answer the steps of a transfer; the last one may bring a version, the weights stay as they are."""
    raw = _object(exchange) if exchange.request.body else {}
    if raw is None:
        return
    if isinstance(version := raw.get("weight_version"), str):
        core.weight_version = version
    exchange.respond(200, orjson.dumps({"message": _DONE[exchange.request.path]}))


def handle_sleep(core: VllmCore, exchange: Exchange) -> None:
    """Abort everything, forget the cache, and take nothing up until the engine is woken."""

    def done() -> None:
        core.clear_caches()
        if not exchange.is_over:
            exchange.respond(200, b"", None)

    core.is_sleeping = True
    core.pause("abort", done)


def handle_wake_up(core: VllmCore, exchange: Exchange) -> None:
    """End the sleep."""
    core.is_sleeping = False
    core.resume()
    exchange.respond(200, b"", None)


def handle_is_sleeping(core: VllmCore, exchange: Exchange) -> None:
    """Tell whether the engine sleeps."""
    exchange.respond(200, orjson.dumps({"is_sleeping": core.is_sleeping}))


def handle_reset_prefix_cache(core: VllmCore, exchange: Exchange) -> None:
    """Forget the cache unless something runs."""
    is_idle = not core.is_busy and not core.pinned_blocks
    if is_idle:
        core.clear_caches()
    exchange.respond(200, orjson.dumps({"success": is_idle}))

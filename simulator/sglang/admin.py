"""Control routes: abort, pause, flush, weights, health."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any
from urllib.parse import parse_qs

import orjson

from simulator.core import Core
from simulator.exchange import Exchange
from simulator.sequence import Sequence
from simulator.sglang import errors
from simulator.sglang.generate_request import load_object

_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)


def _json_body(exchange: Exchange, *, required: bool) -> dict[str, Any] | None:
    """Return the body's object; answers 400 and returns ``None`` if there is none."""
    request = exchange.request
    if not request.body and not required:
        return {}
    try:
        return load_object(request.body, request.header(b"content-type"))
    except errors.BodyError as exc:
        exchange.respond(400, errors.body_error(exc.message, f"{request.method} {request.path}", "control"))
        return None


def handle_abort(core: Core, exchange: Exchange) -> None:
    """Abort, and answer 200 whatever came of it."""
    body = _json_body(exchange, required=True)
    if body is None:
        return
    rid = body.get("rid", "")
    if not isinstance(rid, str):
        message = errors.field_error("string_type", ("body", "rid"), "Input should be a valid string", rid)
        exchange.respond(400, errors.body_error(message, "POST /abort_request", "abort_request"))
        return
    core.abort(rid, abort_all=body.get("abort_all") is True)
    exchange.respond(200, b"", None)


def handle_pause(core: Core, exchange: Exchange) -> None:
    """Pause; mode ``abort`` answers once nothing runs any more."""
    body = _json_body(exchange, required=False)
    if body is None:
        return
    mode = body.get("mode", "abort")
    if mode not in ("abort", "in_place", "retract"):
        message = errors.field_error("literal_error", ("body", "mode"), "Input should be a pause mode", mode)
        exchange.respond(400, errors.body_error(message, "POST /pause_generation", "pause_generation"))
        return
    answer = b'{"message":"Generation paused successfully.","status":"ok"}'
    core.pause(mode, lambda: exchange.respond(200, answer))


def handle_continue(core: Core, exchange: Exchange) -> None:
    """End a pause."""
    if _json_body(exchange, required=False) is None:
        return
    core.resume()
    exchange.respond(200, b'{"message":"Generation continued successfully.","status":"ok"}')


def handle_flush(core: Core, exchange: Exchange) -> None:
    """Empty the caches if nothing runs, waiting for that as long as ``timeout`` says."""
    raw = parse_qs(exchange.request.query).get("timeout", ["0"])[0]
    try:
        timeout_s = float(raw)
    except ValueError:
        timeout_s = 0.0

    if core.is_busy and timeout_s <= 0:
        exchange.respond(400, b"Flush cache failed.\n", None)
        return

    def flush() -> None:
        core.clear_caches()
        if not exchange.is_over:
            exchange.respond(200, _FLUSHED, None)

    def give_up() -> None:
        forget()
        if not exchange.is_over:
            exchange.respond(400, b"Flush cache failed.\n", None)

    forget = core.when_idle(flush)
    if not exchange.is_over:
        core.timers.after(timeout_s, give_up)


def handle_weights(core: Core, exchange: Exchange) -> None:
    """Answer the weight routes; a new version and the flush are taken over, weights are not."""
    body = _json_body(exchange, required=False)
    if body is None:
        return
    path = exchange.request.path
    version = body.get("new_version") if path == "/update_weight_version" else body.get("weight_version")
    # Update_weight_version aborts by default, the others only when asked.
    if body.get("abort_all_requests", path == "/update_weight_version"):
        core.abort("", abort_all=True, source="request")
    if isinstance(version, str | int) and not isinstance(version, bool):
        core.weight_version = str(version)
    if path.startswith("/update_weights") and body.get("flush_cache", True) and not core.is_busy:
        core.clear_caches()
    answer: dict[str, Any] = {"success": True, "message": "Succeeded to update model weights."}
    if path == "/update_weight_version":
        answer = {"success": True, "message": f"Weight version updated to {core.weight_version}"}
        answer["new_version"] = core.weight_version
    elif path == "/update_weights_from_disk":
        answer["num_paused_requests"] = core.held
    exchange.respond(200, orjson.dumps(answer))


def handle_weights_group(core: Core, exchange: Exchange) -> None:
    """Answer as if a group had been joined or left; its port may be digits in a string."""
    body = _json_body(exchange, required=True)
    if body is None:
        return
    name = exchange.request.path.strip("/")
    port = body.get("master_port", 0)
    if not str(port).isdigit():
        message = errors.field_error("int_parsing", ("body", "master_port"), "Input should be a valid integer", port)
        exchange.respond(400, errors.body_error(message, f"POST /{name}", name))
        return
    exchange.respond(200, b'{"success":true,"message":"Succeeded."}')


def handle_empty(core: Core, exchange: Exchange) -> None:
    """Answer 200 without a body and do nothing."""
    exchange.respond(200, b"", None)


def handle_lora(core: Core, exchange: Exchange) -> None:
    """Refuse: the simulated engine runs without adapters."""
    if _json_body(exchange, required=True) is None:
        return
    exchange.respond(400, b'{"success":false,"error_message":"LoRA is not enabled.","loaded_adapters":{}}')


class _HealthProbe:
    """A one-token generation on behalf of ``/health``; whatever else answers first counts too."""

    is_stream = False

    def __init__(self, core: Core, exchange: Exchange) -> None:
        self._core = core
        self._exchange = exchange
        self._period_s = core.options.health_min_s / core.options.speedup
        self._started_s = core.timers.now()
        self.sequences: Seq[Sequence] = ()
        self.sequences = (core.probe_sequence(self),)
        core.timers.after(self._period_s, self._look)
        if not core.is_computing:
            core.run_aside(self, self.sequences[0], 0)

    def on_progress(self, sequence: Sequence) -> None:
        """Do nothing."""

    def on_finished(self, sequence: Sequence) -> None:
        """Do nothing: the next look sees that there was output."""

    def _look(self) -> None:
        core, exchange = self._core, self._exchange
        if exchange.is_over:
            return
        if core.last_output_s >= self._started_s:
            exchange.respond(200, b"", None)
        elif core.timers.now() - self._started_s >= core.options.health_timeout_s / core.options.speedup:
            exchange.respond(503, b"", None)
        else:
            core.timers.after(self._period_s, self._look)


def handle_health(core: Core, exchange: Exchange) -> None:
    """Generate one token and answer at the next look, one second later at the earliest."""
    _HealthProbe(core, exchange)


def handle_ready(core: Core, exchange: Exchange) -> None:
    """Answer 503 while paused."""
    exchange.respond(503 if core.is_paused else 200, b"", None)

"""Path table of the simulated vLLM server."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from simulator.exchange import Exchange
from simulator.faulting import FaultRunner
from simulator.faults import RequestFacts
from simulator.vllm import admin, errors, info, other
from simulator.vllm.auth import is_allowed
from simulator.vllm.engine import VllmCore
from simulator.vllm.generate import handle_chat, handle_completions, handle_generate
from simulator.vllm.messages import handle_count_tokens, handle_messages
from simulator.vllm.responses import handle_response_by_id, handle_responses

Handler = Callable[[VllmCore, Exchange], None]

_GET, _POST, _BOTH = ("GET",), ("POST",), ("GET", "POST")

_ROUTES: dict[str, tuple[tuple[str, ...], Handler]] = {
    "/health": (_GET, info.handle_health),
    "/ping": (_BOTH, info.handle_health),
    "/load": (_GET, info.handle_load),
    "/version": (_GET, info.handle_version),
    "/metrics": (_GET, info.handle_metrics),
    "/v1/models": (_GET, info.handle_models),
    "/kv_event_sources": (_GET, info.handle_event_sources),
    "/tokenize": (_POST, other.handle_tokenize),
    "/detokenize": (_POST, other.handle_detokenize),
    "/v1/messages/count_tokens": (_POST, handle_count_tokens),
    "/inference/v1/abort_requests": (_POST, admin.handle_abort),
}
# Mounted only with --is-embedding.
_POOLING: dict[str, tuple[tuple[str, ...], Handler]] = {
    "/v1/embeddings": (_POST, other.handle_embeddings),
    "/pooling": (_POST, other.handle_embeddings),
}
# Mounted only in development mode.
_DEV: dict[str, tuple[tuple[str, ...], Handler]] = {
    "/server_info": (_GET, info.handle_server_info),
    "/reset_prefix_cache": (_POST, admin.handle_reset_prefix_cache),
    "/pause": (_POST, admin.handle_pause),
    "/resume": (_POST, admin.handle_resume),
    "/is_paused": (_GET, admin.handle_is_paused),
    "/abort_requests": (_POST, admin.handle_dev_abort),
    "/weight_info": (_GET, admin.handle_weight_info),
    "/update_weight_version": (_POST, admin.handle_update_weight_version),
    "/init_weight_transfer_engine": (_POST, admin.handle_weight_update),
    "/start_weight_update": (_POST, admin.handle_weight_update),
    "/update_weights": (_POST, admin.handle_weight_update),
    "/finish_weight_update": (_POST, admin.handle_weight_update),
    "/sleep": (_POST, admin.handle_sleep),
    "/wake_up": (_POST, admin.handle_wake_up),
    "/is_sleeping": (_GET, admin.handle_is_sleeping),
}
# Routes that make sequences, and so need the faults of their streams.
_GENERATION: dict[str, tuple[str, Callable[[VllmCore, FaultRunner, Exchange], None]]] = {
    "/v1/completions": ("cmpl-", handle_completions),
    "/v1/chat/completions": ("chatcmpl-", handle_chat),
    "/inference/v1/generate": ("generate-tokens-", handle_generate),
    "/v1/messages": ("chatcmpl-", handle_messages),
    "/v1/responses": ("resp_", handle_responses),
}
_SCALE_OUT = ("/inference/v1/generate", "/inference/v1/abort_requests")
_SCALE_OUT_OFF = "This endpoint is only available with --enable-scale-out or --tokens-only."


class VllmApi:
    """The routes, bound to one boot of the engine."""

    abort_paths = frozenset({"/inference/v1/abort_requests", "/abort_requests"})

    def __init__(self, core: VllmCore, faults: FaultRunner) -> None:
        self._core = core
        self._faults = faults
        options = core.options
        self._routes = {
            **_ROUTES,
            **(_POOLING if options.is_embedding else {}),
            **(_DEV if options.dev_mode else {}),
        }

    def prepare(self, exchange: Exchange) -> None:
        """Set the answer's ``x-request-id`` and spelling."""
        exchange.has_lower_case_framing = True
        if self._core.options.enable_request_id_headers:
            exchange.tail = other.echo_id(exchange)

    def begin_death(self) -> float:
        """End all requests with an error."""
        return self._core.begin_death()

    def facts(self, exchange: Exchange) -> RequestFacts:
        """Return what faults can be matched with; the ids are the given one and the answer's."""
        request = exchange.request
        generation = _GENERATION.get(request.path)
        is_generation = generation is not None or request.path in _POOLING
        try:
            raw = orjson.loads(request.body)
        except orjson.JSONDecodeError:
            raw = None
        if not isinstance(raw, dict):
            return RequestFacts(request.method, request.path, is_generation)
        given, model = request.header(b"x-request-id") or raw.get("request_id"), raw.get("model")
        rids: tuple[str, ...] = ()
        if isinstance(given, str):
            rids = (given, f"{generation[0]}{given}") if generation is not None else (given,)
        named = model if isinstance(model, str) else None
        return RequestFacts(request.method, request.path, is_generation, rids, named, raw.get("stream") is True)

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""
        request, core = exchange.request, self._core
        path, method = request.path, request.method
        if not is_allowed(core.options, method, path, request.header(b"authorization")):
            exchange.respond(401, b'{"error":"Unauthorized"}')
            return
        if path in _SCALE_OUT and not core.options.enable_scale_out:
            exchange.respond(403, errors.body(_SCALE_OUT_OFF, "PermissionDeniedError", None, 403))
            return
        generation = _GENERATION.get(path)
        if generation is not None:
            if method != "POST":
                _not_allowed(exchange, _POST)
            elif core.is_dying:
                exchange.respond(500, errors.failure_body(errors.ENGINE_DEAD, 500))
            else:
                generation[1](core, self._faults, exchange)
            return
        if path.startswith("/v1/responses/"):
            handle_response_by_id(exchange)
            return
        route = self._routes.get(path)
        if route is None:
            exchange.respond(404, b'{"detail":"Not Found"}')
        elif method not in route[0]:
            _not_allowed(exchange, route[0])
        else:
            route[1](core, exchange)


def _not_allowed(exchange: Exchange, methods: tuple[str, ...]) -> None:
    exchange.respond(405, b'{"detail":"Method Not Allowed"}', extra=f"allow: {', '.join(methods)}\r\n")

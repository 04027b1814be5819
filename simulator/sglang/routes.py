"""Path table of the simulated SGLang server."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from simulator.core import Core
from simulator.exchange import Exchange
from simulator.faulting import FaultRunner
from simulator.faults import RequestFacts
from simulator.sglang import admin, info, other
from simulator.sglang.auth import is_allowed
from simulator.sglang.generate import handle_generate
from simulator.sglang.messages import handle_count_tokens, handle_messages
from simulator.sglang.openai import handle_chat, handle_completions
from simulator.sglang.responses import ResponseStore

Handler = Callable[[Core, Exchange], None]

_GET, _POST, _POST_PUT, _BOTH = ("GET",), ("POST",), ("POST", "PUT"), ("GET", "POST")


def _text(body: bytes, content_type: str | None = "application/json") -> Handler:
    return lambda core, exchange: exchange.respond(200, body, content_type)


_ROUTES: dict[str, tuple[tuple[str, ...], Handler]] = {
    "/": (_GET, _text(b'"SGLang is running"')),
    "/ping": (_GET, _text(b"", None)),
    "/ready": (_GET, admin.handle_ready),
    "/health": (_GET, admin.handle_health),
    "/health_generate": (_GET, admin.handle_health),
    "/metrics": (_GET, info.handle_metrics),
    "/server_info": (_GET, info.handle_server_info),
    "/get_server_info": (_GET, info.handle_server_info),
    "/model_info": (_GET, info.handle_model_info),
    "/get_model_info": (_GET, info.handle_model_info),
    "/v1/models": (_GET, info.handle_models),
    "/v1/loads": (_GET, info.handle_loads),
    "/abort_request": (_POST, admin.handle_abort),
    "/pause_generation": (_POST, admin.handle_pause),
    "/continue_generation": (_POST, admin.handle_continue),
    "/flush_cache": (_BOTH, admin.handle_flush),
    "/update_weights_from_disk": (_POST, admin.handle_weights),
    "/update_weights_from_tensor": (_POST, admin.handle_weights),
    "/update_weights_from_distributed": (_POST, admin.handle_weights),
    "/update_weight_version": (_POST, admin.handle_weights),
    "/init_weights_update_group": (_POST, admin.handle_weights_group),
    "/destroy_weights_update_group": (_POST, admin.handle_weights_group),
    "/release_memory_occupation": (_BOTH, admin.handle_empty),
    "/resume_memory_occupation": (_BOTH, admin.handle_empty),
    "/tokenize": (_POST, other.handle_tokenize),
    "/v1/tokenize": (_POST, other.handle_tokenize),
    "/detokenize": (_POST, other.handle_detokenize),
    "/v1/detokenize": (_POST, other.handle_detokenize),
    "/v1/messages/count_tokens": (_POST, handle_count_tokens),
    "/v1/embeddings": (_POST, other.handle_embeddings),
    "/encode": (_POST_PUT, other.handle_encode),
    "/classify": (_POST_PUT, other.handle_encode),
    "/v1/rerank": (_POST_PUT, other.handle_rerank),
    "/v1/score": (_POST, other.handle_score),
    "/load_lora_adapter": (_POST, admin.handle_lora),
    "/unload_lora_adapter": (_POST, admin.handle_lora),
}

# Routes that work on prompts without making sequences.
_PROMPT_PATHS = frozenset({"/v1/embeddings", "/encode", "/classify", "/v1/rerank", "/v1/score"})

# Routes that make sequences, and so need the faults of their streams.
_GENERATION: dict[str, tuple[tuple[str, ...], Callable[[Core, FaultRunner, Exchange], None]]] = {
    "/generate": (_POST_PUT, handle_generate),
    "/v1/chat/completions": (_POST, handle_chat),
    "/v1/completions": (_POST, handle_completions),
    "/v1/messages": (_POST, handle_messages),
}


class SGLangApi:
    """The routes, bound to one boot of the engine."""

    abort_paths = frozenset({"/abort_request"})

    def __init__(self, core: Core, faults: FaultRunner) -> None:
        self._core = core
        self._faults = faults
        self._responses = ResponseStore()

    def prepare(self, exchange: Exchange) -> None:
        """Do nothing: answers have no header of their own."""

    def begin_death(self) -> float:
        """Tell nobody: the whole server is gone at once."""
        return 0.0

    def facts(self, exchange: Exchange) -> RequestFacts:
        """Return what faults can be matched with."""
        request = exchange.request
        path = request.path
        is_generation = path in _GENERATION or path in _PROMPT_PATHS or path == "/v1/responses"
        try:
            raw = orjson.loads(request.body)
        except orjson.JSONDecodeError:
            raw = None
        if not isinstance(raw, dict):
            return RequestFacts(request.method, request.path, is_generation)
        rid, model = raw.get("rid"), raw.get("model")
        rids = tuple(map(str, rid)) if isinstance(rid, list) else (rid,) if isinstance(rid, str) else ()
        named = model if isinstance(model, str) else None
        return RequestFacts(request.method, request.path, is_generation, rids, named, raw.get("stream") is True)

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later."""
        request = exchange.request
        core = self._core
        if not is_allowed(core.options, request.method, request.path, request.header(b"authorization")):
            exchange.respond(401, b'{"error":"Unauthorized"}')
            return
        generation = _GENERATION.get(request.path)
        if generation is not None:
            methods, handler = generation
            if request.method in methods:
                handler(core, self._faults, exchange)
            else:
                _not_allowed(exchange, methods)
            return
        if request.path.startswith("/v1/responses"):
            self._handle_responses(exchange)
            return
        path = "/v1/models" if request.path.startswith("/v1/models/") else request.path
        route = _ROUTES.get(path)
        if route is None:
            exchange.respond(404, b'{"detail":"Not Found"}')
        elif request.method not in route[0]:
            _not_allowed(exchange, route[0])
        else:
            route[1](core, exchange)

    def _handle_responses(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.path == "/v1/responses":
            if request.method == "POST":
                self._responses.handle_create(self._core, self._faults, exchange)
            else:
                _not_allowed(exchange, _POST)
            return
        methods = _POST if request.path.endswith("/cancel") else _GET
        if request.method in methods:
            self._responses.handle_get(exchange)
        else:
            _not_allowed(exchange, methods)


def _not_allowed(exchange: Exchange, methods: tuple[str, ...]) -> None:
    exchange.respond(405, b'{"detail":"Method Not Allowed"}', extra=f"allow: {', '.join(methods)}\r\n")

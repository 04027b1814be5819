"""HTTP of a node that is not the first: it serves nobody, and says only that it is there."""

from __future__ import annotations

from simulator.core import Core
from simulator.exchange import Exchange
from simulator.faults import RequestFacts
from simulator.sglang import info
from simulator.sglang.auth import is_allowed

_DUMMY_HEALTH = frozenset({"/ping", "/health", "/health_generate"})
# The real one answers this over gRPC only.
_METADATA = frozenset({"/server_info", "/get_server_info"})


class FollowerApi:
    """The few routes of such a node."""

    abort_paths: frozenset[str] = frozenset()

    def __init__(self, core: Core) -> None:
        self._core = core

    def prepare(self, exchange: Exchange) -> None:
        """Do nothing."""

    def begin_death(self) -> float:
        """Tell nobody."""
        return 0.0

    def facts(self, exchange: Exchange) -> RequestFacts:
        """Return what faults can be matched with."""
        return RequestFacts(exchange.request.method, exchange.request.path, False)

    def handle(self, exchange: Exchange) -> None:
        """Answer a request."""
        request = exchange.request
        if request.method == "GET" and request.path in _DUMMY_HEALTH:
            exchange.respond(200, b"", None)
        elif request.method != "GET" or request.path not in _METADATA:
            exchange.respond(404, b"", None)
        elif not is_allowed(self._core.options, "GET", request.path, request.header(b"authorization")):
            exchange.respond(401, b'{"error":"Unauthorized"}')
        else:
            info.handle_server_info(self._core, exchange)

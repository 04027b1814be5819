"""The seam between the engine and the HTTP interface of one engine kind."""

from __future__ import annotations

from typing import Protocol

from simulator.exchange import Exchange
from simulator.faults import RequestFacts


class FatalRequest(Exception):
    """A request that kills the real engine."""


class EngineApi(Protocol):
    """The routes of one engine kind, for one boot of the engine."""

    def facts(self, exchange: Exchange) -> RequestFacts:
        """Return what faults can be matched with; must not raise, whatever the body is."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later.

        Raises:
            FatalRequest: The request kills the engine.
        """

"""The seam between the engine and the HTTP interface of one engine kind."""

from __future__ import annotations

from typing import Protocol

from simulator.exchange import Exchange
from simulator.faults import RequestFacts


class FatalRequest(Exception):
    """A request that kills the real engine."""


class EngineApi(Protocol):
    """The routes of one engine kind, for one boot of the engine."""

    abort_paths: frozenset[str]
    """Where the fault point ``abort`` strikes instead of ``headers``."""

    def prepare(self, exchange: Exchange) -> None:
        """Set what every answer to ``exchange`` has, those of faults included."""

    def facts(self, exchange: Exchange) -> RequestFacts:
        """Return what faults can be matched with; must not raise, whatever the body is."""

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, now or later.

        Raises:
            FatalRequest: The request kills the engine.
        """

    def begin_death(self) -> float:
        """Tell the open requests what they still get to hear of the engine's death.

        Returns:
            Seconds for which the server outlives its engine.
        """

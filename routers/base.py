"""The interface of routing policies. Pure."""

from collections.abc import Sequence
from typing import Protocol

from routers.explain import Explained
from routers.types import Candidate, Placement, RouteRequest


class Router(Protocol):
    """Chooses a rank. Synchronous, so that the choice and its booking are one step."""

    @property
    def name(self) -> str:
        """Name as given to ``--policy``."""

    def select(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Placement:
        """Choose among ``candidates``, all of which can serve the request.

        Args:
            request: What is known of the request.
            candidates: At least one.

        Raises:
            ValueError: There are no candidates.
        """

    def explain(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Explained]:
        """Say what ``select`` would look at, one for each candidate; changes nothing."""

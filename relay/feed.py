"""What the relay's process needs of the part that carries events to gateways. Pure.

The process reads the local engine's publishers, puts what they send in order, and calls the feed; the feed keeps what
a late gateway needs, and holds one connection to every gateway. All calls happen on one event loop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GatewayState:
    """How one gateway stands to this relay.

    Attributes:
        is_connected: The connection is up now.
        is_acknowledged: The gateway has taken all ranks of this relay, on the connection that is up now.
        last_error: Why it is not so, for people; empty if nothing is wrong, or nothing is known yet.
        is_refused: The gateway refuses for good, since another relay has a rank, or a rank or a block size cannot
            be. The process ends with ``last_error``. What may pass by itself is not refused: it is tried again.
    """

    is_connected: bool = False
    is_acknowledged: bool = False
    last_error: str = ""
    is_refused: bool = False


class Feed(Protocol):
    """Where a relay's events go. Ranks are global. The ``source_`` calls must neither wait nor raise."""

    def source_frame(self, rank: int, seq: int, payload: bytes) -> None:
        """Take a batch as the engine sent it.

        Batches of one rank come in order, each once. ``seq`` is the engine's number: it begins anew after
        ``source_restarted``, and may jump after ``source_gap``.
        """

    def source_restarted(self, rank: int) -> None:
        """The rank's publisher is another one than before, or may be: forget all that the rank held."""

    def source_gap(self, rank: int) -> None:
        """Batches of the rank are lost for good: forget all that it held; the next batches come from later on."""

    def source_state(self, rank: int, is_connected: bool) -> None:
        """The connection to the rank's publisher was made or lost; what the rank held stays for the time being."""

    def remap(self, worker_url: str) -> None:
        """The leader is back under another address: the ranks are that worker's, and what they hold stays."""

    def gateways(self) -> Mapping[str, GatewayState]:
        """Give the state of every gateway, by the URL that the operator gave."""

    async def run(self) -> None:
        """Hold the connections until cancelled. Ends by itself only with an error, and with it the process ends."""

    async def aclose(self) -> None:
        """Take back the ranks of this relay at the gateways, and close everything; bounded, may be called again."""

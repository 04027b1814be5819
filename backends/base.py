"""What the gateway asks of an engine kind; ``backends/sglang`` and ``backends/vllm`` answer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from backends.json_body import JsonBody
from backends.types import EngineFacts, EngineIds, ProbeResult, Worker
from backends.upstream.base import Headers, UpstreamRequest

NO_CHANGES: Final[Mapping[str, bytes]] = MappingProxyType({})


class Backend(Protocol):
    """One engine kind: its bodies, ids, aborts and metadata. Stateless but for the client it sends with."""

    def engine_ids(self, path: str, base: str, *, batch_size: int | None, samples: int) -> EngineIds:
        """The ids under which the engine runs a request, made from a fresh 32-hex ``base``.

        Args:
            path: The engine's route.
            base: Fresh for every attempt.
            batch_size: Number of items of a batch, ``None`` for a single request.
            samples: Samples for each prompt.
        """

    def generation_request(
        self,
        worker: Worker,
        path: str,
        body: JsonBody,
        ids: EngineIds,
        *,
        dp_rank: int | None,
        is_stream: bool,
        headers: Headers,
        changes: Mapping[str, bytes] = NO_CHANGES,
    ) -> UpstreamRequest:
        """Build the request of one leg.

        Args:
            worker: Where it goes; supplies the credential.
            path: The engine's route, query included.
            body: The client's body, which is not changed.
            ids: What ``engine_ids`` made for it.
            dp_rank: Rank to run on; ``None`` leaves it to the engine.
            is_stream: What to accept: events, or one JSON document.
            headers: The client's headers that may pass.
            changes: JSON of further fields to set in the body.
        """

    def shows_output(self, event_data: bytes) -> bool:
        """Whether an event of a generation's stream is evidence that the engine has begun to generate, or has ended.

        Args:
            event_data: The event's payload; none and ``[DONE]`` show nothing.

        Raises:
            AnswerMalformed: It is not of the engine's shape.
        """

    def abort_request(self, worker: Worker, engine_id: str) -> UpstreamRequest:
        """Build the request that tells the engine to stop ``engine_id``."""

    def abort_all_request(self, worker: Worker) -> UpstreamRequest | None:
        """Build the request that stops everything on the engine; ``None`` if it knows none."""

    async def identify(self, worker: Worker, timeout_s: float) -> EngineFacts:
        """Read the engine's metadata.

        Raises:
            IdentifyFailed: Unreachable, unauthorised, or not a serving engine; the message is for operators.
        """

    async def weight_version(self, worker: Worker, timeout_s: float) -> str | None:
        """The engine's label of its weights, ``None`` if it has none.

        Raises:
            IdentifyFailed: It did not tell; the message is for operators.
        """

    async def probe(self, worker: Worker, timeout_s: float) -> ProbeResult:
        """Ask the engine's cheap health check; never raises for network reasons."""

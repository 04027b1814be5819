"""The vLLM backend: ids by header, aborts by engine-side id, metadata and health."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import orjson

from backends.base import NO_CHANGES
from backends.control import bearer, get_body, get_optional_body, get_status
from backends.errors import CallEnded, IdentifyFailed, UpstreamError
from backends.json_body import JsonBody
from backends.types import EngineFacts, EngineIds, ProbeResult, Worker
from backends.upstream.base import Headers, Origin, UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch
from backends.vllm.metadata import facts_from, weight_version_from
from backends.vllm.output import has_output
from backends.vllm.pd import mooncake_engine_ids

# What the engine puts in front of the id that it was given, by route. Its abort route takes the whole.
_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/inference/v1/generate": "generate-tokens-",
}


class VLLMBackend:
    """Speaks vLLM's HTTP interface; see ``Backend`` for what each method promises.

    Args:
        client: Used for control calls; the data plane sends what ``generation_request`` builds by itself.
    """

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client
        # Ids of workers that are not in development mode, without which nobody pauses them or changes their weights.
        self._plain: set[str] = set()

    def engine_ids(self, path: str, base: str, *, batch_size: int | None, samples: int) -> EngineIds:
        """One id for the whole request; aborts of completions name each prompt, and samples go with their prompt."""
        del samples
        route = path.partition("?")[0]
        prefix = _PREFIXES.get(route)
        if prefix is None:
            return EngineIds((base,), ())
        if route == "/v1/completions":
            return EngineIds((base,), tuple(f"{prefix}{base}-{index}" for index in range(batch_size or 1)))
        return EngineIds((base,), (prefix + base,))

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
        """Build the request of one leg: the client's bytes as they are, id and rank in headers."""
        sent = [
            *headers,
            (b"accept", b"text/event-stream" if is_stream else b"application/json"),
            (b"x-request-id", ids.sent[0].encode()),
        ]
        if dp_rank is not None:
            sent.append((b"x-data-parallel-rank", b"%d" % dp_rank))
        return UpstreamRequest("POST", path, [*sent, *bearer(worker.api_key)], body.with_fields(changes))

    def shows_output(self, event_data: bytes) -> bool:
        """See ``has_output``.

        Raises:
            AnswerMalformed: It is not of the engine's shape.
        """
        return has_output(event_data)

    def abort_request(self, worker: Worker, engine_id: str) -> UpstreamRequest:
        """Build ``POST /inference/v1/abort_requests`` for one id; the route is there with ``--enable-scale-out``.

        Raises:
            ValueError: The id is empty.
        """
        if not engine_id:
            raise ValueError("an abort needs an id")
        return UpstreamRequest(
            "POST",
            "/inference/v1/abort_requests",
            [(b"content-type", b"application/json"), *bearer(worker.api_key)],
            [orjson.dumps({"request_ids": [engine_id]})],
        )

    def abort_all_request(self, worker: Worker) -> UpstreamRequest | None:
        """Build ``POST /abort_requests``, where the engine is not known to be without it; the other takes ids only."""
        if worker.id in self._plain:
            return None
        headers = [(b"content-type", b"application/json"), *bearer(worker.api_key)]
        return UpstreamRequest("POST", "/abort_requests", headers, [b"{}"])

    async def identify(self, worker: Worker, timeout_s: float) -> EngineFacts:
        """Read ``/version``, ``/v1/models``, ``/metrics``, and ``/kv_event_sources`` where there is one.

        A bootstrap port is that of Mooncake, whose server there knows the ids of the ranks.

        Raises:
            IdentifyFailed: See the message.
        """
        self._plain.discard(worker.id)
        version = await get_body(self._client, worker, ("/version",), timeout_s)
        models = await get_body(self._client, worker, ("/v1/models",), timeout_s)
        metrics = await get_body(self._client, worker, ("/metrics",), timeout_s)
        sources = await get_optional_body(self._client, worker, "/kv_event_sources", timeout_s)
        bootstrap = b""
        if worker.bootstrap_port is not None:
            at = replace(worker, api_key=None, origin=Origin("http", worker.origin.host, worker.bootstrap_port))
            bootstrap = await get_body(self._client, at, ("/query",), timeout_s)
        try:
            facts = facts_from(models, version, metrics, sources)
            if bootstrap:
                facts = replace(facts, transfer_engine_ids=mooncake_engine_ids(bootstrap, facts.dp_size))
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise IdentifyFailed(f"the engine's metadata is not as expected: {exc}") from exc
        try:
            return replace(facts, weight_version=await self.weight_version(worker, timeout_s))
        except IdentifyFailed:
            return facts  # its core is busy; it is asked again with the next probe

    async def weight_version(self, worker: Worker, timeout_s: float) -> str | None:
        """Ask ``/weight_info``, which only engines in development mode have."""
        if worker.id in self._plain:
            return None
        request = UpstreamRequest("GET", "/weight_info", bearer(worker.api_key), [])
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await fetch(self._client, worker.origin, request)
        except (UpstreamError, CallEnded, TimeoutError) as exc:
            raise IdentifyFailed(f"/weight_info: {str(exc) or 'no answer in time'}") from exc
        if status == 404:
            return None
        if status != 200:
            raise IdentifyFailed(f"/weight_info: status {status}")
        try:
            return weight_version_from(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise IdentifyFailed(f"/weight_info is not as expected: {exc}") from exc

    async def probe(self, worker: Worker, timeout_s: float) -> ProbeResult:
        """Ask ``/health``, which generates nothing and is good in a pause too, and then whether there is one."""
        try:
            async with asyncio.timeout(timeout_s):
                if await get_status(self._client, worker, "/health") != 200:
                    return ProbeResult.FAILED
                return ProbeResult.PAUSED if await self._is_paused(worker) else ProbeResult.UP
        except (UpstreamError, CallEnded, TimeoutError):
            return ProbeResult.FAILED

    async def _is_paused(self, worker: Worker) -> bool:
        """Only engines in development mode can be paused, and have the route; others are asked once a reading."""
        if worker.id in self._plain:
            return False
        request = UpstreamRequest("GET", "/is_paused", bearer(worker.api_key), [])
        status, body = await fetch(self._client, worker.origin, request)
        if status == 404:
            self._plain.add(worker.id)
        return status == 200 and body.replace(b" ", b"") == b'{"is_paused":true}'

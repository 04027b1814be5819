"""The SGLang backend: requests with its field names, aborts, metadata and health."""

import asyncio
from collections.abc import Sequence

import msgspec
import orjson

from backends.errors import CallEnded, IdentifyFailed, UpstreamError
from backends.json_body import JsonBody
from backends.lifecycle import CancelPlan, sglang_cancel_plan
from backends.sglang.metadata import facts_from
from backends.types import EngineFacts, ProbeResult, Worker
from backends.upstream.base import Headers, UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch

# The one route that takes a list of ids for a batch; elsewhere the items of "R" are named R_0, R_1, …
_LIST_OF_IDS_PATH = "/generate"


class SGLangBackend:
    """Speaks SGLang's HTTP interface; see ``Backend`` for what each method promises.

    Args:
        client: Used for control calls; the data plane sends what ``generation_request`` builds by itself.
    """

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client

    def engine_ids(self, path: str, base: str, batch_size: int | None) -> list[str]:
        """Ids of equal length that are no prefixes of each other, since the engine matches aborts by prefix.

        Only where the engine takes a list of them: the names that it makes of one id by itself are what they are, and
        an abort of item 1 also ends items 10 to 19.
        """
        if batch_size is None:
            return [base]
        if path.partition("?")[0] == _LIST_OF_IDS_PATH:
            return [f"{base[:24]}{index:08x}" for index in range(batch_size)]
        return [f"{base}_{index}" for index in range(batch_size)]

    def generation_request(
        self,
        worker: Worker,
        path: str,
        body: JsonBody,
        engine_ids: Sequence[str],
        *,
        is_batch: bool,
        dp_rank: int | None,
        is_stream: bool,
        headers: Headers,
    ) -> UpstreamRequest:
        """Build the request of one leg: the client's bytes with our id, and the rank if one was chosen."""
        if is_batch and path.partition("?")[0] == _LIST_OF_IDS_PATH:
            rid = orjson.dumps(list(engine_ids))
        else:
            rid = orjson.dumps(engine_ids[0].removesuffix("_0") if is_batch else engine_ids[0])
        changes = {"rid": rid}
        if dp_rank is not None:
            changes["routed_dp_rank"] = b"%d" % dp_rank
        accept = b"text/event-stream" if is_stream else b"application/json"
        return UpstreamRequest(
            "POST", path, [*headers, (b"accept", accept), *_bearer(worker.api_key)], body.with_fields(changes)
        )

    def cancel_plan(self, facts: EngineFacts, *, is_stream: bool, has_own_ids: bool, is_paused: bool) -> CancelPlan:
        """How a leg is told that its client is gone."""
        return sglang_cancel_plan(facts.version, is_stream=is_stream, has_own_ids=has_own_ids, is_paused=is_paused)

    def abort_request(self, worker: Worker, engine_id: str) -> UpstreamRequest:
        """Build ``POST /abort_request`` for one id.

        Raises:
            ValueError: The id is empty, which older engines take as "all".
        """
        if not engine_id:
            raise ValueError("an abort needs an id")
        return UpstreamRequest(
            "POST",
            "/abort_request",
            [(b"content-type", b"application/json"), *_bearer(worker.admin_api_key or worker.api_key)],
            [orjson.dumps({"rid": engine_id})],
        )

    async def identify(self, worker: Worker, timeout_s: float) -> EngineFacts:
        """Read ``/model_info`` and ``/server_info``.

        The first alone tells a serving engine from a follower node, whose dummy server answers 200 on ``/health``
        for ever and 404 here.

        Raises:
            IdentifyFailed: See the message.
        """
        model_info = await self._get_json(worker, ("/model_info", "/get_model_info"), timeout_s)
        server_info = await self._get_json(worker, ("/server_info", "/get_server_info"), timeout_s)
        models = await self._get_json(worker, ("/v1/models",), timeout_s)
        try:
            return facts_from(model_info, server_info, models)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise IdentifyFailed(f"the engine's metadata is not as expected: {exc}") from exc

    async def _get_json(self, worker: Worker, paths: Sequence[str], timeout_s: float) -> bytes:
        """Body of the first path that exists; later ones are the names that older releases use."""
        status, path = 0, ""
        for path in paths:
            request = UpstreamRequest("GET", path, [*_bearer(worker.api_key)], [])
            try:
                async with asyncio.timeout(timeout_s):
                    status, body = await fetch(self._client, worker.origin, request)
            except (UpstreamError, CallEnded) as exc:
                raise IdentifyFailed(f"{path}: {exc}") from exc
            except TimeoutError as exc:
                raise IdentifyFailed(f"{path}: no answer within {timeout_s:g} s") from exc
            if status == 200:
                return body
            if status in (401, 403):
                raise IdentifyFailed(f"{path}: {status}, the engine refuses this gateway's api key (api_key_env)")
            if status != 404:
                break
        hint = ": not a serving engine (a follower node answers like this)" if status == 404 else ""
        raise IdentifyFailed(f"{path}: status {status}{hint}")

    async def probe(self, worker: Worker, timeout_s: float) -> ProbeResult:
        """Ask ``/ready``, which generates nothing; a 503 beside a good ``/ping`` means paused, not dead."""
        try:
            async with asyncio.timeout(timeout_s):
                ready = await self._status(worker, "/ready")
                if ready == 200:
                    return ProbeResult.UP
                if ready not in (404, 503):
                    return ProbeResult.FAILED
                # Releases without /ready answer 404 there and are judged by /ping alone.
                ping = await self._status(worker, "/ping")
        except (UpstreamError, CallEnded, TimeoutError):
            return ProbeResult.FAILED
        if ping != 200:
            return ProbeResult.FAILED
        return ProbeResult.PAUSED if ready == 503 else ProbeResult.UP

    async def _status(self, worker: Worker, path: str) -> int:
        request = UpstreamRequest("GET", path, [*_bearer(worker.api_key)], [])
        status, _ = await fetch(self._client, worker.origin, request)
        return status


def _bearer(key: str | None) -> Headers:
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]

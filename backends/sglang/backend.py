"""The SGLang backend: requests with its field names, aborts, metadata and health."""

import asyncio
import enum
from collections.abc import Mapping

import msgspec
import orjson

from backends.base import NO_CHANGES
from backends.control import bearer, get_body, get_status
from backends.errors import CallEnded, IdentifyFailed, UpstreamError
from backends.json_body import JsonBody
from backends.quick_enum import quick
from backends.sglang.metadata import facts_from, weight_version_from
from backends.sse import DONE_DATA
from backends.types import EngineFacts, EngineIds, ProbeResult, Worker
from backends.upstream.base import Headers, UpstreamClient, UpstreamRequest

_RESPONSE_PREFIX = "resp_"
_MODEL_INFO = ("/model_info", "/get_model_info")


@quick
class _Style(enum.Enum):
    """How a route takes the id of a request."""

    LIST = "rid: a string, or a list of them for a batch"
    INDEXED = "rid: a string R, of which the engine makes R_0, R_1, … for the items of a batch"
    SINGLE = "rid: a string; there are no batches"
    RESPONSE = "request_id: resp_ and the id"


_LIST, _INDEXED, _SINGLE, _RESPONSE = _Style
_JSON_ACCEPTED = (b"accept", b"application/json")
_EVENTS_ACCEPTED = (b"accept", b"text/event-stream")
# Routes that are not here take no id.
_STYLES = {
    "/generate": _LIST,
    "/encode": _LIST,
    "/classify": _LIST,
    "/v1/embeddings": _LIST,
    "/v1/classify": _LIST,
    "/v1/completions": _INDEXED,
    "/v1/chat/completions": _SINGLE,
    "/v1/responses": _RESPONSE,
}


class SGLangBackend:
    """Speaks SGLang's HTTP interface; see ``Backend`` for what each method promises.

    Args:
        client: Used for control calls; the data plane sends what ``generation_request`` builds by itself.
    """

    def __init__(self, client: UpstreamClient) -> None:
        self._client = client

    def engine_ids(self, path: str, base: str, *, batch_size: int | None, samples: int) -> EngineIds:
        """Ids of equal length that are no prefixes of each other, since the engine matches aborts by prefix.

        Only where the engine takes a list of them: the names that it makes of one id by itself are what they are, and
        an abort of item 1 also ends items 10 to 19.
        """
        style = _STYLES.get(path.partition("?")[0])
        if style is None:
            return EngineIds((base,), ())
        if samples > 1:
            return EngineIds((base,), (), has_children=True)
        if style is _RESPONSE:
            return EngineIds((base,), (_RESPONSE_PREFIX + base,))
        if batch_size is None or style is _SINGLE:
            return EngineIds((base,), (base,))
        if style is _LIST:
            listed = tuple(f"{base[:24]}{index:08x}" for index in range(batch_size))
        else:
            listed = tuple(f"{base}_{index}" for index in range(batch_size))
        return EngineIds(listed, listed, names_items=True)

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
        """Build the request of one leg: the client's bytes with our id, and the rank if one was chosen."""
        style = _STYLES.get(path.partition("?")[0])
        fields = _id_field(style, ids)
        if changes:
            fields = {**changes, **fields}
        if "rid" in body.fields:  # whatever the route does with it: a client's id never reaches the engine
            fields.setdefault("rid", orjson.dumps(ids.sent[0]))
        sent = [*headers, _EVENTS_ACCEPTED if is_stream else _JSON_ACCEPTED]
        if dp_rank is not None and style is None:
            sent.append((b"x-data-parallel-rank", b"%d" % dp_rank))
        elif dp_rank is not None:
            fields["routed_dp_rank"] = b"%d" % dp_rank
        if worker.api_key is not None:
            sent += bearer(worker.api_key)
        return UpstreamRequest("POST", path, sent, body.with_fields(fields))

    def shows_output(self, event_data: bytes) -> bool:
        """Every event but the end marker: nothing of a pair depends on it here."""
        return event_data not in (b"", DONE_DATA)

    def abort_request(self, worker: Worker, engine_id: str) -> UpstreamRequest:
        """Build ``POST /abort_request`` for one id.

        Raises:
            ValueError: The id is empty, which older engines take as "all".
        """
        if not engine_id:
            raise ValueError("an abort needs an id")
        return _abort(worker, {"rid": engine_id})

    def abort_all_request(self, worker: Worker) -> UpstreamRequest | None:
        """Build ``POST /abort_request`` for everything; it also reaches what a lost abort has made deaf to others."""
        return _abort(worker, {"abort_all": True})

    async def identify(self, worker: Worker, timeout_s: float) -> EngineFacts:
        """Read ``/model_info`` and ``/server_info``.

        The first alone tells a serving engine from a follower node, whose dummy server answers 200 on ``/health``
        for ever and 404 here.

        Raises:
            IdentifyFailed: See the message.
        """
        model_info = await get_body(self._client, worker, _MODEL_INFO, timeout_s)
        server_info = await get_body(self._client, worker, ("/server_info", "/get_server_info"), timeout_s)
        models = await get_body(self._client, worker, ("/v1/models",), timeout_s)
        try:
            return facts_from(model_info, server_info, models)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise IdentifyFailed(f"the engine's metadata is not as expected: {exc}") from exc

    async def weight_version(self, worker: Worker, timeout_s: float) -> str | None:
        """Read ``/model_info``, which the front end answers by itself, however busy the schedulers are."""
        body = await get_body(self._client, worker, _MODEL_INFO, timeout_s)
        try:
            return weight_version_from(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
            raise IdentifyFailed(f"the engine's metadata is not as expected: {exc}") from exc

    async def probe(self, worker: Worker, timeout_s: float) -> ProbeResult:
        """Ask ``/ready``, which generates nothing; a 503 beside a good ``/ping`` means paused, not dead."""
        try:
            async with asyncio.timeout(timeout_s):
                ready = await get_status(self._client, worker, "/ready")
                if ready == 200:
                    return ProbeResult.UP
                if ready not in (404, 503):
                    return ProbeResult.FAILED
                # Releases without /ready answer 404 there and are judged by /ping alone.
                ping = await get_status(self._client, worker, "/ping")
        except (UpstreamError, CallEnded, TimeoutError):
            return ProbeResult.FAILED
        if ping != 200:
            return ProbeResult.FAILED
        return ProbeResult.PAUSED if ready == 503 else ProbeResult.UP


def _abort(worker: Worker, body: dict[str, object]) -> UpstreamRequest:
    headers = [(b"content-type", b"application/json"), *bearer(worker.admin_api_key or worker.api_key)]
    return UpstreamRequest("POST", "/abort_request", headers, [orjson.dumps(body)])


def _id_field(style: _Style | None, ids: EngineIds) -> dict[str, bytes]:
    """The body's field that carries the id, if the route takes one."""
    if style is None:
        return {}
    if style is _RESPONSE:
        return {"request_id": orjson.dumps(_RESPONSE_PREFIX + ids.sent[0])}
    if not ids.names_items:
        return {"rid": orjson.dumps(ids.sent[0])}
    if style is _LIST:
        return {"rid": orjson.dumps(ids.sent)}
    return {"rid": orjson.dumps(ids.sent[0].removesuffix("_0"))}

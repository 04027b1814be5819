"""vLLM's requests, ids and aborts; its metadata and health over real sockets with captured bytes."""

from collections.abc import AsyncIterator

import orjson
import pytest

from backends.errors import IdentifyFailed
from backends.json_body import JsonBody
from backends.types import EngineIds, EngineKind, ProbeResult, Role, Worker
from backends.upstream.base import Headers, Origin, UpstreamRequest
from backends.upstream.h1 import H1Client
from backends.vllm.backend import VLLMBackend
from tests.fakes.raw_server import Connection, RawServer, Script, answer, raw_server
from tests.fakes.running import PATIENCE_S
from tests.simulator.wire import VLLM_CAPTURES, load_vllm_capture

BASE = "0123456789abcdef" * 2
WORKER = Worker("w", "http://w:1", Origin("http", "w", 1))
KEYED = Worker("w", "http://w:1", Origin("http", "w", 1), "key", "admin")


@pytest.fixture
async def client() -> AsyncIterator[H1Client]:
    """A client for control calls."""
    one = H1Client()
    yield one
    await one.aclose()


@pytest.fixture
def backend(client: H1Client) -> VLLMBackend:
    """The backend."""
    return VLLMBackend(client)


# Requests.


@pytest.mark.parametrize(
    ("path", "batch_size", "samples", "abortable"),
    [
        pytest.param("/v1/chat/completions", None, 1, [f"chatcmpl-{BASE}"], id="chat"),
        pytest.param("/v1/chat/completions?x=1", None, 3, [f"chatcmpl-{BASE}"], id="samples share their prompt's"),
        pytest.param("/v1/completions", None, 1, [f"cmpl-{BASE}-0"], id="one prompt has a number too"),
        pytest.param("/v1/completions", 3, 2, [f"cmpl-{BASE}-{i}" for i in range(3)], id="one for each prompt"),
        pytest.param("/inference/v1/generate", None, 1, [f"generate-tokens-{BASE}"], id="tokens"),
        pytest.param("/v1/embeddings", 2, 1, [], id="a route without"),
    ],
)
async def test_engine_ids(
    path: str, batch_size: int | None, samples: int, abortable: list[str], backend: VLLMBackend
) -> None:
    found = backend.engine_ids(path, BASE, batch_size=batch_size, samples=samples)
    assert found == EngineIds((BASE,), tuple(abortable))


def sent(
    backend: VLLMBackend, path: str = "/v1/completions", raw: bytes = b"{}", worker: Worker = WORKER, **changes: object
) -> UpstreamRequest:
    """The request of one leg."""
    options = {"dp_rank": None, "is_stream": False, "headers": [], **changes}
    ids = backend.engine_ids(path, BASE, batch_size=None, samples=1)
    return backend.generation_request(worker, path, JsonBody.parse(raw), ids, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "changes", "body"),
    [
        pytest.param(b'{"prompt": "a" }', {}, b'{"prompt": "a" }', id="the client's own bytes"),
        pytest.param(b'{"prompt":"a"}', {"dp_rank": 3}, b'{"prompt":"a"}', id="a rank stands in a header"),
        pytest.param(b'{"prompt":"a","stream":false}', {"changes": {"stream": b"true"}},
                     b'{"prompt":"a","stream":true}', id="fields that are set"),
    ],
)  # fmt: skip
async def test_bodies(raw: bytes, changes: dict[str, object], body: bytes, backend: VLLMBackend) -> None:
    request = sent(backend, "/v1/completions?x=1", raw, WORKER, **changes)
    assert (request.method, request.path) == ("POST", "/v1/completions?x=1")
    assert b"".join(request.body) == body


async def test_headers(backend: VLLMBackend) -> None:
    passed: Headers = [(b"content-type", b"application/json"), (b"x-session-id", b"s")]
    of_us = (b"x-request-id", BASE.encode())
    unary = sent(backend, headers=passed)
    stream = sent(backend, headers=passed, is_stream=True)
    keyed = sent(backend, worker=KEYED, dp_rank=0)
    assert unary.headers == [*passed, (b"accept", b"application/json"), of_us]
    assert stream.headers == [*passed, (b"accept", b"text/event-stream"), of_us]
    assert keyed.headers == [
        (b"accept", b"application/json"),
        of_us,
        (b"x-data-parallel-rank", b"0"),
        (b"authorization", b"Bearer key"),
    ]


@pytest.mark.parametrize(("worker", "key"), [(WORKER, None), (KEYED, b"Bearer key")], ids=["no key", "a key"])
async def test_aborts(worker: Worker, key: bytes | None, backend: VLLMBackend) -> None:
    request = backend.abort_request(worker, f"cmpl-{BASE}-0")
    assert (request.method, request.path) == ("POST", "/inference/v1/abort_requests")
    assert orjson.loads(b"".join(request.body)) == {"request_ids": [f"cmpl-{BASE}-0"]}
    assert dict(request.headers).get(b"authorization") == key


async def test_an_abort_with_an_empty_id_is_never_built(backend: VLLMBackend) -> None:
    with pytest.raises(ValueError, match="needs an id"):
        backend.abort_request(WORKER, "")


async def test_the_role_of_a_chat_is_no_output(backend: VLLMBackend) -> None:
    assert not backend.shows_output(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}')
    assert backend.shows_output(b'{"choices":[{"delta":{"content":"a"}}]}')


# Metadata and health.


def served(paths: dict[bytes, bytes]) -> Script:
    """Answer each path with fixed bytes; everything else with 404."""

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            path = request.line.split(b" ")[1]
            await connection.send(paths.get(path, answer(b'{"detail":"Not Found"}', status=b"404 Not Found")))

    return script


def worker_at(server: RawServer, api_key: str | None = None) -> Worker:
    """The worker behind a server."""
    return Worker("w", "http://w", server.origin, api_key)


TEXT = b"content-type: text/plain; version=1.0.0; charset=utf-8"
GOOD = {
    b"/version": load_vllm_capture("misc/version").response,
    b"/v1/models": load_vllm_capture("misc/models").response,
    b"/metrics": answer((VLLM_CAPTURES / "misc/metrics-vllm-samples.txt").read_bytes(), TEXT),
    b"/health": load_vllm_capture("misc/health").response,
}


async def test_identify_reads_a_real_engine(backend: VLLMBackend) -> None:
    async with raw_server(served(GOOD)) as server:
        facts = await backend.identify(worker_at(server, "key"), PATIENCE_S)
        assert (facts.engine, facts.version, facts.role) == (EngineKind.VLLM, (0, 32, 0), Role.REGULAR)
        assert (facts.models, facts.page_size, facts.dp_size) == (("tiny", "tiny-alias"), 32, 1)
        assert [request.line for request in server.requests] == [
            b"GET /version HTTP/1.1",
            b"GET /v1/models HTTP/1.1",
            b"GET /metrics HTTP/1.1",
            b"GET /kv_event_sources HTTP/1.1",
            b"GET /weight_info HTTP/1.1",
        ]
        assert (facts.kv_announcement, facts.weight_version) == (b"", None)  # this one has no such routes
        assert all((b"authorization", b"Bearer key") in request.headers for request in server.requests)


@pytest.mark.parametrize(
    ("path", "reply", "says"),
    [
        pytest.param(b"/version", None, "not a serving engine", id="no engine of this kind"),
        pytest.param(b"/v1/models", answer(b'{"error":"Unauthorized"}', status=b"401 Unauthorized"), "api_key_env",
                     id="key refused"),
        pytest.param(b"/v1/models", answer(b'{"error":"Forbidden"}', status=b"403 Forbidden"), "api_key_env",
                     id="key forbidden"),
        pytest.param(b"/metrics", None, "/metrics: status 404", id="metrics switched off"),
        pytest.param(b"/version", answer(status=b"500 Internal Server Error"), "/version: status 500$", id="500"),
        pytest.param(b"/version", answer(b"<html>", b"content-type: text/html"), "not as expected", id="HTML"),
        pytest.param(b"/v1/models", answer(b"[" * 100_000), "not as expected", id="depth"),
        pytest.param(b"/v1/models", answer(b'{"data":[]}'), "lists no model", id="no model"),
        pytest.param(b"/metrics", answer(b'vllm:cache_config_info{block_size="%b"} 1.0\n' % (b"9" * 5000), TEXT),
                     "not as expected", id="a number without end"),
        pytest.param(b"/metrics", b"rubbish", "valid HTTP", id="no HTTP"),
    ],
)  # fmt: skip
async def test_identify_says_why_not(path: bytes, reply: bytes | None, says: str, backend: VLLMBackend) -> None:
    paths = {key: value for key, value in GOOD.items() if key != path}
    if reply is not None:
        paths[path] = reply
    async with raw_server(served(paths)) as server:
        with pytest.raises(IdentifyFailed, match=says):
            await backend.identify(worker_at(server), PATIENCE_S)


async def test_identify_has_a_time_limit(backend: VLLMBackend) -> None:
    async with raw_server(Connection.hang) as server:
        with pytest.raises(IdentifyFailed, match=r"no answer within 0\.02 s"):
            await backend.identify(worker_at(server), 0.02)


async def test_identify_of_nobody(backend: VLLMBackend) -> None:
    async with raw_server(served(GOOD)) as server:
        worker = worker_at(server)
    with pytest.raises(IdentifyFailed, match="cannot connect"):
        await backend.identify(worker, PATIENCE_S)


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        pytest.param(GOOD[b"/health"], ProbeResult.UP, id="healthy"),
        pytest.param(load_vllm_capture("engine-death/health-after").response, ProbeResult.FAILED, id="engine died"),
        pytest.param(None, ProbeResult.FAILED, id="no engine at all"),
        pytest.param(b"rubbish", ProbeResult.FAILED, id="no HTTP"),
    ],
)
async def test_probe(reply: bytes | None, result: ProbeResult, backend: VLLMBackend) -> None:
    async with raw_server(served({} if reply is None else {b"/health": reply})) as server:
        assert await backend.probe(worker_at(server), PATIENCE_S) is result


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        pytest.param(b'{"is_paused":true}', ProbeResult.PAUSED, id="paused"),
        pytest.param(b'{"is_paused": true}', ProbeResult.PAUSED, id="paused, with a space"),
        pytest.param(b'{"is_paused":false}', ProbeResult.UP, id="not paused"),
        pytest.param(b"true", ProbeResult.UP, id="something else"),
    ],
)
async def test_probe_tells_a_pause(reply: bytes, result: ProbeResult, backend: VLLMBackend) -> None:
    async with raw_server(served({b"/health": GOOD[b"/health"], b"/is_paused": answer(reply)})) as server:
        assert await backend.probe(worker_at(server), PATIENCE_S) is result


async def test_an_engine_that_cannot_be_paused_is_asked_once_after_each_reading(backend: VLLMBackend) -> None:
    asked: list[bytes] = []

    async def script(connection: Connection) -> None:
        while True:
            asked.append((await connection.request()).line.split(b" ")[1])
            await connection.send(GOOD.get(asked[-1], answer(b"{}", status=b"404 Not Found")))

    async with raw_server(script) as server:
        worker = worker_at(server)
        for _ in range(2):
            await backend.identify(worker, PATIENCE_S)
            asked.clear()
            for _ in range(3):
                assert await backend.probe(worker, PATIENCE_S) is ProbeResult.UP
            assert asked == [b"/health", b"/is_paused", b"/health", b"/health"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        pytest.param(answer(b'{"weight_version":"7"}'), "7", id="a version"),
        pytest.param(answer(b'{"weight_version":null}'), None, id="none"),
        pytest.param(None, None, id="no such route"),
        pytest.param(answer(b"{}", status=b"500 Internal Server Error"), "status 500", id="500"),
        pytest.param(answer(b'{"weight_version":7}'), "not as expected", id="a number"),
        pytest.param(b"rubbish", "valid HTTP", id="no HTTP"),
    ],
)
async def test_the_version_of_the_weights(reply: bytes | None, expected: str | None, backend: VLLMBackend) -> None:
    async with raw_server(served(GOOD | ({} if reply is None else {b"/weight_info": reply}))) as server:
        worker = worker_at(server)
        fails = expected is not None and not expected.isdigit()
        if fails:
            with pytest.raises(IdentifyFailed, match=expected):
                await backend.weight_version(worker, PATIENCE_S)
        else:
            assert await backend.weight_version(worker, PATIENCE_S) == expected
        # A core that is too busy to tell it is no reason not to use the engine.
        facts = await backend.identify(worker, PATIENCE_S)
        assert facts.weight_version == (None if fails else expected)


async def test_everything_is_aborted_where_the_engine_may_know_how(backend: VLLMBackend) -> None:
    async with raw_server(served(GOOD)) as server:
        worker = worker_at(server, "key")
        request = backend.abort_all_request(worker)
        assert request is not None
        assert (request.path, request.body) == ("/abort_requests", [b"{}"])
        await backend.probe(worker, PATIENCE_S)  # from which it is known to be in no development mode
        assert backend.abort_all_request(worker) is None


async def test_probe_has_a_time_limit_and_survives_nobody(backend: VLLMBackend) -> None:
    async with raw_server(Connection.hang) as server:
        worker = worker_at(server)
        assert await backend.probe(worker, 0.02) is ProbeResult.FAILED
    assert await backend.probe(worker, PATIENCE_S) is ProbeResult.FAILED

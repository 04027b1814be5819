"""SGLang's requests, ids and aborts; its metadata and health over real sockets with captured bytes."""

import re
from collections.abc import AsyncIterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import IdentifyFailed
from backends.json_body import JsonBody
from backends.sglang.backend import SGLangBackend
from backends.types import EngineIds, ProbeResult, Role, Worker
from backends.upstream.base import Headers, Origin, UpstreamRequest
from backends.upstream.h1 import H1Client
from tests.fakes.raw_server import Connection, RawServer, Script, answer, raw_server
from tests.fakes.running import PATIENCE_S
from tests.simulator.wire import load_capture

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
def backend(client: H1Client) -> SGLangBackend:
    """The backend."""
    return SGLangBackend(client)


# Requests.


@pytest.mark.parametrize(
    ("path", "batch_size", "ids"),
    [
        pytest.param("/generate", None, [BASE], id="single"),
        pytest.param("/v1/chat/completions", None, [BASE], id="single chat"),
        pytest.param("/generate", 1, [BASE[:24] + "00000000"], id="batch of one"),
        pytest.param("/generate?x=1", 2, [BASE[:24] + "00000000", BASE[:24] + "00000001"], id="query"),
        pytest.param("/v1/completions", 2, [BASE + "_0", BASE + "_1"], id="names that the engine makes"),
    ],
)
async def test_engine_ids(path: str, batch_size: int | None, ids: list[str], backend: SGLangBackend) -> None:
    found = backend.engine_ids(path, BASE, batch_size=batch_size, samples=1)
    assert found.sent == found.abortable == tuple(ids)
    assert found.names_items is (batch_size is not None)


@pytest.mark.parametrize(
    ("path", "samples", "ids"),
    [
        pytest.param("/generate", 2, EngineIds((BASE,), (), has_children=True), id="samples get ids of their own"),
        pytest.param("/v1/chat/completions", 3, EngineIds((BASE,), (), has_children=True), id="choices too"),
        pytest.param("/v1/responses", 1, EngineIds((BASE,), ("resp_" + BASE,)), id="responses"),
        pytest.param("/v1/messages", 1, EngineIds((BASE,), ()), id="a route that takes no id"),
    ],
)
async def test_ids_that_cannot_be_chosen(path: str, samples: int, ids: EngineIds, backend: SGLangBackend) -> None:
    assert backend.engine_ids(path, BASE, batch_size=None, samples=samples) == ids


async def test_s2_15_batch_ids_have_one_length_and_are_no_prefixes(backend: SGLangBackend) -> None:
    ids = backend.engine_ids("/generate", BASE, batch_size=300, samples=1).sent
    assert len(set(ids)) == 300
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)


def sent(
    backend: SGLangBackend, path: str, raw: bytes, batch_size: int | None = None, **changes: object
) -> UpstreamRequest:
    """The request of one leg."""
    options = {"dp_rank": None, "is_stream": False, "headers": [], **changes}
    return backend.generation_request(
        WORKER,
        path,
        JsonBody.parse(raw),
        backend.engine_ids(path, BASE, batch_size=batch_size, samples=1),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("path", "raw", "batch_size", "changes", "body"),
    [
        pytest.param("/generate", b'{"text":"a"}', None, {}, b'{"text":"a","rid":"%b"}' % BASE.encode(), id="added"),
        pytest.param("/generate", b'{"rid":"mine","text":"a"}', None, {}, b'{"rid":"%b","text":"a"}' % BASE.encode(),
                     id="replaced"),
        pytest.param("/generate", b'{"text":"a"}', None, {"dp_rank": 3},
                     b'{"text":"a","rid":"%b","routed_dp_rank":3}' % BASE.encode(), id="rank"),
        pytest.param("/generate", b'{"text":["a","b"]}', 2, {},
                     b'{"text":["a","b"],"rid":["%b00000000","%b00000001"]}' % ((BASE[:24].encode(),) * 2),
                     id="batch"),
        pytest.param("/v1/completions", b'{"prompt":["a","b"],"rid":["x","y"]}', 2, {},
                     b'{"prompt":["a","b"],"rid":"%b"}' % BASE.encode(), id="batch, the engine names items"),
        pytest.param("/v1/embeddings", b'{"input":["a","b"]}', 2, {},
                     b'{"input":["a","b"],"rid":["%b00000000","%b00000001"]}' % ((BASE[:24].encode(),) * 2),
                     id="a batch of embeddings takes a list only"),
        pytest.param("/v1/responses", b'{"input":"a"}', None, {},
                     b'{"input":"a","request_id":"resp_%b"}' % BASE.encode(), id="responses"),
        pytest.param("/v1/messages", b'{"messages":[]}', None, {"dp_rank": 1}, b'{"messages":[]}', id="no id taken"),
        pytest.param("/v1/messages", b'{"rid":"mine"}', None, {}, b'{"rid":"%b"}' % BASE.encode(), id="not mine"),
        pytest.param("/v1/completions", b'{"prompt":["a"]}', 1, {"dp_rank": 0},
                     b'{"prompt":["a"],"rid":"%b","routed_dp_rank":0}' % BASE.encode(), id="batch of one"),
    ],
)  # fmt: skip
async def test_bodies(
    path: str, raw: bytes, batch_size: int | None, changes: dict[str, object], body: bytes, backend: SGLangBackend
) -> None:
    request = sent(backend, path, raw, batch_size, **changes)
    assert (request.method, request.path) == ("POST", path)
    assert b"".join(request.body) == body


async def test_headers(backend: SGLangBackend) -> None:
    passed: Headers = [(b"content-type", b"application/json"), (b"x-session-id", b"s")]
    unary = sent(backend, "/generate", b"{}", headers=passed)
    stream = sent(backend, "/generate", b"{}", headers=passed, is_stream=True)
    assert unary.headers == [*passed, (b"accept", b"application/json")]
    assert stream.headers == [*passed, (b"accept", b"text/event-stream")]
    keyed = backend.generation_request(
        KEYED,
        "/generate",
        JsonBody.parse(b"{}"),
        EngineIds((BASE,), (BASE,)),
        dp_rank=None,
        is_stream=False,
        headers=[],
    )
    assert keyed.headers[-1] == (b"authorization", b"Bearer key")


@pytest.mark.parametrize(
    ("worker", "key"),
    [
        pytest.param(WORKER, None, id="no key"),
        pytest.param(Worker("w", "", WORKER.origin, "key"), b"Bearer key", id="the ordinary key"),
        pytest.param(KEYED, b"Bearer admin", id="the admin key"),
    ],
)
async def test_aborts(worker: Worker, key: bytes | None, backend: SGLangBackend) -> None:
    request = backend.abort_request(worker, BASE)
    assert (request.method, request.path) == ("POST", "/abort_request")
    assert orjson.loads(b"".join(request.body)) == {"rid": BASE}
    assert dict(request.headers).get(b"authorization") == key


async def test_a2_13_an_abort_with_an_empty_id_is_never_built(backend: SGLangBackend) -> None:
    with pytest.raises(ValueError, match="needs an id"):
        backend.abort_request(WORKER, "")


# Explicit, since Hypothesis takes seconds to list all characters on a first run.
TEXT = st.text('aé\u0001"\\/\u2028\U0001f600', max_size=5)


@given(st.dictionaries(TEXT, st.integers(-(2**63), 2**64 - 1) | TEXT))
def test_a2_14_extras_reach_the_engine(extras: dict[str, object]) -> None:
    request = SGLangBackend.generation_request(
        None,  # type: ignore[arg-type]
        WORKER,
        "/generate",
        JsonBody.parse(orjson.dumps(extras)),
        EngineIds((BASE,), (BASE,)),
        dp_rank=None,
        is_stream=False,
        headers=[],
    )
    assert orjson.loads(b"".join(request.body)) == {**extras, "rid": BASE}


@pytest.mark.parametrize(("data", "expected"), [(b"", False), (b"[DONE]", False), (b'{"text":""}', True)])
async def test_any_event_shows_output(backend: SGLangBackend, data: bytes, expected: bool) -> None:
    assert backend.shows_output(data) is expected


# Metadata and health.


def served(paths: dict[bytes, bytes]) -> Script:
    """Answer each path with fixed bytes; everything else with 404."""

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            path = request.line.split(b" ")[1]
            await connection.send(paths.get(path, answer(b'{"detail":"Not Found"}', status=b"404 Not Found")))

    return script


def captured(path: str) -> bytes:
    """A captured answer as it came; all captures end their connection."""
    return load_capture(path.removesuffix(".http")).response


def worker_at(server: RawServer, api_key: str | None = None) -> Worker:
    """The worker behind a server."""
    return Worker("w", "http://w", server.origin, api_key)


GOOD = {
    b"/model_info": captured("http/get_model_info.http"),
    b"/server_info": captured("http/get_server_info.http"),
    b"/v1/models": captured("http/get_v1_models.http"),
    b"/ready": captured("http/get_ready.http"),
    b"/ping": captured("http/get_ping.http"),
}


async def test_identify_reads_a_real_engine(backend: SGLangBackend) -> None:
    async with raw_server(served(GOOD)) as server:
        facts = await backend.identify(worker_at(server, "key"), PATIENCE_S)
        assert (facts.version_text, facts.model_id, facts.role, facts.page_size) == ("0.5.23", "model", Role.REGULAR, 4)
        assert [request.line for request in server.requests] == [
            b"GET /model_info HTTP/1.1",
            b"GET /server_info HTTP/1.1",
            b"GET /v1/models HTTP/1.1",
        ]
        assert all((b"authorization", b"Bearer key") in request.headers for request in server.requests)


async def test_identify_knows_the_older_names(backend: SGLangBackend) -> None:
    older = {
        b"/get_model_info": GOOD[b"/model_info"],
        b"/get_server_info": captured("http_dp2/server_info.http"),
        b"/v1/models": GOOD[b"/v1/models"],
    }
    async with raw_server(served(older)) as server:
        assert (await backend.identify(worker_at(server), PATIENCE_S)).dp_size == 2


@pytest.mark.parametrize(
    ("path", "reply", "says"),
    [
        pytest.param(b"/model_info", None, "follower", id="a follower node"),
        pytest.param(b"/model_info", answer(b'{"error":"Unauthorized"}', status=b"401 Unauthorized"), "api_key_env",
                     id="key refused"),
        pytest.param(b"/server_info", answer(b'{"error":"Forbidden"}', status=b"403 Forbidden"), "api_key_env",
                     id="key forbidden"),
        pytest.param(b"/server_info", answer(b"oops", status=b"500 Internal Server Error"), "status 500", id="500"),
        pytest.param(b"/model_info", answer(b"<html>", b"content-type: text/html"), "not as expected", id="HTML"),
        pytest.param(b"/model_info", answer(b"[" * 100_000), "not as expected", id="depth"),
        pytest.param(b"/v1/models", answer(b'{"data":{}}'), "not as expected", id="other types"),
        pytest.param(b"/server_info", b"rubbish", "valid HTTP", id="no HTTP"),
        pytest.param(b"/server_info", b"HTTP/1.1 200 OK\r\ncontent-length: 20000000\r\n\r\n" + bytes(17_000_000),
                     "larger than", id="a body without end"),
    ],
)  # fmt: skip
async def test_identify_says_why_not(path: bytes, reply: bytes | None, says: str, backend: SGLangBackend) -> None:
    paths = {key: value for key, value in GOOD.items() if key != path}
    if reply is not None:
        paths[path] = reply
    async with raw_server(served(paths)) as server:
        with pytest.raises(IdentifyFailed, match=says):
            await backend.identify(worker_at(server), PATIENCE_S)


async def test_identify_has_a_time_limit(backend: SGLangBackend) -> None:
    async with raw_server(Connection.hang) as server:
        with pytest.raises(IdentifyFailed, match=r"no answer within 0\.02 s"):
            await backend.identify(worker_at(server), 0.02)


async def test_identify_of_nobody(backend: SGLangBackend) -> None:
    async with raw_server(served(GOOD)) as server:
        worker = worker_at(server)
    with pytest.raises(IdentifyFailed, match="cannot connect"):
        await backend.identify(worker, PATIENCE_S)


async def test_a_key_that_cannot_be_sent_is_said_and_not_sent(backend: SGLangBackend) -> None:
    async with raw_server(served(GOOD)) as server:
        with pytest.raises(IdentifyFailed, match="line break"):
            await backend.identify(worker_at(server, "key\n"), PATIENCE_S)
        assert server.requests == []


UNAVAILABLE = answer(b"", status=b"503 Service Unavailable")
FAILING = answer(b"", status=b"500 Internal Server Error")


@pytest.mark.parametrize(
    ("paths", "result"),
    [
        pytest.param({b"/ready": GOOD[b"/ready"]}, ProbeResult.UP, id="ready"),
        pytest.param({b"/ready": UNAVAILABLE, b"/ping": GOOD[b"/ping"]}, ProbeResult.PAUSED, id="paused"),
        pytest.param({b"/ping": GOOD[b"/ping"]}, ProbeResult.UP, id="a release without /ready"),
        pytest.param({b"/ready": UNAVAILABLE, b"/ping": UNAVAILABLE}, ProbeResult.FAILED, id="neither"),
        pytest.param({}, ProbeResult.FAILED, id="no engine at all"),
        pytest.param({b"/ready": FAILING, b"/ping": GOOD[b"/ping"]}, ProbeResult.FAILED, id="an error is not a pause"),
        pytest.param({b"/ready": b"rubbish", b"/ping": GOOD[b"/ping"]}, ProbeResult.FAILED, id="no HTTP"),
    ],
)
async def test_probe(paths: dict[bytes, bytes], result: ProbeResult, backend: SGLangBackend) -> None:
    async with raw_server(served(paths)) as server:
        assert await backend.probe(worker_at(server), PATIENCE_S) is result


async def test_probe_has_a_time_limit_and_survives_nobody(backend: SGLangBackend) -> None:
    async with raw_server(Connection.hang) as server:
        worker = worker_at(server)
        assert await backend.probe(worker, 0.02) is ProbeResult.FAILED
    assert await backend.probe(worker, PATIENCE_S) is ProbeResult.FAILED

"""Random bytes as bodies and as whole requests: never a 500, never a hang, nothing left, no worker in danger."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from gateway.routes import ROUTES
from tests.fakes.running import TIME_SCALE, RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Wire, request_bytes, wire

PATHS = [path for path, route in ROUTES.items() if "POST" in route.methods]
# An answer, or the decision to wait for more, comes within this time.
QUIET_S = 0.05 * TIME_SCALE
FIELDS = [
    "text", "input_ids", "rid", "stream", "model", "n", "prompt", "input", "messages", "query", "items", "logprobs",
    "sampling_params", "top_logprobs_num", "input_embeds", "return_logprob", "return_flat_raw_output_top_logprobs",
    "bootstrap_room", "session_id", "background", "positional_embed_overrides", "label_token_ids",
]  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["", "model", "-1", "a\r\nb", "\x00", "true"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), values, max_size=4)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A body that was valid, with a few bytes changed, cut out or doubled."""
    raw = bytearray(json.dumps(draw(bodies)).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        raw[at : at + draw(st.integers(0, 2))] = draw(st.binary(max_size=2) | st.sampled_from([b'"', b"{", b"]", b","]))
    return bytes(raw)


_TOKENS = [
    b"POST ", b"PUT ", b"GET ", b"/generate", b"/v1/chat/completions", b"/health", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n",
    b"Host: g\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"12", b"0", b"5",
    b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"X-Request-Id: a\r\n", b"\r\n",
    b"\r\n\r\n",
    b"\n", b"\r", b" ", b":", b"0\r\n\r\n", b"c\r\n", b'{"text":"a"}', b'{"text":"a","stream":true}', b"\x00", b"\xff",
]  # fmt: skip
requests = st.lists(st.sampled_from(_TOKENS) | st.binary(max_size=4), max_size=14).map(b"".join)
_START = b"POST /generate HTTP/1.1\r\nHost: g\r\n"
starts = st.sampled_from(
    [b"", _START, _START + b"Content-Length: 12\r\n", _START + b"Transfer-Encoding: chunked\r\n\r\n"]
)


class Fuzzed:
    """A gateway in front of an engine, in a loop that examples of a synchronous test can run in."""

    def __init__(self, runner: asyncio.Runner, front: RunningGateway, engine: ScriptEngine) -> None:
        self.front = front
        self.engine = engine
        self._runner = runner

    def body(self, body: bytes) -> None:
        """Send a body to every route and check what comes of it."""
        self._runner.run(self._body(body))

    def connection(self, data: bytes, cuts: list[int]) -> None:
        """Send bytes in pieces and check what comes of them."""
        self._runner.run(self._connection(data, cuts))

    async def _body(self, body: bytes) -> None:
        self.front.records.clear()
        async with wire(self.front.address) as connection:
            for path in PATHS:
                self.engine.requests.clear()
                await connection.send(request_bytes(path, body))
                answer = await connection.answer()
                assert answer.is_whole
                assert answer.status in (200, 400, 404)
                if answer.status == 200:
                    assert len(self.engine.requests) == 1
                    _assert_harmless(self.engine.requests[0], path)
                else:
                    assert answer.json()["error"]["code"] == answer.status
                    assert self.engine.requests == []
        assert len(self.front.records) == len(PATHS)

    async def _connection(self, data: bytes, cuts: list[int]) -> None:
        async with wire(self.front.address) as connection:
            for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                try:
                    await connection.send(data[start:end])
                except ConnectionError:
                    break
                await asyncio.sleep(0)
            received = await _all_of(connection)
            connection.reset()
        assert b" 500 " not in received
        assert received == b"" or received.startswith(b"HTTP/1.1 ")
        await self.front.settle()


def _assert_harmless(request: SeenRequest, path: str) -> None:
    """What has passed is an object under an id of the gateway's, without what kills an engine."""
    sent = json.loads(request.body.decode("utf-8", "replace"))
    assert request.path == path
    assert not any(key.startswith("bootstrap_") and value is not None for key, value in sent.items())
    assert sent.get("positional_embed_overrides") is None
    if path == "/generate":
        assert sent.get("text") != ""
        assert not isinstance(sent.get("text"), list) or "" not in sent["text"]
    ids = sent.get("input_ids")
    flat = list(_numbers(ids)) if isinstance(ids, list) else []
    assert all(0 <= number < 2**31 for number in flat)


def _numbers(value: Any) -> Iterator[int]:
    for one in value if isinstance(value, list) else []:
        if isinstance(one, list):
            yield from _numbers(one)
        elif isinstance(one, int):
            yield one


async def _all_of(connection: Wire) -> bytes:
    """What comes until the gateway closes, or has nothing more to say."""
    received = b""
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                part = await connection.reader.read(65536)
        except TimeoutError:
            return received
        except ConnectionError:
            return received
        if not part:
            return received
        received += part


async def _answer(request: SeenRequest, reply: Reply) -> None:
    await reply.whole(b'{"text":"a"}')


async def _next(running: AsyncGenerator[tuple[RunningGateway, ScriptEngine]]) -> tuple[RunningGateway, ScriptEngine]:
    return await anext(running)


async def _end(running: AsyncGenerator[tuple[RunningGateway, ScriptEngine]]) -> None:
    async for _ in running:
        raise AssertionError("it ends after one")


async def _running() -> AsyncGenerator[tuple[RunningGateway, ScriptEngine]]:
    async with script_engine(_answer) as engine, running_gateway(engine.url) as front:
        yield front, engine


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    """See ``Fuzzed``; at the end nothing may be left of any request."""
    with asyncio.Runner() as runner:
        running = _running()
        front, engine = runner.run(_next(running))
        yield Fuzzed(runner, front, engine)
        runner.run(front.settle())
        runner.run(_end(running))


def bounded(examples: int) -> settings:
    """Few examples, the same ones in every run."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )


@bounded(40)
@given(body=st.binary(max_size=100))
def test_raw_bytes_as_bodies(fuzzed: Fuzzed, body: bytes) -> None:
    fuzzed.body(body)


@bounded(200)
@given(body=damaged())
def test_damaged_bodies(fuzzed: Fuzzed, body: bytes) -> None:
    fuzzed.body(body)


@bounded(250)
@given(data=st.builds(bytes.__add__, starts, requests), seed=st.integers(0, 1000), pieces=st.integers(0, 3))
def test_raw_bytes_as_requests(fuzzed: Fuzzed, data: bytes, seed: int, pieces: int) -> None:
    chance = random.Random(seed)
    fuzzed.connection(data, sorted(chance.randrange(len(data) + 1) for _ in range(pieces)))


def test_after_all_that_requests_are_served(fuzzed: Fuzzed) -> None:
    fuzzed.body(b'{"text":"a"}')

"""Fixtures of the tests of the HTTP/1.1 client."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from backends.errors import BackendError
from backends.upstream.base import AnswerHead, Origin, UpstreamRequest
from backends.upstream.h1 import H1Client
from backends.upstream.h1_call import H1Call
from tests.fakes.running import PATIENCE_S, until


@pytest.fixture(params=[pytest.param(False, id="asyncio"), pytest.param(True, id="uvloop")])
def both_loops(request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
    """Imported as ``anyio_backend``: run on both event loops, whose transports differ in details that matter."""
    return ("asyncio", {"debug": not request.param, "use_uvloop": request.param})


@pytest.fixture
async def client() -> AsyncIterator[H1Client]:
    """A client that must hold nothing at the end."""
    one = H1Client(connect_timeout_s=PATIENCE_S)
    yield one
    await one.aclose()
    await until(lambda: one.active_connections == 0, "no connection left")
    assert (one.connecting, one.idle_connections) == (0, 0)


Post = Callable[..., H1Call]


@pytest.fixture
def post(client: H1Client) -> Post:
    """Send a small POST."""

    def send(origin: Origin, body: bytes = b"{}", path: str = "/generate") -> H1Call:
        return client.send(origin, UpstreamRequest("POST", path, [(b"content-type", b"application/json")], [body]))

    return send


Whole = Callable[[H1Call], Coroutine[Any, Any, tuple[AnswerHead, bytes]]]


@pytest.fixture
def whole() -> Whole:
    """Read a whole answer."""

    async def read(call: H1Call) -> tuple[AnswerHead, bytes]:
        head = await call.head()
        parts = []
        while data := await call.read():
            parts.append(data)
        return head, b"".join(parts)

    return read


Fails = Callable[..., Coroutine[Any, Any, None]]


@pytest.fixture
def fails(whole: Whole) -> Fails:
    """Read until the call fails, in the way that is expected; for tasks of a group."""

    async def read(call: H1Call, error: type[BackendError], match: str | None = None) -> None:
        with pytest.raises(error, match=match):
            await whole(call)

    return read

"""Who is cut off when a request is stopped: clients that do not read, and nobody else."""

import time

import pytest

from backends.leg_events import Cause
from gateway.data_plane import AsgiDownstream
from gateway.stopping import TELL_CLIENT_S
from tests.fakes.pair_fleet import pair_fleet
from tests.fakes.running import running_gateway, until
from tests.fakes.script_engine import Reply, SeenRequest, script_engine
from tests.fakes.wire import request_bytes, wire

ID = "the-request"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """The loop of the real process, which runs its timers first."""
    return ("asyncio", {"use_uvloop": True})


async def test_a_gateway_that_was_not_run_in_time_still_tells_why() -> None:
    """Mutation tried: one timer for all of the time; the loop, held up for longer, would cut the client off first."""

    async def silent(request: SeenRequest, reply: Reply) -> None:
        await reply.gone()

    async with script_engine(silent) as engine, running_gateway(engine.url) as gateway, wire(gateway.address) as client:
        await client.send(request_bytes("/generate", {"text": "a"}, headers={"X-Request-Id": ID}))
        await until(lambda: bool(engine.requests), "the request at the engine")
        ((live, _),) = gateway.gateway.services.live.find(ID)
        live.stop(Cause.CLIENT_ABORT)
        time.sleep(1.2 * TELL_CLIENT_S)  # noqa: ASYNC251 -- nothing in this process runs
        assert (await client.answer()).json()["error"]["type"] == "aborted"


async def test_an_answer_that_was_cut_off_is_not_called_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines have ended, and the client, who has had the request aborted, does not take the end of the answer."""

    async def finish(self: AsgiDownstream, data: bytes = b"") -> None:
        await until(lambda: self.is_gone, "the end of the connection")

    monkeypatch.setattr(AsgiDownstream, "finish", finish)  # the buffers on the way have room for megabytes
    body = {"model": "model", "text": "a", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    async with pair_fleet(model="model") as f, wire(f.gateway.address) as client:
        await client.send(request_bytes("/generate", body, headers={"X-Request-Id": ID}))
        await client.head()
        await until(lambda: f.gateway.state()["live_legs"] == 0, "the ends of the legs")
        ((live, _),) = f.gateway.gateway.services.live.find(ID)
        assert live.abort(None)
        record = await f.gateway.record()
        assert (record.status, record.outcome) == (200, "aborted")


async def test_a_connection_that_was_cut_is_not_reset_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of HTTP/1.0, whose answer ends with a reset, does not read: the end of the exchange finds it cut."""

    async def unending(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="application/json")
        await reply.chunk(b"a" * (3 << 20))  # more than is read before an answer begins
        await reply.gone()

    async def write(self: AsgiDownstream, data: bytes) -> None:
        await until(lambda: self.is_gone, "the end of the connection")

    monkeypatch.setattr(AsgiDownstream, "write", write)
    monkeypatch.setattr(AsgiDownstream, "write_now", lambda self, data: False)
    raw = request_bytes("/generate", {"text": "a"}, headers={"X-Request-Id": ID}).replace(b"HTTP/1.1", b"HTTP/1.0")
    async with (
        script_engine(unending) as engine,
        running_gateway(engine.url) as gateway,
        wire(gateway.address) as client,
    ):
        await client.send(raw)
        assert (await client.head())[0] == 200
        ((live, _),) = gateway.gateway.services.live.find(ID)
        live.stop(Cause.CLIENT_ABORT)
        record = await gateway.record()
        assert (record.status, record.outcome) == (200, "aborted")

"""SIGTERM: what runs may end, what comes is refused, and at the deadline clients and engines are told."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from backends.leg_events import Cause
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, TIME_SCALE, running_gateway, until
from tests.fakes.wire import call, request_bytes, wire

START_S = 3 * PATIENCE_S
BODY: dict[str, Any] = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
ENDLESS: dict[str, Any] = {**BODY, "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}


@pytest.fixture
async def slow() -> AsyncIterator[SimulatedEngine]:
    """An engine that takes its time."""
    engine = SimulatedEngine(EngineOptions(inter_token_ms=10))
    await engine.start()
    yield engine
    await engine.stop()


@dataclass
class Served:
    """A gateway in a process of its own."""

    process: asyncio.subprocess.Process
    address: tuple[str, int]

    def signal(self) -> None:
        """Ask it to stop."""
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self) -> int:
        """Wait for its end."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@asynccontextmanager
async def served(engine: SimulatedEngine, *options: str) -> AsyncIterator[Served]:
    """Run ``forebay serve`` for the length of the block."""
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--worker", engine.url, *options]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")}
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stderr is not None
        found = None
        async with asyncio.timeout(START_S):
            while found is None:
                line = await process.stderr.readline()
                assert line, "it ended at once"
                found = re.search(rb"listening on http://([\d.]+):(\d+)", line)
        address = found[1].decode(), int(found[2])
        async with asyncio.timeout(START_S):
            while (await call(address, "/ready", method="GET")).status != 200:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.02)
        yield Served(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_what_runs_ends_and_what_comes_is_refused(slow: SimulatedEngine) -> None:
    async with served(slow) as gateway, wire(gateway.address) as stream, wire(gateway.address) as unary:
        await stream.send(request_bytes("/generate", {**BODY, "stream": True}))
        status, headers = await stream.head()
        await unary.send(request_bytes("/generate", BODY))
        await slow.wait_for(lambda e: e.running == 2, PATIENCE_S)
        gateway.signal()
        async with asyncio.timeout(PATIENCE_S):
            while (ready := await call(gateway.address, "/ready", method="GET")).status == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (ready.status, ready.json()["reason"]) == (503, "draining")
        assert (await call(gateway.address, "/health", method="GET")).status == 200
        refused = await call(gateway.address, "/generate", BODY)
        assert (refused.status, refused.json()["error"]["type"]) == (503, "engine_shutdown")
        assert refused.headers["retry-after"] == "1"
        *_, last, done = (await stream.body(status, headers)).events()
        assert done == b"[DONE]"
        assert json.loads(last)["meta_info"]["finish_reason"]["type"] == "length"
        assert (await unary.answer()).json()["meta_info"]["completion_tokens"] == 40
        assert await gateway.exit_code() == 0


async def test_at_the_deadline_clients_and_engine_are_told(slow: SimulatedEngine) -> None:
    options = ("--drain-timeout-s", str(0.3 * TIME_SCALE))
    async with served(slow, *options) as gateway, wire(gateway.address) as stream, wire(gateway.address) as unary:
        await stream.send(request_bytes("/generate", {**ENDLESS, "stream": True}))
        status, headers = await stream.head()
        await unary.send(request_bytes("/generate", ENDLESS))
        await slow.wait_for(lambda e: e.running == 2, PATIENCE_S)
        gateway.signal()
        *_, error, done = (await stream.body(status, headers)).events()
        assert done == b"[DONE]"
        assert json.loads(error)["error"]["type"] == "engine_shutdown"
        answer = await unary.answer()
        assert (answer.status, answer.json()["error"]["type"]) == (503, "engine_shutdown")
        assert await gateway.exit_code() == 0
        await slow.wait_for(lambda e: e.running == 0, PATIENCE_S)
        aborted = {entry.rid for entry in slow.log.aborts if entry.source == "request"}
        assert aborted == {entry.rids[0] for entry in slow.log.requests_to("/generate") if not entry.stream}


async def test_a_second_signal_ends_it_now(slow: SimulatedEngine) -> None:
    async with served(slow) as gateway, wire(gateway.address) as stream:
        await stream.send(request_bytes("/generate", {**ENDLESS, "stream": True}))
        await stream.head()
        gateway.signal()
        async with asyncio.timeout(PATIENCE_S):
            while (await call(gateway.address, "/ready", method="GET")).status == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert slow.running == 1
        gateway.signal()
        assert await gateway.exit_code() == 0
        await slow.wait_for(lambda e: e.running == 0, PATIENCE_S)


async def test_an_idle_gateway_stops_at_once(slow: SimulatedEngine) -> None:
    async with served(slow) as gateway, wire(gateway.address) as kept:
        await kept.send(request_bytes("/health", method="GET"))
        assert (await kept.answer()).status == 200
        gateway.signal()
        assert await kept.is_closed()
        assert await gateway.exit_code() == 0


async def test_requests_that_end_at_the_deadline_are_counted_as_shut_down(slow: SimulatedEngine) -> None:
    async with running_gateway(slow.url, drain_timeout_s=0) as gateway, wire(gateway.address) as unread:
        await unread.send(request_bytes("/generate", {**ENDLESS, "stream": True}))
        await unread.head()  # the first event has come, so the status is out
        gateway.gateway.begin_drain()
        record = await gateway.record()
        assert (record.outcome, record.status) == ("shutdown", 200)
        await until(gateway.gateway.drained.is_set, "the drain's end")
        await gateway.settle()


async def test_a_body_that_comes_after_the_deadline_reaches_no_engine(slow: SimulatedEngine) -> None:
    async with running_gateway(slow.url, drain_timeout_s=0) as gateway, wire(gateway.address) as late:
        raw = request_bytes("/generate", BODY)
        await late.send(raw[:-5])
        await until(lambda: gateway.state()["in_flight_requests"] == 1, "the request's begin")
        for request in gateway.gateway.services.live:
            request.stop(Cause.SHUTDOWN)
        await late.send(raw[-5:])
        answer = await late.answer()
        assert (answer.status, answer.json()["error"]["type"]) == (503, "engine_shutdown")
        assert (await gateway.record()).outcome == "shutdown"
    assert slow.log.requests_to("/generate") == []

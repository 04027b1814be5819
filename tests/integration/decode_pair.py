"""A decode leg of a vLLM pair, its engine on a real socket, and the load that it books.

Requests are not sent in pairs yet, so legs are made here, as an exchange will make them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from backends.abort_supervisor import AbortSupervisor
from backends.cancel_policy import LegKind, abort_capability, cancel_policy
from backends.leg import Leg
from backends.leg_events import LegTimes
from backends.types import EngineKind, Worker
from backends.upstream.base import UpstreamRequest
from backends.upstream.fetch import fetch
from backends.upstream.h1 import H1Client
from backends.vllm.backend import VLLMBackend
from routers.load import RankLoad
from tests.fakes.raw_server import Connection, RawServer, answer, raw_server
from tests.fakes.running import PATIENCE_S, until

# Far longer than any test; what ends sooner was ended by something else.
FOREVER_S = 10 * PATIENCE_S
PROMPT_TOKENS = 64
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PING = b": keep-alive\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """An engine whose one generation the test plays.

    Attributes:
        generation: The connection of the generation, once its request is there.
        has_left: Its other side has closed.
    """

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.has_left = asyncio.Event()
        self.generation: Connection

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            if b"/other" in request.line:
                await connection.send(answer())
                continue
            self.generation = connection
            self.arrived.set()
            try:
                while await connection.reader.read(65536):
                    pass
            except ConnectionError:
                pass
            self.has_left.set()
            return

    async def send(self, *pieces: bytes) -> None:
        """Send pieces of the answer, each as a chunk; the head as it is."""
        await within(self.arrived.wait())
        for piece in pieces:
            await self.generation.send(piece if piece is HEAD else chunk(piece))


async def within(waited: Awaitable[object]) -> None:
    """Wait, with a limit."""
    async with asyncio.timeout(PATIENCE_S):
        await waited


class Counters:
    """What was counted."""

    def __init__(self) -> None:
        self.abandoned = 0

    def abort_sent(self, worker_id: str) -> None:
        raise AssertionError("vLLM's decode legs are not aborted")

    def abort_confirmed(self) -> None:
        raise AssertionError("vLLM's decode legs are not aborted")

    def abort_unconfirmed(self) -> None:
        raise AssertionError("vLLM's decode legs are not aborted")

    def handoff_abandoned(self) -> None:
        self.abandoned += 1


class Pair:
    """An engine, what speaks to it, and the load that legs book."""

    def __init__(self, engine: Engine, server: RawServer, client: H1Client) -> None:
        self.engine = engine
        self.server = server
        self.client = client
        self.load = RankLoad()
        self.counters = Counters()
        self.ended: list[Leg] = []
        self.keeper = self.supervisor()

    def supervisor(self, *, drain_s: float = FOREVER_S) -> AbortSupervisor:
        """What keeps the next legs."""
        self.keeper = AbortSupervisor(self.client, self.counters, times=LegTimes(handoff_drain_s=drain_s))
        return self.keeper

    def leg(self, kind: LegKind = LegKind.DECODE) -> Leg:
        """A leg that has just been sent; its connection does not exist yet, or is a pooled one."""
        request = UpstreamRequest("POST", "/v1/chat/completions", [], [b"{}"])
        return Leg(
            worker=Worker("w", "http://w", self.server.origin),
            backend=VLLMBackend(self.client),
            engine_ids=("chatcmpl-a",),
            policy=cancel_policy(
                EngineKind.VLLM, abort_capability(EngineKind.VLLM, (0, 20)), kind=kind, is_stream=True, has_ids=True
            ),
            call=self.client.send(self.server.origin, request),
            booking=self.load.book(requests=1, blocks=4, prefill_tokens=PROMPT_TOKENS),
            keeper=self.keeper,
            on_end=self.ended.append,
        )

    @property
    def booked(self) -> tuple[int, int, int]:
        """Requests, blocks and prefill tokens that are booked."""
        return self.load.in_flight, self.load.blocks, self.load.prefill_tokens

    async def other_request(self) -> int:
        """The status of a request that has nothing to do with the leg."""
        status, _ = await fetch(self.client, self.server.origin, UpstreamRequest("GET", "/other", [], []))
        return status


@asynccontextmanager
async def paired() -> AsyncIterator[Pair]:
    """Everything, and at its end nothing is left of any leg."""
    engine, client = Engine(), H1Client()
    async with raw_server(engine) as server, asyncio.timeout(2 * PATIENCE_S):
        made = Pair(engine, server, client)
        yield made
        await until(lambda: len(made.keeper) == 0, "the supervisor has nothing left to do")
        await until(lambda: client.active_connections == 0, "no connection is busy")
        await client.aclose()
    assert made.booked == (0, 0, 0)


async def ended(leg: Leg) -> None:
    await until(lambda: leg.is_ended, "the leg's end")

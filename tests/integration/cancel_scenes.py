"""What the cancellation matrix is made of: a body for every route, and an engine that stops at a named stage.

A stage is where the engine is when the request's end comes from outside; a scene is one request's share of the engine.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from backends.types import EngineFacts, EngineKind
from gateway.routes import ROUTES, Dialect
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import JSON_TYPE, Reply, ScriptEngine, SeenRequest, script_engine

# A body for each route, as a client writes it.
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 50}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/classify": {"input": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/score": {"query": "a", "items": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/encode": {"text": "a"},
    "/classify": {"text": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
# SGLang takes no id there, so closing is all there is.
WITHOUT_IDS = {"/v1/messages", "/v1/messages/count_tokens", "/v1/score", "/v1/rerank", "/tokenize", "/detokenize"}

CONNECTING = "before connect"
HEADERS = "before headers"
FIRST_EVENT = "before first event"
MIDSTREAM = "mid-stream"
LAST_EVENT = "in the last event"
STAGES = [CONNECTING, HEADERS, FIRST_EVENT, MIDSTREAM, LAST_EVENT]

# The model of the worker that never takes a connection.
STUCK = "stuck"


@dataclass(frozen=True)
class Cell:
    """One request of the matrix; its text is its public id."""

    path: str
    stage: str
    is_stream: bool

    def __str__(self) -> str:
        return f"{self.path} {'stream' if self.is_stream else 'unary'} {self.stage}".replace(" ", "-")

    @property
    def body(self) -> dict[str, Any]:
        """What its client sends."""
        model = STUCK if self.stage == CONNECTING else "model"
        return {**BODIES[self.path], "model": model, "stream": self.is_stream, "cell": str(self)}

    @property
    def has_begun(self) -> bool:
        """The client has the status when the end comes."""
        return self.is_stream and self.stage in (MIDSTREAM, LAST_EVENT)

    @property
    def has_ids(self) -> bool:
        """The engine's abort route knows the request."""
        return self.path not in WITHOUT_IDS


def event_of(path: str, rid: str, *, is_last: bool) -> bytes:
    """One event of a stream; the last one before ``[DONE]`` says that the engine was told to stop."""
    finish = b'"abort"' if is_last else b"null"
    dialect = ROUTES[path].dialect
    if dialect in (Dialect.CHAT, Dialect.COMPLETIONS):
        return b'data: {"id":"%b","choices":[{"index":0,"finish_reason":%b}]}\n\n' % (rid.encode(), finish)
    if dialect is Dialect.RESPONSES:
        name = b"response.incomplete" if is_last else b"response.output_text.delta"
        return b'event: %b\ndata: {"type":"%b"}\n\n' % (name, name)
    if dialect is Dialect.MESSAGES:
        name = b"message_stop" if is_last else b"content_block_delta"
        return b'event: %b\ndata: {"type":"%b"}\n\n' % (name, name)
    reason = b'{"type":"abort","message":"Abort request"}' if is_last else b"null"
    return b'data: {"text":"a","meta_info":{"id":"%b","finish_reason":%b}}\n\n' % (rid.encode(), reason)


def last_event_of(path: str, rid: str) -> bytes:
    """What ends a stream."""
    if ROUTES[path].dialect in (Dialect.RESPONSES, Dialect.MESSAGES):
        return event_of(path, rid, is_last=True)
    return b"data: [DONE]\n\n"


def body_of(path: str, rid: str) -> bytes:
    """A unary answer as an engine gives it that was told to stop."""
    if ROUTES[path].dialect in (Dialect.CHAT, Dialect.COMPLETIONS):
        return b'{"id":"%b","choices":[{"index":0,"finish_reason":"abort"}]}' % rid.encode()
    if ROUTES[path].dialect is Dialect.NATIVE:
        return b'{"text":"a","meta_info":{"id":"%b","finish_reason":{"type":"abort"}}}' % rid.encode()
    return b'{"id":"%b","object":"an answer","status":"incomplete"}' % rid.encode()


class Scene:
    """What an engine lived through with one request.

    Attributes:
        reached: Its stage is there.
        told: How it was told to stop: ``abort``, ``close``, or not yet.
        told_at: When.
        is_open_at_abort: The connection was open when the abort came.
        rid: Id that the engine was given.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self.reached = asyncio.Event()
        self.told = ""
        self.told_at = 0.0
        self.is_open_at_abort = False
        self.rid = ""

    async def play(self, engine: ScriptEngine, request: SeenRequest, reply: Reply) -> None:
        """Answer up to the stage, wait to be told, and end what an aborted engine ends."""
        self.rid = request.rid
        rest = await self._begin(reply)
        self.reached.set()
        await until(lambda: reply.is_gone or self.rid in engine.aborted, f"the end of {self._cell}")
        self.told_at = time.monotonic()
        self.is_open_at_abort = not reply.is_gone
        self.told = "abort" if self.rid in engine.aborted else "close"
        if self.told == "close":
            raise ConnectionError("it is closed")
        if self._cell.stage == HEADERS:
            await reply.start_chunked(content_type=self._type)
        await reply.chunk(rest)
        await reply.end_chunked()

    @property
    def _type(self) -> str:
        return "text/event-stream" if self._cell.is_stream else JSON_TYPE

    async def _begin(self, reply: Reply) -> bytes:
        """Send what comes before the stage; what an aborted engine sends after it."""
        path, stage = self._cell.path, self._cell.stage
        if self._cell.is_stream:
            first = event_of(path, self.rid, is_last=False)
            last = last_event_of(path, self.rid)
            rest = last if b"[DONE]" not in last else event_of(path, self.rid, is_last=True) + last
            cut = len(rest) - 4
        else:
            whole = body_of(path, self.rid)
            first, rest = whole[:20], whole[20:]
            cut = len(rest) - 1
        if stage == HEADERS:
            return rest if self._cell.is_stream else first + rest
        await reply.start_chunked(content_type=self._type)
        if stage == FIRST_EVENT:
            return rest if self._cell.is_stream else first + rest
        await reply.chunk(first)
        if stage == MIDSTREAM:
            return rest
        await reply.chunk(rest[:cut])
        return rest[cut:]


@asynccontextmanager
async def full_backlog() -> AsyncIterator[str]:
    """URL of a listener that takes no connection, so that connecting never ends."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(listener.getsockname())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            for filler in fillers:
                filler.close()


@asynccontextmanager
async def staged(**options: Any) -> AsyncIterator[tuple[ScriptEngine, RunningGateway]]:
    """An engine for scenes, a worker that can never be connected to, and a gateway in front of both."""
    patient: dict[str, Any] = {"health_timeout_s": 600, "connect_timeout_s": 600}
    async with (
        script_engine() as engine,
        full_backlog() as url,
        running_gateway(engine.url, url, wait_ready=1, **patient, **options) as gateway,
    ):
        stuck = next(member for member in gateway.gateway.services.fleet if member.worker.url == url)
        stuck.identified(EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", STUCK, models=(STUCK,)))
        yield engine, gateway

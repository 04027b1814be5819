"""Prefill and decode engines whose answers a test gives step by step, and a gateway in front of them."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.fakes.running import PATIENCE_S, RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call

VLLM_METADATA: dict[str, Any] = {
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "model", "max_model_len": 1 << 20}]},
    "/metrics": b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="4096"} 1.0\n',
    "/health": {},
}
DONE = b"data: [DONE]\n\n"
HANDOFF = (
    b'{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1, 2]], "remote_engine_id": "e", '
    b'"remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}'
)
BODY: dict[str, Any] = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}, "rid": "public"}
CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "a"}], "max_tokens": 8}


def _compact(item: object) -> bytes:
    """JSON as engines write it."""
    return json.dumps(item, separators=(",", ":")).encode()


def token(rid: str, text: str = "a", *, index: int | None = None, **meta: Any) -> bytes:
    """An event of a native stream that ends nothing."""
    return _native(rid, text, index, {"finish_reason": None, **meta})


def terminal(rid: str, text: str = "a", *, index: int | None = None, **meta: Any) -> bytes:
    """The event that ends a native answer well."""
    return _native(rid, text, index, {"finish_reason": {"type": "length", "length": 1}, **meta})


def aborted(rid: str, message: str = "KVTransferError", status: int | None = 500, text: str = "") -> bytes:
    """The event that ends a native answer otherwise."""
    reason = {"type": "abort", "message": message, **({} if status is None else {"status_code": status})}
    return _native(rid, text, None, {"finish_reason": reason})


def _native(rid: str, text: str, index: int | None, meta: dict[str, Any]) -> bytes:
    where = {} if index is None else {"index": index}
    item = {"text": text, "output_ids": [7], **where, "meta_info": {"id": rid, "prompt_tokens": 3, **meta}}
    return b"data: " + _compact(item) + b"\n\n"


def chat_chunk(text: str = "a", finish: str | None = None, *, role: bool = False) -> bytes:
    """An event of a chat stream of vLLM's."""
    delta = {"role": "assistant", "content": ""} if role else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 1, "model": "model", "choices": [choice]}
    return b"data: " + _compact(chunk) + b"\n\n"


def prefilled(params: bytes = HANDOFF, finish: str = "length") -> bytes:
    """The answer of a vLLM prefill."""
    return (
        b'{"id":"chatcmpl-x","object":"chat.completion","created":1,"model":"model","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"a"},"finish_reason":"%b"}],"kv_transfer_params":%b}'
        % (finish.encode(), params)
    )


class Turn:
    """One generation request at one engine, which the test answers.

    Attributes:
        request: It.
        reply: Writes the answer.
    """

    def __init__(self, request: SeenRequest, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self._over = asyncio.Event()

    @property
    def body(self) -> dict[str, Any]:
        """What the engine was sent."""
        body: dict[str, Any] = json.loads(self.request.body)
        return body

    @property
    def rid(self) -> str:
        """The id that the engine was given."""
        return self.request.rid

    @property
    def is_gone(self) -> bool:
        """The gateway has closed the connection."""
        return self.reply.is_gone

    async def open(self) -> None:
        """The head of a stream."""
        await self.reply.start_chunked()

    async def send(self, *blocks: bytes) -> None:
        """Pieces of the body."""
        for block in blocks:
            await self.reply.chunk(block)

    async def finish(self, *blocks: bytes) -> None:
        """The last pieces, in one write; a gateway that has seen enough of them may have left before their end."""
        data = b"".join(b"%x\r\n%b\r\n" % (len(block), block) for block in blocks)
        with contextlib.suppress(ConnectionError):
            await self.reply.raw(data + b"0\r\n\r\n")
        self._over.set()

    async def stream(self, *blocks: bytes) -> None:
        """All of a stream."""
        await self.open()
        await self.finish(*blocks)

    async def whole(self, body: bytes, status: int = 200) -> None:
        """All of a document."""
        await self.reply.whole(body, status=status)
        self._over.set()

    def reset(self) -> None:
        """End the connection with a RST."""
        self.reply.reset()
        self._over.set()

    def close(self) -> None:
        """End the connection with a FIN."""
        self.reply.close()
        self._over.set()

    async def over(self) -> None:
        """What the test has written by other means was the end."""
        self._over.set()
        await self.reply.writer.drain()

    async def left(self) -> None:
        """Wait for the gateway to close the connection."""
        await until(lambda: self.is_gone, "the gateway closes the connection")

    async def played(self) -> None:
        """Wait until the test has answered, or the gateway is gone."""
        while not (self._over.is_set() or self.is_gone):
            try:
                async with asyncio.timeout(0.02):
                    await self._over.wait()
            except TimeoutError:
                continue


class Stage:
    """One engine.

    Attributes:
        engine: What listens, and records.
    """

    def __init__(self, engine: ScriptEngine) -> None:
        self.engine = engine
        self._turns: asyncio.Queue[Turn] = asyncio.Queue()
        engine.script = self._play

    async def _play(self, request: SeenRequest, reply: Reply) -> None:
        turn = Turn(request, reply)
        self._turns.put_nowait(turn)
        await turn.played()
        if turn.is_gone:
            raise ConnectionError("the gateway is gone")

    async def turn(self) -> Turn:
        """The next request."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._turns.get()

    @property
    def worker_id(self) -> str:
        """As the gateway names it."""
        return self.engine.url.removeprefix("http://")

    @property
    def count(self) -> int:
        """Requests so far."""
        return len(self.engine.requests)

    @property
    def aborted(self) -> list[str]:
        """Ids given to its abort route."""
        return self.engine.aborted

    def die(self) -> None:
        """End as a process does that is killed."""
        assert self.engine.server is not None
        self.engine.server.close()
        for writer in list(self.engine.writers):
            writer.transport.abort()

    async def told(self, rid: str) -> None:
        """Wait until it is told to stop a request."""
        await until(lambda: rid in self.engine.aborted, f"an abort of {rid}")


class ScriptedPair:
    """Scripted engines by role, and the gateway in front of them.

    Attributes:
        prefills: Prefill engines.
        decodes: Decode engines.
        gateway: The gateway.
    """

    def __init__(
        self, prefills: list[Stage], decodes: list[Stage], gateway: RunningGateway, clients: asyncio.TaskGroup
    ) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.gateway = gateway
        self._clients = clients

    @property
    def prefill(self) -> Stage:
        """The first prefill engine."""
        return self.prefills[0]

    @property
    def decode(self) -> Stage:
        """The first decode engine."""
        return self.decodes[0]

    def begin(self, path: str, body: Any, **more: Any) -> "asyncio.Task[Answer]":
        """A client that reads its whole answer."""
        return self._clients.create_task(call(self.gateway.address, path, body, **more))

    def metric(self, name: str) -> float:
        """The sum of a counter's samples."""
        found = 0.0
        for line in self.gateway.gateway.services.metrics.render().decode().splitlines():
            if line.startswith((f"forebay_{name} ", f"forebay_{name}{{")):
                found += float(line.rsplit(" ", 1)[1])
        return found


async def answer_of(client: "asyncio.Task[Answer]") -> Answer:
    """What a client got, within a limit."""
    async with asyncio.timeout(PATIENCE_S):
        return await client


@asynccontextmanager
async def scripted_pair(
    prefills: int = 1, decodes: int = 1, *, engine: str = "sglang", **options: Any
) -> AsyncIterator[ScriptedPair]:
    """Run them for the length of the block; at its end nothing may be left of any request.

    Args:
        prefills: Number of prefill engines.
        decodes: Number of decode engines.
        engine: ``sglang`` or ``vllm``.
        options: Settings of the gateway.
    """
    metadata = METADATA if engine == "sglang" else VLLM_METADATA
    async with AsyncExitStack() as stack:
        stages, specs = [], []
        for number in range(prefills + decodes):
            one = await stack.enter_async_context(script_engine())
            one.metadata = dict(metadata)
            stages.append(Stage(one))
            role = "prefill" if number < prefills else "decode"
            if engine == "sglang" and number < prefills:
                role += ",bootstrap_port=8998"
            specs.append(f"{one.url},engine={engine},role={role}")
        running = await stack.enter_async_context(running_gateway(*specs, **{"seed": 1, **options}))
        clients = await stack.enter_async_context(asyncio.TaskGroup())
        yield ScriptedPair(stages[:prefills], stages[prefills:], running, clients)

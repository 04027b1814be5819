"""From a vLLM worker to a client that is to see something else: native requests, and flat arrays."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from backends.errors import AnswerBroken, AnswerMalformed, BackendError, UpstreamError
from backends.leg import Leg
from backends.leg_events import Cause
from backends.slices import run
from backends.sse import EventCutter
from backends.upstream.base import AnswerHead
from backends.vllm.native_request import refuses_text
from gateway.answer import StreamAnswer, Verdict, first_data, passed_headers, unary_verdict
from gateway.client_side import ClientSide
from gateway.engine_errors import refusal_in
from gateway.errors import EngineRefused, GatewayError, WorkerUnfit
from gateway.placement import Placed
from gateway.routes import Dialect
from gateway.samples import read_samples
from gateway.unary import refusal_of

EVENT_STREAM = "text/event-stream"
_ERROR_EVENT = b'data: {"error"'
_DONE = b"data: [DONE]"


class _ClientSide(ClientSide, Protocol):
    """The same, for streams that break off."""

    async def cut(self, answer: StreamAnswer, error: UpstreamError) -> Verdict:
        """The stream broke off: say so in the stream itself, unless the engine has."""


async def forward_built(
    client: _ClientSide, placed: Placed, dialect: Dialect, limit_bytes: int, clock: Callable[[], float]
) -> Verdict:
    """Send the answer of an attempt of which ``build`` or ``native`` is set; see ``AnswerRelay.forward``.

    Args:
        client: Where it goes.
        placed: The attempt.
        dialect: Shape of the client's answer.
        limit_bytes: Bound of the engine's answers together, of one event, and of the client's body.
        clock: Monotonic seconds.

    Raises:
        UpstreamError: Nothing has been sent to the client, which is still to be told.
        GatewayError: The same; ``WorkerUnfit`` if the worker lacks what was taken for granted.
        CallEnded: This side stopped it.
    """
    try:
        if placed.native is not None and placed.is_stream:
            return await _Stream(client, placed, limit_bytes, clock).forward()
        assert placed.build is not None
        head, bodies = await read_samples(placed, limit_bytes, clock)
        body = await run(placed.build(bodies))
    except EngineRefused as exc:
        if placed.native is not None and refuses_text(exc.report.status, exc.body or b""):
            raise WorkerUnfit(exc.report) from exc
        raise
    await client.send_whole(200, passed_headers(head), body)
    return unary_verdict(body, dialect)


class _Stream:
    """Streams of all legs as the client's one stream; each waits for the client as it reads."""

    def __init__(self, client: _ClientSide, placed: Placed, limit_bytes: int, clock: Callable[[], float]) -> None:
        assert placed.native is not None
        self._client = client
        self._placed = placed
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._told = placed.native.stream()
        self._answer = StreamAnswer(placed.ids, limit_bytes, has_items=len(placed.native.public_ids) > 1)
        self._turn = asyncio.Lock()
        self._written_at = clock()
        self._is_over = False
        self._has_failed = False
        self._failure: BackendError | GatewayError | None = None

    async def forward(self) -> Verdict:
        """Read all legs at once; of several, or where the client is to get signs of life, each in a task."""
        client, legs = self._client, self._placed.legs
        try:
            if len(legs) == 1 and not client.keepalive_s:
                await self._read(0)
            else:
                await self._read_all()
        finally:
            client.events_seen = self._answer.events_seen
            client.silent_since = None
        failure = self._failure
        if failure is not None and (not client.status or not isinstance(failure, UpstreamError)):
            raise failure
        if failure is not None:
            return await client.cut(self._answer, failure)
        return self._answer.verdict(was_aborted=any(leg.was_called_off for leg in legs))

    async def _read_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            signs = group.create_task(self._give_signs(), name="signs of life") if self._client.keepalive_s else None
            readers = [
                group.create_task(self._read(number), name=f"leg {number}") for number in range(len(self._placed.legs))
            ]
            await asyncio.wait(readers)
            if signs is not None:
                signs.cancel()

    async def _give_signs(self) -> None:
        interval_s = self._client.keepalive_s
        while True:
            due_s = self._written_at + interval_s - self._clock()
            if due_s > 0:
                await asyncio.sleep(due_s)
                continue
            async with self._turn:
                if self._is_over:
                    return
                await self._client.comment()
                self._written_at = self._clock()

    async def _read(self, number: int) -> None:
        """Read one leg to its end, unless the whole ends before; when it fails, so does the whole."""
        leg = self._placed.legs[number]
        try:
            await self._pass_on(number, leg)
        except (BackendError, GatewayError) as exc:
            if not self._is_over:
                self._failure = exc
                self._end(leg)

    def _end(self, leg: Leg) -> None:
        """A leg has failed: nothing more is wanted of the others."""
        self._is_over = self._has_failed = True
        for other in self._placed.legs:
            if other is not leg:
                other.cancel(Cause.SIBLING_FAILED, is_paused=self._placed.member.is_paused)

    async def _pass_on(self, number: int, leg: Leg) -> None:
        head = await leg.call.head()
        if not 200 <= head.status < 300:
            raise await refusal_of(leg.call, self._placed.ids_of_legs[number], head, self._limit_bytes)
        if head.content_type != EVENT_STREAM:
            raise AnswerMalformed(f"content type {head.content_type!r} with status {head.status}")
        cutter = EventCutter(self._limit_bytes)
        while data := await leg.call.read():
            self._placed.member.last_byte_at = self._clock()
            if block := cutter.feed(data):
                leg.saw(block)
                async with self._turn:
                    await self._tell(leg, head, self._told.feed(number, block))
            if self._has_failed:
                return
            if self._client.status:
                self._client.silent_since = self._clock()
        if not self._told.has_ended(number):
            raise AnswerBroken("the engine's stream ended without its end marker")

    async def _tell(self, leg: Leg, head: AnswerHead, block: bytes) -> None:
        """Send events to the client, the last ones with the end of the answer."""
        if not block or self._is_over:
            return
        client = self._client
        if not client.status and (refusal := refusal_in(first_data(block))) is not None:
            raise refusal
        block = self._answer.feed(block)
        await client.begin_stream(head)
        self._written_at = self._clock()
        if block.find(_ERROR_EVENT) >= 0:
            self._end(leg)
            if _DONE not in block:
                block += client.end_after_error
        self._is_over = self._is_over or self._told.is_ended
        await (client.finish(block) if self._is_over else client.write(block))

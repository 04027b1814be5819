"""From a worker's answer to the client: status, headers, stream or body, with backpressure both ways."""

import asyncio
import functools
from collections.abc import Callable

import msgspec

from backends.errors import AnswerBroken, AnswerMalformed, CallInterrupted, UpstreamError
from backends.sse import DONE_EVENT, EventCutter
from backends.upstream.base import AnswerHead, Headers, UpstreamCall
from gateway.answer import (
    StreamAnswer,
    Verdict,
    first_data,
    passed_headers,
    rank_in,
    unary_verdict,
)
from gateway.answer_headers import identity_headers
from gateway.child_ids import revealed
from gateway.document import forward_document
from gateway.downstream import Downstream
from gateway.engine_errors import refusal_in
from gateway.envelope import Envelope
from gateway.errors import ABORTED, EngineRefused, ErrorReport, GatewayError, report_of
from gateway.fold import FoldIncomplete
from gateway.merge import merge
from gateway.native_relay import forward_built
from gateway.outcome import Outcome
from gateway.pair_attempt import PairAttempt
from gateway.pair_relay import forward_pair
from gateway.placement import Attempt, Placed
from gateway.routes import LAST_EVENTS, Dialect
from gateway.samples import read_samples
from gateway.services import Limits
from gateway.unary import refusal_of

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
# An engine's comments before its first event are held back with the status, up to here.
MAX_HELD_COMMENTS_BYTES = 64 * 1024
KEEP_ALIVE = b": keep-alive\n\n"


class AnswerRelay:
    """Sends one answer, or one error, to one client.

    Attributes:
        identity: Makes the headers that every answer of this request carries, as it stands when that begins.
        status: Status that was sent, 0 before.
        first_byte_at: Clock of the first byte that was sent.
        bytes_out: Body bytes sent.
        events_seen: Events that passed, an estimate of tokens.
        silent_since: Clock since which more of an answer that has begun is awaited from the engine; ``None`` if not.
    """

    __slots__ = (
        "_clock",
        "_dialect",
        "_downstream",
        "_is_sse",
        "_is_tick_due",
        "_limits",
        "_public_id",
        "_wants_stream",
        "bytes_out",
        "events_seen",
        "first_byte_at",
        "identity",
        "silent_since",
        "status",
    )

    def __init__(self, downstream: Downstream, limits: Limits, clock: Callable[[], float], dialect: Dialect) -> None:
        self._downstream = downstream
        self._dialect = dialect
        self._is_tick_due = False
        self._limits = limits
        self._clock = clock
        self._is_sse = False
        self._public_id = ""
        self._wants_stream = False
        self.identity: Callable[[], Headers] = list
        self.status = 0
        self.first_byte_at: float | None = None
        self.silent_since: float | None = None
        self.bytes_out = 0
        self.events_seen = 0

    def identify(self, envelope: Envelope, placed: Attempt, attempts: int) -> None:
        """Set the headers that say which request this is and where it went."""
        self._public_id = envelope.public_id
        self._wants_stream = envelope.is_stream
        self.identity = functools.partial(identity_headers, envelope, placed, attempts)

    async def forward(self, placed: Attempt) -> Verdict:
        """Relay the answer of ``placed``.

        Returns:
            How it ended, once the client has it.

        Raises:
            UpstreamError: Nothing has been sent to the client, which is still to be told.
            EngineRefused: The same, and the engine has said why.
            CallEnded: This side stopped the leg.
        """
        if isinstance(placed, PairAttempt):
            return await forward_pair(self, placed)
        if placed.build is not None:
            return await forward_built(self, placed, self._dialect, self._limits.max_response_bytes, self._clock)
        if len(placed.legs) > 1:
            return await self._samples(placed)
        head = await (self._head(placed) if self.keepalive_s else placed.leg.call.head())
        placed.member.last_byte_at = self._clock()
        if not 200 <= head.status < 300:
            raise await refusal_of(placed.leg.call, placed.ids, head, self._limits.max_response_bytes)
        if head.content_type == EVENT_STREAM:
            return await (self._stream(placed, head) if self._wants_stream else self._folded(placed, head))
        if head.content_type == JSON and not self.status:
            return await forward_document(
                self, placed, head, self._dialect, self._limits.max_response_bytes, self._clock
            )
        raise AnswerMalformed(f"content type {head.content_type!r} with status {head.status}")

    async def begin_stream(self, head: AnswerHead) -> None:
        """Send the head of a stream, if that has not been done."""
        self._is_sse = True
        if not self.status:
            await self.start(head.status, passed_headers(head))

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of an answer whose body follows."""
        self.status = status
        self.first_byte_at = self._clock()
        await self._downstream.start(status, [*headers, *self.identity()])

    async def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if not self._write_now(data):
            await self._downstream.write(data)

    def _write_now(self, data: bytes) -> bool:
        """Send a piece of the body if that needs no waiting; where it does, count it as sent all the same."""
        self.silent_since = None  # it is the client's turn
        self.bytes_out += len(data)
        return self._downstream.write_now(data)

    def abort(self) -> None:
        """End the connection, so that nobody takes what was sent for a whole answer."""
        self._downstream.abort()

    async def finish(self, data: bytes) -> None:
        """Send the last piece of the body."""
        self.silent_since = None
        self.bytes_out += len(data)
        await self._downstream.finish(data)

    def with_rank(self, placed: Attempt, verdict: Verdict, data: bytes) -> Verdict:
        """The verdict with the rank that the engine says it ran on, where one was chosen for it."""
        if placed.dp_rank is None or self._dialect is not Dialect.NATIVE:
            return verdict
        return msgspec.structs.replace(verdict, dp_rank=rank_in(data))

    # Streams.

    async def _stream(self, placed: Placed, head: AnswerHead) -> Verdict:
        call = placed.leg.call
        leg = placed.leg
        answer = StreamAnswer(
            placed.ids,
            self._limits.max_response_bytes,
            LAST_EVENTS.get(self._dialect, frozenset()),
            look=(lambda seen: leg.reveal(revealed(seen))) if leg.reveals_ids else None,
        )
        block = first = b""
        while not first:
            data = await self._read(placed)
            if not data:
                raise AnswerBroken("the stream ended before its first event")
            events = answer.feed(data)
            first = first_data(events)
            block = block + events if len(block) < MAX_HELD_COMMENTS_BYTES else events
        refusal = refusal_in(first)
        if refusal is not None:
            raise refusal
        placed.leg.first_token()
        await self.begin_stream(head)
        try:
            while not call.is_complete:
                if block and not self._write_now(block):
                    await self._downstream.write(block)
                placed.member.last_byte_at = self.silent_since = self._clock()
                if not self.keepalive_s:
                    await self._pass_on(placed, answer)
                block = answer.feed(await self._read(placed))
        except UpstreamError as exc:
            return await self.cut(answer, exc)
        finally:
            self.events_seen = answer.events_seen
            self.silent_since = None
        verdict = answer.verdict(was_aborted=placed.leg.was_called_off)
        if not verdict.is_terminated:
            if block:
                await self.write(block)
            return await self.cut(answer, AnswerBroken(verdict.message))
        await self.finish(block)
        return self.with_rank(placed, verdict, answer.last_block)

    async def _pass_on(self, placed: Placed, answer: StreamAnswer) -> None:
        """Send events on in the step in which they arrive, until the end or until the client is the slower one."""
        member, clock, held = placed.member, self._clock, b""

        def take(data: bytes) -> bool:
            nonlocal held
            block = answer.feed(data)
            if block and not self._write_now(block):
                held = block
                return False
            member.last_byte_at = self.silent_since = clock()
            return True

        await placed.leg.call.pass_on(take)
        if held:
            await self._downstream.write(held)
            self.silent_since = clock()

    async def cut(self, answer: StreamAnswer, error: UpstreamError) -> Verdict:
        """The stream broke off: say so in the stream itself, unless the engine has; an unfinished event is dropped."""
        verdict = answer.verdict(was_aborted=False)
        if verdict.is_terminated:
            await self._downstream.finish()
            return verdict
        if verdict.outcome is Outcome.ENGINE_ERROR:
            tail = self.end_after_error
            self.bytes_out += len(tail)
            await self._downstream.finish(tail)
            return verdict
        await self.fail(report_of(error), self._public_id)
        return Verdict(Outcome.TRUNCATED, False, verdict.usage, str(error))

    async def _folded(self, placed: Placed, head: AnswerHead) -> Verdict:
        """Events for a client that wants one document: fold them into it."""
        if placed.new_fold is None:
            raise AnswerMalformed("a stream in answer to a request for one document")
        limit_bytes = self._limits.max_response_bytes
        fold, cutter = placed.new_fold(limit_bytes), EventCutter(limit_bytes)
        while data := await placed.leg.call.read():
            placed.member.last_byte_at = self.silent_since = self._clock()
            if block := cutter.feed(data):
                placed.leg.first_token()
                if placed.leg.reveals_ids:
                    placed.leg.reveal(revealed(block))
                fold.feed(placed.ids.apply(block))
        try:
            body = fold.result()
        except FoldIncomplete as exc:
            if exc.is_terminated and placed.leg.was_called_off:
                raise GatewayError(ABORTED) from exc
            raise
        if isinstance(body, EngineRefused):
            raise body
        headers = [h for h in passed_headers(head) if h[0] != b"content-type"]
        await self.send_whole(200, [(b"content-type", b"application/json"), *headers], body)
        return self.with_rank(placed, unary_verdict(body), body)

    # Waiting, with signs of life for the client.

    async def _head(self, placed: Placed) -> AnswerHead:
        call = placed.leg.call
        while True:
            timer = self._tick_later(call)
            try:
                return await call.head()
            except CallInterrupted:
                self._check_tick(placed)
            finally:
                timer.cancel()
            await self.comment()

    async def _read(self, placed: Placed) -> bytes:
        call = placed.leg.call
        if not self.keepalive_s:
            return await call.read()
        while True:
            timer = self._tick_later(call)
            try:
                return await call.read()
            except CallInterrupted:
                self._check_tick(placed)
            finally:
                timer.cancel()
            await self.comment()

    @property
    def keepalive_s(self) -> float:
        """Silence after which the client gets a sign of life, 0 for never."""
        return self._limits.sse_keepalive_s if self._wants_stream else 0.0

    def _tick_later(self, call: UpstreamCall) -> asyncio.TimerHandle:
        def tick() -> None:
            self._is_tick_due = True
            call.interrupt()

        return asyncio.get_running_loop().call_later(self._limits.sse_keepalive_s, tick)

    def _check_tick(self, placed: Placed) -> None:
        """Let an interruption through that was not the timer's."""
        if not self._is_tick_due or placed.leg.is_detached:
            raise CallInterrupted
        self._is_tick_due = False

    async def comment(self) -> None:
        """Send a comment; only whole events were sent before, so it stands between two. The first one sends 200."""
        if not self.status:
            self._is_sse = True
            await self.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        await self.write(KEEP_ALIVE)

    # Unary answers.

    async def _samples(self, placed: Placed) -> Verdict:
        """The answers to the legs of a request that was taken apart, put together."""
        head, answers = await read_samples(placed, self._limits.max_response_bytes, self._clock)
        body = merge(self._dialect, answers, batch_size=placed.batch_size)
        await self.send_whole(200, passed_headers(head), body)
        return unary_verdict(body, self._dialect)

    def answer_now(self, placed: Placed) -> Verdict | None:
        """Send the answer of a leg of which nothing was read, if it is one document that needs no waiting.

        Returns:
            How it ended; ``None`` if that is for ``forward`` to find out, and nothing was done.
        """
        call = placed.leg.call
        found = call.whole()
        if found is None or not self._downstream.takes_now():
            return None
        head, body = found
        if head.status != 200 or head.content_type != JSON or len(body) > self._limits.max_response_bytes:
            return None
        placed.leg.first_token()
        body = placed.ids.apply(body)
        if not self._downstream.answer_now(head.status, self._headers_of(body, passed_headers(head)), body):
            raise ValueError("a header that cannot be sent")
        call.drop_whole()
        placed.member.last_byte_at = self._note_whole(head.status, body)
        return self.with_rank(placed, unary_verdict(body, self._dialect), body)

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer."""
        self._note_whole(status, body)
        await self._downstream.answer(status, self._headers_of(body, headers), body)

    def _headers_of(self, body: bytes, headers: Headers) -> Headers:
        return [*headers, (b"content-length", b"%d" % len(body)), *self.identity()]

    def _note_whole(self, status: int, body: bytes) -> float:
        """A whole answer is sent; when that is."""
        self.status = status
        self.silent_since = None
        self.bytes_out += len(body)
        self.first_byte_at = now = self._clock()
        return now

    # Errors.

    @property
    def end_after_error(self) -> bytes:
        """What ends a stream behind an error event; routes with end events of their own have none."""
        if self._dialect in LAST_EVENTS or not self._limits.sse_done_after_error:
            return b""
        return DONE_EVENT

    async def pass_refusal(self, refusal: EngineRefused) -> None:
        """Send the engine's own error body, or what it says where the status is gone."""
        if self.status:
            await self.fail(refusal.report, self._public_id)
            return
        await self.send_whole(refusal.report.status, refusal.headers or [], refusal.body or b"")

    async def fail(self, report: ErrorReport, request_id: str | None) -> Outcome:
        """Tell the client of an error, in the way that is still open.

        Returns:
            The request's outcome, which is ``truncated`` where a body was cut.
        """
        if not self.status:
            await self.send_whole(report.status, report.headers, report.body(request_id))
            return report.outcome
        if not self._is_sse:
            self.abort()
            return Outcome.TRUNCATED
        tail = report.event(request_id, self._dialect) + self.end_after_error
        self.bytes_out += len(tail)
        await self._downstream.finish(tail)
        return report.outcome

"""The answer of a decode leg, read for a client who may not get the end of it before prefill has ended.

What is read is told in pieces: whole events, with the first of those that may be its end apart from what comes before.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from backends.errors import AnswerBroken, AnswerMalformed
from backends.leg import Leg
from backends.sse import DONE_DATA, EventCutter, data_of, events
from backends.upstream.base import AnswerHead
from gateway.answer import StreamAnswer, Usage, Verdict, first_data, unary_verdict
from gateway.engine_errors import refusal_in
from gateway.errors import EngineRefused
from gateway.fold import Fold
from gateway.ids import IdMap
from gateway.outcome import Outcome
from gateway.pair_failure import EndedByEngine
from gateway.routes import Dialect
from gateway.unary import read_whole, refusal_of

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
# A choice or an item has ended; in generated text the quotes are escaped.
_FINISHED = re.compile(rb'"finish_reason":\s*["{]')
_ERROR = re.compile(rb'data: ?\{"error"')
_ABORT = re.compile(rb'"finish_reason":\s*(?:"abort"|\{"type":\s*"abort")')
_items = msgspec.json.Decoder(list[msgspec.Raw])
_ENDED_BADLY = frozenset({Outcome.ENGINE_ERROR, Outcome.ABORTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWants:
    """What is read, and for whom.

    Attributes:
        dialect: Shape of the answer.
        limit_bytes: Bound of one event, and of a whole document.
        sequences: Items that end, each with a finish reason.
        is_stream: The client gets events.
        new_fold: Makes the fold where it does not, and the engine streams.
    """

    dialect: Dialect
    limit_bytes: int
    sequences: int
    is_stream: bool
    new_fold: Callable[[int], Fold] | None


class PieceSink(Protocol):
    """Takes what was read."""

    def on_head(self, head: AnswerHead) -> None:
        """The answer begins with success."""

    def on_piece(self, block: bytes, *, is_ending: bool) -> Awaitable[None]:
        """Whole events; the end of the wait is leave to read on."""


def _is_bad(event: bytes) -> bool:
    return bool(_ERROR.search(event) or _ABORT.search(event)) or data_of(event) == DONE_DATA


class DecodeReader:
    """Reads one decode leg.

    Args:
        leg: The leg.
        ids: Rewrites the ids in its answer.
        wants: What is read.
        sink: Takes it.
        on_byte: Told of every read.

    Attributes:
        verdict: How the answer ended, once ``read`` has returned.
    """

    def __init__(self, leg: Leg, ids: IdMap, wants: DecodeWants, sink: PieceSink, on_byte: Callable[[], None]) -> None:
        self._leg = leg
        self._ids = ids
        self._wants = wants
        self._sink = sink
        self._on_byte = on_byte
        self._finished = 0
        self.verdict = Verdict(Outcome.TRUNCATED, False, Usage())

    async def read(self) -> bytes:
        """Read it to its end.

        Returns:
            What has not been told in pieces: the whole document, or nothing.

        Raises:
            UpstreamError: It cannot be had, or broke off.
            GatewayError: The engine refuses the request, or has failed.
            EndedByEngine: The engine says so inside an answer that has begun.
            CallEnded: This side stopped it, or somebody else reads it now.
        """
        call, wants = self._leg.call, self._wants
        head = await call.head()
        self._on_byte()
        if not 200 <= head.status < 300:
            raise await refusal_of(call, self._ids, head, wants.limit_bytes)
        self._sink.on_head(head)
        if head.content_type == EVENT_STREAM and wants.is_stream:
            await self._stream()
            return b""
        if head.content_type == EVENT_STREAM and wants.new_fold is not None:
            return self._judged(await self._folded(wants.new_fold))
        if head.content_type == JSON and not wants.is_stream:
            body = self._ids.apply(await read_whole(call, head, wants.limit_bytes))
            self._leg.first_token()
            return self._judged(body)
        raise AnswerMalformed(f"content type {head.content_type!r} with status {head.status}")

    def _judged(self, body: bytes) -> bytes:
        if self._wants.dialect is Dialect.NATIVE and not self._leg.was_called_off and _ABORT.search(body):
            items = _items.decode(body) if body.lstrip().startswith(b"[") else [body]
            if refusal := next(filter(None, (refusal_in(bytes(item)) for item in items)), None):
                raise refusal
        self.verdict = unary_verdict(body, self._wants.dialect)
        if self.verdict.outcome in _ENDED_BADLY and not self._leg.was_called_off:
            raise EndedByEngine(body, self.verdict)
        return body

    async def _folded(self, new_fold: Callable[[int], Fold]) -> bytes:
        wants, leg = self._wants, self._leg
        fold, cutter = new_fold(wants.limit_bytes), EventCutter(wants.limit_bytes)
        while data := await leg.call.read():
            self._on_byte()
            if block := cutter.feed(data):
                had_output = leg.has_output
                leg.saw(block)
                fold.feed(self._ids.apply(block))
                if leg.has_output and not had_output:
                    await self._sink.on_piece(b"", is_ending=False)
        body = fold.result()
        if isinstance(body, EngineRefused):
            raise body
        return body

    async def _stream(self) -> None:
        wants, leg = self._wants, self._leg
        answer = StreamAnswer(self._ids, wants.limit_bytes)
        has_begun = False
        rest = b""
        while data := await leg.call.read():
            self._on_byte()
            block = answer.feed(data)
            if not block:
                continue
            if not has_begun and (first := first_data(block)):
                has_begun = True
                if (refusal := refusal_in(first)) is not None:
                    raise refusal
            leg.saw(block)
            if rest or _ERROR.search(block) or _ABORT.search(block) or self._is_cut_short(block):
                rest = await self._before_bad_end(rest, block)
            else:
                await self._tell(block)
        if not has_begun:
            raise AnswerBroken("the stream ended before its first event")
        self.verdict = answer.verdict(was_aborted=leg.was_called_off)
        is_wanted = leg.was_called_off and self.verdict.outcome is Outcome.ABORTED
        if self.verdict.outcome is Outcome.ABORTED and not (is_wanted or leg.has_output):
            raise AnswerBroken("the stream ended before its first token")  # nothing was told yet: no empty success
        if self.verdict.outcome in _ENDED_BADLY and not is_wanted:
            raise EndedByEngine(rest, self.verdict)
        if self.verdict.outcome is Outcome.TRUNCATED:
            raise AnswerBroken(self.verdict.message)
        if rest:
            await self._sink.on_piece(rest, is_ending=True)

    async def _before_bad_end(self, rest: bytes, block: bytes) -> bytes:
        """Tell what comes before a bad end; what comes from there on is what the engine ended with."""
        if rest:
            return rest + block
        whole = list(events(block))
        at = next(i for i, one in enumerate(whole) if _is_bad(one))
        if at:
            await self._tell(b"".join(whole[:at]))
        return b"".join(whole[at:])

    def _is_cut_short(self, block: bytes) -> bool:
        """The end marker is in it, and not all sequences have ended: vLLM ends so what it has aborted by itself."""
        if block.find(b"[DONE]") < 0 or self._finished + len(_FINISHED.findall(block)) >= self._wants.sequences:
            return False
        return any(data_of(event) == DONE_DATA for event in events(block))

    async def _tell(self, block: bytes) -> None:
        """Tell whole events; those that end the answer apart from the ones before."""
        sequences = self._wants.sequences
        count = len(_FINISHED.findall(block))
        if self._finished + count < sequences:
            self._finished += count
            await self._sink.on_piece(block, is_ending=False)
            return
        if self._finished >= sequences:
            await self._sink.on_piece(block, is_ending=True)
            return
        before = 0
        whole = list(events(block))
        for event in whole:
            self._finished += len(_FINISHED.findall(event))
            if self._finished >= sequences:
                break
            before += 1
        if before:
            await self._sink.on_piece(b"".join(whole[:before]), is_ending=False)
        if before < len(whole):
            await self._sink.on_piece(b"".join(whole[before:]), is_ending=True)

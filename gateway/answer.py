"""The engine's answer on its way to the client: headers, events, and the verdict on how it ended. Pure.

Events are looked at twice: the first, because an error there still has a true status, and the last before the end,
for verdict and usage. The rest is bytes with ids replaced.
"""

import re
from collections.abc import Callable

import msgspec

from backends.sse import DONE_DATA, EventCutter, data_of, events, name_of
from backends.upstream.base import AnswerHead, Headers
from backends.vllm.output import is_silent
from gateway.engine_errors import engine_message, refusal_in
from gateway.ids import IdMap
from gateway.outcome import Outcome
from gateway.routes import Dialect
from gateway.usage import ItemEnds, last_usage, usage_of
from gateway.usage import Usage as Usage

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers"
    b" transfer-encoding upgrade".split()
)
# Ours to set, or about the hop between engine and gateway.
NOT_PASSED = HOP_BY_HOP | {b"server", b"date", b"x-request-id", b"content-length"}

# See ``backends.quick_enum``. Likewise ``find`` for ``in``, which first tries bytes as a number and drops the error.
_RESPONSES = Dialect.RESPONSES
_COMPLETE = Outcome.COMPLETE

_TOKENS = re.compile(rb'"(prompt|completion|cached)_tokens":(\d{1,18})')
_COUNT = b'_tokens":'
_COUNT_NAMES = (b'"prompt', b'"completion', b'"cached')
# Sums over a whole OpenAI answer, which may hold the counts of its parts before.
_SUMS = b'"usage":{'
_SUMS_AT = re.compile(re.escape(_SUMS)).finditer
# A usage object and its details are shorter.
_USAGE_BYTES = 512
_RANK = re.compile(rb'"dp_rank":\s*(\d{1,6})')
# A choice has ended: a reason in words, or natively in an object.
_FINISHED = re.compile(rb'"finish_reason":\s*["{]')
_UNFINISHED = re.compile(rb'"finish_reason":\s*null')
_ABORT = (b'"type":"abort"', b'"finish_reason":"abort"')
_FAILED_EVENTS = frozenset({b"error", b"response.failed"})
_FAILED_RESPONSE = b'"status":"failed"'
_ERROR_EVENT = b'data: {"error"'
# Longer than anything that is looked for in pieces.
_TAIL_BYTES = 64
# A single byte is found ten times sooner than a word, which only pays where there is much to look through.
_GATE_BYTES = 4096
# Unquoted, these bytes cannot be part of a generated text, in which quotes are escaped.
_LOOK_AT_BYTES = 64 * 1024


def passed_headers(head: AnswerHead) -> Headers:
    """The engine's headers that the client gets."""
    passed: Headers = []
    lists: list[bytes] = []
    for header in head.headers:
        if header[0] not in NOT_PASSED:
            passed.append(header)
        elif header[0] == b"connection":
            lists.append(header[1])
    if lists:
        named = {token.strip().lower() for value in lists for token in value.split(b",")}
        passed = [h for h in passed if h[0] not in named]
    return passed


class _Response(msgspec.Struct):
    status: str = ""


_response = msgspec.json.Decoder(_Response)


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """How an answer ended.

    Attributes:
        outcome: Its class.
        is_terminated: The stream's own end marker was there.
        usage: Token counts.
        message: The engine's words, if it failed.
        dp_rank: Rank that the engine says it ran on, ``None`` if nobody looked, or it does not say.
    """

    outcome: Outcome
    is_terminated: bool
    usage: Usage
    message: str = ""
    dp_rank: int | None = None


def rank_in(data: bytes) -> int | None:
    """The rank that the last native answer in ``data`` names; ``None`` if it names none.

    In generated text the quotes of such a name are escaped.
    """
    match = _RANK.match(data, max(data.rfind(b'"dp_rank":'), 0))
    return int(match[1]) if match else None


class StreamAnswer:
    """One stream of events: whole events out, with public ids, and the verdict at the end.

    Args:
        ids: Replaces engine ids.
        max_event_bytes: Bound of one event.
        last_events: Names of the events that end a stream; where there are none, ``[DONE]`` ends it, behind an event
            with a finish reason.
        look: Shown every block of whole events as the engine sent it.
        has_items: It may be that of several items though its ids do not say so.
    """

    __slots__ = (
        "_abort_block",
        "_before_last",
        "_cutter",
        "_error_block",
        "_has_ended",
        "_ids",
        "_is_silent",
        "_item_ends",
        "_last",
        "_last_events",
        "_look",
        "_saw_done",
        "_usage_pieces",
        "bytes_in",
        "events_seen",
    )

    def __init__(
        self,
        ids: IdMap,
        max_event_bytes: int,
        last_events: frozenset[bytes] = frozenset(),
        look: Callable[[bytes], None] | None = None,
        *,
        has_items: bool = False,
    ) -> None:
        # One item's end tells the counts of all: of several each has to be seen.
        self._item_ends = ItemEnds(_LOOK_AT_BYTES) if (ids.has_items or has_items) and not last_events else None
        self._look = look
        self._last_events = last_events
        self._ids = ids
        self._cutter = EventCutter(max_event_bytes)
        self._last = self._before_last = b""
        self._abort_block = b""
        self._saw_done = False
        self._has_ended = False
        self._is_silent = True
        self._error_block = b""
        self._usage_pieces: list[bytes] = []
        self.bytes_in = 0
        self.events_seen = 0

    def feed(self, data: bytes) -> bytes:
        """Take one read and return the whole events in it, rewritten; ``b""`` if none is complete.

        Raises:
            AnswerTooLarge: One event passes the bound.
        """
        self.bytes_in += len(data)
        block = self._cutter.feed(data)
        if not block:
            return b""
        if self._look is not None:
            self._look(block)
        block = self._ids.apply(block)
        has_done = block.find(b"[DONE]", -_TAIL_BYTES) >= 0
        if has_done and self._last_events:
            # No end here, though a client may take it for one and miss an error behind it.
            block = b"".join(event for event in events(block) if data_of(event) != DONE_DATA)
            has_done = block.find(b"[DONE]", -_TAIL_BYTES) >= 0
        self.events_seen += block.count(b"\n\n")
        if (has_done or block.find(b"data:") < 0) and self._is_end_only(block):
            return block
        if self._last_events:
            block = self._until_last_event(block)
            if not block:
                return b""
            if block.find(_SUMS) >= 0:
                self._note_usage(block)
        if self._is_silent:
            self._is_silent = is_silent(block)
        self._before_last, self._last = self._last, block
        if self._item_ends is not None:
            self._item_ends.see(block)
        if block.find(_ERROR_EVENT) >= 0:
            self._error_block = block
        if block.find(b'"abort"') >= 0 and (_ABORT[0] in block or _ABORT[1] in block):
            self._abort_block = block
        return block

    @property
    def last_block(self) -> bytes:
        """The last block of whole events that said more than that the stream ends."""
        return self._last

    def _until_last_event(self, block: bytes) -> bytes:
        """The block without what an engine sends behind its own last event: the client takes that for the end."""
        if self._has_ended:
            return b""
        if not any(b"event: " + name in block for name in self._last_events):
            return block
        kept = []
        for event in events(block):
            kept.append(event)
            if name_of(event) in self._last_events:
                self._has_ended = True
                break
        return b"".join(kept)

    def _note_usage(self, block: bytes) -> None:
        """Remember the first and the last usage; ``/v1/messages`` tells input and output in different events."""
        pieces = [block[match.start() : match.start() + _USAGE_BYTES].split(b"\n", 1)[0] for match in _SUMS_AT(block)]
        self._usage_pieces = [*self._usage_pieces[:1], *pieces[:1], pieces[-1]]

    def _is_end_only(self, block: bytes) -> bool:
        """Look for the end marker; whether the block says nothing else."""
        payloads = [data_of(event) for event in events(block)]
        self._saw_done = self._saw_done or DONE_DATA in payloads
        return all(payload in (b"", DONE_DATA) for payload in payloads)

    def verdict(self, *, was_aborted: bool) -> Verdict:
        """The verdict, once the engine's stream has ended."""
        last = b""
        for event in events(self._last):
            payload = data_of(event)
            if payload and payload != DONE_DATA:
                last = payload
        if self._last_events:
            return self._named_verdict(last_usage(self._usage_pieces), last)
        ends = self._item_ends
        usage = (ends and ends.usage) or usage_of([last[-_LOOK_AT_BYTES:]])
        if self._error_block:
            return Verdict(Outcome.ENGINE_ERROR, self._saw_done, usage, _error_message(self._error_block))
        if not self._saw_done:
            return Verdict(Outcome.TRUNCATED, False, usage, "the engine's stream ended without its end marker")
        if self._abort_block:
            return Verdict(_abort_outcome(self._abort_block), True, usage)
        # vLLM ends its OpenAI streams like this where a request was aborted before its first token, by whomever.
        if self._is_silent or (was_aborted and not self._is_finished(last)):
            return Verdict(Outcome.ABORTED, True, usage)
        if not self._is_finished(last):
            return Verdict(Outcome.TRUNCATED, True, usage, "the engine ended its stream without a finish reason")
        return Verdict(Outcome.COMPLETE, True, usage)

    def _is_finished(self, last: bytes) -> bool:
        """Whether anything came, and the last of it had a finish reason, if it had one at all.

        Chunks of usage come behind the last choice's end.
        """
        ends = (self._before_last, self._last)
        return bool(last) and (
            any(_FINISHED.search(block) for block in ends) or not any(_UNFINISHED.search(block) for block in ends)
        )

    def _named_verdict(self, usage: Usage, last: bytes) -> Verdict:
        """The verdict by the name of the last event that has data."""
        names = [name_of(event) for event in events(self._last) if data_of(event) not in (b"", DONE_DATA)]
        name = names[-1] if names else b""
        if name not in self._last_events:
            return Verdict(Outcome.TRUNCATED, False, usage, "the engine's stream ended without its last event")
        if name in _FAILED_EVENTS:
            return Verdict(Outcome.ENGINE_ERROR, True, usage, engine_message(last))
        return Verdict(Outcome.COMPLETE, True, usage)


def _error_message(block: bytes) -> str:
    """The engine's words in the first error event of a block."""
    found = (data_of(event) for event in events(block) if _ERROR_EVENT in event)
    return engine_message(next(found, b"{}"))


def _abort_outcome(block: bytes) -> Outcome:
    """Ordinary cancellation, or an engine's failure in the guise of an abort."""
    for event in events(block):
        refusal = refusal_in(data_of(event))
        if refusal is not None:
            return refusal.report.outcome
    return Outcome.ABORTED


def first_data(block: bytes) -> bytes:
    """Payload of the first event in ``block`` that has one; ``b""`` for comments only."""
    for event in events(block):
        payload = data_of(event)
        if payload:
            return payload
    return b""


class BodyAnswer:
    """A unary body that is sent on while it is read: ids replaced on the way, a little looked at for the log.

    Args:
        ids: Replaces engine ids.
    """

    __slots__ = ("_counts", "_held", "_ids", "_is_abort", "_tail", "bytes_in")

    def __init__(self, ids: IdMap) -> None:
        self._ids = ids
        self._held = b""
        self._tail = b""
        self._counts: dict[bytes, int] = {}
        self._is_abort = False
        self.bytes_in = 0

    def feed(self, data: bytes) -> bytes:
        """Take one piece and return what can be sent on."""
        self.bytes_in += len(data)
        data = self._held + data if self._held else data
        # All that is looked for begins with a quote, and long runs of numbers or of Base64 have none.
        has_quotes = len(data) < _GATE_BYTES or data.find(b'"') >= 0
        held = self._ids.held(data)
        self._held = data[len(data) - held :] if held else b""
        if held:
            data = data[: len(data) - held]
        if has_quotes:
            ready = self._ids.apply(data)
            self._look(ready, is_end=False)
        else:
            ready = self._ids.apply_without_quotes(data)
            self._look(ready[:_TAIL_BYTES], is_end=False)  # what began in the piece before ends here
            self._tail = ready[-_TAIL_BYTES:]
        return ready

    def end(self) -> bytes:
        """What is left at the end of the body."""
        rest, self._held = self._held, b""
        rest = self._ids.apply(rest)
        self._look(rest, is_end=True)
        return rest

    def _look(self, data: bytes, *, is_end: bool) -> None:
        """Look for aborts and token counts; what may go on in the next piece is looked at with that."""
        data = self._tail + data
        if not self._is_abort and (_ABORT[0] in data or _ABORT[1] in data):
            self._is_abort = True
        done = 0
        if data.find(b"_") >= 0:  # in no other place would the counts begin anew
            done = data.rfind(_SUMS) + 1
            if done:
                self._counts.clear()
            while (at := data.find(_COUNT, done)) >= 0 and (is_end or at + len(_COUNT) + 18 < len(data)):
                done = at + len(_COUNT)
                if data.endswith(_COUNT_NAMES, 0, at) and (match := _TOKENS.search(data, max(at - 11, 0))):
                    self._counts[match[1]] = self._counts.get(match[1], 0) + int(match[2])
        self._tail = data[max(done, len(data) - _TAIL_BYTES) :]

    def verdict(self) -> Verdict:
        """The verdict, once the body is complete."""
        counts = self._counts
        outcome = Outcome.ABORTED if self._is_abort else Outcome.COMPLETE
        return Verdict(outcome, True, Usage(counts.get(b"prompt"), counts.get(b"completion"), counts.get(b"cached")))


def unary_verdict(body: bytes, dialect: Dialect = Dialect.NATIVE) -> Verdict:
    """The verdict on a whole unary body with a 2xx status."""
    has_abort = body.find(b'"abort"') >= 0 and (_ABORT[0] in body or _ABORT[1] in body)
    outcome = Outcome.ABORTED if has_abort else _COMPLETE
    if dialect is _RESPONSES and _FAILED_RESPONSE in body and _status_in(body) == "failed":
        outcome = Outcome.ENGINE_ERROR
    sums = body[body.rfind(_SUMS) :] if body.find(_SUMS) >= 0 else body  # the search from the end is the slower one
    return Verdict(outcome, True, usage_of([sums]))


def _status_in(body: bytes) -> str:
    """The status of a whole response; its items have statuses too."""
    try:
        return _response.decode(body).status
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""

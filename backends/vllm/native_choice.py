"""What one choice of vLLM's token route says, in SGLang's terms. Pure.

Numbers are never decoded, so that they reach the client digit by digit as the engine wrote them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from backends.errors import AnswerMalformed
from backends.flat_arrays import FlatRows
from backends.vllm.native_wanted import Wanted

NULL = b"null"


class Choice(msgspec.Struct):
    """A choice of a unary answer or of an event, its log-probabilities still as text."""

    index: int
    finish_reason: str | None = None
    stop_reason: msgspec.Raw = msgspec.Raw(NULL)
    token_ids: list[int] | None = None
    text: msgspec.Raw = msgspec.Raw(b'""')
    weight_versions: msgspec.Raw = msgspec.Raw(NULL)
    logprobs: "_Logprobs | None" = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


class _Top(msgspec.Struct):
    token_id: int
    logprob: msgspec.Raw
    rank: int | None = None


class _Entry(msgspec.Struct):
    logprob: msgspec.Raw
    token: msgspec.Raw = msgspec.Raw(NULL)
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


class _Span(msgspec.Struct):
    version: msgspec.Raw = msgspec.Raw(NULL)


class _Likely(msgspec.Struct):
    logprob: msgspec.Raw
    rank: int | None = None
    decoded_token: msgspec.Raw = msgspec.Raw(NULL)


_entry = msgspec.json.Decoder(_Entry)
_tops = msgspec.json.Decoder(list[_Top])
_spans = msgspec.json.Decoder(list[_Span])
_position = msgspec.json.Decoder(dict[int, _Likely])


@dataclass(slots=True)
class Rows:
    """Log-probabilities by position, as JSON.

    Attributes:
        tokens: Triples of log-probability, token and text.
        tops: Lists of such triples of the likeliest tokens.
        chosen: The same of the tokens that were asked for.
        flat: Takes what would go into ``tops``, if it is there.
        is_ragged: It could not, and both are to be thrown away.
    """

    tokens: list[bytes] = field(default_factory=list)
    tops: list[bytes] = field(default_factory=list)
    chosen: list[bytes] = field(default_factory=list)
    flat: FlatRows | None = None
    is_ragged: bool = False

    def add_tops(self, tops: Sequence[tuple[bytes, int, bytes]]) -> None:
        """Take the likeliest tokens of one position."""
        if self.flat is None:
            self.tops.append(b"[%b]" % b",".join(triple(*top) for top in tops))
            return
        try:
            self.flat.add([value for value, _, _ in tops], [token for _, token, _ in tops])
        except ValueError:
            self.is_ragged = True


def triple(logprob: bytes | msgspec.Raw, token: int, text: bytes | msgspec.Raw = NULL) -> bytes:
    """One token's log-probability as SGLang shows it."""
    return b"[%b,%d,%b]" % (logprob, token, text)


def malformed(what: str) -> AnswerMalformed:
    """The error for an answer of another shape."""
    return AnswerMalformed(f"the answer of a vLLM worker {what}")


def add_output(rows: Rows, wanted: Wanted, token: int, raw: bytes | msgspec.Raw) -> None:
    """Take the log-probabilities of one token of the output.

    Raises:
        AnswerMalformed: They are not of the engine's shape, or lack a token that was asked for.
    """
    try:
        entry = _entry.decode(raw)
        tops = _tops.decode(entry.top_logprobs) if wanted.top or wanted.token_ids else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise malformed("has log-probabilities of another shape") from exc
    rows.tokens.append(triple(entry.logprob, token, _shown(entry.token, wanted)))
    if wanted.top:
        # The sampled token is first, and one too many if it is not among the likeliest.
        tops.sort(key=lambda top: top.rank or 1 << 62)
        rows.add_tops([(bytes(top.logprob), top.token_id, NULL) for top in tops[: wanted.top]])
    if wanted.token_ids:
        told = {top.token_id: top.logprob for top in tops}
        if not told.keys() >= set(wanted.token_ids):
            raise malformed("lacks the log-probability of a token that was asked for")
        rows.chosen.append(b"[%b]" % b",".join(triple(told[one], one) for one in wanted.token_ids))


def add_prompt(rows: Rows, wanted: Wanted, token: int, raw: bytes | msgspec.Raw) -> None:
    """Take the log-probabilities of one token of the prompt, which is not the first that is shown.

    Raises:
        AnswerMalformed: They are not of the engine's shape.
    """
    try:
        likely = _position.decode(raw)
        own = likely[token]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError) as exc:
        raise malformed("has log-probabilities of the prompt of another shape") from exc
    rows.tokens.append(triple(own.logprob, token, _shown(own.decoded_token, wanted)))
    if wanted.top:
        ranked = sorted(likely.items(), key=lambda one: one[1].rank or 1 << 62)[: wanted.top]
        rows.add_tops([(bytes(one.logprob), other, _shown(one.decoded_token, wanted)) for other, one in ranked])


def _shown(text: msgspec.Raw, wanted: Wanted) -> bytes:
    return bytes(text) if wanted.has_token_text else NULL


def finish(choice: Choice, wanted: Wanted, produced: int, last_token: int | None) -> bytes:
    """SGLang's ``finish_reason``.

    Args:
        choice: A choice, or its last event.
        wanted: What was asked for.
        produced: Tokens of the whole output.
        last_token: The last of them, ``None`` for no output.
    """
    reason = choice.finish_reason
    if reason is None:
        return NULL
    if reason == "abort":
        return b'{"type":"abort","message":"Aborted","status_code":null,"err_type":null}'
    if reason == "length" or not wanted.has_output:
        return b'{"type":"length","length":%d}' % produced
    matched = bytes(choice.stop_reason)
    if matched == NULL and last_token is not None:
        matched = b"%d" % last_token  # the end of the sequence, which vLLM does not name
    return b'{"type":"stop","matched":%b}' % matched


def versions(choice: Choice, wanted: Wanted, known: bytes) -> tuple[bytes, bytes]:
    """The last version of the weights, and all of them with their tokens, both as JSON.

    Args:
        choice: A choice, or one of its events.
        wanted: What was asked for.
        known: The worker's version, should the choice tell none.

    Raises:
        AnswerMalformed: They are not of the engine's shape.
    """
    text = bytes(choice.weight_versions)
    if text == NULL:
        return known, b""
    try:
        spans = _spans.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise malformed("has weight versions of another shape") from exc
    last = bytes(spans[-1].version) if spans else known
    if not wanted.has_output:
        text = b'[{"version":%b,"start":0,"end":0}]' % last
    return last, text


def text_inner(choice: Choice) -> bytes:
    """A choice's text as it stands between the quotes.

    Raises:
        AnswerMalformed: It is none.
    """
    text = bytes(choice.text)
    if text == NULL:
        return b""
    if not text.startswith(b'"'):
        raise malformed("has a text that is none")
    return text[1:-1]

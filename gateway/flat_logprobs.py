"""Flat top log-probabilities on the OpenAI routes, in SGLang's form: ``choices[].meta_info``. Pure.

SGLang builds them itself for chat, if it is asked in its own way. For vLLM they are built here from what it tells:
tokens as ids, the sampled one first, the others by rank.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import orjson

from backends.errors import AnswerMalformed
from backends.flat_arrays import FlatRows
from backends.json_body import JsonBody
from backends.slices import Slices
from backends.types import EngineKind
from gateway.envelope import FLAT_OUTPUT
from gateway.errors import InvalidRequest
from gateway.fold_values import NULL, Fields, parse_object, parse_objects, render
from gateway.routes import Dialect

BASE64 = "return_flat_raw_top_logprobs_b64"
# Well below a millisecond of work with twenty likeliest tokens each.
SLICE_POSITIONS = 32
_OFF = (b"", b"false")
_PREFIX = "token_id:"

_count = msgspec.json.Decoder(int)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_content: msgspec.json.Decoder[list[msgspec.Raw] | None] = msgspec.json.Decoder(list[msgspec.Raw] | None)
_names = msgspec.json.Decoder(list[str])
_named: msgspec.json.Decoder[dict[str, msgspec.Raw] | None] = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


class _Top(msgspec.Struct):
    token: str
    logprob: msgspec.Raw


class _Entry(_Top):
    bytes: list[int] | None = None
    top_logprobs: list[_Top] = []


_entry = msgspec.json.Decoder(_Entry)
_Row = tuple[bytes, int]
_T = TypeVar("_T")


def wants_flat(dialect: Dialect, body: JsonBody) -> bool:
    """Whether a request on an OpenAI route asks for flat arrays."""
    return dialect in (Dialect.CHAT, Dialect.COMPLETIONS) and body.text(FLAT_OUTPUT) not in _OFF


def flat_changes(dialect: Dialect, engine: EngineKind, body: JsonBody, *, is_stream: bool) -> dict[str, bytes]:
    """JSON of the fields to set in a request of which ``wants_flat`` is true.

    Args:
        dialect: Shape of the request.
        engine: Engine of the worker that was chosen.
        body: The client's.
        is_stream: The client wants events.

    Raises:
        InvalidRequest: Names the field that stands in the way.
    """
    if is_stream:
        raise InvalidRequest(f"{FLAT_OUTPUT!r} is told in unary answers only, not with 'stream'", param=FLAT_OUTPUT)
    if engine is EngineKind.SGLANG:
        if dialect is Dialect.COMPLETIONS:
            raise InvalidRequest(f"an SGLang worker does not know {FLAT_OUTPUT!r} on this route", param=FLAT_OUTPUT)
        # The engine's default here is Base64.
        return {"return_meta_info": b"true", BASE64: b"false" if body.text(BASE64) in _OFF else b"true"}
    width = flat_width(dialect, body)
    if not width:
        return {}
    if body.text("echo") not in _OFF:
        raise InvalidRequest(f"{FLAT_OUTPUT!r} tells the output only, not an 'echo'", param="echo")
    changes = {"return_tokens_as_token_ids": b"true"}
    if dialect is Dialect.CHAT:
        # The sampled token counts, whether or not it is one of the likeliest. Completions do not count it.
        changes["top_logprobs"] = b"%d" % (width + 1)
    return changes


def flat_width(dialect: Dialect, body: JsonBody) -> int:
    """How many likeliest tokens are asked for; 0 if no log-probabilities are, and then there are no flat arrays."""
    if dialect is Dialect.CHAT and body.text("logprobs") in _OFF:
        return 0
    text = body.text("top_logprobs" if dialect is Dialect.CHAT else "logprobs")
    try:
        return max(_count.decode(text or b"0"), 0)
    except msgspec.DecodeError:
        return 0  # the engine says what is wrong


def flat_builder(
    dialect: Dialect, engine: EngineKind, body: JsonBody
) -> Callable[[Sequence[bytes]], Slices[bytes]] | None:
    """What makes the client's answer of the engine's, given as the only item of a list; ``None`` if that is it.

    Args:
        dialect: Shape of the request, of which ``wants_flat`` is true.
        engine: Who answers.
        body: The client's.
    """
    if engine is EngineKind.SGLANG or not flat_width(dialect, body):
        return None
    return lambda answers: flat_answer(dialect, answers[0], body)


def flat_answer(dialect: Dialect, answer: bytes, body: JsonBody) -> Slices[bytes]:
    """Put flat arrays into the answer of a vLLM worker, in the place of the nested lists.

    Args:
        dialect: Chat or completions.
        answer: A whole body with status 200.
        body: The client's request, of which ``flat_width`` is above 0.

    Yields:
        Between slices of less than a millisecond, but for walks over the whole answer, about 2.5 ms a megabyte each.

    Returns:
        The body, in all else the engine's. Choices of which the rows are not equally long keep their nested lists.

    Raises:
        AnswerMalformed: The answer is not of the engine's shape.
    """
    fields = parse_object(answer)
    yield
    width = flat_width(dialect, body)
    is_base64 = body.text(BASE64) not in _OFF
    shows_ids = body.text("return_tokens_as_token_ids") not in _OFF
    choices: list[bytes] = []
    for choice in parse_objects(fields.get("choices", NULL)):
        yield
        if bytes(choice.get("logprobs", NULL)) == NULL:
            choices.append(render(choice.items()))
            continue
        logprobs = parse_object(choice["logprobs"])
        yield
        rows = FlatRows(width, is_base64=is_base64)
        chosen: list[bytes] = []
        if dialect is Dialect.CHAT:
            lists = yield from _fill_chat(logprobs, rows, chosen, width, shows_ids=shows_ids)
        else:
            lists = yield from _fill_completion(logprobs, rows, chosen, width)
        choices.append(_choice(choice, logprobs | lists, rows, chosen) if lists else render(choice.items()))
    return render({**fields, "choices": b"[%b]" % b",".join(choices)}.items())


def _choice(choice: Fields, logprobs: Fields, rows: FlatRows, chosen: Sequence[bytes]) -> bytes:
    meta = {
        "output_token_logprobs": b"[%b]" % b",".join(chosen),
        "output_token_logprobs_length": b"%d" % len(chosen),
        **rows.fields("output"),
    }
    changed = {**choice, "logprobs": render(logprobs.items()), "meta_info": render(meta.items())}
    return render(changed.items())


def _fill_chat(logprobs: Fields, rows: FlatRows, chosen: list[bytes], width: int, *, shows_ids: bool) -> Slices[Fields]:
    """Fill ``rows`` and ``chosen``; the lists without what is in there, empty if the rows do not fit."""
    content: list[bytes] = []
    entries: list[msgspec.Raw] | None = _decoded(_content, logprobs.get("content", NULL))
    yield
    for number, raw in enumerate(entries or (), 1):
        entry = _decoded(_entry, raw)
        row = [(bytes(top.logprob), _id(top.token)) for top in entry.top_logprobs]
        if not _add(rows, row, width):
            return {}
        chosen.append(b"[%b,%d,null]" % (entry.logprob, _id(entry.token)))
        told: dict[str, bytes | msgspec.Raw] = {**parse_object(raw), "top_logprobs": b"[]"}
        if not shows_ids and entry.bytes is not None:
            # The client has asked for no ids, and the bytes of the sampled token are still those of its text.
            told["token"] = orjson.dumps(bytes(entry.bytes).decode("utf-8", "replace"))
        content.append(render(told.items()))
        if number % SLICE_POSITIONS == 0:
            yield
    return {"content": msgspec.Raw(b"[%b]" % b",".join(content))}


def _fill_completion(logprobs: Fields, rows: FlatRows, chosen: list[bytes], width: int) -> Slices[Fields]:
    """The same for the parallel lists of completions."""
    tokens = _decoded(_names, logprobs.get("tokens", NULL))
    values = _decoded(_raws, logprobs.get("token_logprobs", NULL))
    tops = _decoded(_raws, logprobs.get("top_logprobs", NULL))
    if not len(tokens) == len(values) == len(tops):
        raise AnswerMalformed("the lists of the engine's log-probabilities differ in length")
    for number, (token, value, raw) in enumerate(zip(tokens, values, tops, strict=True), 1):
        row = [(bytes(one), _id(name)) for name, one in (_decoded(_named, raw) or {}).items()]
        if not _add(rows, row, width):
            return {}
        chosen.append(b"[%b,%d,null]" % (value, _id(token)))
        if number % SLICE_POSITIONS == 0:
            yield
    return {"top_logprobs": msgspec.Raw(NULL)}


def _add(rows: FlatRows, row: list[_Row], width: int) -> bool:
    """Take the likeliest tokens of one position, as many as were asked for; whether they fit."""
    likeliest = by_rank(row)[:width]
    try:
        rows.add([value for value, _ in likeliest], [token for _, token in likeliest])
    except ValueError:
        return False
    return True


def by_rank(row: Sequence[_Row]) -> list[_Row]:
    """A position's tokens, likeliest first, of which vLLM puts the sampled one in front.

    Args:
        row: JSON of log-probabilities with their tokens, all but the first by rank.
    """
    if not row:
        return []
    first, *others = row
    value = float(first[0])
    place = next((index for index, (other, _) in enumerate(others) if float(other) <= value), len(others))
    return [*others[:place], first, *others[place:]]


def _id(token: str) -> int:
    digits = token.removeprefix(_PREFIX)
    if digits == token or not (digits.isascii() and digits.isdigit()):
        raise AnswerMalformed("the engine's log-probabilities do not tell tokens by their ids")
    return int(digits)


def _decoded(decoder: msgspec.json.Decoder[_T], text: bytes | msgspec.Raw) -> _T:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise AnswerMalformed("the engine's log-probabilities are not of the shape that they should have") from exc

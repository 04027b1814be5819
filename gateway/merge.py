"""The answers to the legs of a request for several samples as the one answer that it would have had. Pure.

Nothing is decoded but what has to be told apart, so numbers, escapes and unknown fields stay the engine's. Legs are
what ``gateway.expand`` makes: leg i has sample i of every prompt.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from backends.errors import AnswerMalformed
from backends.types import EngineKind
from gateway.fold_values import NULL, Fields, render, render_ordered, template
from gateway.routes import Dialect

_COUNT = re.compile(rb"\d{1,18}")
_SPEC_DETAILS = "spec_tokens_details"
_EXTENSION = template("routed_experts? cached_tokens_details? spec_tokens_details? input_ids? output_ids?")
_SUMMED = ("completion_tokens", "reasoning_tokens")

_object = msgspec.json.Decoder(Fields)
_objects = msgspec.json.Decoder(list[Fields])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_T = TypeVar("_T")
_Items = Sequence[bytes | msgspec.Raw]


def merge(
    dialect: Dialect,
    answers: Sequence[bytes],
    *,
    batch_size: int | None = None,
    engine: EngineKind = EngineKind.SGLANG,
) -> bytes:
    """The answer to the whole request.

    SGLang's native one is a list in which a prompt's samples follow each other, each with its own bytes. All others
    are one object, in all but ``choices``, ``usage``, ``sglext`` and ``metrics`` the first leg's. As in the engine,
    ``usage`` counts each prompt once, with the cached tokens of its first sample, ``sglext`` holds every sample's ids
    and speculation, and vLLM's ``metrics`` are null, since they tell of one sample.

    Args:
        dialect: Shape of the answers; native on vLLM is its token route ``/inference/v1/generate``.
        answers: Whole bodies with status 200, in the order of the legs, at least one; ids already public.
        batch_size: Items of the batch, ``None`` for a single request.
        engine: Who answered; of no account but natively.

    Raises:
        AnswerMalformed: An answer is not of the engine's shape.
    """
    if dialect is Dialect.NATIVE and engine is EngineKind.SGLANG:
        return _list([_native_items(answer, batch_size) for answer in answers])
    legs = [_decoded(_object, answer) for answer in answers]
    first = legs[0]
    changed = {"choices": _choices(legs, batch_size or 1)}
    if "metrics" in first:
        changed["metrics"] = NULL
    if is_there(first, "usage"):
        changed["usage"] = merged_usage([_decoded(_object, leg.get("usage", NULL)) for leg in legs])
    if extension := _extension([_decoded(_object, leg["sglext"]) if is_there(leg, "sglext") else {} for leg in legs]):
        changed["sglext"] = extension
    return render({**first, **changed}.items())


def _malformed(what: str) -> AnswerMalformed:
    return AnswerMalformed(f"the engine's answer to one of several samples {what}")


def _decoded(decoder: msgspec.json.Decoder[_T], text: bytes | msgspec.Raw) -> _T:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise _malformed("is not of the shape that it should have") from exc


def is_there(fields: Fields, name: str) -> bool:
    """Whether a member is there, and not null."""
    return name in fields and bytes(fields[name]) != NULL


def _list(legs: Sequence[_Items]) -> bytes:
    """A list of what the legs have for the first prompt, then of what they have for the next."""
    return b"[%b]" % b",".join(item for row in zip(*legs, strict=True) for item in row)


def _native_items(answer: bytes, batch_size: int | None) -> _Items:
    items: _Items = [answer.strip()]
    if batch_size is not None:
        batch = _decoded(_items, answer)
        items = batch
    if len(items) != (batch_size or 1):
        raise _malformed(f"has {len(items)} items instead of {batch_size}")
    if not all("meta_info" in _decoded(_object, item) for item in items):
        raise _malformed("has no meta_info")
    return items


def _choices(legs: Sequence[Fields], batch_size: int) -> bytes:
    rows: list[list[bytes]] = []
    for number, leg in enumerate(legs):
        choices = _decoded(_objects, leg.get("choices", NULL))
        if [bytes(choice.get("index", b"")) for choice in choices] != [b"%d" % prompt for prompt in range(batch_size)]:
            raise _malformed(f"has other choices than the {batch_size} of one sample each")
        flat = (prompt * len(legs) + number for prompt in range(batch_size))
        rows.append(
            [render({**choice, "index": b"%d" % index}.items()) for choice, index in zip(choices, flat, strict=True)]
        )
    return _list(rows)


def merged_usage(legs: Sequence[Fields]) -> bytes:
    """The usage of all samples, from that of each leg: the prompt counted once, what was generated added up.

    Raises:
        AnswerMalformed: A count is none.
    """
    first = legs[0]
    changed = {name: _sum(legs, name) for name in _SUMMED if name in first}
    if "total_tokens" in first:
        others = (_number(leg.get("completion_tokens", NULL)) or 0 for leg in legs[1:])
        changed["total_tokens"] = b"%d" % ((_number(first["total_tokens"]) or 0) + sum(others))
    if any("completion_tokens_details" in leg for leg in legs):  # a stream's usage leaves out what is null
        there = [leg["completion_tokens_details"] for leg in legs if is_there(leg, "completion_tokens_details")]
        details = [_decoded(_object, one) for one in there]
        names = {name: None for one in details for name in one}
        sums = render((name, _sum(details, name)) for name in names)
        changed["completion_tokens_details"] = sums if details else NULL
    return render({**first, **changed}.items())


def _sum(legs: Iterable[Fields], name: str) -> bytes:
    """The sum of a count over the legs that have it, null where none has."""
    numbers = [_number(leg.get(name, NULL)) for leg in legs]
    known = [number for number in numbers if number is not None]
    return b"%d" % sum(known) if known else NULL


def _number(raw: bytes | msgspec.Raw) -> int | None:
    text = bytes(raw)
    if text == NULL:
        return None
    if _COUNT.fullmatch(text) is None:
        raise _malformed("has a count that is none")
    return int(text)


def _extension(legs: Sequence[Fields]) -> bytes:
    """SGLang's ``sglext``, ``b""`` if there is none; what is not told for each sample is the first leg's."""
    merged = {name: bytes(raw) for name, raw in legs[0].items()}
    speculation = [[leg[_SPEC_DETAILS]] for leg in legs if _SPEC_DETAILS in leg]
    if not merged and not speculation:
        return b""
    merged[_SPEC_DETAILS] = _list(speculation)  # beside n > 1 a list, even of none (0.5.23)
    if "output_ids" in merged:
        merged["output_ids"] = _list([_one_of(leg.get("output_ids", NULL)) for leg in legs])
    return render_ordered(merged, _EXTENSION)


def merged_stream_extension(legs: Sequence[Fields]) -> bytes:
    """The ``sglext`` of a stream of all samples, from that of each leg: of what is told once, the first that is told.

    Args:
        legs: In their order; empty for a leg that told none.

    Raises:
        AnswerMalformed: It is not of the engine's shape.
    """
    merged = {name: bytes(raw) for leg in reversed(legs) for name, raw in leg.items()}
    if _SPEC_DETAILS in merged:
        merged[_SPEC_DETAILS] = _list([[leg[_SPEC_DETAILS]] for leg in legs if _SPEC_DETAILS in leg])
    if "output_ids" in merged:
        merged["output_ids"] = _list([_one_of(leg.get("output_ids", b"[[]]")) for leg in legs])
    return render_ordered(merged, _EXTENSION)


def _one_of(raw: bytes | msgspec.Raw) -> list[msgspec.Raw]:
    items = _decoded(_items, raw)
    if len(items) != 1:
        raise _malformed(f"has the ids of {len(items)} samples")
    return items

"""Unary answers of vLLM's token route as SGLang's native answer. Pure.

The work grows with the tokens, the likeliest of each included, so it is done in slices between which others may run.
One slice is longer than the others: the body is parsed in one go, about 2.5 ms a megabyte.
What vLLM does not tell is left out of ``meta_info``: times, retractions, reasoning tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import orjson

from backends.flat_arrays import FlatRows
from backends.slices import Slices
from backends.vllm.native_choice import (
    NULL,
    Choice,
    Rows,
    add_output,
    add_prompt,
    finish,
    malformed,
    text_inner,
    versions,
)
from backends.vllm.native_request import NativeLeg, NativePlan
from backends.vllm.native_values import render
from backends.vllm.native_wanted import Wanted

# About a millisecond of work with twenty likeliest tokens each.
SLICE_POSITIONS = 64


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Counts of a whole request."""

    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were cached; 0 if the worker does not tell."""
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class _Answer(msgspec.Struct):
    choices: list[Choice]
    usage: Usage | None = None
    prompt_logprobs: list[msgspec.Raw] | None = None


_answer = msgspec.json.Decoder(_Answer)


def answer(
    plan: NativePlan, bodies: Sequence[bytes], public_ids: Sequence[str], *, weight_version: str = "default"
) -> Slices[bytes]:
    """Build the client's body.

    Args:
        plan: What ``translate`` made of the request.
        bodies: The legs' answers, all with status 200, in the plan's order.
        public_ids: One for each item of the answer.
        weight_version: The worker's, should an answer tell none.

    Yields:
        Between slices of about a millisecond.

    Returns:
        The body.

    Raises:
        AnswerMalformed: An answer is not of the engine's shape.
    """
    items: list[bytes] = []
    version = orjson.dumps(weight_version)
    for leg, body in zip(plan.legs, bodies, strict=True):
        items += yield from _leg_items(leg, body, public_ids, version)
    return b"[%b]" % b",".join(items) if plan.is_list else items[0]


def _leg_items(leg: NativeLeg, body: bytes, public_ids: Sequence[str], version: bytes) -> Slices[list[bytes]]:
    try:
        parsed = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise malformed("is not of the token route's shape") from exc
    choices = sorted(parsed.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(leg.samples)):
        raise malformed(f"has other choices than the {leg.samples} that were asked for")
    prompt = yield from _prompt_rows(leg.wanted, parsed.prompt_logprobs)
    cached = (parsed.usage or Usage()).cached_tokens
    items: list[bytes] = []
    for choice in choices:
        output = yield from _output_rows(leg.wanted, choice)
        public_id = public_ids[leg.first + choice.index]
        items.append(_item(leg.wanted, choice, prompt, output, public_id, version, cached))
    return items


def _prompt_rows(wanted: Wanted, told: list[msgspec.Raw] | None) -> Slices[Rows]:
    start = wanted.logprob_start
    if start is None or start >= wanted.prompt_tokens:
        return Rows()
    if told is None or len(told) != wanted.prompt_tokens:
        raise malformed("lacks log-probabilities of the prompt")
    flat = FlatRows(wanted.top, is_base64=wanted.is_base64) if wanted.is_flat_input and wanted.top else None
    rows = Rows(flat=flat)
    ids: list[int] = orjson.loads(wanted.prompt)
    # The first of them was predicted by nothing that is shown.
    rows.tokens.append(b"[null,%d,%b]" % (ids[start], NULL))
    if flat is not None:
        flat.add_null()
    elif wanted.top:
        rows.tops.append(NULL)
    for position in range(start + 1, len(ids)):
        add_prompt(rows, wanted, ids[position], told[position])
        if position % SLICE_POSITIONS == 0:
            yield
    if rows.is_ragged:  # rows of unequal length stay nested, as in SGLang
        return (yield from _prompt_rows(replace(wanted, is_flat_input=False), told))
    return rows


def _output_rows(wanted: Wanted, choice: Choice) -> Slices[Rows]:
    flat = FlatRows(wanted.top, is_base64=wanted.is_base64) if wanted.is_flat_output and wanted.top else None
    rows = Rows(flat=flat)
    if not wanted.has_logprobs or not wanted.has_output:
        return rows
    for number, (token, entry) in enumerate(entries(choice), 1):
        add_output(rows, wanted, token, entry)
        if number % SLICE_POSITIONS == 0:
            yield
    if rows.is_ragged:
        return (yield from _output_rows(replace(wanted, is_flat_output=False), choice))
    return rows


def entries(choice: Choice) -> list[tuple[int, msgspec.Raw]]:
    """A choice's tokens with their log-probabilities, as text.

    Raises:
        AnswerMalformed: They are not as many.
    """
    tokens = choice.token_ids or []
    content = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if len(tokens) != len(content):
        raise malformed(f"has {len(content)} log-probabilities for {len(tokens)} tokens")
    return list(zip(tokens, content, strict=True))


def _item(
    wanted: Wanted, choice: Choice, prompt: Rows, output: Rows, public_id: str, version: bytes, cached: int
) -> bytes:
    tokens = (choice.token_ids or []) if wanted.has_output else []
    meta = {"id": orjson.dumps(public_id)}
    meta["finish_reason"] = finish(choice, wanted, len(tokens), tokens[-1] if tokens else None)
    meta |= counts_of_prompt(wanted)
    meta["weight_version"], spans = versions(choice, wanted, version)
    meta |= logprob_fields(wanted, prompt, output, len(tokens))
    meta |= {"completion_tokens": b"%d" % len(tokens), "cached_tokens": b"%d" % cached}
    if spans:
        meta["weight_versions"] = spans
    text = text_inner(choice) if wanted.has_output else b""
    return item(wanted, text, orjson.dumps(tokens), meta)


def counts_of_prompt(wanted: Wanted) -> dict[str, bytes]:
    """What ``meta_info`` tells of the prompt alone."""
    return {"prompt_tokens": b"%d" % wanted.prompt_tokens}


def item(wanted: Wanted, text: bytes, ids: bytes, meta: dict[str, bytes]) -> bytes:
    """One item of an answer, or the payload of one event.

    Args:
        wanted: What was asked for.
        text: What stands between the text's quotes.
        ids: The output's ids, as JSON.
        meta: Members of ``meta_info``.
    """
    members = {"text": b'"%b"' % text} if wanted.has_text else {}
    members |= {"output_ids": ids, "meta_info": render(meta)}
    if wanted.has_prompt_ids:
        members["prompt_token_ids"] = wanted.prompt
    return render(members)


def logprob_fields(wanted: Wanted, prompt: Rows, output: Rows, produced: int) -> dict[str, bytes]:
    """The members of ``meta_info`` that tell log-probabilities, in SGLang's order.

    Args:
        wanted: What was asked for.
        prompt: Those of the prompt.
        output: Those of the output, or of what is new of it.
        produced: Tokens of the whole output so far.
    """
    if not wanted.has_logprobs:
        return {}
    fields = {
        "input_token_logprobs": as_list(prompt.tokens),
        "output_token_logprobs": as_list(output.tokens),
        "output_token_logprobs_length": b"%d" % produced,
    }
    if wanted.top:
        fields |= prompt.flat.fields("input") if prompt.flat else {"input_top_logprobs": as_list(prompt.tops)}
        fields |= output.flat.fields("output") if output.flat else {"output_top_logprobs": as_list(output.tops)}
    if wanted.token_ids:
        fields["input_token_ids_logprobs"] = b"[]"
        fields["output_token_ids_logprobs"] = as_list(output.chosen)
    return fields


def as_list(items: Sequence[bytes]) -> bytes:
    """A JSON list of what is JSON."""
    return b"[%b]" % b",".join(items)

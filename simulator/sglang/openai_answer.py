"""Shape of chat and completions answers and events.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import orjson

from simulator.sequence import FinishKind, Sequence
from simulator.sglang.errors import openai_stream_error
from simulator.sglang.generate_answer import Context, Sent, answer
from simulator.sglang.openai_request import OpenAIRequest
from simulator.text import decode, logprob, token_bytes, top_logprobs


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % orjson.dumps(body)


def usage(sequences: Seq[Sequence], samples: int) -> dict[str, Any]:
    """Return the usage of a request; a prompt counts once for all its samples."""
    prompt = sum(len(s.prompt) for s in sequences[::samples])
    completion = sum(len(s.output) for s in sequences)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def samples_per_prompt(request: OpenAIRequest) -> int:
    """Return ``n``."""
    return len(request.generate.prompts[0].rids)


def finish_fields(sequence: Sequence) -> dict[str, Any]:
    """Return ``finish_reason`` and ``matched_stop`` of a choice."""
    finish = sequence.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    matched = finish.matched if finish.kind is FinishKind.STOP else None
    return {"finish_reason": finish.kind.value, "matched_stop": matched}


def unary_body(
    request: OpenAIRequest, sequences: Seq[Sequence], context: Context, created: int, now: float, *, is_chat: bool
) -> bytes:
    """Return the body of a finished unary request."""
    choices = []
    for index, sequence in enumerate(sequences):
        if is_chat:
            choices.append(_chat_choice(request, index, sequence, context, now))
        else:
            choices.append(_completion_choice(request, index, sequence, context))
    first = sequences[0]
    version = context.weight_version
    return orjson.dumps(
        {
            "id": first.rid,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": created,
            "model": request.model,
            "choices": choices,
            "usage": usage(sequences, samples_per_prompt(request)),
            "metadata": {
                "weight_version": version,
                "weight_versions": [{"version": version, "start": 0, "end": len(first.output)}],
            },
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def _chat_choice(
    request: OpenAIRequest, index: int, sequence: Sequence, context: Context, now: float
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": sequence.text, "reasoning_content": None},
        "logprobs": _chat_logprobs(request, sequence, 0, context) if request.logprobs else None,
        **finish_fields(sequence),
    }
    if request.wants_prompt_ids:
        choice["prompt_token_ids"] = sequence.prompt
    if request.wants_output_ids:
        choice["response_token_ids"] = sequence.output
    if request.wants_meta_info:
        returns = request.generate.prompts[0].returns
        choice["meta_info"] = answer(sequence, returns, context, Sent(), is_delta=False, now=now)["meta_info"]
    return choice


def _completion_choice(request: OpenAIRequest, index: int, sequence: Sequence, context: Context) -> dict[str, Any]:
    text = sequence.text
    if request.echo:
        text = request.prompt_texts[index // samples_per_prompt(request)] + text
    logprobs = None
    if request.logprobs:
        logprobs = _completion_logprobs(request, sequence, 0, context, with_prompt=request.echo)
    return {"index": index, "text": text, "logprobs": logprobs, **finish_fields(sequence)}


def _chat_logprobs(request: OpenAIRequest, s: Sequence, start: int, context: Context) -> dict[str, Any] | None:
    count = request.generate.prompts[0].returns.top_logprobs
    content = []
    for offset, token in enumerate(s.output[start:]):
        position = len(s.prompt) + start + offset
        tops = top_logprobs(token, position, count, context.vocab_size)
        content.append(
            {
                "token": decode((token,)),
                "bytes": list(token_bytes(token)),
                "logprob": logprob(token, position),
                "top_logprobs": [
                    {"token": decode((other,)), "bytes": list(token_bytes(other)), "logprob": value}
                    for value, other in tops
                ],
            }
        )
    return {"content": content}


def _completion_logprobs(
    request: OpenAIRequest, s: Sequence, start: int, context: Context, *, with_prompt: bool
) -> dict[str, Any]:
    count = request.generate.prompts[0].returns.top_logprobs
    tokens = s.output[start:]
    first = len(s.prompt) + start
    with_prompt = with_prompt and not context.is_decode
    if with_prompt:
        tokens, first = [*s.prompt, *tokens], 0
    values: list[float | None] = [logprob(token, first + i) for i, token in enumerate(tokens)]
    tops: list[dict[str, float] | None] = [
        {decode((other,)): value for value, other in top_logprobs(token, first + i, count, context.vocab_size)}
        for i, token in enumerate(tokens)
    ]
    if with_prompt:
        values[0] = tops[0] = None
    return {
        "text_offset": [-1] * len(tokens),
        "token_logprobs": values,
        "tokens": [decode((token,)) for token in tokens],
        "top_logprobs": tops,
    }


class _OpenAIRenderer:
    """What chat and completions streams have in common."""

    def __init__(self, request: OpenAIRequest, context: Context, created: int) -> None:
        self.request = request
        self.context = context
        self.created = created
        self.sequences: Seq[Sequence] = ()
        count = sum(len(spec.rids) for spec in request.generate.prompts)
        self.characters = [0] * count
        self.tokens = [0] * count
        self.is_failed = False

    def failure(self, sequence: Sequence) -> Seq[bytes] | None:
        """Return the events of a sequence that the scheduler refused, ``None`` if it did not."""
        finish = sequence.finish
        if finish is None or finish.status_code is None:
            return None
        self.is_failed = True
        kind = "SERVICE_UNAVAILABLE" if finish.status_code == 503 else "INTERNAL_SERVER_ERROR"
        return (openai_stream_error(finish.message, kind, finish.status_code),)

    def advance(self, index: int, sequence: Sequence) -> tuple[str, int]:
        """Return the new text and where the new tokens start, and move on."""
        text = sequence.text[self.characters[index] :]
        start = self.tokens[index]
        self.characters[index] = len(sequence.text)
        self.tokens[index] = len(sequence.output)
        return text, start


class ChatRenderer(_OpenAIRenderer):
    """Events of a chat stream."""

    def __init__(self, request: OpenAIRequest, context: Context, created: int) -> None:
        super().__init__(request, context, created)
        self._has_role = [False] * len(self.characters)
        self._finishes: dict[int, dict[str, Any]] = {}
        self._last_id = ""

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return the role chunk if it is still missing, and a content chunk if there is new text."""
        if self.is_failed:
            return ()
        failure = self.failure(sequence)
        if failure is not None:
            return failure
        out = []
        self._last_id = sequence.rid
        if not self._has_role[index]:
            self._has_role[index] = True
            delta = {"reasoning_content": None, "role": "assistant", "content": ""}
            out.append(event(self._chunk(sequence.rid, index, delta, None)))
        text, start = self.advance(index, sequence)
        if text:
            logprobs = _chat_logprobs(self.request, sequence, start, self.context) if self.request.logprobs else None
            chunk = self._chunk(sequence.rid, index, {"reasoning_content": None, "content": text}, logprobs)
            if self.request.continuous_usage:
                chunk["usage"] = usage((sequence,), 1)
            out.append(event(chunk))
        if sequence.finish is not None:
            self._finishes[index] = finish_fields(sequence)
        return out

    def ending(self) -> Seq[bytes]:
        """Return the finish chunks, all with the last id as the real server does, and the usage."""
        if self.is_failed:
            return ()
        out = []
        for index in sorted(self._finishes):
            chunk = self._chunk(self._last_id, index, {"reasoning_content": None}, None)
            chunk["choices"][0].update(self._finishes[index])
            out.append(event(chunk))
        if self.request.include_usage:
            chunk = self._chunk(self._last_id, 0, {}, None)
            chunk["choices"] = []
            chunk["usage"] = usage(self.sequences, samples_per_prompt(self.request))
            out.append(event(chunk))
        return out

    def _chunk(self, rid: str, index: int, delta: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None, "matched_stop": None}
        return {
            "id": rid,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.request.model,
            "choices": [choice],
        }


class CompletionRenderer(_OpenAIRenderer):
    """Events of a completions stream."""

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return one chunk per token, with or without text."""
        if self.is_failed:
            return ()
        failure = self.failure(sequence)
        if failure is not None:
            return failure
        is_first = not self.tokens[index]
        text, start = self.advance(index, sequence)
        echoes = is_first and self.request.echo
        if echoes:
            text = self.request.prompt_texts[index // samples_per_prompt(self.request)] + text
        logprobs = None
        if self.request.logprobs:
            logprobs = _completion_logprobs(self.request, sequence, start, self.context, with_prompt=echoes)
        choice = {"index": index, "text": text, "logprobs": logprobs, **finish_fields(sequence)}
        chunk = self._chunk(sequence.rid, [choice])
        chunk["usage"] = usage((sequence,), 1) if self.request.continuous_usage else None
        return (event(chunk),)

    def ending(self) -> Seq[bytes]:
        """Return the usage chunk if it is wanted; it has fewer fields than elsewhere."""
        if self.is_failed or not self.request.include_usage:
            return ()
        chunk = self._chunk(self.sequences[0].rid, [])
        total = usage(self.sequences, samples_per_prompt(self.request))
        names = ("prompt_tokens", "total_tokens", "completion_tokens", "reasoning_tokens")
        chunk["usage"] = {name: total[name] for name in names}
        return (event(chunk),)

    def _chunk(self, rid: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": rid,
            "object": "text_completion",
            "created": self.created,
            "model": self.request.model,
            "choices": choices,
        }

"""Events of vLLM's streams: every one holds what is new since the one before. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import orjson

from simulator.sequence import FinishKind, Sequence
from simulator.vllm import answer
from simulator.vllm.answer import Context
from simulator.vllm.errors import failure_event
from simulator.vllm.request import VllmRequest


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % orjson.dumps(body)


class VllmRenderer:
    """What the three routes have in common; a renderer serves one stream."""

    tells_empty_aborts = False

    def __init__(self, request: VllmRequest, context: Context) -> None:
        self.request = request
        self.context = context
        self.sequences: Seq[Sequence] = ()
        count = len(request.prompts) * request.sampling.n
        self._characters = [0] * count
        self._tokens = [0] * count
        self._is_failed = False

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return the events of what is new of choice ``index``."""
        if self._is_failed:
            return ()
        finish = sequence.finish
        if finish is not None and finish.status_code is not None:
            self._is_failed = True
            return (failure_event(finish.message, finish.status_code),)
        before = self.before(index, sequence)
        is_empty_abort = finish is not None and finish.kind is FinishKind.ABORT and not sequence.output
        if is_empty_abort and not self.tells_empty_aborts:
            # The real server takes an abort before the first token for an empty chunk of a prefill.
            return before
        text = self._new_text(index, sequence)
        start = self._tokens[index]
        self._tokens[index] = len(sequence.output)
        return (*before, event(self.chunk(index, sequence, start, text)))

    def before(self, index: int, sequence: Sequence) -> tuple[bytes, ...]:
        """Return the events that go before the first one with output."""
        return ()

    def chunk(self, index: int, sequence: Sequence, start: int, text: str) -> dict[str, Any]:
        """Return the body of the event with ``text`` and the tokens from ``start`` on."""
        raise NotImplementedError

    def ending(self) -> Seq[bytes]:
        """Return the usage event if it is wanted."""
        if self._is_failed or not self.request.include_usage:
            return ()
        return (event(self.usage_chunk()),)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the body of the usage event."""
        raise NotImplementedError

    def total_usage(self) -> dict[str, Any]:
        """Return the counts of the whole request with the cached tokens."""
        cached = self.sequences[-self.request.sampling.n].cached_tokens
        total = answer.total_usage(self.request, self.sequences)
        return {**total, "prompt_tokens_details": {"cached_tokens": cached}}

    def _new_text(self, index: int, sequence: Sequence) -> str:
        text, begin = sequence.text, self._characters[index]
        # The tail may be the beginning of a stop string, which must not be sent.
        end = len(text) if sequence.finish is not None else len(text) - self.request.sampling.held_back
        if end <= begin:
            return ""
        self._characters[index] = end
        return text[begin:end]


class CompletionRenderer(VllmRenderer):
    """Events of ``/v1/completions``."""

    def __init__(self, request: VllmRequest, context: Context) -> None:
        super().__init__(request, context)
        self._offsets = [0] * len(self._tokens)
        self._begun = [False] * len(self._tokens)

    def chunk(self, index: int, sequence: Sequence, start: int, text: str) -> dict[str, Any]:
        """Return the body of one event."""
        request = self.request
        is_first, self._begun[index] = not self._begun[index], True
        echoes = is_first and request.echo
        logprobs, self._offsets[index] = answer.completion_logprobs(
            request, sequence, start, self.context, offset=self._offsets[index], with_prompt=echoes
        )
        if echoes:
            text = request.prompt_texts[index // request.sampling.n] + text
        ids = request.return_token_ids
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason(sequence),
            "stop_reason": answer.stop_reason(sequence),
            "prompt_token_ids": sequence.prompt if ids and is_first else None,
            "token_ids": sequence.output[start:] if ids else None,
        }
        chunk = self._chunk([choice])
        if request.continuous_usage:
            chunk["usage"] = answer.usage(len(sequence.prompt), len(sequence.output))
        if sequence.finish is not None and not request.include_usage:
            chunk["system_fingerprint"] = self.context.fingerprint
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the body of the usage event."""
        return {**self._chunk([]), "usage": self.total_usage(), "system_fingerprint": self.context.fingerprint}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request.answer_id,
            "object": "text_completion",
            "created": self.context.created,
            "model": self.request.model,
            "choices": choices,
        }


class ChatRenderer(VllmRenderer):
    """Events of ``/v1/chat/completions``."""

    def __init__(self, request: VllmRequest, context: Context) -> None:
        super().__init__(request, context)
        self._has_roles = False

    def before(self, index: int, sequence: Sequence) -> tuple[bytes, ...]:
        """Return the role chunks of all choices, once."""
        if self._has_roles:
            return ()
        self._has_roles = True
        request = self.request
        chunks = []
        for choice_index in range(request.sampling.n):
            delta = {"role": "assistant", "content": ""}
            chunk = self._chunk([{"index": choice_index, "delta": delta, "logprobs": None, "finish_reason": None}])
            if request.continuous_usage:
                chunk["usage"] = {**answer.usage(len(sequence.prompt), 0), "completion_tokens_details": None}
            chunk["prompt_token_ids"] = sequence.prompt if request.return_token_ids else None
            chunk["prompt_text"] = None
            chunks.append(event(chunk))
        return tuple(chunks)

    def chunk(self, index: int, sequence: Sequence, start: int, text: str) -> dict[str, Any]:
        """Return the body of one event."""
        request = self.request
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": text},
            "logprobs": answer.chat_logprobs(request, sequence, start, self.context),
            "finish_reason": answer.finish_reason(sequence),
        }
        if sequence.finish is not None:
            choice["stop_reason"] = answer.stop_reason(sequence)
        choice["token_ids"] = sequence.output[start:] if request.return_token_ids else None
        chunk = self._chunk([choice])
        if request.continuous_usage:
            counts = answer.usage(len(sequence.prompt), len(sequence.output))
            chunk["usage"] = {**counts, "completion_tokens_details": None}
        if sequence.finish is not None and not request.include_usage:
            chunk["system_fingerprint"] = self.context.fingerprint
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the body of the usage event."""
        total = self.total_usage()
        total["prompt_tokens_details"]["created_cache_tokens"] = 0
        return {**self._chunk([]), "usage": total, "system_fingerprint": self.context.fingerprint}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request.answer_id,
            "object": "chat.completion.chunk",
            "created": self.context.created,
            "model": self.request.model,
            "choices": choices,
        }


class GenerateRenderer(VllmRenderer):
    """Events of ``/inference/v1/generate``."""

    tells_empty_aborts = True

    def __init__(self, request: VllmRequest, context: Context) -> None:
        super().__init__(request, context)
        self._has_prompt = not request.return_token_ids

    def chunk(self, index: int, sequence: Sequence, start: int, text: str) -> dict[str, Any]:
        """Return the body of one event; the first one may have the prompt's tokens."""
        counts = None
        if self.request.continuous_usage:
            counts = answer.usage(len(sequence.prompt), len(sequence.output))
            counts |= {"prompt_tokens_details": None, "completion_tokens_details": None}
        chunk: dict[str, Any] = {"request_id": self.request.answer_id, "usage": counts}
        if not self._has_prompt:
            self._has_prompt = True
            chunk["prompt_token_ids"] = sequence.prompt
        chunk["output_mode"] = self.request.output_mode
        chunk["choices"] = [answer.generate_choice(self.request, index, sequence, start, text, self.context)]
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """Return the body of the usage event."""
        return {
            "request_id": self.request.answer_id,
            "usage": self.total_usage(),
            "output_mode": self.request.output_mode,
            "choices": [],
        }

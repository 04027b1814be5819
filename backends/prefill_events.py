"""The answer of a prefill leg, read as far as the request over the pair needs it. Pure.

Its tokens are dropped. What counts is whether it ends well, and what only it knows: the prompt's log-probabilities and
how many of the prompt's tokens were cached. An engine reports many failures inside an answer of status 200, perhaps in
the same event as tokens, so every event is looked into before it is dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from backends.errors import AnswerBroken, AnswerMalformed, AnswerTooLarge, UpstreamError
from backends.sse import DONE_DATA, EventCutter, data_of, events

# How a finish reason says that the request was not served.
FAILED_FINISHES = frozenset({"abort", "error", "cancelled"})
MAX_TEXT_CHARS = 8192

Fields = dict[str, msgspec.Raw]
_T = TypeVar("_T")


class PrefillRefused(UpstreamError):
    """The engine says inside a successful answer that it has failed.

    Attributes:
        status: The status that it gives, 500 if none.
        kind: ``error`` for an error object, else the type of the finish reason.
        body: The error's JSON, for a client; empty where there is none.
    """

    def __init__(self, status: int, message: str, kind: str, body: bytes = b"") -> None:
        super().__init__(message or f"the prefill worker ended the request: {kind}")
        self.status = status
        self.kind = kind
        self.body = body

    def renamed(self, rename: Callable[[bytes], bytes]) -> "PrefillRefused":
        """The same for a client, in whose terms ``rename`` puts the ids that engines name in their messages."""
        return PrefillRefused(self.status, rename(str(self).encode()).decode(), self.kind, rename(self.body))


@dataclass(slots=True)
class PromptReport:
    """What a prefill leg says of one prompt.

    Attributes:
        logprobs: Raw JSON by name, of what is about the prompt: SGLang's ``input_*`` fields, an OpenAI choice's
            ``logprobs``, or vLLM's ``prompt_logprobs``.
        output_tokens: Tokens that it has generated, which stand at the end of an OpenAI choice's ``logprobs``.
        cached_tokens: Of the prompt, ``None`` if it does not say.
    """

    logprobs: dict[str, bytes] = field(default_factory=dict)
    output_tokens: int = 1
    cached_tokens: int | None = None


class _Finish(msgspec.Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    prompt_logprobs: msgspec.Raw = msgspec.Raw(b"null")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"null")
    meta_info: msgspec.Raw = msgspec.Raw(b"null")
    index: int = 0
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_logprobs: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_id_logprobs: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    message: str | None = None
    code: int | str | None = None


_answer = msgspec.json.Decoder(_Answer)
_items: msgspec.json.Decoder[list[_Answer]] = msgspec.json.Decoder(list[_Answer])
_meta = msgspec.json.Decoder(_Meta)
_fields = msgspec.json.Decoder(Fields)
_error = msgspec.json.Decoder(_Error | str)


def is_prompt_field(name: str) -> bool:
    """Whether a field of SGLang's ``meta_info`` tells log-probabilities of the prompt, in any of its forms."""
    return name.startswith("input_") and "logprobs" in name


class PrefillReader:
    """Reads one prefill answer, an event stream or one document.

    Args:
        limit_bytes: Bound of one event or of the document, and of the log-probabilities that are kept.
        is_stream: The answer is a stream, by its content type.
        count: Prompts of the request, ``>= 1``.
        keeps_logprobs: The client wants the prompt's log-probabilities.

    Attributes:
        prompts: What was said, by the prompt's position.
        body: The whole document; empty for a stream.
    """

    def __init__(self, *, limit_bytes: int, is_stream: bool, count: int = 1, keeps_logprobs: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._cutter = EventCutter(limit_bytes) if is_stream else None
        self._keeps_logprobs = keeps_logprobs
        self._parts: list[bytes] = []
        self._size = 0
        self._kept_bytes = 0
        self._unfinished = set(range(count))
        self.prompts = [PromptReport() for _ in range(count)]
        self.body = b""

    @property
    def is_terminated(self) -> bool:
        """Every prompt has ended well."""
        return not self._unfinished

    def feed(self, data: bytes) -> None:
        """Take one read.

        Raises:
            PrefillRefused: The engine says that it has failed.
            AnswerMalformed: An event is no JSON or not of the engine's shape, or the stream's end marker came first.
            AnswerTooLarge: An event, the document, or what is to be kept passes the bound.
        """
        if self._cutter is None:
            self._size += len(data)
            if self._size > self._limit_bytes:
                raise AnswerTooLarge(self._limit_bytes)
            self._parts.append(data)
            return
        for event in events(self._cutter.feed(data)):
            payload = data_of(event)
            if payload == DONE_DATA:
                if not self.is_terminated:
                    raise AnswerMalformed("the prefill stream's end marker came before its end")
            elif payload:
                self._take(_decoded(_answer, payload), payload)

    def end(self) -> None:
        """The answer has ended.

        Raises:
            AnswerBroken: Before its terminal.
            PrefillRefused: As for ``feed``.
            AnswerMalformed: The same.
            AnswerTooLarge: The same.
        """
        if self._cutter is None:
            self.body = b"".join(self._parts)
            self._parts.clear()
            if self.body.lstrip().startswith(b"["):
                items: list[_Answer] = _decoded(_items, self.body)
                for index, item in enumerate(items):
                    item.index = index
                    self._take(item, self.body)
            else:
                self._take(_decoded(_answer, self.body), self.body)
        if not self.is_terminated:
            raise AnswerBroken("the prefill worker's answer ended before its terminal")

    def _take(self, answer: _Answer, payload: bytes) -> None:
        if bytes(answer.error) != b"null":
            raise _refusal(bytes(answer.error), payload)
        if bytes(answer.meta_info) != b"null":
            self._take_meta(answer)
        for choice in answer.choices:
            self._take_choice(choice, answer)
        details = answer.usage.prompt_tokens_details if answer.usage else None
        if details is not None and details.cached_tokens is not None:
            self.prompts[0].cached_tokens = details.cached_tokens

    def _prompt(self, index: int) -> PromptReport:
        if not 0 <= index < len(self.prompts):
            raise AnswerMalformed("the prefill worker's answer is about a prompt that was not sent")
        return self.prompts[index]

    def _take_meta(self, answer: _Answer) -> None:
        prompt = self._prompt(answer.index)
        meta = _decoded(_meta, answer.meta_info)
        finish = meta.finish_reason
        if finish is not None and finish.type in FAILED_FINISHES:
            raise PrefillRefused(_status(finish.status_code), (finish.message or "")[:MAX_TEXT_CHARS], finish.type)
        prompt.output_tokens = meta.completion_tokens or prompt.output_tokens
        prompt.cached_tokens = meta.cached_tokens
        if self._keeps_logprobs:
            told = _decoded(_fields, answer.meta_info)
            self._keep(prompt, {name: raw for name, raw in told.items() if is_prompt_field(name)})
        if finish is not None:
            self._unfinished.discard(answer.index)

    def _take_choice(self, choice: _Choice, answer: _Answer) -> None:
        prompt = self._prompt(choice.index)
        if choice.finish_reason in FAILED_FINISHES:
            raise PrefillRefused(500, "", choice.finish_reason)
        if self._keeps_logprobs:
            told = (
                ("logprobs", choice.logprobs),
                ("prompt_logprobs", choice.prompt_logprobs),
                ("prompt_logprobs", answer.prompt_logprobs),
                ("prompt_token_id_logprobs", answer.prompt_token_id_logprobs),
            )
            # In a stream the first piece tells of the prompt, and later ones of what follows.
            found = {name: raw for name, raw in told if bytes(raw) != b"null" and name not in prompt.logprobs}
            self._keep(prompt, found)
        if choice.finish_reason is not None:
            self._unfinished.discard(choice.index)

    def _keep(self, prompt: PromptReport, found: Mapping[str, msgspec.Raw]) -> None:
        for name, raw in found.items():
            self._kept_bytes += len(raw) - len(prompt.logprobs.get(name, b""))
            prompt.logprobs[name] = bytes(raw)
        if self._kept_bytes > self._limit_bytes:
            raise AnswerTooLarge(self._limit_bytes)


def _decoded(decoder: msgspec.json.Decoder[_T], text: bytes | msgspec.Raw) -> _T:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise AnswerMalformed(f"the prefill worker's answer cannot be read: {exc}") from exc


def _status(code: int | str | None) -> int:
    text = str(code)
    return int(text) if text.isdecimal() and len(text) == 3 and 400 <= int(text) <= 599 else 500


def _refusal(error: bytes, payload: bytes) -> PrefillRefused:
    found = _decoded(_error, error)
    if isinstance(found, str):
        return PrefillRefused(500, found[:MAX_TEXT_CHARS], "error", payload)
    return PrefillRefused(_status(found.code), (found.message or "")[:MAX_TEXT_CHARS], "error", payload)

"""The prompt's log-probabilities, which only prefill has, in the answer that decode gives. Pure.

Decode leaves them empty, or out. They are put where one worker alone would have told them, in the spelling in which
prefill did; nothing else of an answer is touched, and nothing is made up.
"""

import re
from collections.abc import Sequence

import msgspec

from backends.errors import AnswerMalformed
from backends.json_body import JsonBody
from backends.prefill_events import PromptReport, is_prompt_field
from backends.sse import DONE_DATA, data_of, events
from backends.types import EngineKind
from gateway.fold_values import NULL, Fields, parse_object, parse_objects, render
from gateway.routes import Dialect

_OFF = (b"", b"false")
_START = re.compile(rb"(?<![-\d])\d")
_TOP_LEVEL = ("prompt_logprobs", "prompt_token_id_logprobs")
_items = msgspec.json.Decoder(list[msgspec.Raw])


def asks_prompt_logprobs(dialect: Dialect, engine: EngineKind, body: JsonBody) -> bool:
    """Whether the answer is to tell log-probabilities of the prompt, so that it cannot begin before prefill has ended.

    Args:
        dialect: Shape of the request.
        engine: Who serves it.
        body: The client's.
    """
    if engine is EngineKind.VLLM:
        return bool(body.text("prompt_logprobs"))
    if dialect is Dialect.COMPLETIONS:
        return body.text("echo") not in _OFF and bool(body.text("logprobs"))
    wanted = body.text("return_logprob")
    is_wanted = b"true" in wanted if wanted.startswith(b"[") else wanted not in _OFF
    # Without a position from which they are told, the engine tells none.
    return dialect is Dialect.NATIVE and is_wanted and _START.search(body.text("logprob_start_len")) is not None


class PromptLogprobs:
    """Puts what the prefill legs of one request have told into the answer of its decode leg.

    Args:
        dialect: Shape of the answer.
        engine: Who gave it.
        prompts: What prefill has told, by the prompt's position.
    """

    def __init__(self, dialect: Dialect, engine: EngineKind, prompts: Sequence[PromptReport]) -> None:
        self._dialect = dialect
        self._is_vllm = engine is EngineKind.VLLM
        self._prompts = prompts
        # In a stream of chunks the prompt is told once, with the choice's first tokens.
        self._untold = set(range(len(prompts)))

    def in_events(self, block: bytes) -> bytes:
        """Whole events of a stream, with what they lack; all else of them stays as it is.

        Raises:
            AnswerMalformed: An event is not of the engine's shape.
        """
        return b"".join(map(self._in_event, events(block)))

    def in_body(self, body: bytes) -> bytes:
        """A whole answer of status 200, with what it lacks.

        Raises:
            AnswerMalformed: It is not of the engine's shape.
        """
        if self._dialect is Dialect.NATIVE and body.lstrip().startswith(b"["):
            items = enumerate(map(bytes, _decoded_items(body)))
            return b"[%b]" % b",".join(self._native(parse_object(item), index) or item for index, item in items)
        fields = parse_object(body)
        return (self._native(fields, 0) if self._is_native else self._openai(fields)) or body

    @property
    def _is_native(self) -> bool:
        return self._dialect is Dialect.NATIVE and not self._is_vllm

    def _in_event(self, event: bytes) -> bytes:
        payload = data_of(event)
        if payload in (b"", DONE_DATA):
            return event
        fields = parse_object(payload)
        told = self._native(fields, _position(fields.get("index", b"0"))) if self._is_native else self._openai(fields)
        return event.replace(payload, told, 1) if told else event

    def _prompt(self, index: int) -> PromptReport:
        if index >= len(self._prompts):
            raise AnswerMalformed("the decode worker's answer is about a prompt that was not sent")
        return self._prompts[index]

    # The object with what it lacks; empty where it lacks nothing.

    def _native(self, fields: Fields, index: int) -> bytes:
        if "meta_info" not in fields:
            return b""
        told = self._prompt(index).logprobs
        meta = parse_object(fields["meta_info"])
        kept = {name: raw for name, raw in meta.items() if name in told or not is_prompt_field(name)}
        return render({**fields, "meta_info": render({**kept, **told}.items())}.items())

    def _openai(self, fields: Fields) -> bytes:
        if self._is_vllm and self._dialect is not Dialect.COMPLETIONS:
            told = self._prompt(0).logprobs
            found = {name: told[name] for name in _TOP_LEVEL if name in told}
            return render({**fields, **found}.items()) if found else b""
        if "choices" not in fields:
            return b""
        choices = parse_objects(fields["choices"])
        changes = [self._choice(choice) for choice in choices]
        if not any(changes):
            return b""
        merged = (render({**choice, **change}.items()) for choice, change in zip(choices, changes, strict=True))
        return render({**fields, "choices": b"[%b]" % b",".join(merged)}.items())

    def _choice(self, choice: Fields) -> dict[str, bytes]:
        """What is to be changed in a choice."""
        index = _position(choice.get("index", b"0"))
        told = self._prompt(index).logprobs
        if self._is_vllm:
            return {name: raw for name, raw in told.items() if name == "prompt_logprobs"}
        if index not in self._untold or "logprobs" not in told or bytes(choice.get("logprobs", NULL)) == NULL:
            return {}
        self._untold.discard(index)
        return {"logprobs": _prepended(self._prompt(index), parse_object(choice["logprobs"]))}


def _prepended(prompt: PromptReport, decode: Fields) -> bytes:
    """The lists of a choice's ``logprobs``, with the prompt's part of prefill's lists in front."""
    prefill = parse_object(prompt.logprobs["logprobs"])
    joined: dict[str, bytes | msgspec.Raw] = {}
    for name, raw in decode.items():
        told = bytes(prefill.get(name, NULL))
        if not (told.startswith(b"[") and bytes(raw).startswith(b"[")):
            joined[name] = raw
            continue
        of_prompt = _decoded_items(told)[: -prompt.output_tokens]
        joined[name] = b"[%b]" % b",".join(map(bytes, [*of_prompt, *_decoded_items(bytes(raw))]))
    return render(joined.items())


def _decoded_items(text: bytes) -> list[msgspec.Raw]:
    try:
        return _items.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise AnswerMalformed("a list in the engine's answer is none") from exc


def _position(raw: bytes | msgspec.Raw) -> int:
    text = bytes(raw)
    if not text.isdigit() or len(text) > 9:
        raise AnswerMalformed("the decode worker's answer has a position that is none")
    return int(text)

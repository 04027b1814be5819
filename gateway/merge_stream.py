"""The streams of the legs of a request for several samples as the one stream that it would have had. Pure.

Legs are what ``gateway.expand`` makes: leg i has sample i of every prompt. Events are passed on as they come, each
with its choice's number in the whole request; what the engine tells once, behind all choices, waits for the end.
Nothing is decoded but what has to be told apart.

Differences to the stream of SGLang for ``n > 1``: a choice's finish reason does not wait for the other choices, and
has that choice's id.
"""

import re
from collections.abc import Mapping

import msgspec

from backends.errors import AnswerMalformed
from backends.sse import DONE_DATA, DONE_EVENT, data_of, events, name_of
from backends.types import EngineKind
from gateway.fold_values import NULL, Fields, parse_index, parse_object, parse_objects, render
from gateway.merge import is_there, merged_stream_extension, merged_usage
from gateway.routes import Dialect

# SGLang names the event in which it tells token ids, where the client asks for that.
_IDS_NAME = b"sglext_ids"
_KNOWN_NAMES = frozenset({b"", b"message", _IDS_NAME})
_IDS = frozenset({"input_ids", "output_ids"})
# Where SGLang's native events end, if they are items of a list.
_INDEX_AT_END = re.compile(rb',\s*"index":\s*(\d{1,9})\s*\}\s*\Z')
_TAIL_BYTES = 48
# Quotes inside a generated text are escaped, so this is the member's name.
_META = b'"meta_info":'
# vLLM's token route tells these in the very first chunk alone.
_PROMPT = frozenset({"prompt_token_ids", "mm_placeholders"})
_SAMPLED = frozenset({Dialect.NATIVE, Dialect.CHAT, Dialect.COMPLETIONS})


class StreamMerge:
    """One stream of several.

    Args:
        dialect: Shape of the events; native on vLLM is its token route ``/inference/v1/generate``.
        engine: Who answers.
        batch_size: Items of the batch, ``None`` for a single request.
        count: Legs, which is samples per prompt.

    Raises:
        ValueError: The dialect has no samples.
    """

    def __init__(self, dialect: Dialect, engine: EngineKind, *, batch_size: int | None, count: int) -> None:
        if dialect not in _SAMPLED:
            raise ValueError(f"{dialect.value} has no samples")
        self._prompts = batch_size or 1
        self._is_batch = batch_size is not None
        self._count = count
        self._is_native = dialect is Dialect.NATIVE and engine is EngineKind.SGLANG
        self._is_token_route = dialect is Dialect.NATIVE and engine is EngineKind.VLLM
        self._has_told_prompt = False
        self._has_failed = False
        self._created = b""
        # Chunks without choices, by leg.
        self._extensions: dict[int, Fields] = {}
        self._named_extensions: dict[int, Fields] = {}
        self._usages: dict[int, Fields] = {}

    def feed(self, choice: int, block: bytes) -> bytes:
        """Take events of one leg and return those that the client gets now; ``b""`` if none.

        Errors, comments, and events with names of their own are passed on as they are.

        Args:
            choice: Number of the leg, from 0.
            block: Whole events, ids already public.

        Raises:
            AnswerMalformed: An event is not of the engine's shape.
        """
        return b"".join([self._merged(choice, event) for event in events(block)])

    def end(self) -> bytes:
        """What the engine tells behind all choices, and the end marker; to be called once, when all legs have ended.

        A usage is told if all legs told one, since it counts what all of them did.

        Raises:
            AnswerMalformed: What a leg told is not of the engine's shape.
        """
        told = [self._extension(self._extensions, b""), self._extension(self._named_extensions, _IDS_NAME)]
        if len(self._usages) == self._count:
            chunks = [self._usages[choice] for choice in range(self._count)]
            usage = merged_usage([parse_object(chunk["usage"]) for chunk in chunks])
            first = {name: raw for name, raw in chunks[0].items() if name != "metrics"}  # those are one sample's
            told.append(self._event_of({**first, "usage": usage}))
        return b"".join([*told, DONE_EVENT])

    def _merged(self, choice: int, event: bytes) -> bytes:
        data = data_of(event)
        if data == DONE_DATA:
            return b""
        name = name_of(event)
        if not data or name not in _KNOWN_NAMES:
            return event
        if self._is_native:
            return self._native(choice, event, data)
        return self._chunk(choice, event, data, self._named_extensions if name == _IDS_NAME else self._extensions)

    def _native(self, choice: int, event: bytes, data: bytes) -> bytes:
        """An event of SGLang's ``/generate``, which has its index last; that of a single request has none."""
        match = _INDEX_AT_END.search(data, max(len(data) - _TAIL_BYTES, 0))
        if match is not None:
            return _event(b'%b,"index":%b}' % (data[: match.start()], self._index(choice, match[1])))
        if not self._is_batch and data.find(_META) >= 0 and data.rstrip().endswith(b"}"):
            return _event(b'%b,"index":%b}' % (data[: data.rindex(b"}")], self._index(choice, b"0")))
        fields = parse_object(data)
        if "error" in fields:
            return event
        if "meta_info" not in fields or "index" not in fields:
            raise AnswerMalformed("an event of the engine's stream does not say to which item it belongs")
        return _event(render({**fields, "index": self._index(choice, fields["index"])}.items()))

    def _chunk(self, choice: int, event: bytes, data: bytes, extensions: dict[int, Fields]) -> bytes:
        """An event with ``choices``."""
        fields = parse_object(data)
        if "choices" not in fields:
            if "error" not in fields:
                raise AnswerMalformed("an event of the engine's stream has no choices")
            self._has_failed = True
            return event
        choices = parse_objects(fields["choices"])
        if not choices:
            for name, held in (("sglext", extensions), ("usage", self._usages)):
                if is_there(fields, name):
                    held[choice] = fields
                    return b""
        rendered = [render({**one, "index": self._index(choice, one.get("index", NULL))}.items()) for one in choices]
        if self._is_token_route and "prompt_token_ids" in fields:
            if self._has_told_prompt:
                fields = {name: raw for name, raw in fields.items() if name not in _PROMPT}
            self._has_told_prompt = True
        return self._event_of({**fields, "choices": b"[%b]" % b",".join(rendered)})

    def _index(self, choice: int, index: bytes | msgspec.Raw) -> bytes:
        """Number of a leg's choice in the whole request."""
        return b"%d" % (parse_index(index, self._prompts) * self._count + choice)

    def _extension(self, held: dict[int, Fields], name: bytes) -> bytes:
        """The legs' pieces of ``sglext`` as one event; without token ids behind an error, as in the engine."""
        legs = [parse_object(held[choice]["sglext"]) if choice in held else {} for choice in range(self._count)]
        if self._has_failed:
            legs = [{name: raw for name, raw in leg.items() if name not in _IDS} for leg in legs]
        if not any(legs):
            return b""
        event = self._event_of({**held[min(held)], "sglext": merged_stream_extension(legs)})
        return b"event: %b\n%b" % (name, event) if name else event

    def _event_of(self, fields: Mapping[str, bytes | msgspec.Raw]) -> bytes:
        """A chunk, created when the first one was: all chunks of a stream say the same."""
        if "created" in fields:
            self._created = self._created or bytes(fields["created"])
            fields = {**fields, "created": self._created}
        return _event(render(fields.items()))


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data.replace(b"\n", b" ")  # a line break stands between tokens, never in one

"""Folding OpenAI streams, and vLLM's token stream which is shaped like them, into the unary object. Pure.

Chunks are deltas on both engines. Key order and the fields that stand there even when null are those of the unary
answers of SGLang 0.5.23 and vLLM 0.32. ``null`` in a chunk means that it says nothing. Fields that are known to
neither table are kept: in a delta strings are concatenated, lists extended, and of anything else the last wins; in a
choice lists are extended and of anything else the last wins; at the top the last wins.

What a stream does not tell:

- SGLang: ``metadata`` (weight versions). Chat ``logprobs`` of tokens that gave no text of their own are left out of
  the stream by the engine; ``return_meta_info`` and its like are refused with ``stream``.
- vLLM: ``kv_transfer_params``, ``ec_transfer_params``, ``metrics`` and ``prompt_logprobs`` are always null; the token
  route says neither ``model`` nor ``created``. The caller may supply such fields.
- ``null`` members that the engine leaves out of a stream's ``usage`` are put back.
- Ids of tool calls are the stream's; an engine makes them up per answer. An empty text beside tool calls or reasoning
  becomes null.
"""

from collections.abc import Mapping

from backends.types import EngineKind
from gateway.fold_values import (
    NULL,
    EventFold,
    Fields,
    Joined,
    Latest,
    Members,
    Template,
    Value,
    parse_index,
    parse_object,
    parse_objects,
    render,
    render_ordered,
    template,
)
from gateway.routes import Dialect

_SGLANG, _VLLM = EngineKind.SGLANG, EngineKind.VLLM
_TOP: Mapping[tuple[EngineKind, Dialect], Template] = {
    (_SGLANG, Dialect.CHAT): template("id? object? created? model? choices? usage metadata? sglext?"),
    (_SGLANG, Dialect.COMPLETIONS): template("id? object? created? model? choices? usage metadata? sglext?"),
    (_VLLM, Dialect.CHAT): template(
        "id? object? created? model? choices? service_tier system_fingerprint usage"
        " prompt_logprobs prompt_token_ids prompt_text kv_transfer_params ec_transfer_params metrics"
    ),
    (_VLLM, Dialect.COMPLETIONS): template(
        "id? object? created? model? choices? service_tier system_fingerprint usage"
        " kv_transfer_params ec_transfer_params metrics"
    ),
    (_VLLM, Dialect.NATIVE): template(
        "request_id? model? created? usage prompt_logprobs prompt_token_id_logprobs prompt_token_ids"
        " mm_placeholders metrics kv_transfer_params ec_transfer_params output_mode choices?"
    ),
}
_CHOICE: Mapping[tuple[EngineKind, Dialect], Template] = {
    (_SGLANG, Dialect.CHAT): template("index? message? logprobs finish_reason matched_stop"),
    (_SGLANG, Dialect.COMPLETIONS): template('index? text="" logprobs finish_reason matched_stop'),
    (_VLLM, Dialect.CHAT): template("index? message? logprobs finish_reason stop_reason token_ids routed_experts"),
    (_VLLM, Dialect.COMPLETIONS): template(
        'index? text="" logprobs finish_reason stop_reason token_ids prompt_logprobs prompt_token_ids routed_experts'
    ),
    (_VLLM, Dialect.NATIVE): template(
        "index? finish_reason stop_reason token_ids=[] routed_experts sampling_mask weight_versions text? logprobs"
    ),
}
_MESSAGE: Mapping[EngineKind, Template] = {
    _SGLANG: template('role="assistant" content="" reasoning_content tool_calls?'),
    _VLLM: template('role="assistant" content="" refusal annotations audio function_call tool_calls? reasoning'),
}
_TOOL_CALL: Mapping[EngineKind, Template] = {
    _SGLANG: template("id? index? type? function?"),
    _VLLM: template("id? type? function?"),
}
_USAGE: Mapping[EngineKind, Template] = {
    _SGLANG: template(
        "prompt_tokens? total_tokens? completion_tokens? prompt_tokens_details"
        " reasoning_tokens? completion_tokens_details"
    ),
    _VLLM: template("prompt_tokens? total_tokens? completion_tokens? prompt_tokens_details completion_tokens_details"),
}
_PROMPT_DETAILS = template("cached_tokens created_cache_tokens multimodal_tokens")

# Said once, or again and again, but never in pieces.
_WHOLE_IN_CHOICE = frozenset(
    {
        "index",
        "finish_reason",
        "stop_reason",
        "matched_stop",
        "prompt_token_ids",
        "prompt_logprobs",
        "routed_experts",
        "weight_versions",
    }
)
_WHOLE_IN_CALL = frozenset({"id", "index", "type", "name"})
_SAID_FIRST = frozenset({"object", "created", "model", "request_id"})


def _new_joined(_name: str) -> Value:
    return Joined()


def _new_in_call(name: str) -> Value:
    if name == "function":
        return Members(_new_in_call)
    return Latest() if name in _WHOLE_IN_CALL else Joined()


def _new_in_delta(name: str) -> Value:
    if name == "tool_calls":
        return _ToolCalls()
    if name == "function_call":
        return Members(_new_in_call)
    return Latest() if name == "role" else Joined()


def _new_in_choice(name: str) -> Value:
    if name == "delta":
        return Members(_new_in_delta)
    if name == "logprobs":
        return Members(_new_joined)
    if name in _WHOLE_IN_CHOICE:
        return Latest()
    return Joined() if name == "text" else Joined(b"[")


def _new_on_top(name: str) -> Value:
    return Latest(keeps_first=name in _SAID_FIRST)


class _ToolCalls:
    """Tool calls, each growing under its index."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: dict[int, Members] = {}

    def add(self, piece: bytes) -> int:
        """Take one piece; see ``gateway.fold_values.Value``."""
        if piece == NULL:
            return 0
        growth = 0
        for position, fields in enumerate(parse_objects(piece)):
            index = parse_index(fields["index"], 1 << 20) if "index" in fields else position
            growth += self._calls.setdefault(index, Members(_new_in_call)).update(fields)
        return growth

    def json(self) -> bytes:
        """The value so far, in whatever order its members came; see ``gateway.fold_values.Value``."""
        return b"[%b]" % b",".join(render(texts.items()) for texts in self.texts())

    def texts(self) -> list[dict[str, bytes]]:
        """The members of each call, in the order of the calls."""
        return [self._calls[index].texts() for index in sorted(self._calls)]


class ChunkFold(EventFold):
    """Chunks with ``choices``, whose fields are deltas.

    Args:
        dialect: Chat, completions, or native for vLLM's token route.
        engine: Whose unary answer to give.
        count: Choices of the answer: prompts times samples.
        limit_bytes: Bound of what is held.
        supplied: JSON of top-level fields that the stream does not tell.
    """

    def __init__(
        self, dialect: Dialect, engine: EngineKind, count: int, limit_bytes: int, supplied: Mapping[str, bytes]
    ) -> None:
        super().__init__(count, limit_bytes)
        self._dialect = dialect
        self._engine = engine
        self._supplied = supplied
        self._top = Members(_new_on_top)
        self._choices: dict[int, Members] = {}

    def _take(self, data: bytes) -> None:
        fields = parse_object(data)
        if "error" in fields:
            self._refuse(data)
            return
        # Samples of SGLang have ids of their own; a unary answer has that of the first.
        if 0 in self._choices:
            fields.pop("id", None)
        choices = fields.pop("choices", None)
        growth = self._top.update(fields)
        for choice in parse_objects(choices) if choices is not None else ():
            growth += self._take_choice(choice)
        self._hold(growth)

    def _take_choice(self, fields: Fields) -> int:
        index = parse_index(fields["index"], self._count) if "index" in fields else 0
        return self._choices.setdefault(index, Members(_new_in_choice)).update(fields)

    def _is_whole(self) -> bool:
        return len(self._choices) == self._count

    def _answer(self) -> bytes:
        choices = [self._choice(index, self._choices[index]) for index in range(self._count)]
        texts = {**self._supplied, **self._top.texts(), "choices": b"[%b]" % b",".join(choices)}
        if "object" in texts:
            texts["object"] = texts["object"].replace(b".chunk", b"")
        usage = texts.get("usage", NULL)
        if usage != NULL:
            texts["usage"] = self._usage(usage)
        return render_ordered(texts, _TOP[self._engine, self._dialect])

    def _choice(self, index: int, choice: Members) -> bytes:
        values = dict(choice.values)
        message = b""
        if self._dialect is Dialect.CHAT:
            delta = values.pop("delta", None)
            members = dict(delta.values) if isinstance(delta, Members) else {}
            # SGLang streams them in the delta, and answers with them beside the message.
            if "hidden_states" in members:
                values["hidden_states"] = members.pop("hidden_states")
            message = self._message(members)
        texts = {name: value.json() for name, value in values.items()}
        texts["index"] = b"%d" % index
        if message:
            texts["message"] = message
        return render_ordered(texts, _CHOICE[self._engine, self._dialect])

    def _message(self, members: dict[str, Value]) -> bytes:
        calls = members.pop("tool_calls", None)
        texts = {name: value.json() for name, value in members.items()}
        is_beside = any(texts.get(name, NULL) != NULL for name in ("reasoning", "reasoning_content"))
        merged = calls.texts() if isinstance(calls, _ToolCalls) else []
        if merged:
            is_beside = True
            if self._engine is _VLLM:
                merged = [{name: text for name, text in call.items() if name != "index"} for call in merged]
            order = _TOOL_CALL[self._engine]
            texts["tool_calls"] = b"[%b]" % b",".join(render_ordered(call, order) for call in merged)
        if is_beside and texts.get("content", b'""') == b'""':
            texts["content"] = NULL
        return render_ordered(texts, _MESSAGE[self._engine])

    def _usage(self, usage: bytes) -> bytes:
        texts = {name: bytes(raw) for name, raw in parse_object(usage).items()}
        details = texts.get("prompt_tokens_details", NULL)
        if self._engine is _VLLM and details != NULL:
            members = {name: bytes(raw) for name, raw in parse_object(details).items()}
            texts["prompt_tokens_details"] = render_ordered(members, _PROMPT_DETAILS)
        return render_ordered(texts, _USAGE[self._engine])

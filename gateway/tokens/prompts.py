"""Which prompts a request has, by route and engine. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from backends.json_body import JsonBody
from backends.types import EngineKind
from gateway.routes import Dialect, Route
from gateway.tokens.chat import ChatPrompt, NotKnown
from gateway.tokens.content_format import ContentFormat
from gateway.tokens.sglang_chat import sglang_chat
from gateway.tokens.vllm_chat import vllm_chat

CHATS: Mapping[EngineKind, Callable[[dict[str, Any], ContentFormat, str], ChatPrompt]] = {
    EngineKind.SGLANG: sglang_chat,
    EngineKind.VLLM: vllm_chat,
}
# Fields of a chat request that have a say in its prompt. Everything else stays unparsed.
_CHAT_FIELDS = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "input_ids",
    "media_io_kwargs",
    "messages",
    "mm_processor_kwargs",
    "reasoning",
    "reasoning_effort",
    "tool_choice",
    "tools",
    "truncate_prompt_tokens",
)
# Fields that give the prompt in another way than as text, or add to it.
_NATIVE_OTHER = ("input_ids", "input_embeds", "image_data", "video_data", "audio_data", "session_params", "session_id")
_COMPLETIONS_OTHER = ("suffix", "prompt_embeds", "truncate_prompt_tokens", "session_params", "session_id")


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts that go to the tokenizer as they are.

    Attributes:
        texts: One, or one for each item of a batch.
        add_special_tokens: Ids of the tokenizer's own beginning and end are added.
    """

    texts: tuple[str, ...]
    add_special_tokens: bool = True


def prompts_of(engine: EngineKind, route: Route, body: JsonBody) -> Texts | dict[str, Any]:
    """The texts of ``body``, or the fields of a chat.

    Raises:
        NotKnown: Prompts of another kind.
    """
    if route.dialect is Dialect.CHAT:
        return _parsed(body, _CHAT_FIELDS)
    if route.path == "/generate" and engine is EngineKind.SGLANG:
        return _texts(body, "text", _NATIVE_OTHER, add_special_tokens=True)
    if route.dialect is not Dialect.COMPLETIONS:
        raise NotKnown(route.path)
    add = _parsed(body, ("add_special_tokens",)).get("add_special_tokens", True) if engine is EngineKind.VLLM else True
    if not isinstance(add, bool):
        raise NotKnown("add_special_tokens")
    return _texts(body, "prompt", _COMPLETIONS_OTHER, add_special_tokens=add)


def _parsed(body: JsonBody, names: tuple[str, ...]) -> dict[str, Any]:
    """The named fields that are there and not null."""
    try:
        return {name: orjson.loads(text) for name in names if (text := body.text(name))}
    except orjson.JSONDecodeError as exc:
        raise NotKnown("JSON that only some parsers take") from exc


def _texts(body: JsonBody, field: str, others: tuple[str, ...], *, add_special_tokens: bool) -> Texts:
    for name in others:
        if body.text(name):
            raise NotKnown(name)
    value = _parsed(body, (field,)).get(field)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise NotKnown(field)
    return Texts(tuple(texts), add_special_tokens)

"""Asks a worker's engine which token ids it makes of a request's text, where there is no local tokenizer."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from backends.control import bearer
from backends.errors import CallEnded, UpstreamError
from backends.json_body import JsonBody
from backends.types import EngineKind, Worker
from backends.upstream.base import UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch

TOKENIZE_PATH = "/tokenize"
# Text that is tokenized as it is, by the field in which a route takes it.
_TEXT_FIELDS = {"/generate": "text", "/v1/completions": "prompt"}
_CHAT_PATH = "/v1/chat/completions"
# What each engine's /tokenize understands of a chat.
_CHAT_FIELDS: Mapping[EngineKind, Sequence[str]] = {
    EngineKind.SGLANG: (
        "model", "messages", "tools", "tool_choice", "reasoning", "reasoning_effort", "continue_final_message",
        "chat_template_kwargs",
    ),
    EngineKind.VLLM: (
        "model", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
        "add_special_tokens", "chat_template_kwargs",
    ),
}  # fmt: skip
# Fields with a say in the prompt that /tokenize has no place for: its ids would be of another prompt.
_UNASKABLE: Mapping[EngineKind, Sequence[str]] = {
    EngineKind.SGLANG: ("input_ids", "input_embeds", "image_data", "video_data", "audio_data", "suffix"),
    EngineKind.VLLM: ("documents", "reasoning_effort", "truncate_prompt_tokens", "prompt_embeds", "suffix"),
}
# Media would be fetched, and become other ids than those of the template's text.
_MEDIA = (b"_url", b"input_audio", b"input_image", b"_embeds")


class _Answer(msgspec.Struct):
    tokens: list[int | list[int]]


_answers = msgspec.json.Decoder(_Answer)


def tokenize_body(engine: EngineKind, path: str, body: JsonBody) -> bytes | None:
    """Body of the ``/tokenize`` call for a request; ``None`` where that route cannot say what the request's ids are.

    Args:
        engine: The worker's engine.
        path: The request's route.
        body: The request.
    """
    if any(body.text(name) for name in _UNASKABLE[engine]):
        return None
    if path == _CHAT_PATH:
        fields = {name: text for name in _CHAT_FIELDS[engine] if (text := body.text(name))}
        messages = fields.get("messages", b"")
        if not messages.startswith(b"[") or any(word in messages for word in _MEDIA):
            return None
    else:
        text = body.text(_TEXT_FIELDS.get(path, ""))
        is_batch = text.startswith(b"[")
        if not text.startswith((b'"', b"[")) or (is_batch and engine is EngineKind.VLLM):
            return None
        if is_batch and not text[1:].lstrip().startswith(b'"'):
            return None
        names = ("model", "add_special_tokens") if engine is EngineKind.VLLM else ("model",)
        fields = {name: value for name in names if (value := body.text(name))} | {"prompt": text}
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), text) for name, text in fields.items()) + b"}"


async def engine_token_ids(
    client: UpstreamClient, worker: Worker, engine: EngineKind, path: str, body: JsonBody, timeout_s: float
) -> tuple[bytes, ...] | None:
    """The ids that ``worker`` makes of a request's prompts: one item each, ids of four bytes, little-endian.

    ``None`` where it does not say: another kind of prompt, no such route, a refusal, no answer within ``timeout_s``
    seconds. Raises nothing for what a request or an engine does; leaving early closes the call.
    """
    asked = tokenize_body(engine, path, body)
    if asked is None:
        return None
    headers = [*bearer(worker.api_key), (b"content-type", b"application/json")]
    request = UpstreamRequest("POST", TOKENIZE_PATH, headers, [asked])
    try:
        async with asyncio.timeout(timeout_s):
            status, answer = await fetch(client, worker.origin, request)
    except (UpstreamError, CallEnded, TimeoutError):
        return None
    return token_ids_in(answer) if status == 200 else None


def token_ids_in(answer: bytes) -> tuple[bytes, ...] | None:
    """The ids in an answer of ``/tokenize``; ``None`` if it holds something else."""
    try:
        tokens = _answers.decode(answer).tokens
        is_batch = any(isinstance(one, list) for one in tokens)
        if is_batch and not all(isinstance(one, list) for one in tokens):
            return None
        return tuple(np.asarray(ids, dtype="<u4").tobytes() for ids in (tokens if is_batch else [tokens]))
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, TypeError, ValueError):
        return None

"""Reading the bodies of the OpenAI routes.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from simulator.chat import GENERATION_PROMPT, render
from simulator.options import EngineOptions
from simulator.sglang.errors import BodyError, InvalidRequest, SchemaError, field_error
from simulator.sglang.generate_request import (
    GenerateRequest,
    PromptSpec,
    Returns,
    check_lengths,
    dp_rank,
    fresh_rid,
    namespace_of,
    session_of,
    with_rooms,
)
from simulator.sglang.sampling import Sampling, parse_sampling
from simulator.text import encode

_ROLES = ("system", "user", "assistant", "tool", "function", "developer", "latest_reminder", "root")
_SAME_NAME = (
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "no_stop_trim",
    "regex",
    "ebnf",
    "n",
)
_NUMBERS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "min_tokens", "seed", "top_logprobs")


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A checked request of an OpenAI route."""

    generate: GenerateRequest
    model: str
    logprobs: bool = False
    echo: bool = False
    prompt_texts: tuple[str, ...] = ()
    include_usage: bool = False
    continuous_usage: bool = False
    wants_meta_info: bool = False
    wants_prompt_ids: bool = False
    wants_output_ids: bool = False


def chat_prompt(messages: Any) -> list[int]:
    """Return the token ids of a conversation.

    Raises:
        BodyError: A message cannot be read.
        InvalidRequest: There is no message.
    """
    if not isinstance(messages, list):
        raise BodyError(field_error("list_type", ("body", "messages"), "Input should be a valid list", messages))
    if not messages:
        raise InvalidRequest("Messages cannot be empty.")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role.lower() not in _ROLES:
            location = ("body", "messages", index, "role")
            raise BodyError(field_error("value_error", location, "Value error, 'role' must be a known one", role))
    return encode(render(messages) + GENERATION_PROMPT)


def check_common(raw: Mapping[str, Any]) -> None:
    """Run the typed parse on the fields that all OpenAI routes share.

    Raises:
        BodyError: A field has a wrong type.
    """
    if "model" in raw and not isinstance(raw["model"], str):
        raise BodyError(field_error("string_type", ("body", "model"), "Input should be a valid string", raw["model"]))
    for name in _NUMBERS:
        value = raw.get(name)
        if value is not None and not isinstance(value, int):
            raise BodyError(field_error("int_parsing", ("body", name), "Input should be a valid integer", value))
    stream = raw.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BodyError(field_error("bool_parsing", ("body", "stream"), "Input should be a valid boolean", stream))


def parse_chat(raw: Mapping[str, Any], rank_header: str | None, options: EngineOptions) -> OpenAIRequest:
    """Check a chat body.

    Raises:
        BodyError: A field has a wrong type.
        InvalidRequest: A value is refused.
        FatalRequest: Deadly to the engine.
    """
    check_common(raw)
    prompt = chat_prompt(raw.get("messages"))
    ids = raw.get("input_ids")
    if isinstance(ids, list) and ids:
        prompt = ids
    limit = raw.get("max_completion_tokens")
    sampling = _sampling(raw, raw.get("max_tokens") if limit is None else limit)
    stream = bool(raw.get("stream"))
    extras = ("return_prompt_token_ids", "return_token_ids", "return_meta_info")
    if stream and any(raw.get(name) for name in extras):
        raise InvalidRequest("return_prompt_token_ids, return_token_ids and return_meta_info do not support streaming.")
    is_flat = bool(raw.get("return_flat_raw_output_top_logprobs"))
    if is_flat and (stream or not raw.get("return_meta_info")):
        raise InvalidRequest("return_flat_raw_output_top_logprobs needs return_meta_info and no stream.")
    has_base64 = raw.get("return_flat_raw_top_logprobs_b64")
    returns = Returns(
        logprob=bool(raw.get("logprobs")),
        top_logprobs=raw.get("top_logprobs") or 0,
        flat_output=is_flat,
        flat_base64=is_flat and (has_base64 is None or bool(has_base64)),
    )
    generate = _request(raw, [prompt], sampling, returns, rank_header, options)
    request = _with_stream_options(raw, OpenAIRequest(generate, raw.get("model", options.model)))
    return replace(
        request,
        logprobs=returns.logprob,
        wants_meta_info=bool(raw.get("return_meta_info")),
        wants_prompt_ids=bool(raw.get("return_prompt_token_ids")),
        wants_output_ids=bool(raw.get("return_token_ids")),
    )


def parse_completion(raw: Mapping[str, Any], rank_header: str | None, options: EngineOptions) -> OpenAIRequest:
    """Check a completions body.

    Raises:
        BodyError: A field has a wrong type.
        InvalidRequest: A value is refused.
        FatalRequest: Deadly to the engine.
    """
    check_common(raw)
    prompts, texts = _completion_prompts(raw.get("prompt"))
    limit = raw.get("max_tokens")
    sampling = _sampling(raw, 16 if limit is None else limit)
    logprobs, echo = raw.get("logprobs"), bool(raw.get("echo"))
    if logprobs is not None and (not isinstance(logprobs, int) or isinstance(logprobs, bool)):
        raise BodyError(field_error("int_type", ("body", "logprobs"), "Input should be a valid integer", logprobs))
    for name in ("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs"):
        if raw.get(name):
            raise InvalidRequest(f"{name} is not supported on this route.")
    start = 0 if echo else -1
    returns = Returns(logprob=logprobs is not None, logprob_start=start, top_logprobs=logprobs or 0)
    if logprobs is None:
        returns = Returns()
    generate = _request(raw, prompts, sampling, returns, rank_header, options)
    request = _with_stream_options(raw, OpenAIRequest(generate, raw.get("model", options.model)))
    return replace(request, logprobs=returns.logprob, echo=echo, prompt_texts=tuple(texts))


def plain_request(
    raw: Mapping[str, Any], prompt: Seq[int], limit: int | None, rank_header: str | None, options: EngineOptions
) -> OpenAIRequest:
    """Make the request of a route that has one prompt and no extras (Anthropic messages, responses).

    Raises:
        InvalidRequest: A value is refused.
        FatalRequest: Deadly to the engine.
    """
    sampling = _sampling(raw, limit)
    generate = _request(raw, [prompt], sampling, Returns(), rank_header, options)
    return OpenAIRequest(generate, raw.get("model", options.model))


def _sampling(raw: Mapping[str, Any], limit: int | None) -> Sampling:
    params = {name: raw[name] for name in _SAME_NAME if raw.get(name) is not None}
    temperature = params.get("temperature")
    if isinstance(temperature, int):
        params["temperature"] = float(temperature)
    if limit is not None:
        params["max_new_tokens"] = limit
    if raw.get("seed") is not None:
        params["sampling_seed"] = raw["seed"]
    if raw.get("min_tokens") is not None:
        params["min_new_tokens"] = raw["min_tokens"]
    try:
        sampling = parse_sampling(params)
    except SchemaError as exc:
        raise InvalidRequest(exc.message) from exc
    return sampling if limit is not None else replace(sampling, max_new_tokens=None)


def _request(
    raw: Mapping[str, Any],
    prompts: Seq[Seq[int]],
    sampling: Sampling,
    returns: Returns,
    rank_header: str | None,
    options: EngineOptions,
) -> GenerateRequest:
    if raw.get("lora_path"):
        raise InvalidRequest(f"LoRA adapter '{raw['lora_path']}' was requested, but LoRA is not enabled.")
    rank = dp_rank(raw, options)
    if rank_header is not None:
        if not rank_header.strip().lstrip("-").isdecimal():
            raise InvalidRequest("X-Data-Parallel-Rank must be an integer.")
        rank = dp_rank({"routed_dp_rank": int(rank_header)}, options)
    rid = raw.get("rid")
    specs: list[PromptSpec] = []
    for index, prompt in enumerate(prompts):
        limit = check_lengths(prompt, sampling.max_new_tokens, options)
        rids = tuple(fresh_rid() for _ in range(sampling.n))
        if sampling.n == 1 and isinstance(rid, str):
            rids = (rid if len(prompts) == 1 else f"{rid}_{index}",)
        names = namespace_of(raw, index)
        specs.append(PromptSpec(prompt, rids, sampling, limit, returns, names, session_of(raw)))
    specs = with_rooms(raw, options, specs)
    return GenerateRequest(tuple(specs), len(specs) > 1 or sampling.n > 1, bool(raw.get("stream")), rank)


def _completion_prompts(prompt: Any) -> tuple[list[Seq[int]], list[str]]:
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not all(isinstance(item, str | list) for item in prompt):
        raise BodyError(field_error("list_type", ("body", "prompt"), "Input should be a valid list", prompt))
    if not prompt or not all(prompt):
        raise InvalidRequest("Prompt cannot be empty")
    texts = [item if isinstance(item, str) else "" for item in prompt]
    return [encode(item) if isinstance(item, str) else item for item in prompt], texts


def _with_stream_options(raw: Mapping[str, Any], request: OpenAIRequest) -> OpenAIRequest:
    options = raw.get("stream_options")
    if not isinstance(options, dict):
        return request
    return replace(
        request,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
    )

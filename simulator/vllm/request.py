"""Reading the bodies of the generation routes into one form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from simulator.cache import Namespace
from simulator.chat import GENERATION_PROMPT, render
from simulator.options import EngineOptions
from simulator.text import encode
from simulator.vllm import fields as schema
from simulator.vllm.errors import RequestError, invalid, refused_value, unknown_model
from simulator.vllm.sampling import Sampling, parse_logprob_ids, parse_sampling
from simulator.vllm.transfer import Transfer, parse_transfer

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VllmRequest:
    """A checked request; ``answer_id`` is what the client reads, ``names`` are what aborts go by, one per prompt."""

    answer_id: str
    names: tuple[str, ...]
    model: str
    prompts: tuple[Seq[int], ...]
    limits: tuple[int, ...]
    sampling: Sampling
    namespace: Namespace
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    session_id: str | None = None
    transfer: Transfer | None = None
    echo: bool = False
    prompt_texts: tuple[str, ...] = ()
    as_token_ids: bool = False
    """Show tokens of log-probabilities as ``token_id:N``."""
    output_mode: str = "tokens"


def served_models(options: EngineOptions) -> list[str]:
    """Return the names of the model, the shown one first."""
    return [options.model, *_split(options.model_aliases)]


def adapters(options: EngineOptions) -> list[str]:
    """Return the names of the adapters."""
    return _split(options.lora_names)


def _split(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def check_model(model: Any, options: EngineOptions) -> str:
    """Return the name that answers show.

    Raises:
        RequestError: The model is not served.
    """
    served = served_models(options)
    if model is None or model in served:
        return served[0]
    if isinstance(model, str) and model in adapters(options):
        return model
    raise unknown_model(str(model), served)


def check_messages(raw: Raw) -> list[dict[str, Any]]:
    """Return the messages.

    Raises:
        RequestError: They cannot be read.
    """
    if "messages" not in raw:
        raise schema.missing(raw, "messages")
    messages = raw["messages"]
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            location = f"body.messages.{index}.ChatCompletionDeveloperMessageParam.role"
            raise invalid("missing", location, "Field required", message)
    if not messages:
        raise RequestError("At least one message is required.")
    return messages


def chat_prompt(messages: list[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
    """Return the token ids of a conversation."""
    return encode(render(messages) + (GENERATION_PROMPT if add_generation_prompt else ""))


def parse_completion(raw: Raw, given_id: str, options: EngineOptions, context: int) -> VllmRequest:
    """Check a completions body; ``given_id`` is the id without its prefix.

    Raises:
        RequestError: It is refused.
    """
    fields = schema.check_fields(raw, schema.COMPLETION)
    prompt = raw.get("prompt")
    _check_prompt_types(prompt)
    if prompt is None or prompt == "":
        raise refused_value("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    _check_stream_options(fields)
    model = check_model(fields.get("model"), options)
    is_single = isinstance(prompt, str) or (prompt and type(prompt[0]) is int)
    items = [prompt] if is_single else prompt
    if not items:
        raise RequestError("You must pass at least one prompt")
    prompts = tuple(encode(item) if isinstance(item, str) else item for item in items)
    texts = tuple(item if isinstance(item, str) else "" for item in items)
    logprobs = fields.get("logprobs")
    fields.setdefault("max_tokens", 16)
    if fields.get("echo") and logprobs is not None:
        fields.setdefault("prompt_logprobs", logprobs)
    sampling = parse_sampling(fields, raw, logprobs=logprobs)
    ids = parse_logprob_ids(raw, options.vocab_size)
    if ids is not None and logprobs is None:
        raise refused_value("when using `logprob_token_ids`, `logprobs` must be set.", "logprob_token_ids")
    sampling = replace(sampling, logprob_ids=ids)
    answer_id = f"cmpl-{given_id}"
    names = tuple(f"{answer_id}-{index}" for index in range(len(prompts)))
    request = _request(fields, model, prompts, sampling, answer_id, names, (options, context))
    return replace(
        request,
        echo=bool(fields.get("echo")),
        prompt_texts=texts,
        as_token_ids=bool(fields.get("return_tokens_as_token_ids")),
    )


def parse_chat(raw: Raw, given_id: str, options: EngineOptions, context: int) -> VllmRequest:
    """Check a chat body; ``given_id`` is the id without its prefix.

    Raises:
        RequestError: It is refused.
    """
    fields = schema.check_fields(raw, schema.CHAT)
    messages = check_messages(raw)
    _check_stream_options(fields)
    model = check_model(fields.get("model"), options)
    if raw.get("tools") and raw.get("tool_choice", "auto") == "auto":
        raise RequestError('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    tops = fields.get("top_logprobs")
    if tops is not None and not fields.get("logprobs"):
        raise refused_value("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if fields.get("max_completion_tokens") is not None:
        fields["max_tokens"] = fields["max_completion_tokens"]
    sampling = parse_sampling(fields, raw, logprobs=(tops or 0) if fields.get("logprobs") else None)
    ids = parse_logprob_ids(raw, options.vocab_size)
    if ids is not None and not fields.get("logprobs"):
        raise refused_value("when using `logprob_token_ids`, `logprobs` must be set to true.", "logprob_token_ids")
    sampling = replace(sampling, logprob_ids=ids)
    prompt = chat_prompt(messages, add_generation_prompt=fields.get("add_generation_prompt", True))
    name = f"chatcmpl-{given_id}"
    request = _request(fields, model, (prompt,), sampling, name, (name,), (options, context))
    return replace(request, as_token_ids=bool(fields.get("return_tokens_as_token_ids")))


def parse_generate(raw: Raw, given_id: str, options: EngineOptions, context: int) -> VllmRequest:
    """Check a body of ``/inference/v1/generate``; ``given_id`` is the id without its prefix.

    Raises:
        RequestError: It is refused.
    """
    fields = schema.check_fields(raw, schema.GENERATE)
    for name in ("token_ids", "sampling_params"):
        if name not in raw:
            raise schema.missing(raw, name)
    ids, params = raw["token_ids"], raw["sampling_params"]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise invalid("list_type", "body.token_ids", "Input should be a valid list of token ids", ids)
    if not ids:
        sizes = {"field_type": "List", "min_length": 1, "actual_length": 0}
        message = "List should have at least 1 item after validation, not 0"
        raise invalid("too_short", "body.token_ids", message, ids, sizes)
    if not isinstance(params, dict):
        raise invalid("dict_type", "body.sampling_params", "Input should be a valid dictionary", params)
    _check_stream_options(fields)
    model = check_model(fields.get("model"), options)
    checked = schema.check_fields(params, schema.GENERATE_SAMPLING, "body.sampling_params")
    logprobs = checked.get("logprobs")
    sampling = parse_sampling(checked, params, logprobs=logprobs)
    chosen = parse_logprob_ids(params, options.vocab_size)
    if chosen is not None and logprobs is not None and logprobs != len(chosen):
        raise refused_value(
            "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). "
            f"Got logprobs={logprobs}, len(logprob_token_ids)={len(chosen)}.",
            "logprob_token_ids",
            len(chosen),
        )
    sampling = replace(sampling, logprob_ids=chosen)
    name = f"generate-tokens-{given_id}"
    request = _request(fields, model, (ids,), sampling, name, (name,), (options, context))
    return replace(request, output_mode="text" if raw.get("output_mode") == "text" else "tokens")


def plain_request(
    raw: Raw, prompt: Seq[int], limit: int | None, name: str, options: EngineOptions, context: int
) -> VllmRequest:
    """Make the request of a route with one prompt and no extras (Anthropic messages, responses).

    Raises:
        RequestError: It is refused.
    """
    fields = schema.check_fields(raw, schema.CHAT)
    model = check_model(fields.get("model"), options)
    fields.pop("max_tokens", None)
    if limit is not None:
        fields["max_tokens"] = limit
    sampling = parse_sampling(fields, raw, logprobs=None)
    return _request(fields, model, (prompt,), sampling, name, (name,), (options, context))


def _request(
    fields: Raw,
    model: str,
    prompts: tuple[Seq[int], ...],
    sampling: Sampling,
    answer_id: str,
    names: tuple[str, ...],
    engine: tuple[EngineOptions, int],
) -> VllmRequest:
    options, context = engine
    if fields.get("cache_salt") == "":
        raise refused_value("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    for prompt in prompts:
        _check_prompt(prompt, options.vocab_size, context)
    limits = tuple(min(sampling.max_tokens or context, context - len(prompt)) for prompt in prompts)
    stream_options = fields.get("stream_options") or {}
    include_usage = bool(stream_options.get("include_usage"))
    adapter = model if model != options.model else ""
    return VllmRequest(
        answer_id=answer_id,
        names=names,
        model=model,
        prompts=prompts,
        limits=limits,
        sampling=sampling,
        namespace=Namespace(cache_salt=fields.get("cache_salt") or "", lora_name=adapter),
        stream=bool(fields.get("stream")),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(stream_options.get("continuous_usage_stats")),
        return_token_ids=bool(fields.get("return_token_ids")),
        session_id=fields.get("session_id"),
        # Without a connector the field is read and has no meaning.
        transfer=None if options.role == "regular" else parse_transfer(fields.get("kv_transfer_params")),
    )


def _check_stream_options(fields: Raw) -> None:
    if fields.get("stream_options") is not None and not fields.get("stream"):
        raise refused_value("Stream options can only be defined when `stream=True`.", "stream_options")
    if fields.get("stream") and fields.get("prompt_logprobs"):
        raise refused_value("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def _check_prompt_types(prompt: Any) -> None:
    if prompt is None or isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)
    is_nested = bool(prompt) and isinstance(prompt[0], list)
    for index, item in enumerate(prompt):
        location = f"body.prompt.{index}"
        if isinstance(item, str) and isinstance(prompt[0], str):
            continue
        tokens = item if isinstance(item, list) and is_nested else [item]
        for token in tokens:
            if type(token) is not int:
                raise invalid("int_type", location, "Input should be a valid integer", token)
            if token < 0:
                message = "Input should be greater than or equal to 0"
                raise invalid("greater_than_equal", location, message, token, {"ge": 0})


def _check_prompt(prompt: Seq[int], vocab_size: int, context: int) -> None:
    if not prompt:
        raise RequestError("The decoder prompt cannot be empty")
    if len(prompt) >= context:
        message = (
            f"This model's maximum context length is {context} tokens. However, your prompt contains {len(prompt)} "
            "input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt."
        )
        raise refused_value(message, "input_tokens", len(prompt))
    largest = max(prompt)
    if largest >= vocab_size:
        raise RequestError(f"Token id {largest} is out of vocabulary")

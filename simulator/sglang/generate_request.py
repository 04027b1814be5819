"""Reading and checking a native ``/generate`` body.

Pure. The order of the checks is that of SGLang's three gates, since it decides the error's shape.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import orjson

from simulator.api import FatalRequest
from simulator.cache import BASE, Namespace
from simulator.options import EngineOptions
from simulator.sglang.errors import BodyError, InvalidRequest, field_error
from simulator.sglang.rooms import Room, rooms_of
from simulator.sglang.sampling import DEFAULT_SAMPLING, Sampling, parse_sampling, wrong_type
from simulator.text import encode

_TRUE_WORDS = ("true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0")


@dataclass(frozen=True, slots=True)
class Returns:
    """What one prompt's answer has to contain beside text and ids."""

    logprob: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    text_in_logprobs: bool = False
    flat_input: bool = False
    flat_output: bool = False
    flat_base64: bool = False
    prompt_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """One prompt of a request."""

    prompt: Seq[int]
    rids: tuple[str, ...]
    """Id of each sample; ``n`` of them."""
    sampling: Sampling
    max_new_tokens: int
    returns: Returns
    namespace: Namespace = BASE
    session_id: str | None = None
    room: Room | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A checked request. ``is_list``: the answer is a list, and stream events carry ``index``."""

    prompts: tuple[PromptSpec, ...]
    is_list: bool
    stream: bool
    dp_rank: int | None


def load_object(body: bytes, content_type: str | None) -> dict[str, Any]:
    """Parse a body that has to be a JSON object.

    Raises:
        BodyError: No JSON, no object, or another content type.
    """
    if not body:
        raise BodyError("{'type': 'missing', 'loc': ('body',), 'msg': 'Field required', 'input': None}")
    if content_type is not None and content_type.split(";")[0].strip().lower() != "application/json":
        content_type = None
    if content_type is None:
        raise BodyError(field_error("dataclass_type", ("body",), "Input should be a dictionary", body[:200]))
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise BodyError(field_error("json_invalid", ("body", exc.pos), "JSON decode error", {})) from exc
    if not isinstance(raw, dict):
        raise BodyError(field_error("dataclass_type", ("body",), "Input should be a dictionary", raw))
    return raw


def wants_stream(raw: Mapping[str, Any]) -> bool:
    """Return the value of ``stream``.

    Raises:
        BodyError: It is no boolean in any spelling.
        SchemaError: It is a boolean spelt as something else.
    """
    stream = raw.get("stream")
    if stream is None or isinstance(stream, bool):
        return bool(stream)
    if isinstance(stream, str) and stream.lower() not in _TRUE_WORDS:
        raise BodyError(field_error("bool_parsing", ("body", "stream"), "Input should be a valid boolean", stream))
    raise wrong_type(stream, "a boolean")


def check_types(raw: Mapping[str, Any]) -> None:
    """Run the typed parse on the fields that the simulated engine reads.

    Raises:
        BodyError: A field has a type that cannot be read.
    """
    text = raw.get("text")
    if text is not None and not isinstance(text, str) and not _is_list_of(text, str):
        raise BodyError(field_error("string_type", ("body", "text", "str"), "Input should be a valid string", text))
    rid = raw.get("rid")
    if rid is not None and not isinstance(rid, str) and not _is_list_of(rid, str):
        raise BodyError(field_error("string_type", ("body", "rid", "str"), "Input should be a valid string", rid))
    ids = raw.get("input_ids")
    if ids is not None:
        if not isinstance(ids, list):
            raise BodyError(field_error("list_type", ("body", "input_ids"), "Input should be a valid list", ids))
        if not (_is_list_of(ids, int) or (_is_list_of(ids, list) and all(_is_list_of(row, int) for row in ids))):
            message = "Value error, elements must be int or list"
            raise BodyError(field_error("value_error", ("body", "input_ids"), message, ids[:8]))
    params = raw.get("sampling_params")
    if params is not None and not isinstance(params, dict) and not _is_list_of(params, dict):
        location = ("body", "sampling_params", "list[dict[str,any]]")
        raise BodyError(field_error("list_type", location, "Input should be a valid list", params))


def parse_generate(raw: Mapping[str, Any], options: EngineOptions) -> GenerateRequest:
    """Check a body whose types are right and make the prompts out of it.

    Raises:
        SchemaError: Refused by the schema gate.
        InvalidRequest: Refused for a value.
        FatalRequest: Accepted, and deadly to the engine.
    """
    params = raw.get("sampling_params")
    samplings = [parse_sampling(p) for p in params] if isinstance(params, list) else None
    sampling = parse_sampling(params) if isinstance(params, dict) else DEFAULT_SAMPLING
    _check_returns(raw)
    text, ids = raw.get("text"), raw.get("input_ids")
    if text is None and ids is None:
        raise InvalidRequest("Either text, input_ids or input_embeds should be provided.")
    prompts, is_batch = _prompts(text, ids)
    if samplings is not None and len(samplings) != len(prompts):
        raise InvalidRequest("The length of sampling_params should be equal to the batch size.")
    per_prompt = samplings or [sampling] * len(prompts)
    n = per_prompt[0].n if per_prompt else 1
    if any(item.n != n for item in per_prompt):
        raise InvalidRequest("The parallel_sample_num should be the same for all samples in sample params.")
    rids = _rids(raw.get("rid"), len(prompts), is_batch=is_batch, n=n)
    if raw.get("lora_path"):
        raise InvalidRequest(f"LoRA adapter '{raw['lora_path']}' was requested, but LoRA is not enabled.")
    rank = dp_rank(raw, options)
    specs: list[PromptSpec] = []
    for index, prompt in enumerate(prompts):
        returns = _returns(raw, index, options)
        limit = check_lengths(prompt, per_prompt[index].max_new_tokens, options)
        _check_positions(prompt, returns)
        names = namespace_of(raw, index)
        specs.append(PromptSpec(prompt, rids[index], per_prompt[index], limit, returns, names, session_of(raw)))
    specs = with_rooms(raw, options, specs)
    stream = wants_stream(raw)
    if not stream:
        for item in per_prompt:
            if item.grammar_error:
                raise InvalidRequest(item.grammar_error)
    return GenerateRequest(tuple(specs), is_batch or n > 1, stream, rank)


def with_rooms(raw: Mapping[str, Any], options: EngineOptions, specs: list[PromptSpec]) -> list[PromptSpec]:
    """Return ``specs`` as an engine with a role takes them: with the rooms where its pairs meet.

    Raises:
        InvalidRequest: A room is missing.
        FatalRequest: Deadly to the engine.
    """
    if options.role == "regular":
        return specs
    rooms = rooms_of(raw, options, [spec.rids[0] for spec in specs])
    met = [replace(spec, room=room) for spec, room in zip(specs, rooms, strict=True)]
    if options.role == "prefill":
        return met
    # Of the prompt only prefill knows log-probabilities.
    return [replace(spec, returns=replace(spec.returns, logprob_start=-1)) for spec in met]


def check_lengths(prompt: Seq[int], max_new_tokens: int | None, options: EngineOptions) -> int:
    """Check a prompt against context and pool; returns how many tokens it may produce.

    Raises:
        InvalidRequest: Too long, or an id that is no token.
        FatalRequest: Empty, or with a negative id.
    """
    if not prompt or min(prompt) < 0:
        if options.die_on_bad_input:
            raise FatalRequest
        raise InvalidRequest("The prompt is empty or has a negative token id.")
    if max(prompt) >= 1 << 32:
        raise InvalidRequest("A token id is out of range.")
    length, context = len(prompt), options.context_length
    if length >= context:
        raise InvalidRequest(
            f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
        )
    if max_new_tokens is not None and length + max_new_tokens > context:
        raise InvalidRequest(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested "
            f"a total of {length + max_new_tokens} tokens: {length} tokens from the input messages and "
            f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input messages "
            "or the completion to fit within the limit."
        )
    if length > options.max_input_tokens:
        raise InvalidRequest(
            f"Input length ({length} tokens) exceeds the maximum allowed length ({options.max_input_tokens} tokens). "
            "Use a shorter input or enable --allow-auto-truncate."
        )
    room = min(context, options.pool_tokens) - length - 1
    return room if max_new_tokens is None else min(max_new_tokens, room)


def dp_rank(raw: Mapping[str, Any], options: EngineOptions) -> int | None:
    """Return the rank that the body asks for.

    Raises:
        InvalidRequest: There is no such rank.
    """
    rank = raw.get("routed_dp_rank")
    if rank is None:
        rank = raw.get("data_parallel_rank")
    if rank is None:
        return None
    if not isinstance(rank, int) or not 0 <= rank < options.dp_size:
        raise InvalidRequest(f"routed_dp_rank={rank} out of range [0, {options.dp_size})")
    return rank


def fresh_rid() -> str:
    """Return an id as SGLang makes them."""
    return uuid.uuid4().hex


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _prompts(text: Any, ids: Any) -> tuple[list[Seq[int]], bool]:
    if ids is not None:
        if not ids:
            raise InvalidRequest("input_ids cannot be empty.")
        if isinstance(ids[0], list):
            return ids, True
        return [ids], isinstance(text, list)
    if isinstance(text, str):
        return [encode(text)], False
    return [encode(item) for item in text], True


def _rids(rid: Any, count: int, *, is_batch: bool, n: int) -> list[tuple[str, ...]]:
    if isinstance(rid, list):
        if len(rid) != count:
            raise InvalidRequest("The specified rids length mismatch with the batch_size for batch processing.")
        twice = sorted({item for item in rid if rid.count(item) > 1})
        if twice:
            raise InvalidRequest(f"Duplicate request IDs detected within the request: {twice}")
    # With n above 1 the caller's ids are thrown away.
    if n > 1 or rid is None:
        return [tuple(fresh_rid() for _ in range(n)) for _ in range(count)]
    if isinstance(rid, list):
        return [(item,) for item in rid]
    if is_batch:
        return [(f"{rid}_{index}",) for index in range(count)]
    return [(rid,)]


def _check_returns(raw: Mapping[str, Any]) -> None:
    flat_output = raw.get("return_flat_raw_output_top_logprobs")
    if flat_output and wants_stream(raw):
        raise InvalidRequest(
            "return_flat_raw_output_top_logprobs is only set on the finished response and does not support stream=True."
        )
    if raw.get("return_flat_raw_top_logprobs_b64") and not (flat_output or raw.get("return_flat_raw_top_logprobs")):
        raise InvalidRequest(
            "return_flat_raw_top_logprobs_b64 requires return_flat_raw_top_logprobs or "
            "return_flat_raw_output_top_logprobs."
        )
    if raw.get("return_hidden_states"):
        raise InvalidRequest(
            "The server is not configured to return hidden states. Please set `--return-hidden-states-mode last`, "
            "`--return-hidden-states-mode full`, or the legacy `--enable-return-hidden-states` flag."
        )
    session = raw.get("session_params")
    if isinstance(session, dict) and session.get("id") is not None:
        raise InvalidRequest(f"Invalid request: session id {session['id']} does not exist")


def _returns(raw: Mapping[str, Any], index: int, options: EngineOptions) -> Returns:
    def pick(name: str, default: Any, is_scalar: Callable[[Any], bool]) -> Any:
        value = raw.get(name)
        if value is None:
            return default
        return value if is_scalar(value) else value[index]

    has_prompt_ids = bool(raw.get("return_prompt_token_ids"))
    if not pick("return_logprob", False, lambda v: isinstance(v, bool)):
        return Returns(prompt_token_ids=has_prompt_ids)
    top = pick("top_logprobs_num", 0, lambda v: isinstance(v, int))
    if top > options.vocab_size:
        if options.die_on_bad_input:
            raise FatalRequest
        raise InvalidRequest("top_logprobs_num is above the vocabulary.")
    ids = pick("token_ids_logprob", (), lambda v: not v or isinstance(v[0], int))
    return Returns(
        logprob=True,
        logprob_start=pick("logprob_start_len", -1, lambda v: isinstance(v, int)),
        top_logprobs=max(0, top),
        token_ids_logprob=tuple(ids or ()),
        text_in_logprobs=bool(raw.get("return_text_in_logprobs")),
        flat_input=bool(raw.get("return_flat_raw_top_logprobs")),
        flat_output=bool(raw.get("return_flat_raw_output_top_logprobs")),
        flat_base64=bool(raw.get("return_flat_raw_top_logprobs_b64")),
        prompt_token_ids=has_prompt_ids,
    )


def _check_positions(prompt: Seq[int], returns: Returns) -> None:
    if returns.logprob_start > len(prompt):
        raise InvalidRequest(
            f"req.logprob_start_len={returns.logprob_start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={len(prompt)}. Please use a smaller logprob_start_len."
        )


def namespace_of(raw: Mapping[str, Any], index: int) -> Namespace:
    """Return what prompt number ``index`` shares its cached blocks by, next to its tokens."""
    parts = []
    for name in ("extra_key", "cache_salt"):
        value = raw.get(name)
        if isinstance(value, list):
            value = value[index] if index < len(value) else None
        parts.append(str(value or ""))
    return Namespace(*parts)


def session_of(raw: Mapping[str, Any]) -> str | None:
    """Return the session that KV events name."""
    session = raw.get("session_id")
    return session if isinstance(session, str) else None

"""What of a request's body is refused for the engine's sake. Pure.

Fields that belong to the gateway or to the engine's own processes, values that an engine does not check and then dies
of, and answers that are sure to be too large.
"""

import re
from collections.abc import Collection

import msgspec
import numpy as np

from backends.json_body import JsonBody
from backends.types import EngineKind
from gateway.errors import InvalidRequest
from gateway.routes import Dialect, Route

# Fields that only the gateway may set, since a client could reach other clients' requests or kill an engine.
ROUTING_FIELDS = frozenset(
    {
        "bootstrap_info",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "data_parallel_rank",
        "routed_dp_rank",
        "decode_tp_size",
        "disaggregated_params",
        "disagg_prefill_dp_rank",
        "external_trace_header",
        "received_time",
        "kv_transfer_params",
        "ec_transfer_params",
    }
)
# SGLang's own internal fields, meant for its processes or for a trusted orchestrator.
ENGINE_FIELDS = frozenset(
    {
        "encoder_urls",
        "http_worker_ipc",
        "kv_hints",
        "lora_id",
        "multi_item_delimiter_indices",
        "need_wait_for_mm_inputs",
        "num_items_assigned",
        "positional_embed_overrides",
        "token_indices_to_pool",
    }
)
INTERNAL_PREFIX = "bootstrap_"
_STATE_FIELDS = frozenset({"session_params", "session_id", "previous_response_id", "background"})
INTERNAL_FIELDS = ROUTING_FIELDS | ENGINE_FIELDS
# SGLang dies of more top log-probabilities than the vocabulary has tokens; none has fewer than this.
MAX_TOP_LOGPROBS = 1024
# No vocabulary has more tokens, and what an engine cannot hold in 32 bits it does not hold at all.
MAX_TOKEN_ID = 2**31 - 1
# JSON text of one value and one index of a top-k pair, and the same in Base64 of float32 and int32.
BYTES_PER_PAIR = 24
BYTES_PER_PAIR_B64 = 10

_texts = msgspec.json.Decoder(list[str | dict[str, msgspec.Raw]])
_values = msgspec.json.Decoder(float | str | list[float | str | None])
# Where a route takes the number of top log-probabilities.
_TOP_LOGPROBS = {
    Dialect.NATIVE: "top_logprobs_num",
    Dialect.CHAT: "top_logprobs",
    Dialect.COMPLETIONS: "logprobs",
    Dialect.RESPONSES: "top_logprobs",
}
# Quotes inside a JSON string are escaped, so this finds empty items only.
_EMPTY_ITEM = re.compile(rb'[\[,]\s*""')
_EMPTY_LIST = re.compile(rb"\[\s*\]")
_EXPONENT = re.compile(rb"\d[eE]")
_LONG_NUMBER = re.compile(rb"\d{10,}")
# Long numbers are found by one search for ten equal digits, a tenth of what a pattern costs on a long prompt.
_ALL_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"000000000")
_TEN_DIGITS = b"0" * 10
# The same, and whatever makes a list of ids worth a closer look.
_KINDS = bytes.maketrans(b'123456789"-\\eE', b"000000000xxxxx")
# Long lists are looked through with numpy, in parts that stay in a core's cache.
_NUMPY_BYTES = 32 * 1024
_IDS_ONLY = frozenset({"input_ids", "label_token_ids"})
_INPUT_IDS = ("input_ids",)
# Of them, what is run as it is: no token to compute kills a scheduler, unless other prompts happen to be beside it.
_PROMPTS = frozenset({"input_ids", "prompt"})
# Fields that hold ids, texts, or lists of either.
_PROMPT_FIELDS = {
    "/v1/completions": ("input_ids", "prompt"),
    "/v1/embeddings": ("input_ids", "input"),
    "/v1/classify": ("input_ids", "input"),
    "/v1/score": ("input_ids", "query", "items", "label_token_ids"),
}


class Sampling(msgspec.Struct):
    """What the gateway reads of sampling parameters."""

    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    ignore_eos: bool | None = None


class _Logprobs(msgspec.Struct):
    top_logprobs_num: int | None = None
    logprob_start_len: int | None = None
    return_flat_raw_top_logprobs_b64: bool | None = None


_sampling = msgspec.json.Decoder(Sampling)


def refuse_internal(body: JsonBody) -> None:
    """Refuse fields that only the gateway, or the engine's own processes, may set.

    Raises:
        InvalidRequest: Names the field.
    """
    fields = body.fields
    if INTERNAL_FIELDS.isdisjoint(fields) and INTERNAL_PREFIX not in "".join(fields):
        return  # nearly always, and sooner than one by one
    for name in fields:
        # null is as good as absent, and clients that dump whole dataclasses send it
        if (name in INTERNAL_FIELDS or name.startswith(INTERNAL_PREFIX)) and body.text(name):
            raise InvalidRequest(f"the field {name!r} is internal routing state and not a client's to set", param=name)


def refuse_engine_state(body: JsonBody, engines: Collection[EngineKind | None]) -> None:
    """Refuse what refers to state inside one engine, while several engines serve the model.

    Args:
        body: The request.
        engines: The kinds of the engines; to vLLM ``session_id`` is a hint and no state.

    Raises:
        InvalidRequest: Names the field.
    """
    if len(engines) < 2 or body.fields.keys().isdisjoint(_STATE_FIELDS):
        return
    is_only_vllm = all(kind is EngineKind.VLLM for kind in engines)
    for name in ("session_params", "session_id", "previous_response_id"):
        if body.text(name) and not (is_only_vllm and name == "session_id"):
            raise InvalidRequest(
                f"{name!r} refers to state inside one engine, and several serve this model",
                param=name,
                type="unsupported",
            )
    if body.text("background") not in (b"", b"false"):  # engines take "yes" and 1 for true
        raise InvalidRequest(
            "'background' leaves the answer inside one engine, and several serve this model",
            param="background",
            type="unsupported",
        )


def refuse_deadly(body: JsonBody, route: Route) -> None:
    """Refuse what SGLang does not check and then dies of, with every request that it runs.

    Raises:
        InvalidRequest: Names the field.
    """
    fields = body.fields
    if "custom_labels" in fields and body.text("custom_labels") not in (b"", b"{}"):
        raise InvalidRequest("'custom_labels' is not passed on", param="custom_labels")
    if "text" in fields and route.dialect is Dialect.NATIVE:
        _refuse_empty(body.text("text"), "text", is_alone_empty=True)
    if "prompt" in fields and route.dialect is Dialect.COMPLETIONS:
        _refuse_empty(body.text("prompt"), "prompt", is_alone_empty=False)
    for name in _PROMPT_FIELDS.get(route.path, _INPUT_IDS):
        if name not in fields or name in body.id_counts:
            continue
        ids = body.text(name)
        if ids.startswith(b"["):
            _refuse_impossible_ids(ids, name)
            if name in _PROMPTS and _has_empty_row(ids):
                raise InvalidRequest(f"one of {name!r} is empty", param=name)
    if route.path == "/v1/score" and _is_empty(body.text("query")) and _has_empty_item(body.text("items")):
        raise InvalidRequest("'query' is empty and so is one of 'items'", param="items")
    field = _TOP_LOGPROBS.get(route.dialect, "")
    if field in fields and _largest(body.text(field)) > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{field!r} is {MAX_TOP_LOGPROBS} at most", param=field)


def _refuse_empty(text: bytes, name: str, *, is_alone_empty: bool) -> None:
    """Refuse an empty text in a batch, or alone where the engine does not refuse that itself."""
    if (text == b'""' and is_alone_empty) or (text.startswith(b"[") and _has_empty_text(text)):
        raise InvalidRequest(f"{name!r} is empty", param=name)


def _refuse_impossible_ids(ids: bytes, name: str) -> None:
    """Refuse ids that no vocabulary has; by searches for bytes, since a long prompt is not to be parsed."""
    if len(ids) < _NUMPY_BYTES:  # one walk for most lists, which are nothing but short numbers
        kinds = ids.translate(_KINDS)
        if kinds.find(b"x") < 0 and kinds.find(_TEN_DIGITS) < 0:
            return
    if b'"' in ids and name not in _IDS_ONLY:
        _refuse_ids_among_texts(ids, name)
    elif b"-" in ids or b"\\" in ids:  # a number in a string may be one to the engine, in whatever spelling
        raise InvalidRequest(f"{name!r} holds a negative id", param=name)
    elif (_has_ten_digits(ids) and any(map(_is_above, _LONG_NUMBER.findall(ids)))) or (
        (b"e" in ids or b"E" in ids) and _EXPONENT.search(ids)
    ):
        raise InvalidRequest(f"{name!r} holds an id above {MAX_TOKEN_ID}", param=name)


def _refuse_ids_among_texts(items: bytes, name: str) -> None:
    """Refuse texts and ids in one list, since an engine takes a number in a string for one beside others."""
    try:
        _texts.decode(items)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"{name!r} mixes texts with something else", param=name) from exc
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # no text to the engine either


def _has_ten_digits(text: bytes) -> bool:
    """Whether ten digits follow each other somewhere in ``text``."""
    if len(text) < _NUMPY_BYTES:
        return _TEN_DIGITS in text.translate(_ALL_DIGITS_ALIKE)
    data = np.frombuffer(text, np.uint8)
    for begin in range(0, len(data), _NUMPY_BYTES):
        run = data[begin : begin + _NUMPY_BYTES + len(_TEN_DIGITS) - 1] - np.uint8(ord("0")) < 10
        for step in (1, 2, 4, 2):  # where 2, 4, 8 and 10 digits begin
            run = run[:-step] & run[step:]
        if run.any():
            return True
    return False


def _is_above(digits: bytes) -> bool:
    return len(digits) > 10 or int(digits) > MAX_TOKEN_ID


def _is_empty(value: bytes) -> bool:
    """A query without a token."""
    return value == b'""' or _EMPTY_LIST.fullmatch(value) is not None


def _has_empty_item(items: bytes) -> bool:
    """Items of which one, or all of them together, are nothing."""
    return _is_empty(items) or _has_empty_text(items) or _EMPTY_LIST.search(items) is not None


def _has_empty_row(ids: bytes) -> bool:
    """A list of lists, one of them empty; brackets in texts are none."""
    return ids.find(b"[", 1) > 0 and b'"' not in ids and _EMPTY_LIST.search(ids, 1) is not None


def _has_empty_text(items: bytes) -> bool:
    return b'""' in items and _EMPTY_ITEM.search(items) is not None


def _largest(text: bytes) -> float:
    """The largest number in ``text``, read as loosely as the engine does; 0 where the engine says what is wrong."""
    try:
        value = _values.decode(text or b"0")
        return max((float(item or 0) for item in (value if isinstance(value, list) else [value])), default=0)
    except ValueError:
        return 0


def refuse_oversized_logprobs(body: JsonBody, prompt_tokens: int, max_response_bytes: int) -> None:
    """Refuse what is sure to pass the bound of an answer: certain tokens times top-k times the bytes of a pair.

    Raises:
        InvalidRequest: Says how large.
    """
    if (
        "top_logprobs_num" not in body.fields
        or not body.text("top_logprobs_num")
        or body.text("return_logprob") != b"true"
    ):
        return
    try:
        wanted = msgspec.convert(
            {name: msgspec.json.decode(text) for name in _Logprobs.__struct_fields__ if (text := body.text(name))},
            _Logprobs,
        )
        sampling = _sampling.decode(body.text("sampling_params") or b"{}")
    except msgspec.DecodeError:
        return  # the engine says what is wrong
    tokens = sampling.min_new_tokens or 0
    if sampling.ignore_eos:
        tokens = max(tokens, sampling.max_new_tokens or 0)
    if wanted.logprob_start_len is not None and wanted.logprob_start_len >= 0:
        tokens += max(prompt_tokens - wanted.logprob_start_len, 0)
    pair = BYTES_PER_PAIR_B64 if wanted.return_flat_raw_top_logprobs_b64 else BYTES_PER_PAIR
    size = tokens * (wanted.top_logprobs_num or 0) * pair
    if size > max_response_bytes:
        raise InvalidRequest(
            f"the log-probabilities asked for are about {size} bytes, above the limit of {max_response_bytes}",
            param="top_logprobs_num",
        )

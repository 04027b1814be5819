"""Every field of SGLang's native request, and what becomes of it on vLLM. Pure.

One table, of which the translation is made and which the documents show.
"""

import enum
import re
from dataclasses import dataclass
from typing import Final

# Values that ask for nothing, whatever the field: null, false, and what is empty, in lists too.
_NOTHING = re.compile(rb'[\[\],\s]*(?:(?:null|false|""|\{\s*\})[\[\],\s]*)*')


class Fate(enum.Enum):
    """What becomes of a field."""

    SENT = "sent"
    OF_GATEWAY = "gateway"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class NativeField:
    """One field.

    Attributes:
        name: SGLang's name.
        fate: What becomes of it.
        target: vLLM's name of it, where it is sent; of sampling parameters inside ``sampling_params``.
        note: For people: what differs, or why there is no counterpart.
        harmless: JSON of a value that asks for nothing, beside null, false and what is empty.
        is_copied: The value goes as it is.
    """

    name: str
    fate: Fate
    target: str = ""
    note: str = ""
    harmless: bytes = b"null"
    is_copied: bool = False

    def asks(self, text: bytes) -> bool:
        """Whether a value, as JSON text, asks for anything."""
        return text != self.harmless and _NOTHING.fullmatch(text) is None


class NativeRefused(ValueError):
    """The request cannot be translated.

    Attributes:
        param: The field at fault; of sampling parameters ``sampling_params.NAME``.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def _copied(name: str, target: str = "", note: str = "") -> NativeField:
    return NativeField(name, Fate.SENT, target or name, note, is_copied=True)


def _sent(name: str, target: str, note: str = "") -> NativeField:
    return NativeField(name, Fate.SENT, target, note)


def _here(name: str, note: str) -> NativeField:
    return NativeField(name, Fate.OF_GATEWAY, note=note)


def _ignored(name: str, note: str) -> NativeField:
    return NativeField(name, Fate.IGNORED, note=note)


def _refused(name: str, note: str, harmless: bytes = b"null") -> NativeField:
    return NativeField(name, Fate.REFUSED, note=note, harmless=harmless)


def _by_name(*fields: NativeField) -> dict[str, NativeField]:
    return {field.name: field for field in fields}


_GRAMMAR = "at most one of the four; an empty one is none"
_MEDIA = "the token route takes media in another form"
_ROUTING = "routing state, refused from clients on every route"
_INTERNAL = "internal to SGLang, refused from clients on every route"

SAMPLING_FIELDS: Final = _by_name(
    _sent("max_new_tokens", "max_tokens", "128 if absent; 0 becomes 1, and the token is left out of the answer"),
    _copied("min_new_tokens", "min_tokens"),
    _copied("stop"),
    _copied("stop_token_ids"),
    _refused("stop_regex", "vLLM stops at strings and token ids only"),
    _copied("temperature", note="vLLM takes 2 at most, and 0.01 for anything between 0 and that"),
    _copied("top_p"),
    _copied("top_k"),
    _copied("min_p"),
    _copied("frequency_penalty"),
    _copied("presence_penalty"),
    _copied("repetition_penalty"),
    _sent("n", "n", "of greedy requests one request each, since vLLM refuses more"),
    _sent("sampling_seed", "seed", "sample i has the seed s + i; -1 is refused, since to vLLM it is no seed"),
    _sent("json_schema", "structured_outputs.json", _GRAMMAR),
    _sent("regex", "structured_outputs.regex", _GRAMMAR),
    _sent("ebnf", "structured_outputs.grammar", _GRAMMAR),
    _sent("structural_tag", "structured_outputs.structural_tag", _GRAMMAR),
    _copied("ignore_eos"),
    _copied("skip_special_tokens"),
    _copied("spaces_between_special_tokens"),
    _copied("no_stop_trim", "include_stop_str_in_output"),
    _copied("stream_interval"),
    _copied("logit_bias"),
    _refused("beam_width", "vLLM has no beam search on this route", harmless=b"1"),
    _refused("choice", "not a sampling parameter of SGLang 0.5.23 either"),
    _refused("custom_params", "made for SGLang's own logit processors"),
    _refused("watermark", "the engines' watermarks differ"),
)

TOP_FIELDS: Final = _by_name(
    _here("rid", "public id, a list or R_0, R_1, … in a batch; the engine has an id of its own"),
    _sent("input_ids", "token_ids", "a list of lists becomes one request for each"),
    _here("text", "the ids that the gateway's tokenizer for the model makes, or the worker's; 400 without both"),
    _refused("input_embeds", "the token route takes ids only"),
    _sent("sampling_params", "sampling_params", "see the other table"),
    _sent("stream", "stream", "with the usage of the whole at the end"),
    _sent("return_logprob", "sampling_params.logprobs", "0 if no other number is asked for"),
    _sent(
        "top_logprobs_num",
        "sampling_params.logprobs",
        "one more than asked for, since vLLM counts the sampled token, so below the worker's `--max-logprobs` (20)",
    ),
    _sent(
        "logprob_start_len",
        "sampling_params.prompt_logprobs",
        "positions before it are left out of the answer; 0 and more are refused in streams",
    ),
    _sent(
        "token_ids_logprob",
        "sampling_params.logprob_token_ids",
        "below the worker's `--max-logprobs` (20), 127 at most; of output tokens only, not beside `top_logprobs_num`",
    ),
    _here("return_text_in_logprobs", "refused beside `top_logprobs_num` and `token_ids_logprob`, which come as ids"),
    _here("return_flat_raw_top_logprobs", "built here"),
    _here("return_flat_raw_output_top_logprobs", "built here; refused in streams"),
    _here("return_flat_raw_top_logprobs_b64", "built here"),
    _here("return_prompt_token_ids", "the request's own"),
    _sent("lora_path", "model", "the adapter's name as the worker serves it"),
    _sent("priority", "priority", "with the other sign, since low values come first in vLLM"),
    _copied("cache_salt"),
    _sent("extra_key", "cache_salt", "refused beside `cache_salt`"),
    _sent("session_id", "header x-session-id", "a hint"),
    _sent("max_thinking_tokens", "sampling_params.thinking_token_budget"),
    _here("model", "chooses the worker"),
    _ignored("routing_key", "stickiness is by header"),
    _ignored("conversation_id", "without effect on the answer"),
    _ignored("no_logs", "the engine's own log"),
    _ignored("log_metrics", "the engine's own metrics"),
    _ignored("modalities", "without media nothing to say"),
    _ignored("use_audio_in_video", "without media nothing to say"),
    _ignored("video_config", "without media nothing to say"),
    _ignored("images_config", "without media nothing to say"),
    _ignored("mm_processor_kwargs", "without media nothing to say"),
    _ignored("max_dynamic_patch", "without media nothing to say"),
    _ignored("min_dynamic_patch", "without media nothing to say"),
    _ignored("image_max_dynamic_patch", "without media nothing to say"),
    _ignored("video_max_dynamic_patch", "without media nothing to say"),
    _ignored("routed_experts_start_len", "without `return_routed_experts` nothing to say"),
    _refused("image_data", _MEDIA),
    _refused("video_data", _MEDIA),
    _refused("audio_data", _MEDIA),
    _refused("mm_hashes", _MEDIA),
    _refused("mm_content_hashes", _MEDIA),
    _refused("watermark", "the engines' watermarks differ"),
    _refused("custom_logit_processor", "code for SGLang"),
    _refused("require_reasoning", "grammars after reasoning are asked for in another way"),
    _refused("positional_embed_overrides", _INTERNAL),
    _refused("return_sampling_mask", "vLLM's masks are a setting of the server"),
    _refused("sampling_logprobs_mode", "goes with `return_sampling_mask`"),
    _refused("return_hidden_states", "vLLM returns none"),
    _refused("return_routed_experts", "vLLM's have another shape and type, by a setting of the server"),
    _refused("return_indexer_topk", "vLLM returns none"),
    _refused("return_entropy", "vLLM returns none"),
    _refused("return_bytes", _INTERNAL),
    _refused("session_params", "vLLM has no sessions"),
    _refused("background", "vLLM has no answers to be fetched later on this route"),
    _refused("custom_labels", "not passed on, on any route"),
    *(
        _refused(name, _ROUTING)
        for name in (
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "bootstrap_pair_key",
            "decode_tp_size",
            "routed_dp_rank",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "external_trace_header",
            "received_time",
        )
    ),
    *(
        _refused(name, _INTERNAL)
        for name in (
            "lora_id",
            "http_worker_ipc",
            "need_wait_for_mm_inputs",
            "num_items_assigned",
            "encoder_urls",
            "multi_item_delimiter_indices",
            "token_indices_to_pool",
            "kv_hints",
        )
    ),
)

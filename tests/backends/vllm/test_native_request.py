"""Native requests in the terms of vLLM's token route, and what is refused by its name."""

import json
from array import array
from typing import Any

import pytest

from backends.json_body import JsonBody
from backends.vllm.native_fields import SAMPLING_FIELDS, TOP_FIELDS, Fate, NativeRefused
from backends.vllm.native_request import refuses_text, translate
from gateway.screening import INTERNAL_FIELDS
from simulator.sglang.sampling import _FIELDS as SGLANG_SAMPLING
from tests.backends.vllm.native_agreement import plan_of

IDS = [784, 15, 812]
# The fields of GenerateReqInput in SGLang 0.5.23.
GENERATE_REQ_INPUT = """
rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes
use_audio_in_video video_config sampling_params watermark return_logprob logprob_start_len top_logprobs_num
token_ids_logprob return_sampling_mask sampling_logprobs_mode return_text_in_logprobs return_flat_raw_top_logprobs
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states
return_routed_experts routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id
custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key
decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc
background require_reasoning max_thinking_tokens priority extra_key no_logs custom_labels return_bytes return_entropy
return_prompt_token_ids external_trace_header received_time need_wait_for_mm_inputs num_items_assigned encoder_urls
max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config mm_processor_kwargs
multi_item_delimiter_indices token_indices_to_pool cache_salt kv_hints
"""


def legs(body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """The bodies of the legs of a request, which lacks nothing but ids if it has no prompt."""
    prompt = {} if "text" in body or "input_ids" in body else {"input_ids": IDS}
    return [json.loads(leg.body) for leg in plan_of({**prompt, **body}, **more).legs]


def params(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The sampling parameters of the one leg, without the default."""
    (leg,) = legs(body, **more)
    found = leg["sampling_params"]
    assert isinstance(found, dict)
    return {name: value for name, value in found.items() if (name, value) != ("max_tokens", 128)}


def test_every_field_of_the_engine_has_its_line() -> None:
    assert set(GENERATE_REQ_INPUT.split()) <= TOP_FIELDS.keys()
    assert SAMPLING_FIELDS.keys() == SGLANG_SAMPLING.keys()
    assert {
        name for name in INTERNAL_FIELDS & set(GENERATE_REQ_INPUT.split()) if TOP_FIELDS[name].fate is not Fate.REFUSED
    } == set()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"max_new_tokens": None, "temperature": None, "stop": None}, {}, id="null is the default"),
        pytest.param({"max_new_tokens": 5}, {"max_tokens": 5}, id="limit"),
        pytest.param({"max_new_tokens": 0, "min_new_tokens": 0}, {"max_tokens": 1}, id="no output"),
        pytest.param({"min_new_tokens": 3}, {"min_tokens": 3}, id="least"),
        pytest.param({"stop": ["a"], "stop_token_ids": [5]}, {"stop": ["a"], "stop_token_ids": [5]}, id="stops"),
        pytest.param({"no_stop_trim": True}, {"include_stop_str_in_output": True}, id="stops shown"),
        pytest.param({"sampling_seed": 7}, {"seed": 7}, id="seed"),
        pytest.param({"n": 3}, {"n": 3}, id="samples"),
        pytest.param({"n": 1}, {}, id="one sample"),
        pytest.param({"json_schema": "{}"}, {"structured_outputs": {"json": "{}"}}, id="schema"),
        pytest.param({"regex": "a+", "ebnf": ""}, {"structured_outputs": {"regex": "a+"}}, id="regex"),
        pytest.param({"ebnf": "x"}, {"structured_outputs": {"grammar": "x"}}, id="grammar"),
        pytest.param({"structural_tag": "x"}, {"structured_outputs": {"structural_tag": "x"}}, id="tag"),
        pytest.param({"logit_bias": {"5": -1.5}}, {"logit_bias": {"5": -1.5}}, id="bias"),
        pytest.param({"beam_width": 1, "stop_regex": [], "custom_params": {}, "choice": []}, {}, id="harmless"),
        pytest.param(
            {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "ignore_eos": True},
            {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "ignore_eos": True},
            id="same names",
        ),
    ],
)
def test_sampling_parameters(sampling: dict[str, Any], expected: dict[str, Any]) -> None:
    assert params({"sampling_params": sampling}) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, {"logprobs": 0}, id="chosen"),
        pytest.param({"top_logprobs_num": 2}, {"logprobs": 3}, id="likeliest"),
        pytest.param({"token_ids_logprob": [5, 6]}, {"logprobs": 3, "logprob_token_ids": [5, 6, 6]}, id="ids"),
        pytest.param({"logprob_start_len": -1}, {"logprobs": 0}, id="no prompt"),
        pytest.param({"logprob_start_len": 0}, {"logprobs": 0, "prompt_logprobs": 0}, id="prompt"),
        pytest.param(
            {"logprob_start_len": 2, "top_logprobs_num": 4}, {"logprobs": 5, "prompt_logprobs": 4}, id="prompt's tops"
        ),
        pytest.param({"return_logprob": False, "top_logprobs_num": 4, "logprob_start_len": 0}, {}, id="not asked for"),
    ],
)
def test_log_probabilities(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert params({"return_logprob": True, **fields}) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, {"output_mode": "text"}, id="text"),
        pytest.param({"return_logprob": True}, {"output_mode": "text"}, id="text and chosen tokens"),
        pytest.param({"return_logprob": True, "top_logprobs_num": 1}, {}, id="ids of the likeliest"),
        pytest.param(
            {"stream": True},
            {"output_mode": "text", "stream": True, "stream_options": {"include_usage": True}},
            id="stream",
        ),
        pytest.param({"lora_path": "mine", "extra_key": ""}, {"output_mode": "text", "model": "mine"}, id="adapter"),
        pytest.param({"priority": 5}, {"output_mode": "text", "priority": -5}, id="priority"),
        pytest.param({"priority": -(2**63)}, {"output_mode": "text", "priority": 2**63 - 1}, id="least of priorities"),
        pytest.param({"cache_salt": "x"}, {"output_mode": "text", "cache_salt": "x"}, id="salt"),
        pytest.param({"extra_key": "x"}, {"output_mode": "text", "cache_salt": "x"}, id="key"),
        pytest.param(
            {"image_data": [None, []], "return_routed_experts": False, "no_logs": True, "unknown": {"a": 1}},
            {"output_mode": "text"},
            id="nothing is asked for",
        ),
    ],
)
def test_other_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    (leg,) = legs(fields)
    del leg["sampling_params"]
    assert leg == {"token_ids": IDS, **expected}


def test_a_worker_without_a_tokenizer_is_asked_for_tokens() -> None:
    assert "output_mode" not in legs({}, with_text=False)[0]


def test_thinking_and_session() -> None:
    plan = plan_of({"input_ids": IDS, "max_thinking_tokens": 9, "session_id": "s-1"})
    assert json.loads(plan.legs[0].body)["sampling_params"]["thinking_token_budget"] == 9
    assert plan.legs[0].headers == ((b"x-session-id", b"s-1"),)


def test_each_prompt_of_a_batch_is_a_leg_with_its_own_values() -> None:
    body = {
        "input_ids": [[5], [6, 7]],
        "sampling_params": [{"n": 2, "top_k": 1}, {"n": 2}],
        "return_logprob": [False, True],
        "top_logprobs_num": [1, 2],
        "lora_path": [None, "mine"],
        "cache_salt": ["a", None],
    }
    plan = plan_of(body)
    first, second = (json.loads(leg.body) for leg in plan.legs)
    assert (first["token_ids"], second["token_ids"]) == ([5], [6, 7])
    assert (first["sampling_params"].get("top_k"), second["sampling_params"].get("top_k")) == (1, None)
    assert ("logprobs" in first["sampling_params"], second["sampling_params"]["logprobs"]) == (False, 3)
    assert (first.get("model"), second.get("model")) == (None, "mine")
    assert (first.get("cache_salt"), second.get("cache_salt")) == ("a", None)
    assert [(leg.first, leg.samples) for leg in plan.legs] == [(0, 2), (2, 2)]
    assert (plan.count, plan.is_list, plan.is_stream) == (4, True, False)


def test_ids_for_each_prompt_of_a_batch() -> None:
    body = {"input_ids": [[5], [6]], "return_logprob": True, "token_ids_logprob": [[1], None]}
    first, second = (json.loads(leg.body)["sampling_params"] for leg in plan_of(body).legs)
    assert (first["logprob_token_ids"], second.get("logprob_token_ids")) == ([1, 1], None)


def test_greedy_samples_are_a_leg_each() -> None:
    plan = plan_of({"input_ids": [IDS, [1]], "sampling_params": {"n": 2, "temperature": 0}})
    assert [(leg.first, leg.samples) for leg in plan.legs] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert not any("n" in json.loads(leg.body)["sampling_params"] for leg in plan.legs)


def test_values_go_as_they_are_written() -> None:
    raw = b'{"input_ids": [ 1,2 , 3],"sampling_params":{"temperature":0.10000000000000001,"top_p":9e-1}}'
    body = translate(JsonBody.parse(raw)).legs[0].body
    assert b'"token_ids":[ 1,2 , 3]' in body
    assert b'"temperature":0.10000000000000001' in body
    assert b'"top_p":9e-1' in body


def test_a_long_prompt_is_counted_by_the_parser() -> None:
    raw = json.dumps({"input_ids": list(range(20_000)), "return_logprob": True, "logprob_start_len": 20_000}).encode()
    assert translate(JsonBody.parse(raw)).legs[0].wanted.prompt_tokens == 20_000


def test_text_is_translated_by_the_ids_of_a_tokenizer() -> None:
    packed = [array("I", [5, 6]).tobytes(), array("I", [70_000]).tobytes()]
    body: dict[str, Any] = {"text": ["a", "b"], "return_prompt_token_ids": True}
    plan = plan_of(body, prompt_ids=packed)
    assert [leg.wanted.prompt for leg in plan.legs] == [b"[5,6]", b"[70000]"]
    assert plan.is_list
    assert not plan_of({"text": "a"}, prompt_ids=packed[:1]).is_list


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"text": "a"}, "text", id="text and no tokenizer"),
        pytest.param({"sampling_params": {}}, "input_ids", id="no prompt"),
        pytest.param({"input_ids": []}, "input_ids", id="empty"),
        pytest.param({"input_ids": [[]]}, "input_ids", id="empty item"),
        pytest.param({"input_ids": ["5"]}, "input_ids", id="ids in strings"),
        pytest.param({"input_ids": [[5], 6]}, "input_ids", id="mixed"),
        pytest.param({"input_ids": [-1]}, "input_ids", id="negative id"),
        pytest.param({"image_data": "http://x"}, "image_data", id="image"),
        pytest.param({"input_embeds": [[0.1]]}, "input_embeds", id="embeddings"),
        pytest.param({"return_hidden_states": "last"}, "return_hidden_states", id="hidden states"),
        pytest.param({"return_routed_experts": True}, "return_routed_experts", id="experts"),
        pytest.param({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex", id="stop regex"),
        pytest.param({"sampling_params": {"beam_width": 2}}, "sampling_params.beam_width", id="beams"),
        pytest.param({"sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params", id="custom"),
        pytest.param({"sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens", id="unknown"),
        pytest.param({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", id="negative"),
        pytest.param({"sampling_params": {"max_new_tokens": "1"}}, "sampling_params.max_new_tokens", id="string"),
        pytest.param({"sampling_params": {"sampling_seed": -1}}, "sampling_params.sampling_seed", id="no seed"),
        pytest.param({"sampling_params": {"sampling_seed": 2**63}}, "sampling_params.sampling_seed", id="65 bits"),
        pytest.param({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf", id="two grammars"),
        pytest.param({"sampling_params": 5}, "sampling_params", id="no object"),
        pytest.param(
            {"sampling_params": {"n": 2, "temperature": "a", "regex": "a", "ebnf": "b"}},
            "sampling_params.ebnf",
            id="no number",
        ),
        pytest.param({"sampling_params": [{}, {}]}, "sampling_params", id="too many"),
        pytest.param({"input_ids": [[5], [6]], "sampling_params": [{"n": 2}, {}]}, "sampling_params", id="samples"),
        pytest.param({"input_ids": [[5], [6]], "return_logprob": [True]}, "return_logprob", id="too few"),
        pytest.param({"return_logprob": 1}, "return_logprob", id="no switch"),
        pytest.param({"cache_salt": "a", "extra_key": "b"}, "extra_key", id="two salts"),
        pytest.param({"session_id": "a\nb"}, "session_id", id="no header"),
        pytest.param({"session_id": 5}, "session_id", id="no string"),
        pytest.param(
            {"return_flat_raw_output_top_logprobs": True, "stream": True},
            "return_flat_raw_output_top_logprobs",
            id="flat stream",
        ),
        pytest.param({"return_flat_raw_top_logprobs_b64": True}, "return_flat_raw_top_logprobs_b64", id="Base64 alone"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    prompt = {} if {"text", "input_ids"} & body.keys() or param == "input_ids" else {"input_ids": IDS}
    with pytest.raises(NativeRefused) as refused:
        plan_of({**prompt, **body})
    assert refused.value.param == param
    assert refused.value.args[0]


@pytest.mark.parametrize("text", [7, True, {"a": 1}, [7], ["a", 7], [["a"]]], ids=str)
def test_what_is_no_text_is_not_told_of_a_tokenizer(text: Any) -> None:
    with pytest.raises(NativeRefused, match="'text' must be a string, or a list of them for a batch"):
        plan_of({"text": text})
    with pytest.raises(NativeRefused, match="takes token ids"):
        plan_of({"text": ["a", "7"]})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"token_ids_logprob": [5], "top_logprobs_num": 1}, "token_ids_logprob", id="ids and tops"),
        pytest.param({"token_ids_logprob": [5], "logprob_start_len": 0}, "token_ids_logprob", id="ids of the prompt"),
        pytest.param({"token_ids_logprob": list(range(128))}, "token_ids_logprob", id="too many ids"),
        pytest.param({"token_ids_logprob": ["a"]}, "token_ids_logprob", id="no ids"),
        pytest.param({"token_ids_logprob": "a"}, "token_ids_logprob", id="no list"),
        pytest.param({"return_text_in_logprobs": True, "top_logprobs_num": 1}, "return_text_in_logprobs", id="texts"),
        pytest.param({"logprob_start_len": 0, "stream": True}, "logprob_start_len", id="prompt in a stream"),
        pytest.param({"logprob_start_len": 4}, "logprob_start_len", id="behind the prompt"),
    ],
)
def test_refused_log_probabilities(body: dict[str, Any], param: str) -> None:
    with pytest.raises(NativeRefused) as refused:
        plan_of({"input_ids": IDS, "return_logprob": True, **body})
    assert refused.value.param == param


def test_a_text_of_no_tokens_is_refused() -> None:
    with pytest.raises(NativeRefused, match="without a token"):
        plan_of({"text": ["a", ""]}, prompt_ids=[array("I", [5]).tobytes(), b""])


@pytest.mark.parametrize(
    ("text", "ids", "is_list"),
    [
        pytest.param("a", IDS, False, id="single"),
        pytest.param(["a", "b"], [[5], [6]], True, id="batch"),
        pytest.param(["a", "b"], [5, 6], None, id="texts, and one prompt of ids"),
        pytest.param(["a", "b"], [[5]], None, id="one is missing"),
        pytest.param("a", [[5]], None, id="a text, and a batch"),
    ],
)
def test_ids_go_before_text(text: Any, ids: Any, is_list: bool | None) -> None:
    body = {"text": text, "input_ids": ids}
    if is_list is None:
        with pytest.raises(NativeRefused, match="as many prompts"):
            plan_of(body)
    else:
        assert plan_of(body).is_list is is_list


def test_what_is_no_temperature_is_left_to_the_worker() -> None:
    assert legs({"sampling_params": {"n": 2, "temperature": "a"}})[0]["sampling_params"]["n"] == 2


def test_texts_of_tokens_need_a_tokenizer() -> None:
    body = {"input_ids": IDS, "return_logprob": True, "return_text_in_logprobs": True}
    assert plan_of(body).legs[0].wanted.has_token_text
    with pytest.raises(NativeRefused, match="no tokenizer"):
        plan_of(body, with_text=False)


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        pytest.param(
            400,
            "output_mode='text' requires a tokenizer, but this server does not load one (--tokens-only or "
            "--skip-tokenizer-init). Send the request to a server that loads a tokenizer, or use output_mode='tokens'.",
            True,
            id="vLLM 0.32",
        ),
        pytest.param(400, "Token id 999999 is out of vocabulary", False, id="something else"),
        pytest.param(200, "output_mode='text' requires a tokenizer", False, id="no error"),
    ],
)
def test_a_worker_without_a_tokenizer_says_so(status: int, message: str, expected: bool) -> None:
    assert refuses_text(status, json.dumps({"error": {"message": message}}).encode()) is expected

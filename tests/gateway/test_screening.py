"""What of a body is refused for the engine's sake, and what only looks like it."""

import json
import time
from typing import Any

import pytest

from backends.json_body import JsonBody
from gateway.errors import InvalidRequest
from gateway.routes import ROUTES
from gateway.screening import refuse_deadly
from tests.gateway.envelopes import CHAT, COMPLETIONS, EMBEDDINGS, NATIVE, parsed, refused

RESPONSES, SCORE = "/v1/responses", "/v1/score"
TWELVE = [
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
]
MORE = [
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_anything",
    "kv_hints",
    "http_worker_ipc",
    "lora_id",
    "token_indices_to_pool",
    "encoder_urls",
    "need_wait_for_mm_inputs",
    "num_items_assigned",
    "positional_embed_overrides",
    "multi_item_delimiter_indices",
]


@pytest.mark.parametrize("name", TWELVE + MORE)
def test_a2_12_internal_names_are_refused(name: str) -> None:
    values: tuple[object, ...] = (0, False, "", [], {}, "x", 1)
    for path in ROUTES:
        for value in values:
            error = refused({"text": "a", "prompt": "a", name: value}, path=path)
            assert error.report.param == name
            assert name in error.report.message
            assert "internal" in error.report.message


@pytest.mark.parametrize("name", TWELVE + MORE)
def test_a2_12_null_is_as_good_as_absent(name: str) -> None:
    assert parsed({"text": "a", name: None}).body.raw == json.dumps({"text": "a", name: None}).encode()


@pytest.mark.parametrize("name", ["bootstrap\\u005froom", "\\u0062ootstrap_room", "routed_dp_ran\\u006b"])
def test_a2_12_in_any_spelling(name: str) -> None:
    refused(b'{"text":"a","%b":1}' % name.encode())


@pytest.mark.parametrize("name", ["bootstrap", "xbootstrap_room", "priority", "lora_path", "dp_rank", "BOOTSTRAP_ROOM"])
def test_other_names_pass(name: str) -> None:
    parsed({"text": "a", name: 1})


def test_names_inside_other_fields_pass() -> None:
    parsed({"text": "a", "custom_params": {"bootstrap_room": 1}})


# What an engine dies of.


@pytest.mark.parametrize(
    ("body", "path", "param"),
    [
        pytest.param({"text": ""}, NATIVE, "text", id="empty text"),
        pytest.param({"text": ["a", ""]}, NATIVE, "text", id="empty text in a batch"),
        pytest.param(b'{"text":[ "" ,"a"]}', NATIVE, "text", id="empty text first"),
        pytest.param({"text": "", "input_ids": [1]}, NATIVE, "text", id="empty text beside ids"),
        pytest.param({"input_ids": [[1, 2], []]}, NATIVE, "input_ids", id="an empty list of ids in a batch"),
        pytest.param(b'{"input_ids":[ [ ] ]}', NATIVE, "input_ids", id="a batch of one empty list of ids"),
        pytest.param({"input_ids": [[5] * 40_000, []]}, NATIVE, "input_ids", id="an empty list behind many ids"),
        pytest.param({"prompt": [[], [1]]}, COMPLETIONS, "prompt", id="an empty list of ids in completions"),
        pytest.param({"input_ids": [1, -1]}, NATIVE, "input_ids", id="negative id"),
        pytest.param({"input_ids": [[1], [-1]]}, NATIVE, "input_ids", id="negative id in a batch"),
        pytest.param({"messages": [], "input_ids": [-1]}, CHAT, "input_ids", id="negative id in a chat"),
        pytest.param({"prompt": [5, -1]}, COMPLETIONS, "prompt", id="negative id in a completion"),
        pytest.param({"prompt": [[5], [-1]]}, COMPLETIONS, "prompt", id="negative id in a batch of completions"),
        pytest.param({"input": [5, -1]}, EMBEDDINGS, "input", id="negative id to be embedded"),
        pytest.param({"text": "a", "top_logprobs_num": 1025}, NATIVE, "top_logprobs_num", id="top-k"),
        pytest.param({"text": "a", "top_logprobs_num": 5000.0}, NATIVE, "top_logprobs_num", id="top-k as a float"),
        pytest.param({"text": "a", "top_logprobs_num": "5000"}, NATIVE, "top_logprobs_num", id="top-k as a string"),
        pytest.param({"text": ["a"], "top_logprobs_num": [1, None, 2000]}, NATIVE, "top_logprobs_num",
                     id="top-k of one item"),
        pytest.param({"messages": [], "top_logprobs": 1025}, CHAT, "top_logprobs", id="top-k of a chat"),
        pytest.param({"prompt": "a", "logprobs": 1025}, COMPLETIONS, "logprobs", id="top-k of a completion"),
        pytest.param({"input": "a", "top_logprobs": 1025}, RESPONSES, "top_logprobs", id="top-k of a response"),
        pytest.param({"prompt": ["a", ""]}, COMPLETIONS, "prompt", id="empty text in a batch of completions"),
        pytest.param({"prompt": [""]}, COMPLETIONS, "prompt", id="a batch of one empty text"),
        pytest.param({"input_ids": [1, 2**31]}, NATIVE, "input_ids", id="id above 31 bits"),
        pytest.param({"input_ids": [[1], [10**30, 2]]}, NATIVE, "input_ids", id="id above 64 bits in a batch"),
        pytest.param(b'{"input_ids":[1,1%b]}' % (b"0" * 5000), NATIVE, "input_ids", id="id of 5,000 digits"),
        pytest.param(b'{"input_ids":[1,1e9]}', NATIVE, "input_ids", id="id with an exponent"),
        pytest.param(b'{"input_ids":[1,9E99]}', NATIVE, "input_ids", id="id with a capital exponent"),
        pytest.param({"input_ids": ["-1", 5]}, NATIVE, "input_ids", id="id in a string"),
        pytest.param(b'{"input_ids":["\\u002d1"]}', NATIVE, "input_ids", id="id in an escaped string"),
        pytest.param({"messages": [], "input_ids": [2**31]}, CHAT, "input_ids", id="id above 31 bits in a chat"),
        pytest.param({"prompt": [2**31]}, COMPLETIONS, "prompt", id="id above 31 bits in a completion"),
        pytest.param({"prompt": ["-1", 5]}, COMPLETIONS, "prompt", id="an id in a string beside one that is none"),
        pytest.param({"prompt": [5, "-1"]}, COMPLETIONS, "prompt", id="an id beside one in a string"),
        pytest.param({"prompt": [[5, "-1"]]}, COMPLETIONS, "prompt", id="an id in a string in a batch"),
        pytest.param({"input": [[2**31]]}, EMBEDDINGS, "input", id="id above 31 bits to be embedded"),
        pytest.param({"input_ids": [-1]}, "/encode", "input_ids", id="negative id to be encoded"),
        pytest.param({"text": ["a", ""]}, "/classify", "text", id="empty text to be classified"),
        pytest.param({"query": [-1], "items": [[1]]}, SCORE, "query", id="negative id in a query"),
        pytest.param({"query": [1], "items": [[1], [-1]]}, SCORE, "items", id="negative id in an item"),
        pytest.param({"query": [2**31], "items": [[1]]}, SCORE, "query", id="id above 31 bits in a query"),
        pytest.param({"query": [1], "items": [[2**31]]}, SCORE, "items", id="id above 31 bits in an item"),
        pytest.param({"query": "a", "items": ["b"], "label_token_ids": [-1]}, SCORE, "label_token_ids",
                     id="negative label"),
        pytest.param({"query": "", "items": [""]}, SCORE, "items", id="empty query and item"),
        pytest.param({"query": "", "items": ""}, SCORE, "items", id="empty query and items"),
        pytest.param({"query": "", "items": []}, SCORE, "items", id="empty query and no items"),
        pytest.param({"query": "", "items": ["a", ""]}, SCORE, "items", id="empty query and one empty item"),
        pytest.param({"query": [], "items": [[1], []]}, SCORE, "items", id="no ids in the query and in one item"),
        pytest.param({"text": "a", "positional_embed_overrides": {"embeds": [[0.1]]}}, NATIVE,
                     "positional_embed_overrides", id="embeddings over tokens"),
    ],
)  # fmt: skip
def test_what_kills_an_engine_is_refused(body: dict[str, Any] | bytes, path: str, param: str) -> None:
    assert refused(body, path=path).report.param == param


@pytest.mark.parametrize(
    ("body", "path"),
    [
        pytest.param({"text": " "}, NATIVE, id="white space"),
        pytest.param({"text": ['a,""', '","', "x", '[""]']}, NATIVE, id="quotes in texts"),
        pytest.param({"prompt": ""}, COMPLETIONS, id="the engine refuses an empty prompt"),
        pytest.param({"prompt": ["-1", "- a"]}, COMPLETIONS, id="a dash in texts"),
        pytest.param({"prompt": "[-1]"}, COMPLETIONS, id="a text that looks like ids"),
        pytest.param({"text": "a", "top_logprobs_num": 1024}, NATIVE, id="top-k at the limit"),
        pytest.param({"text": "a", "top_logprobs_num": [0, 5]}, NATIVE, id="top-k of items"),
        pytest.param({"text": "a", "top_logprobs_num": []}, NATIVE, id="top-k of no items"),
        pytest.param({"text": "a", "top_logprobs_num": {"a": 1}}, NATIVE, id="top-k is nonsense"),
        pytest.param({"text": "a", "top_logprobs_num": "many"}, NATIVE, id="top-k is a word"),
        pytest.param({"text": "a", "top_logprobs_num": -1}, NATIVE, id="top-k is negative"),
        pytest.param({"messages": [], "logprobs": True, "top_logprobs": 5}, CHAT, id="chat"),
        pytest.param({"input_ids": [0, 1, 2**31 - 1]}, NATIVE, id="ids up to 31 bits"),
        pytest.param(b'{"input_ids":[true,false,null]}', NATIVE, id="letters among ids are the engine's to judge"),
        pytest.param({"input_ids": ["a"]}, NATIVE, id="a text where ids are wanted"),
        pytest.param({"input_ids": []}, NATIVE, id="the engine refuses no ids"),
        pytest.param({"prompt": []}, COMPLETIONS, id="the engine refuses no prompt"),
        pytest.param({"prompt": ["[]", "a [[], []]"]}, COMPLETIONS, id="empty lists in texts"),
        pytest.param({"query": [1], "items": [[], [2]]}, SCORE, id="an empty list of ids behind a query"),
        pytest.param({"text": "a", "input_embeds": [[-1.5, 1e-9]]}, NATIVE, id="embeddings"),
        pytest.param({"prompt": ["a-1", "9999999999", "1e9"]}, COMPLETIONS, id="numbers in texts"),
        pytest.param(b'{"prompt":["\xff"]}', COMPLETIONS, id="bytes that are no text are the engine's to judge"),
        pytest.param({"input": [{"text": "a-1"}, {"image": "9999999999"}]}, EMBEDDINGS, id="objects to be embedded"),
        pytest.param({"input": ["-1", "9999999999"]}, EMBEDDINGS, id="texts to be embedded"),
        pytest.param({"input": [{"role": "user", "content": ""}]}, RESPONSES, id="empty content of a response"),
        pytest.param({"messages": [{"role": "user", "content": ""}]}, CHAT, id="empty content of a chat"),
        pytest.param({"query": "a", "items": ["", "b"]}, SCORE, id="an empty item behind a query"),
        pytest.param({"query": "", "items": ["b"]}, SCORE, id="an item without a query"),
        pytest.param({"query": "-1", "items": ["9999999999", "-1"]}, SCORE, id="numbers in texts to score"),
        pytest.param({"query": [1], "items": [[2], [3]], "label_token_ids": [1, 2]}, SCORE, id="ids to score"),
        pytest.param({"input": "a", "top_logprobs": 5000}, EMBEDDINGS, id="a field that the route does not have"),
    ],
)
def test_what_an_engine_survives_passes(body: dict[str, Any] | bytes, path: str) -> None:
    parsed(body, path=path)


def test_a_long_prompt_is_looked_at_in_no_time() -> None:
    body = JsonBody.parse(json.dumps({"input_ids": list(range(1000, 101_000))}).encode())
    started = time.process_time()
    for _ in range(10):
        refuse_deadly(body, ROUTES[NATIVE])
    # 2 ms each where it was measured; parsing the list into numbers takes several times as long.
    assert (time.process_time() - started) / 10 < 0.02


# The size guard.


def logprobs(**changes: Any) -> dict[str, Any]:
    """A request that is sure to get 1,000 tokens with 10 top log-probabilities each: 240,000 bytes."""
    sampling = {"max_new_tokens": 1000, "ignore_eos": True}
    return {
        "input_ids": [1] * 100,
        "return_logprob": True,
        "top_logprobs_num": 10,
        "sampling_params": sampling,
        **changes,
    }


@pytest.mark.parametrize(
    ("body", "size"),
    [
        pytest.param(logprobs(), 240_000, id="output"),
        pytest.param(logprobs(sampling_params={"min_new_tokens": 500}), 120_000, id="least output"),
        pytest.param(logprobs(logprob_start_len=0), 264_000, id="and the prompt"),
        pytest.param(logprobs(logprob_start_len=90), 242_400, id="and some of the prompt"),
        pytest.param(logprobs(return_flat_raw_top_logprobs_b64=True), 100_000, id="Base64"),
    ],
)
def test_s2_8_answers_that_are_sure_to_be_too_large_are_refused(body: dict[str, Any], size: int) -> None:
    error = refused(body, cap=size - 1)
    assert error.report.param == "top_logprobs_num"
    assert f"about {size} bytes" in error.report.message
    parsed(body, cap=size)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(logprobs(return_logprob=False), id="none asked for"),
        pytest.param({**logprobs(), "return_logprob": None}, id="null is none"),
        pytest.param(logprobs(top_logprobs_num=0), id="top 0"),
        pytest.param(logprobs(top_logprobs_num=None), id="top null"),
        pytest.param(logprobs(sampling_params={"max_new_tokens": 1000}), id="it may end early"),
        pytest.param(logprobs(sampling_params=None), id="no sampling parameters"),
        pytest.param(logprobs(logprob_start_len=-1, sampling_params={}), id="no prompt"),
        pytest.param(logprobs(logprob_start_len=200, sampling_params={}), id="start behind the prompt"),
        pytest.param(logprobs(stream=True), id="streams are bounded by the event"),
        pytest.param(logprobs(top_logprobs_num=[10, 10], input_ids=[[1], [2]]), id="lists are the engine's to judge"),
        pytest.param(logprobs(sampling_params=[{"min_new_tokens": 9999}]), id="a list of parameters too"),
        pytest.param(logprobs(sampling_params={"min_new_tokens": "9999"}), id="wrong types too"),
    ],
)
def test_s2_8_what_is_not_sure_passes(body: dict[str, Any]) -> None:
    parsed(body, cap=1000)


def test_s2_8_the_guard_is_for_the_native_route() -> None:
    parsed({**logprobs(), "messages": []}, path=CHAT, cap=1000)


@pytest.mark.parametrize("at", [0, 2, 3000, *range(32_744, 32_774, 2), 65_530, 100_000])
def test_an_impossible_id_is_found_anywhere_in_a_long_list(at: int) -> None:
    ids = b"1," * 50_000
    raw = b'{"input_ids":[' + ids[:at] + b"%b" + ids[at:] + b"1]}"
    refuse_deadly(JsonBody.parse(raw % b"214748364,"), ROUTES["/generate"])
    with pytest.raises(InvalidRequest, match="above"):
        refuse_deadly(JsonBody.parse(raw % b"2147483648,"), ROUTES["/generate"])

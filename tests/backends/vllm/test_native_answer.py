"""Answers of real vLLM servers in SGLang's shape."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.errors import AnswerMalformed
from backends.flat_arrays import FlatRows
from backends.json_body import JsonBody
from backends.slices import run, whole
from backends.vllm.native_answer import answer
from backends.vllm.native_request import NativePlan, translate
from tests.backends.vllm.native_agreement import PUBLIC, plan_of
from tests.simulator.wire import load_capture, load_vllm_capture, parse_answer

RECORDED = Path(__file__).parents[2] / "data" / "vllm_native"
IDS = [784, 15, 812, 4, 856, 432]


def captured(name: str) -> bytes:
    """Body of a captured answer."""
    parsed = parse_answer(load_vllm_capture(f"generate/{name}").response)
    assert parsed is not None
    return parsed.body


def recorded(name: str, **changes: Any) -> tuple[NativePlan, bytes]:
    """A native request with some fields changed, and the body of vLLM's answer to it."""
    body = {**json.loads((RECORDED / f"{name}.native.json").read_bytes()), **changes}
    return plan_of(body), (RECORDED / f"{name}.resp.json").read_bytes()


def answered(plan: NativePlan, *bodies: bytes, **more: Any) -> Any:
    return json.loads(whole(answer(plan, bodies, PUBLIC, **more)))


def test_tokens_alone() -> None:
    plan = plan_of({"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}}, with_text=False)
    assert answered(plan, captured("unary")) == {
        "output_ids": [229, 221, 442, 322],
        "meta_info": {
            "id": "public-0",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 6,
            "weight_version": "default",
            "completion_tokens": 4,
            "cached_tokens": 0,
            "weight_versions": [{"version": "default", "start": 0, "end": 4}],
        },
    }


def test_text() -> None:
    plan = plan_of({"input_ids": IDS, "return_prompt_token_ids": True})
    found = answered(plan, captured("text-mode"))
    assert list(found) == ["text", "output_ids", "meta_info", "prompt_token_ids"]
    assert found["text"] == "\ufffd\x1dgrouplo"
    assert found["prompt_token_ids"] == IDS


def test_samples_are_a_list() -> None:
    plan = plan_of({"input_ids": IDS, "sampling_params": {"n": 2}}, with_text=False)
    found = answered(plan, captured("n2"))
    assert [item["output_ids"] for item in found] == [[910, 654, 910, 831], [804, 320, 903, 591]]
    assert [item["meta_info"]["id"] for item in found] == PUBLIC[:2]


def test_the_samples_of_a_batch_go_by_prompt() -> None:
    plan = plan_of({"input_ids": [IDS, IDS[:2]], "sampling_params": {"n": 2}}, with_text=False)
    found = answered(plan, captured("n2"), captured("n2"))
    assert [item["meta_info"]["id"] for item in found] == PUBLIC[:4]
    assert [item["meta_info"]["prompt_tokens"] for item in found] == [6, 6, 2, 2]


def test_numbers_keep_their_spelling() -> None:
    plan = plan_of({"input_ids": IDS, "return_logprob": True}, with_text=False)
    body = captured("logprobs").replace(b"-1.7248893976211548", b"-1.72488939762115480E0")
    assert b'"output_token_logprobs":[[-1.72488939762115480E0,229,null],' in whole(answer(plan, [body], PUBLIC))


def test_every_digit_of_the_engine_is_there() -> None:
    plan, body = recorded("likeliest")
    numbers = set(re.findall(rb"-?\d+\.\d{6,}", whole(answer(plan, [body], PUBLIC))))
    assert len(numbers) > 15
    assert numbers <= set(re.findall(rb"-?\d+\.\d{6,}", body))


def test_a_sampled_token_is_not_among_the_likeliest() -> None:
    """Sampled at temperature 2: vLLM puts it in front, and it must not push out one of the two likeliest."""
    plan, body = recorded("likeliest")
    meta = answered(plan, body)["meta_info"]
    told = json.loads(body)["choices"][0]["logprobs"]["content"]
    for (value, token, _), tops, entry in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], told, strict=True
    ):
        assert (value, token) == (entry["logprob"], entry["token_id"])
        ranked = {top["rank"]: [top["logprob"], top["token_id"], None] for top in entry["top_logprobs"]}
        assert tops == [ranked[1], ranked[2]]
        assert tops[0][0] >= tops[1][0]
    assert any(entry["rank"] > 2 for entry in told)


def test_the_prompt_from_a_position_on() -> None:
    plan, body = recorded("likeliest")
    meta = answered(plan, body)["meta_info"]
    told = json.loads(body)["prompt_logprobs"]
    assert meta["input_token_logprobs"][0] == [None, IDS[1], None]
    assert meta["input_token_logprobs"][1:] == [
        [told[position][str(IDS[position])]["logprob"], IDS[position], None] for position in range(2, 6)
    ]
    assert meta["input_top_logprobs"][0] is None
    for position, tops in enumerate(meta["input_top_logprobs"][1:], 2):
        best = sorted(told[position].items(), key=lambda one: one[1]["rank"])[:2]
        assert tops == [[one["logprob"], int(token), None] for token, one in best]


def test_flat_arrays_hold_what_the_nested_lists_hold() -> None:
    flags = {"return_flat_raw_top_logprobs": True, "return_flat_raw_output_top_logprobs": True}
    nested = answered(*recorded("likeliest"))["meta_info"]
    flat = answered(*recorded("likeliest", **flags))["meta_info"]
    packed = answered(*recorded("likeliest", **flags, return_flat_raw_top_logprobs_b64=True))["meta_info"]
    for side, nulls in (("input", 1), ("output", 0)):
        name = f"{side}_top_logprobs"
        rows = nested[name][nulls:]
        assert name not in flat.keys() | packed.keys()
        assert flat[f"{name}_val_flat"] == [value for row in rows for value, _, _ in row]
        assert flat[f"{name}_idx_flat"] == [token for row in rows for _, token, _ in row]
        assert flat[f"{name}_shape"] == packed[f"{name}_shape"] == [len(rows), 2]
        assert flat[f"{name}_null_prefix"] == packed[f"{name}_null_prefix"] == nulls
        values = np.frombuffer(base64.b64decode(packed[f"{name}_val_flat_b64"]), packed[f"{name}_val_flat_b64_dtype"])
        tokens = np.frombuffer(base64.b64decode(packed[f"{name}_idx_flat_b64"]), packed[f"{name}_idx_flat_b64_dtype"])
        assert values.astype(float).tolist() == flat[f"{name}_val_flat"]
        assert tokens.tolist() == flat[f"{name}_idx_flat"]


def test_fields_stand_where_sglang_has_them() -> None:
    flags = {"return_flat_raw_top_logprobs": True, "return_flat_raw_output_top_logprobs": True}
    found = answered(*recorded("likeliest", **flags, return_flat_raw_top_logprobs_b64=True))["meta_info"]
    parsed = parse_answer(load_capture("http/gen_flat_in_out_b64").response)
    assert parsed is not None
    engine = parsed.json()["meta_info"]
    assert [name for name in engine if name in found] == list(found)


def test_chosen_ids() -> None:
    """Both of them, although vLLM counts the sampled token among them."""
    plan, body = recorded("chosen-ids")
    meta = answered(plan, body)["meta_info"]
    assert meta["input_token_ids_logprobs"] == []
    assert [[token for _, token, _ in row] for row in meta["output_token_ids_logprobs"]] == [[5, 6]] * 4
    told = json.loads(body)["choices"][0]["logprobs"]["content"]
    expected = [{top["token_id"]: top["logprob"] for top in entry["top_logprobs"]} for entry in told]
    assert [[value for value, _, _ in row] for row in meta["output_token_ids_logprobs"]] == [
        [one[5], one[6]] for one in expected
    ]


def test_texts_of_tokens() -> None:
    plan, body = recorded("text")
    found = answered(plan, body)
    assert found["text"] == "\ufffd\x1d"
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "group"}
    assert [(token, text) for _, token, text in found["meta_info"]["output_token_logprobs"]] == [
        (229, ""),
        (221, "\x1d"),
        (442, "group"),
    ]


def test_no_output_leaves_out_the_token_that_vllm_makes() -> None:
    body = {"input_ids": IDS[:3], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    plan = plan_of({**body, "logprob_start_len": 0}, with_text=False)
    choice = {"index": 0, "token_ids": [5], "finish_reason": "length", "logprobs": {"content": [{"logprob": -1.0}]}}
    rows = [None, {"15": {"logprob": -12.5, "rank": 899}}, {"812": {"logprob": -13.25, "rank": 970}}]
    found = answered(plan, json.dumps({"choices": [choice], "prompt_logprobs": rows}).encode())
    assert found["output_ids"] == []
    meta = found["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (meta["completion_tokens"], meta["output_token_logprobs"]) == (0, [])
    assert meta["input_token_logprobs"] == [[None, 784, None], [-12.5, 15, None], [-13.25, 812, None]]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        pytest.param({"finish_reason": "length"}, {"type": "length", "length": 2}, id="length"),
        pytest.param({"finish_reason": "stop", "stop_reason": 'a"'}, {"type": "stop", "matched": 'a"'}, id="string"),
        pytest.param({"finish_reason": "stop", "stop_reason": 7}, {"type": "stop", "matched": 7}, id="token"),
        pytest.param({"finish_reason": "stop"}, {"type": "stop", "matched": 6}, id="end of sequence"),
        pytest.param({"finish_reason": "stop", "token_ids": []}, {"type": "stop", "matched": None}, id="no token"),
        pytest.param(
            {"finish_reason": "abort"},
            {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
            id="abort",
        ),
    ],
)
def test_finish_reasons(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = plan_of({"input_ids": IDS}, with_text=False)
    body = json.dumps({"choices": [{"index": 0, "token_ids": [5, 6], **choice}]}).encode()
    assert answered(plan, body)["meta_info"]["finish_reason"] == expected


def test_what_the_answer_does_not_tell() -> None:
    plan = plan_of({"input_ids": IDS}, with_text=False)
    body = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "token_ids": [5]}]}).encode()
    meta = answered(plan, body, weight_version="42")["meta_info"]
    assert (meta["weight_version"], meta["cached_tokens"], "weight_versions" in meta) == ("42", 0, False)


def test_the_version_of_the_last_token_counts() -> None:
    plan = plan_of({"input_ids": IDS}, with_text=False)
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6], "weight_versions": spans}
    usage = {"prompt_tokens": 6, "prompt_tokens_details": {"cached_tokens": 5}}
    meta = answered(plan, json.dumps({"choices": [choice], "usage": usage}).encode())["meta_info"]
    assert (meta["weight_version"], meta["weight_versions"], meta["cached_tokens"]) == ("2", spans, 5)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"{", id="no JSON"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b'{"choices":[]}', id="no choice"),
        pytest.param(b'{"choices":[{"index":1}]}', id="another choice"),
        pytest.param(b'{"choices":[{"index":0,"token_ids":[5]}]}', id="no log-probabilities"),
        pytest.param(
            b'{"choices":[{"index":0,"token_ids":[5],"logprobs":{"content":[{"a":1}]}}],"prompt_logprobs":[null,{}]}',
            id="another entry",
        ),
        pytest.param(
            b'{"choices":[{"index":0,"token_ids":[],"logprobs":{"content":[]}}],"prompt_logprobs":[null]}',
            id="a short prompt",
        ),
        pytest.param(
            b'{"choices":[{"index":0,"token_ids":[],"logprobs":{"content":[]}}],"prompt_logprobs":[null,{"9":{}}]}',
            id="another token",
        ),
    ],
)
def test_other_shapes_are_errors(body: bytes) -> None:
    plan = plan_of({"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": 0}, with_text=False)
    with pytest.raises(AnswerMalformed):
        whole(answer(plan, [body], PUBLIC))


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"text": 5}, id="text"),
        pytest.param({"text": "", "weight_versions": 5}, id="versions"),
        pytest.param({"text": "", "stop_reason": "a", "token_ids": ["a"]}, id="ids"),
    ],
)
def test_other_parts_are_errors(choice: dict[str, Any]) -> None:
    body = json.dumps({"choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop", **choice}]}).encode()
    with pytest.raises(AnswerMalformed):
        whole(answer(plan_of({"input_ids": [5]}), [body], PUBLIC))


def test_a_chosen_id_that_is_missing_is_an_error() -> None:
    plan, body = recorded("chosen-ids")
    with pytest.raises(AnswerMalformed, match="asked for"):
        whole(answer(plan, [body.replace(b'"token_id":6,', b'"token_id":7,')], PUBLIC))


def test_rows_of_unequal_length_stay_nested() -> None:
    plan, body = recorded("likeliest", return_flat_raw_output_top_logprobs=True)
    fields = json.loads(body)
    del fields["choices"][0]["logprobs"]["content"][1]["top_logprobs"][1:]
    meta = answered(plan, json.dumps(fields).encode())["meta_info"]
    assert [len(row) for row in meta["output_top_logprobs"]] == [2, 1, 2, 2]
    assert not [name for name in meta if "flat" in name]


def test_rows_of_the_prompt_too() -> None:
    plan, body = recorded("likeliest", return_flat_raw_top_logprobs=True)
    fields = json.loads(body)
    del (
        fields["prompt_logprobs"][3][list(fields["prompt_logprobs"][3])[-1]],
        fields["prompt_logprobs"][3][list(fields["prompt_logprobs"][3])[-1]],
    )
    meta = answered(plan, json.dumps(fields).encode())["meta_info"]
    assert [row and len(row) for row in meta["input_top_logprobs"]] == [None, 2, 1, 2, 2]
    assert not [name for name in meta if "flat" in name]


def test_a_prompt_with_nothing_behind_the_position() -> None:
    plan, body = recorded("likeliest", logprob_start_len=6, return_flat_raw_top_logprobs=True)
    meta = answered(plan, body)["meta_info"]
    assert (meta["input_token_logprobs"], meta["input_top_logprobs"]) == ([], [])


def test_flat_rows_without_a_row() -> None:
    told = FlatRows(3, is_base64=True).fields("output")
    assert told["output_top_logprobs_val_flat_b64"] == b'""'
    assert told["output_top_logprobs_shape"] == b"[0,3]"
    assert FlatRows(3, is_base64=False).fields("input")["input_top_logprobs_idx_flat"] == b"[]"


def test_a_missing_row_must_come_first() -> None:
    rows = FlatRows(1, is_base64=False)
    rows.add_null()
    rows.add([b"-1"], [5])
    with pytest.raises(ValueError, match="missing row"):
        rows.add_null()


async def test_long_answers_are_built_in_slices() -> None:
    tokens = list(range(2000))
    tops = [{"token_id": token, "logprob": -0.5, "rank": rank} for rank, token in ((1, 7), (2, 8))]
    content = [{"token_id": token, "logprob": -0.5, "top_logprobs": tops} for token in tokens]
    choice = {"index": 0, "finish_reason": "length", "token_ids": tokens, "logprobs": {"content": content}}
    plan = translate(JsonBody.parse(b'{"input_ids":[5],"return_logprob":true,"top_logprobs_num":1}'))
    body = json.dumps({"choices": [choice]}).encode()
    assert sum(1 for _ in answer(plan, [body], PUBLIC)) > 20
    assert await run(answer(plan, [body], PUBLIC), hold_s=0) == whole(answer(plan, [body], PUBLIC))

"""Flat arrays on the OpenAI routes, against what real engines tell."""

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
from backends.types import EngineKind
from gateway.errors import InvalidRequest
from gateway.flat_logprobs import by_rank, flat_answer, flat_changes, flat_width, wants_flat
from gateway.routes import Dialect
from tests.simulator.wire import load_capture, parse_answer

SGLANG, VLLM = EngineKind.SGLANG, EngineKind.VLLM
CHAT, COMPLETIONS = Dialect.CHAT, Dialect.COMPLETIONS
RECORDED = Path(__file__).parents[1] / "data" / "vllm_native"
FLAT = {"return_flat_raw_output_top_logprobs": True}
NAMES = {CHAT: "chat", COMPLETIONS: "completion"}
BOTH = pytest.mark.parametrize("dialect", [CHAT, COMPLETIONS], ids=["chat", "completions"])


def body(**fields: Any) -> JsonBody:
    return JsonBody.parse(json.dumps({**FLAT, **fields}).encode())


def asked(dialect: Dialect, **fields: Any) -> JsonBody:
    """A request for two likeliest tokens."""
    count = {"logprobs": True, "top_logprobs": 2} if dialect is CHAT else {"logprobs": 2}
    return body(**{**count, **fields})


def recorded(dialect: Dialect) -> bytes:
    """The answer of a real vLLM server that was asked with the changes that are made for this."""
    return (RECORDED / f"{NAMES[dialect]}.resp.json").read_bytes()


def flat(dialect: Dialect, **fields: Any) -> Any:
    return json.loads(whole(flat_answer(dialect, recorded(dialect), asked(dialect, **fields))))


def meta_of(name: str) -> dict[str, Any]:
    """The ``meta_info`` of an answer of a real SGLang server."""
    parsed = parse_answer(load_capture(f"http/{name}").response)
    assert parsed is not None
    found = parsed.json()["meta_info"]
    assert isinstance(found, dict)
    return found


def unpacked(meta: dict[str, Any], side: str) -> tuple[list[list[float]], list[list[int]]]:
    """Values and ids by row, as a client reads them with numpy."""
    name = f"{side}_top_logprobs"
    shape = meta[f"{name}_shape"]
    if f"{name}_val_flat" in meta:
        values, ids = np.array(meta[f"{name}_val_flat"]), np.array(meta[f"{name}_idx_flat"])
    else:
        packed = [
            (base64.b64decode(meta[f"{name}_{kind}_flat_b64"]), meta[f"{name}_{kind}_flat_b64_dtype"])
            for kind in ("val", "idx")
        ]
        assert [dtype for _, dtype in packed] == ["float32", "int32"]
        values, ids = np.frombuffer(packed[0][0], "<f4"), np.frombuffer(packed[1][0], "<i4")
    return values.reshape(shape).astype(float).tolist(), ids.reshape(shape).tolist()


# --- the form is SGLang's


@pytest.mark.parametrize(
    ("nested", "flat_name", "side", "is_base64"),
    [
        pytest.param("gen_logprob_top2", "gen_flat_out", "output", False, id="output"),
        pytest.param("gen_logprob_top2", "gen_flat_out_b64", "output", True, id="output in Base64"),
        pytest.param("gen_logprob_top2", "gen_flat_in", "input", False, id="input"),
        pytest.param("gen_logprob_top2", "gen_flat_in_out_b64", "input", True, id="input in Base64"),
        pytest.param("gen_logprob_top2", "gen_flat_in_out_b64", "output", True, id="both in Base64"),
    ],
)
def test_arrays_are_those_of_sglang(nested: str, flat_name: str, side: Any, is_base64: bool) -> None:
    """The nested lists of one answer give byte by byte the arrays of the other, which had the same prompt."""
    rows = FlatRows(2, is_base64=is_base64)
    for row in meta_of(nested)[f"{side}_top_logprobs"]:
        if row is None:
            rows.add_null()
        else:
            rows.add([repr(value).encode() for value, _, _ in row], [token for _, token, _ in row])
    told = {name: json.loads(text) for name, text in rows.fields(side).items()}
    expected = {name: value for name, value in meta_of(flat_name).items() if name.startswith(f"{side}_top_logprobs")}
    assert told == expected
    assert list(told) == list(expected)


# --- vLLM


@BOTH
@pytest.mark.parametrize("is_base64", [False, True], ids=["JSON", "Base64"])
def test_arrays_from_vllm(dialect: Dialect, is_base64: bool) -> None:
    """Sampled at temperature 2, so that the sampled token is seldom among the two likeliest."""
    found = flat(dialect, return_flat_raw_top_logprobs_b64=is_base64)
    for choice, engine in zip(found["choices"], json.loads(recorded(dialect))["choices"], strict=True):
        rows = nested(dialect, engine)
        expected = [sorted(row, key=lambda one: -one[0])[:2] for row in rows]
        values, ids = unpacked(choice["meta_info"], "output")
        assert values == [[value for value, _ in row] for row in expected]
        assert ids == [[token for _, token in row] for row in expected]
        assert choice["meta_info"]["output_top_logprobs_null_prefix"] == 0
        assert choice["meta_info"]["output_top_logprobs_shape"] == [4, 2]
        assert choice["meta_info"]["output_token_logprobs"] == [[value, token, None] for (value, token), *_ in rows]
        assert ("output_top_logprobs_val_flat" in choice["meta_info"]) is not is_base64


def nested(dialect: Dialect, choice: Any) -> list[list[tuple[float, int]]]:
    """Log-probabilities with their ids, in vLLM's order."""
    if dialect is CHAT:
        tops = [
            [(top["token"], top["logprob"]) for top in row["top_logprobs"]] for row in choice["logprobs"]["content"]
        ]
    else:
        tops = [list(row.items()) for row in choice["logprobs"]["top_logprobs"]]
    return [[(value, int(token.removeprefix("token_id:"))) for token, value in row] for row in tops]


@BOTH
def test_every_digit_is_the_engines(dialect: Dialect) -> None:
    numbers = re.findall(rb"-\d+\.\d+", whole(flat_answer(dialect, recorded(dialect), asked(dialect))))
    assert len(numbers) >= 24
    assert set(numbers) <= set(re.findall(rb"-\d+\.\d+", recorded(dialect)))


def test_nested_lists_give_way_in_chat() -> None:
    found = flat(CHAT)["choices"][0]
    assert [entry["top_logprobs"] for entry in found["logprobs"]["content"]] == [[]] * 4
    assert [entry["token"] for entry in found["logprobs"]["content"]] == ["red", "ab", "", "od"]
    assert found["message"] == json.loads(recorded(CHAT))["choices"][0]["message"]


def test_a_client_that_asked_for_ids_keeps_them() -> None:
    found = flat(CHAT, return_tokens_as_token_ids=True)["choices"][0]
    assert found["logprobs"]["content"][0]["token"] == "token_id:493"


def test_nested_lists_give_way_in_completions() -> None:
    found, engine = flat(COMPLETIONS), json.loads(recorded(COMPLETIONS))
    for choice in found["choices"]:
        assert choice["logprobs"].pop("top_logprobs") is None
        del choice["meta_info"]
    for choice in engine["choices"]:
        del choice["logprobs"]["top_logprobs"]
    assert found == engine


@BOTH
def test_choices_without_log_probabilities_stay(dialect: Dialect) -> None:
    answer = b'{"choices":[{"index":0,"logprobs":null}],"usage":{"a":1.50}}'
    assert whole(flat_answer(dialect, answer, asked(dialect))) == answer


def test_rows_of_unequal_length_stay_nested() -> None:
    fields = json.loads(recorded(CHAT))
    del fields["choices"][0]["logprobs"]["content"][1]["top_logprobs"][1:]
    first, second = json.loads(whole(flat_answer(CHAT, json.dumps(fields).encode(), asked(CHAT))))["choices"]
    assert first == fields["choices"][0]
    assert "meta_info" in second


def test_rows_of_unequal_length_stay_nested_in_completions() -> None:
    fields = json.loads(recorded(COMPLETIONS))
    fields["choices"][1]["logprobs"]["top_logprobs"][2] = None
    first, second = json.loads(whole(flat_answer(COMPLETIONS, json.dumps(fields).encode(), asked(COMPLETIONS))))[
        "choices"
    ]
    assert "meta_info" in first
    assert second == fields["choices"][1]


def test_chat_without_content() -> None:
    answer = b'{"choices":[{"index":0,"logprobs":{"content":null}}]}'
    (choice,) = json.loads(whole(flat_answer(CHAT, answer, asked(CHAT))))["choices"]
    assert choice["meta_info"]["output_top_logprobs_shape"] == [0, 2]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param([], "", id="none"),
        pytest.param([(b"-1", 1)], "1", id="one"),
        pytest.param([(b"-1", 1), (b"-2", 2)], "12", id="sampled first"),
        pytest.param([(b"-2", 1), (b"-1", 2), (b"-3", 3)], "213", id="sampled second"),
        pytest.param([(b"-9999.0", 1), (b"-1", 2)], "21", id="sampled last"),
        pytest.param([(b"-1", 1), (b"-1.0", 2)], "12", id="alike"),
    ],
)
def test_order_of_a_row(row: list[tuple[bytes, int]], expected: str) -> None:
    assert "".join(str(token) for _, token in by_rank(row)) == expected


@pytest.mark.parametrize(
    ("dialect", "answer"),
    [
        pytest.param(CHAT, b"{", id="no JSON"),
        pytest.param(CHAT, b"{}", id="no choices"),
        pytest.param(CHAT, b'{"choices":[{"logprobs":{"content":[{"token":"a","logprob":-1}]}}]}', id="texts"),
        pytest.param(CHAT, b'{"choices":[{"logprobs":{"content":5}}]}', id="no list"),
        pytest.param(CHAT, b'{"choices":[{"logprobs":{"content":[{"token":"token_id:x","logprob":-1}]}}]}', id="no id"),
        pytest.param(COMPLETIONS, b'{"choices":[{"logprobs":{"tokens":["token_id:5"]}}]}', id="lists are missing"),
        pytest.param(
            COMPLETIONS,
            b'{"choices":[{"logprobs":{"tokens":[],"token_logprobs":[-1],"top_logprobs":[]}}]}',
            id="lists differ",
        ),
    ],
)
def test_other_shapes_are_errors(dialect: Dialect, answer: bytes) -> None:
    with pytest.raises(AnswerMalformed):
        whole(flat_answer(dialect, answer, asked(dialect)))


async def test_long_answers_are_built_in_slices() -> None:
    tops = [{"token": f"token_id:{token}", "logprob": -token / 3} for token in range(20)]
    content = [{"token": "token_id:0", "logprob": -0.0, "bytes": [97], "top_logprobs": tops}] * 1000
    answer = json.dumps({"choices": [{"logprobs": {"content": content}}]}).encode()
    wanted = body(logprobs=True, top_logprobs=19)
    assert sum(1 for _ in flat_answer(CHAT, answer, wanted)) > 25
    built = await run(flat_answer(CHAT, answer, wanted), hold_s=0)
    assert json.loads(built)["choices"][0]["meta_info"]["output_top_logprobs_shape"] == [1000, 19]


# --- what the engine is asked


@pytest.mark.parametrize(
    ("dialect", "engine", "fields", "expected"),
    [
        pytest.param(
            CHAT,
            SGLANG,
            {},
            {"return_meta_info": b"true", "return_flat_raw_top_logprobs_b64": b"false"},
            id="SGLang chat, whose default is Base64",
        ),
        pytest.param(
            CHAT,
            SGLANG,
            {"return_flat_raw_top_logprobs_b64": True},
            {"return_meta_info": b"true", "return_flat_raw_top_logprobs_b64": b"true"},
            id="SGLang chat, Base64",
        ),
        pytest.param(
            CHAT,
            VLLM,
            {"logprobs": True, "top_logprobs": 2},
            {"return_tokens_as_token_ids": b"true", "top_logprobs": b"3"},
            id="vLLM chat",
        ),
        pytest.param(
            COMPLETIONS, VLLM, {"logprobs": 2}, {"return_tokens_as_token_ids": b"true"}, id="vLLM completions"
        ),
        pytest.param(CHAT, VLLM, {"top_logprobs": 2}, {}, id="no log-probabilities in chat"),
        pytest.param(CHAT, VLLM, {"logprobs": True}, {}, id="none of the likeliest in chat"),
        pytest.param(COMPLETIONS, VLLM, {}, {}, id="none in completions"),
        pytest.param(COMPLETIONS, VLLM, {"logprobs": "a"}, {}, id="no number"),
    ],
)
def test_changes(dialect: Dialect, engine: EngineKind, fields: dict[str, Any], expected: dict[str, bytes]) -> None:
    assert flat_changes(dialect, engine, body(**fields), is_stream=False) == expected


def test_the_recorded_requests_are_those_that_are_sent() -> None:
    for dialect in (CHAT, COMPLETIONS):
        sent = json.loads((RECORDED / f"{NAMES[dialect]}.req.json").read_bytes())
        for name, value in flat_changes(dialect, VLLM, asked(dialect), is_stream=False).items():
            assert sent[name] == json.loads(value)


@pytest.mark.parametrize(
    ("dialect", "engine", "fields", "is_stream", "param"),
    [
        pytest.param(CHAT, SGLANG, {}, True, "return_flat_raw_output_top_logprobs", id="stream"),
        pytest.param(CHAT, VLLM, {}, True, "return_flat_raw_output_top_logprobs", id="stream on vLLM"),
        pytest.param(COMPLETIONS, SGLANG, {}, False, "return_flat_raw_output_top_logprobs", id="completions"),
        pytest.param(COMPLETIONS, VLLM, {"logprobs": 1, "echo": True}, False, "echo", id="echo"),
    ],
)
def test_refusals(dialect: Dialect, engine: EngineKind, fields: dict[str, Any], is_stream: bool, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        flat_changes(dialect, engine, body(**fields), is_stream=is_stream)
    assert (refused.value.report.status, refused.value.report.param) == (400, param)
    assert param in refused.value.report.message


@pytest.mark.parametrize(
    ("dialect", "fields", "expected"),
    [
        pytest.param(CHAT, {}, True, id="chat"),
        pytest.param(COMPLETIONS, {}, True, id="completions"),
        pytest.param(Dialect.NATIVE, {}, False, id="native, the engine's own"),
        pytest.param(Dialect.RESPONSES, {}, False, id="a route that does not know it"),
        pytest.param(CHAT, {"return_flat_raw_output_top_logprobs": None}, False, id="null"),
        pytest.param(CHAT, {"return_flat_raw_output_top_logprobs": False}, False, id="false"),
    ],
)
def test_who_asks(dialect: Dialect, fields: dict[str, Any], expected: bool) -> None:
    assert wants_flat(dialect, body(**fields)) is expected


def test_width() -> None:
    assert flat_width(CHAT, asked(CHAT)) == flat_width(COMPLETIONS, asked(COMPLETIONS)) == 2
    assert flat_width(COMPLETIONS, body(logprobs=-1)) == 0

"""The prompt's log-probabilities in answers over a pair."""

import json
from typing import Any

import pytest

from backends.errors import AnswerMalformed
from backends.json_body import JsonBody
from backends.prefill_events import PrefillReader, PromptReport
from backends.types import EngineKind
from gateway.prompt_logprobs import PromptLogprobs, asks_prompt_logprobs
from gateway.routes import Dialect
from tests.backends.captured_pair import sglang_answer, vllm_answer

LIMIT = 1 << 20
SGLANG, VLLM = EngineKind.SGLANG, EngineKind.VLLM
NATIVE, CHAT, COMPLETIONS = Dialect.NATIVE, Dialect.CHAT, Dialect.COMPLETIONS


def reports(body: bytes, count: int = 1) -> list[PromptReport]:
    reader = PrefillReader(limit_bytes=LIMIT, is_stream=body.startswith(b"data:"), count=count, keeps_logprobs=True)
    reader.feed(body)
    reader.end()
    return reader.prompts


def payloads(stream: bytes) -> list[Any]:
    return [json.loads(event[6:]) for event in stream.split(b"\n\n") if event.startswith(b"data: {")]


def told(body: Any, prefix: str = "input_") -> dict[str, Any]:
    return {name: value for name, value in body["meta_info"].items() if name.startswith(prefix)}


def test_a_unary_answer_of_a_real_pair() -> None:
    prefill, decode = sglang_answer("http_pd/logprob_prefill"), sglang_answer("http_pd/logprob_decode")
    merged = PromptLogprobs(NATIVE, SGLANG, reports(prefill)).in_body(decode)
    assert told(json.loads(merged)) == told(json.loads(prefill))
    # Decode's own bytes, but for what was empty in them; and prefill's as they were spelt.
    for name, raw in reports(prefill)[0].logprobs.items():
        assert b'"%b":[]' % name.encode() in decode
        merged = merged.replace(b'"%b":%b' % (name.encode(), raw), b'"%b":[]' % name.encode())
    assert merged == decode


def test_a_pair_tells_what_one_worker_tells() -> None:
    """The same prompt on a plain server, whose numbers are the same to the last digit."""
    merged = PromptLogprobs(NATIVE, SGLANG, reports(sglang_answer("http_pd/logprob_prefill"))).in_body(
        sglang_answer("http_pd/logprob_decode")
    )
    plain = json.loads(sglang_answer("http/gen_logprob_start0"))
    assert json.loads(merged)["meta_info"]["input_token_logprobs"] == plain["meta_info"]["input_token_logprobs"]


def test_every_event_of_a_stream_tells_them_as_on_one_worker() -> None:
    prefill, decode = sglang_answer("http_pd/logprob_stream_prefill"), sglang_answer("http_pd/logprob_stream_decode")
    merger = PromptLogprobs(NATIVE, SGLANG, reports(prefill))
    merged = merger.in_events(decode)
    assert merged.endswith(b"\n\ndata: [DONE]\n\n")
    assert len(payloads(merged)) == len(payloads(decode)) == 4
    for ours, theirs in zip(payloads(merged), payloads(decode), strict=True):
        assert told(ours) == told(payloads(prefill)[-1])
        assert told(ours, "output_") == told(theirs, "output_")
        assert ours["text"] == theirs["text"]


@pytest.mark.parametrize(
    "name", ["gen_flat_in", "gen_flat_in_out_b64", "gen_logprob_top2", "gen_logprob_tokenids", "gen_logprob_start0"]
)
def test_every_form_is_carried_over(name: str) -> None:
    """Prefill's answer is a plain server's; decode's the same without the prompt's part, as a pair has it."""
    whole = json.loads(sglang_answer(f"http/{name}"))
    forms = told(whole)
    assert forms
    bare = {name: value for name, value in whole["meta_info"].items() if name not in forms}
    empties: list[dict[str, Any]] = [{}, {"input_token_logprobs": [], "input_top_logprobs": []}]
    for empty in empties:
        decode = {**whole, "meta_info": {**empty, **bare}}
        merged = PromptLogprobs(NATIVE, SGLANG, reports(sglang_answer(f"http/{name}"))).in_body(
            json.dumps(decode).encode()
        )
        assert json.loads(merged) == whole


def test_numbers_and_unknown_fields_survive() -> None:
    prompts = [PromptReport({"input_token_logprobs": b"[[-1.50e0, 1, null]]"})]
    body = b'{"x":12345678901234567890,"meta_info":{"id":"a","input_token_logprobs":[],"y":1.0},"z":"\\u00e9"}'
    assert PromptLogprobs(NATIVE, SGLANG, prompts).in_body(body) == body.replace(b"[]", b"[[-1.50e0, 1, null]]")


def test_a_batch_goes_by_position() -> None:
    prompts = [PromptReport({"input_token_logprobs": b"[%d]" % index}) for index in range(2)]
    item = '{"meta_info":{"input_token_logprobs":[]}}'
    merger = PromptLogprobs(NATIVE, SGLANG, prompts)
    bodies = json.loads(merger.in_body(f" [{item}, {item}]".encode()))
    assert [told(body) for body in bodies] == [{"input_token_logprobs": [0]}, {"input_token_logprobs": [1]}]
    event = b'data: {"meta_info":{"input_token_logprobs":[]},"index":%d}\n\n'
    (body,) = payloads(merger.in_events(event % 1))
    assert told(body) == {"input_token_logprobs": [1]}
    with pytest.raises(AnswerMalformed, match="not sent"):
        merger.in_events(event % 2)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b": comment\n\n", id="comment"),
        pytest.param(b"data: [DONE]\n\n", id="end marker"),
        pytest.param(b'data: {"error":{"message":"x"}}\n\n', id="error"),
        pytest.param(b'event: x\r\nid: 1\r\ndata:{"error":1}\r\n\r\n', id="framing"),
        pytest.param(b"", id="nothing"),
        pytest.param(b'data: { "choices" : [ {"index": 0, "logprobs": null} ]}\n\n', id="no change"),
    ],
)
def test_what_tells_nothing_stays(block: bytes) -> None:
    prompts = [PromptReport({"input_token_logprobs": b"[1]"})]
    for dialect in (NATIVE, COMPLETIONS):
        assert PromptLogprobs(dialect, SGLANG, prompts).in_events(block) == block


def test_framing_stays() -> None:
    merger = PromptLogprobs(NATIVE, SGLANG, [PromptReport({"input_token_logprobs": b"[1]"})])
    assert merger.in_events(b'id: 7\r\ndata:{"meta_info":{}}\r\n\r\n') == (
        b'id: 7\r\ndata:{"meta_info":{"input_token_logprobs":[1]}}\r\n\r\n'
    )


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (NATIVE, b"[1]"),
        (NATIVE, b"[1"),
        (NATIVE, b"5"),
        (NATIVE, b'{"meta_info":5}'),
        (COMPLETIONS, b'{"choices":5}'),
        (COMPLETIONS, b'{"choices":[{"index":-1}]}'),
        (COMPLETIONS, b'{"choices":[{"index":7}]}'),
        (COMPLETIONS, b'{"choices":[{"logprobs":5}]}'),
        (COMPLETIONS, b'{"choices":[{"index":12345678901}]}'),
    ],
)
def test_other_shapes_are_errors(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(AnswerMalformed):
        PromptLogprobs(dialect, SGLANG, [PromptReport({"logprobs": b"{}"})]).in_body(body)


# SGLang's completions with echo: the prompt stands in front of the output, in the same lists.


def echoed() -> tuple[Any, Any, Any]:
    """A plain server's recorded answer, taken apart into what the two legs of a pair have of it."""
    whole = json.loads(sglang_answer("http/comp_echo_logprobs"))
    lists = whole["choices"][0]["logprobs"]
    prefill = {"choices": [{"index": 0, "logprobs": {name: v[:7] for name, v in lists.items()}}]}
    prefill["choices"][0]["finish_reason"] = "length"
    decode = json.loads(json.dumps(whole))
    decode["choices"][0]["logprobs"] = {name: v[6:] for name, v in lists.items()}
    return whole, prefill, decode


def test_an_echoed_prompt() -> None:
    whole, prefill, decode = echoed()
    merger = PromptLogprobs(COMPLETIONS, SGLANG, reports(json.dumps(prefill).encode()))
    assert json.loads(merger.in_body(json.dumps(decode).encode())) == whole


def test_an_echoed_prompt_is_streamed_once() -> None:
    whole, prefill, decode = echoed()
    lists = decode["choices"][0]["logprobs"]
    chunks = [{"choices": [{"index": 0, "text": "", "logprobs": None}]}]
    for start in range(4):
        piece = {name: values[start : start + 1] for name, values in lists.items()}
        chunks.append({"choices": [{"index": 0, "text": "", "logprobs": piece}]})
    chunks.append({"choices": []})
    stream = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)
    merger = PromptLogprobs(COMPLETIONS, SGLANG, reports(b"data: %b\n\n" % json.dumps(prefill).encode()))
    joined: dict[str, list[Any]] = {name: [] for name in lists}
    for chunk in payloads(merger.in_events(stream)):
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                joined[name] += values
    assert joined == whole["choices"][0]["logprobs"]


@pytest.mark.parametrize("logprobs", [b'{"tokens":["a","b"],"top_logprobs":null}', b'{"tokens":["a","b"]}'])
def test_lists_that_one_leg_lacks_stay(logprobs: bytes) -> None:
    merger = PromptLogprobs(COMPLETIONS, SGLANG, [PromptReport({"logprobs": logprobs})])
    merged = merger.in_body(b'{"choices":[{"logprobs":{"tokens":["b"],"top_logprobs":[1]}}]}')
    assert merged == b'{"choices":[{"logprobs":{"tokens":["a","b"],"top_logprobs":[1]}}]}'


def test_choices_without_any_stay() -> None:
    body = b'{"choices" : [{"index" : 0, "text":"x"}]}'
    assert PromptLogprobs(COMPLETIONS, SGLANG, [PromptReport()]).in_body(body) == body
    assert PromptLogprobs(COMPLETIONS, SGLANG, [PromptReport({"logprobs": b"{}"})]).in_body(body) == body


# vLLM.


def test_vllm_tells_them_in_the_choice() -> None:
    prefill = vllm_answer("completions/prompt-logprobs")
    decode = json.loads(prefill)
    decode["choices"][0]["prompt_logprobs"] = None
    merger = PromptLogprobs(COMPLETIONS, VLLM, reports(prefill))
    assert json.loads(merger.in_body(json.dumps(decode).encode())) == json.loads(prefill)


@pytest.mark.parametrize(
    ("dialect", "logprobs", "expected"),
    [
        (CHAT, {"prompt_logprobs": b"[null, 1.50]"}, b'{"id":"x","prompt_logprobs":[null, 1.50]}'),
        (CHAT, {"logprobs": b"{}"}, b'{"id":"x", "prompt_logprobs":null}'),
        (
            NATIVE,
            {"prompt_logprobs": b"[1]", "prompt_token_id_logprobs": b"[2]"},
            b'{"id":"x","prompt_logprobs":[1],"prompt_token_id_logprobs":[2]}',
        ),
    ],
)
def test_vllm_tells_them_beside_the_choices(dialect: Dialect, logprobs: dict[str, bytes], expected: bytes) -> None:
    merger = PromptLogprobs(dialect, VLLM, [PromptReport(logprobs)])
    assert merger.in_body(b'{"id":"x", "prompt_logprobs":null}') == expected


@pytest.mark.parametrize(
    ("dialect", "engine", "body", "expected"),
    [
        pytest.param(NATIVE, SGLANG, {"return_logprob": True, "logprob_start_len": 0}, True, id="from the beginning"),
        pytest.param(NATIVE, SGLANG, {"return_logprob": True, "logprob_start_len": -1}, False, id="from the end"),
        pytest.param(NATIVE, SGLANG, {"return_logprob": True}, False, id="of the output alone"),
        pytest.param(NATIVE, SGLANG, {"return_logprob": False, "logprob_start_len": 0}, False, id="off"),
        pytest.param(NATIVE, SGLANG, {"logprob_start_len": 0}, False, id="absent"),
        pytest.param(
            NATIVE, SGLANG, {"return_logprob": [False, True], "logprob_start_len": [-1, 12]}, True, id="one of a batch"
        ),
        pytest.param(
            NATIVE, SGLANG, {"return_logprob": [False], "logprob_start_len": [-12]}, False, id="none of a batch"
        ),
        pytest.param(NATIVE, SGLANG, {"return_logprob": True, "logprob_start_len": [-12]}, False, id="-12 is not 2"),
        pytest.param(COMPLETIONS, SGLANG, {"echo": True, "logprobs": 1}, True, id="echo"),
        pytest.param(COMPLETIONS, SGLANG, {"echo": True}, False, id="echo alone"),
        pytest.param(COMPLETIONS, SGLANG, {"echo": False, "logprobs": 1}, False, id="output alone"),
        pytest.param(
            CHAT, SGLANG, {"logprobs": True, "return_logprob": True, "logprob_start_len": 0}, False, id="chat"
        ),
        pytest.param(CHAT, VLLM, {"prompt_logprobs": 0}, True, id="vLLM"),
        pytest.param(CHAT, VLLM, {"prompt_logprobs": None, "logprobs": True}, False, id="vLLM, output alone"),
    ],
)
def test_who_asks_for_them(dialect: Dialect, engine: EngineKind, body: Any, expected: bool) -> None:
    assert asks_prompt_logprobs(dialect, engine, JsonBody.parse(json.dumps(body).encode())) is expected

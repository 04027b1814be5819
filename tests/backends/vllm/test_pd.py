"""The bodies of the two legs of a request over a pair of vLLM workers, and the handoff between them."""

import json
from typing import Any

import pytest

from backends.json_body import JsonBody, JsonBodyError
from backends.vllm.pd import (
    GENERATE,
    NIXL_PREFILL,
    HandoffUnusable,
    decode_body,
    handoff_in,
    mooncake_handoff,
    mooncake_prefill,
    needs_one_worker,
    prefill_body,
    transfer_id,
)
from tests.backends.captured_pair import vllm_answer, vllm_request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HANDOFF = b'{"do_remote_prefill": true, "port" : 1.0}'
ONE = {"n": 1, "max_tokens": 1, "ignore_eos": True}
PREFILL = {"stream": False, "kv_transfer_params": json.loads(NIXL_PREFILL)}


def body_of(value: object) -> JsonBody:
    return JsonBody.parse(json.dumps(value).encode())


def prefill(path: str, value: object, *more: bytes) -> Any:
    return json.loads(prefill_body(path, body_of(value), *more).raw)


def decode(path: str, value: object, *, is_release: bool = False) -> Any:
    return json.loads(decode_body(path, body_of(value), HANDOFF, is_release=is_release).raw)


def test_chat_for_one_token() -> None:
    asked = {
        "messages": [], "max_tokens": 9, "max_completion_tokens": 8, "min_tokens": 4, "n": 1, "stop": ["x"],
        "stop_token_ids": [5], "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
        "top_logprobs": 2, "prompt_logprobs": 1, "temperature": 0, "kv_transfer_params": None, "tools": [],
    }  # fmt: skip
    assert prefill(CHAT, asked) == {
        "messages": [], "max_completion_tokens": 1, "prompt_logprobs": 1, "temperature": 0, "tools": [], **ONE,
        **PREFILL,
    }  # fmt: skip


def test_completions_for_one_token() -> None:
    asked = {"prompt": [1], "echo": True, "best_of": 2, "include_stop_str_in_output": True, "logprobs": 3}
    assert prefill(COMPLETIONS, asked) == {"prompt": [1], **ONE, **PREFILL}


def test_generate_for_one_token() -> None:
    asked = {
        "token_ids": [1, 2],
        "stream_options": {},
        "sampling_params": {"max_tokens": 5, "min_tokens": 2, "stop": "x", "logprobs": 1, "prompt_logprobs": 1},
    }
    assert prefill(GENERATE, asked) == {
        "token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 1, **ONE}, **PREFILL
    }  # fmt: skip
    assert prefill(GENERATE, {"token_ids": [1]}) == {"token_ids": [1], "sampling_params": ONE, **PREFILL}


def test_the_handoff_is_given_as_it_came() -> None:
    made = decode_body(COMPLETIONS, JsonBody.parse(b'{"prompt" : "x", "max_tokens": 5}'), HANDOFF)
    assert made.raw == b'{"prompt" : "x", "max_tokens": 5,"kv_transfer_params":%b}' % HANDOFF


@pytest.mark.parametrize(
    ("path", "asked", "expected"),
    [
        pytest.param(CHAT, {"prompt_logprobs": 1, "n": 1}, {"n": 1}, id="prefill tells the prompt's logprobs"),
        pytest.param(
            CHAT,
            {"prompt_logprobs": 1, "stream": True},
            {"prompt_logprobs": 1, "stream": True},
            id="which the engine refuses in a stream",
        ),
        pytest.param(
            GENERATE,
            {"sampling_params": {"prompt_logprobs": 1, "max_tokens": 4}},
            {"sampling_params": {"max_tokens": 4}},
            id="in the sampling parameters",
        ),
        pytest.param(GENERATE, {"token_ids": [1]}, {"token_ids": [1]}, id="no sampling parameters"),
    ],
)
def test_decode_bodies(path: str, asked: Any, expected: Any) -> None:
    assert decode(path, asked) == {**expected, "kv_transfer_params": json.loads(HANDOFF)}


@pytest.mark.parametrize(
    ("path", "asked", "expected"),
    [
        pytest.param(
            CHAT,
            {"max_tokens": 90, "min_tokens": 4, "stream": True},
            {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": True},
            id="chat",
        ),
        pytest.param(COMPLETIONS, {"max_tokens": 90}, {"max_tokens": 1, "n": 1}, id="completions"),
        pytest.param(
            GENERATE,
            {"sampling_params": {"min_tokens": 3, "max_tokens": 9}},
            {"sampling_params": {"max_tokens": 1, "n": 1}},
            id="generate",
        ),
    ],
)
def test_a_release_is_as_short_as_can_be(path: str, asked: Any, expected: Any) -> None:
    assert decode(path, asked, is_release=True) == {**expected, "kv_transfer_params": json.loads(HANDOFF)}


@pytest.mark.parametrize("name", ["completions-unary", "chat", "generate", "completions-decode-stream"])
def test_recorded_handoffs(name: str) -> None:
    """Prefill's recorded answer, and the request with which a real decode worker took it over."""
    handoff = handoff_in(vllm_answer(f"pd/{name}.prefill"))
    sent = json.loads(vllm_request(f"pd/{name}.decode").raw)
    assert json.loads(handoff) == sent["kv_transfer_params"]
    bare = {key: value for key, value in sent.items() if key != "kv_transfer_params"}
    path = {"chat": CHAT, "generate": GENERATE}.get(name, COMPLETIONS)
    assert json.loads(decode_body(path, body_of(bare), handoff).raw) == sent
    asked = json.loads(vllm_request(f"pd/{name}.prefill").raw)
    made = prefill(path, bare)
    assert made["kv_transfer_params"] == asked["kv_transfer_params"]


@pytest.mark.parametrize(
    "name", ["fail-only-flag", "fail-flat-block-ids", "fail-missing-block-ids", "fail-missing-remote-request-id"]
)
def test_handoffs_that_killed_a_decode_worker_are_refused(name: str) -> None:
    params = json.loads(vllm_request(f"pd/{name}").raw)["kv_transfer_params"]
    with pytest.raises(HandoffUnusable, match="cannot be used"):
        handoff_in(json.dumps({"kv_transfer_params": params}).encode())


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b'{"kv_transfer_params":5}', b'{"kv_transfer_params":{}}', b'{"kv_transfer_params":{"a":"\xff"}}'],
)
def test_other_handoffs_are_refused(answer: bytes) -> None:
    with pytest.raises(HandoffUnusable, match="cannot be used"):
        handoff_in(answer)


@pytest.mark.parametrize("name", ["do_remote_prefill", "remote_engine_id", "remote_request_id", "remote_host"])
def test_incomplete_handoffs_are_refused(name: str) -> None:
    params = json.loads(handoff_in(vllm_answer("pd/chat.prefill")))
    empty = False if name == "do_remote_prefill" else ""
    with pytest.raises(HandoffUnusable, match="incomplete"):
        handoff_in(json.dumps({"kv_transfer_params": {**params, name: empty}}).encode())


@pytest.mark.parametrize("name", ["completions/prompt-logprobs", "pd/chat.decode"])
def test_answers_without_a_handoff(name: str) -> None:
    assert handoff_in(vllm_answer(name)) == b""


def test_decode_is_never_made_without_a_handoff() -> None:
    with pytest.raises(ValueError, match="without a handoff"):
        decode_body(CHAT, body_of({}), b"")


@pytest.mark.parametrize("text", [b"[]", b'{"n":1,"n":1}'])
def test_other_sampling_parameters_are_errors(text: bytes) -> None:
    with pytest.raises(JsonBodyError):
        prefill_body(GENERATE, JsonBody.parse(b'{"sampling_params":%b}' % text))


@pytest.mark.parametrize(
    ("path", "asked", "is_batch", "expected"),
    [
        pytest.param(CHAT, {"logprobs": True, "prompt_logprobs": 1}, False, "", id="prompt logprobs"),
        pytest.param(COMPLETIONS, {"echo": True}, False, "", id="echo alone"),
        pytest.param(COMPLETIONS, {"echo": True, "logprobs": 1}, False, "echoes", id="echo with logprobs"),
        pytest.param(COMPLETIONS, {"echo": True, "prompt_logprobs": 1}, False, "echoes", id="or the prompt's"),
        pytest.param(COMPLETIONS, {"echo": False, "logprobs": 1}, False, "", id="no echo"),
        pytest.param(COMPLETIONS, {}, True, "one prompt", id="batch"),
        pytest.param(COMPLETIONS, {"use_beam_search": True}, False, "beam", id="beam search"),
        pytest.param("/v1/responses", {}, False, "route", id="another route"),
    ],
)
def test_what_one_worker_serves(path: str, asked: Any, is_batch: bool, expected: str) -> None:
    reason = needs_one_worker(path, body_of(asked), is_batch=is_batch)
    assert expected in reason
    assert bool(expected) is bool(reason)


def test_mooncake_needs_a_transfer_id_alone() -> None:
    transfer = transfer_id("0123456789abcdef")
    assert prefill(CHAT, {}, mooncake_prefill(transfer))["kv_transfer_params"] == {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-0123456789abcdef",
    }  # fmt: skip
    handoff = mooncake_handoff(transfer, engine_id="e_dp0", bootstrap_address="http://10.0.0.1:8998")
    assert json.loads(handoff) == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": "e_dp0",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
    }
    with pytest.raises(ValueError, match="nowhere"):
        mooncake_handoff(transfer, engine_id="", bootstrap_address="x")

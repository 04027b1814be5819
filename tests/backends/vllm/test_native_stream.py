"""Streams of real vLLM servers as SGLang's events."""

import json
from pathlib import Path
from typing import Any

import pytest

from backends.errors import AnswerMalformed
from backends.slices import whole
from backends.sse import events
from backends.vllm.native_answer import answer
from backends.vllm.native_request import NativePlan
from backends.vllm.native_stream import NativeStream
from tests.backends.vllm.native_agreement import PUBLIC, payloads, plan_of
from tests.simulator.wire import load_vllm_capture, parse_answer

RECORDED = Path(__file__).parents[2] / "data" / "vllm_native"
IDS = [784, 15, 812, 4, 856, 432]
BOTH = pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
DONE = b"data: [DONE]\n\n"
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def captured(name: str) -> bytes:
    """A captured stream; of one that is cut the whole events."""
    parsed = parse_answer(load_vllm_capture(name).response)
    assert parsed is not None
    return parsed.body


def plan(**body: Any) -> NativePlan:
    return plan_of({"input_ids": IDS, "stream": True, **body}, with_text=False)


def stream(made: NativePlan, *, is_incremental: bool = False) -> NativeStream:
    return NativeStream(made, PUBLIC, is_incremental=is_incremental)


def event(**choice: Any) -> bytes:
    """An event of vLLM's with one choice."""
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, **choice}]}).encode()


@BOTH
def test_tokens(is_incremental: bool) -> None:
    found = payloads(stream(plan(), is_incremental=is_incremental).feed(0, captured("generate/stream-usage")))
    ids = [229, 221, 442, 322]
    assert [one["output_ids"] for one in found] == (
        [[token] for token in ids] if is_incremental else [ids[:end] for end in range(1, 5)]
    )
    assert [one["meta_info"]["completion_tokens"] for one in found] == [1, 2, 3, 4]
    assert [one["meta_info"]["finish_reason"] for one in found] == [None, None, None, {"type": "length", "length": 4}]
    assert "index" not in found[0]
    assert found[0] == {
        "output_ids": [229],
        "meta_info": {
            "id": "public-0",
            "finish_reason": None,
            "prompt_tokens": 6,
            "weight_version": "default",
            "completion_tokens": 1,
            "cached_tokens": 0,
        },
    }
    assert found[-1]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]


@BOTH
def test_texts_of_tokens(is_incremental: bool) -> None:
    """The last of a cumulative stream, or all of an incremental one together, is the unary answer."""
    body = json.loads((RECORDED / "text-stream.native.json").read_bytes())
    made = plan_of(body)
    found = payloads(stream(made, is_incremental=is_incremental).feed(0, (RECORDED / "text-stream.sse").read_bytes()))
    unary = json.loads(whole(answer(made, [(RECORDED / "text.resp.json").read_bytes()], PUBLIC)))
    last = found[-1]
    if is_incremental:
        last["text"] = "".join(one["text"] for one in found)
        last["output_ids"] = [token for one in found for token in one["output_ids"]]
        rows = [row for one in found for row in one["meta_info"]["output_token_logprobs"]]
        last["meta_info"]["output_token_logprobs"] = rows
    assert last == unary


@pytest.mark.parametrize("name", ["logprobs-stream"])
def test_the_end_says_what_the_unary_answer_says(name: str) -> None:
    made = plan(return_logprob=True, top_logprobs_num=1)
    last = payloads(stream(made).feed(0, captured(f"generate/{name}")))[-1]
    assert last == json.loads(whole(answer(made, [captured("generate/logprobs")], PUBLIC)))


@BOTH
def test_samples_tell_their_position(is_incremental: bool) -> None:
    made = plan(sampling_params={"n": 2})
    found = payloads(stream(made, is_incremental=is_incremental).feed(0, captured("generate/n2-stream")))
    assert [(one["index"], one["meta_info"]["id"]) for one in found] == [
        (0, "public-0"),
        (1, "public-1"),
        (0, "public-0"),
        (1, "public-1"),
    ]
    assert [one["meta_info"]["finish_reason"] is None for one in found] == [True, True, False, False]


def test_the_legs_of_a_batch_are_one_stream() -> None:
    made = plan(input_ids=[IDS, IDS[:2]])
    one = stream(made)
    body = list(events(captured("generate/stream")))
    told = [one.feed(leg, block) for block in body for leg in (0, 1)]
    assert b"".join(told).count(DONE) == 1
    assert told[-1].endswith(DONE)
    assert one.is_ended
    found = payloads(b"".join(told))
    assert [event["index"] for event in found] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert {event["meta_info"]["prompt_tokens"] for event in found if event["index"]} == {2}


def test_the_last_event_waits_for_the_usage() -> None:
    one = stream(plan())
    usage = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":5}}}\n\n'
    assert one.feed(0, event(token_ids=[5], finish_reason="length")) == b""
    assert one.feed(0, usage) == b""
    (last,) = payloads(one.feed(0, DONE))
    assert last["meta_info"]["cached_tokens"] == 5
    assert last["output_ids"] == [5]


@pytest.mark.parametrize(
    "name",
    [
        "abort/generate-stream-before-first-token",
        "abort/generate-stream-usage-before-first-token",
        "pd/abort-before-first-token-stream",  # of another route, without a finish reason
    ],
)
def test_an_abort_before_the_first_token_is_told(name: str) -> None:
    found = payloads(stream(plan()).feed(0, captured(name)))
    assert [(one["output_ids"], one["meta_info"]["finish_reason"]) for one in found] == [([], ABORTED)]


def test_an_abort_keeps_what_was_there() -> None:
    found = payloads(stream(plan()).feed(0, captured("abort/generate-stream-by-response-id")))
    assert found[-1]["meta_info"]["finish_reason"] == ABORTED
    assert found[-1]["output_ids"] == found[-2]["output_ids"] != []


def test_an_error_ends_its_leg() -> None:
    """The error's own event goes through, and nothing is made up behind it."""
    told = stream(plan()).feed(0, event(token_ids=[5]) + b'data: {"error": {"message": "dead"}}\n\n' + event() + DONE)
    assert [one[:20] for one in events(told)][1:] == [b'data: {"error": {"me', DONE]


def test_no_output_is_one_event() -> None:
    made = plan(sampling_params={"max_new_tokens": 0}, return_logprob=True)
    told = stream(made).feed(0, event(token_ids=[5], finish_reason="length") + DONE)
    (only,) = payloads(told)
    assert (only["output_ids"], only["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})


def test_comments_and_what_follows_the_end_are_dropped() -> None:
    one = stream(plan())
    assert one.feed(0, b": keep-alive\n\n") == b""
    one.feed(0, event(token_ids=[5], finish_reason="stop") + DONE)
    assert one.feed(0, event(token_ids=[6]) + DONE) == b""


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b"data: {\n\n", id="no JSON"),
        pytest.param(b"data: []\n\n", id="no object"),
        pytest.param(event(index=1), id="another choice"),
        pytest.param(event(index=-1), id="a choice that none is"),
        pytest.param(event(token_ids=[5]) + event(token_ids=["a"]), id="no ids"),
        pytest.param(event(finish_reason="stop") + event(token_ids=[5]), id="after its end"),
    ],
)
def test_other_shapes_are_errors(block: bytes) -> None:
    with pytest.raises(AnswerMalformed):
        stream(plan()).feed(0, block)


@BOTH
def test_any_cut_into_events_gives_the_same(is_incremental: bool) -> None:
    body = captured("generate/n2-stream")
    made = plan(sampling_params={"n": 2})
    one = stream(made, is_incremental=is_incremental)
    assert b"".join(one.feed(0, block) for block in events(body)) == stream(made, is_incremental=is_incremental).feed(
        0, body
    )

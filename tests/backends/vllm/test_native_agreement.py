"""SGLang to vLLM and back keeps tokens, log-probabilities and finish reasons."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.vllm.native_agreement import (
    PUBLIC,
    engine_of,
    items_of,
    through_sglang,
    through_vllm,
    told,
)

IDS = st.lists(st.integers(3, 258), min_size=1, max_size=40)


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": draw(st.integers(0, 24)), "n": draw(st.sampled_from([1, 1, 2, 3]))}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from([None, 0.0, 0.7, 1]) if sampling["n"] == 1 else st.sampled_from([None, 0.7]),
        "sampling_seed": st.integers(0, 2**63 - 1),
        "stop_token_ids": st.lists(st.integers(90, 130), max_size=12),
        "stop": st.one_of(st.none(), st.sampled_from(["e", "th"]), st.just(["a ", "o"])),
        "no_stop_trim": st.booleans(),
        "top_k": st.just(-1),
        "top_p": st.floats(0.1, 1),
        "min_new_tokens": st.just(0),
    }
    return sampling | {name: draw(values) for name, values in optional.items() if draw(st.booleans())}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    prompts: list[list[int]] = draw(st.lists(IDS, min_size=1, max_size=3))
    is_batch = len(prompts) > 1 or draw(st.booleans())
    body: dict[str, Any] = {"input_ids": prompts if is_batch else prompts[0], "sampling_params": draw(samplings())}
    body["stream"] = draw(st.booleans())
    if draw(st.booleans()):
        body["return_prompt_token_ids"] = True
    if draw(st.integers(0, 3)):
        body |= {"return_logprob": True, "top_logprobs_num": draw(st.integers(0, 5))}
        if not body["stream"] and draw(st.booleans()):
            body["logprob_start_len"] = draw(st.integers(-1, min(map(len, prompts)) - 1))
            body["return_flat_raw_top_logprobs"] = draw(st.booleans())
        if not body["stream"]:
            body["return_flat_raw_output_top_logprobs"] = draw(st.booleans())
        if body.get("return_flat_raw_top_logprobs") or body.get("return_flat_raw_output_top_logprobs"):
            body["return_flat_raw_top_logprobs_b64"] = draw(st.booleans())
    return body


async def check(body: dict[str, Any], *, is_incremental: bool) -> None:
    sglang = engine_of("sglang", incremental_streaming_output=is_incremental)
    vllm = engine_of("vllm")
    await sglang.start()
    await vllm.start()
    try:
        expected = await through_sglang(sglang.port, body)
        found = await through_vllm(vllm.port, body, is_incremental=is_incremental)
    finally:
        await sglang.stop()
        await vllm.stop()
    if body["stream"]:
        compare_streams(expected, found, is_incremental=is_incremental)
        return
    assert isinstance(expected, list) == isinstance(found, list)
    assert [told(one) for one in items_of(found)] == [told(one) for one in items_of(expected)]
    assert [one["meta_info"]["id"] for one in items_of(found)] == PUBLIC[: len(items_of(found))]
    for mine, theirs in zip(items_of(found), items_of(expected), strict=True):
        assert mine.get("text", theirs["text"]) == theirs["text"]


def compare_streams(expected: list[Any], found: list[Any], *, is_incremental: bool) -> None:
    """Engines cut at other places, so compared is what the events of an item amount to."""
    for index in {one.get("index") for one in expected}:
        theirs = [one for one in expected if one.get("index") == index]
        mine = [one for one in found if one.get("index") == index]
        assert all(one["meta_info"]["finish_reason"] is None for one in mine[:-1])
        assert told(amount(mine, is_incremental)) == told(amount(theirs, is_incremental))
    assert {one.get("index") for one in found} == {one.get("index") for one in expected}


def amount(told_events: list[Any], is_incremental: bool) -> Any:
    last = told_events[-1]
    if not is_incremental:
        return last
    joined = {name: [row for one in told_events for row in one["meta_info"][name]] for name in lists_of(last)}
    ids = [token for one in told_events for token in one["output_ids"]]
    return {**last, "output_ids": ids, "meta_info": {**last["meta_info"], **joined}}


def lists_of(event: Any) -> list[str]:
    return [name for name in event["meta_info"] if name in ("output_token_logprobs", "output_top_logprobs")]


@settings(max_examples=120, deadline=None)
@given(body=requests(), is_incremental=st.booleans())
def test_a_request_means_the_same_to_both(body: dict[str, Any], is_incremental: bool) -> None:
    asyncio.run(check(body, is_incremental=is_incremental))


@pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
def test_a_group_of_samples_in_a_stream(is_incremental: bool) -> None:
    body = {
        "input_ids": [[5, 6, 7], [8, 9]],
        "sampling_params": {"max_new_tokens": 12, "n": 2, "sampling_seed": 5},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "stream": True,
    }
    asyncio.run(check(body, is_incremental=is_incremental))

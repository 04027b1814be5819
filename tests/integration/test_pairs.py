"""Requests over simulated prefill and decode workers have the answers of an engine that serves alone."""

import gc
import re
from typing import Any

import orjson
import pytest

from gateway.pair_run import PairRun
from tests.fakes.pair_fleet import IDS, TEXT, PairFleet, pair_fleet
from tests.fakes.running import TIME_SCALE, until
from tests.fakes.wire import Answer

_OWN = (
    re.compile(rb'"created":\d+'),
    re.compile(rb'"id":"[^"]*"'),
)
# Of one item's meta_info, whatever does not depend on when and where it ran.
_META = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs", "input_token_logprobs")


def same_everywhere(body: bytes) -> bytes:
    for pattern in _OWN:
        body = pattern.sub(b'"own":0', body)
    return body


async def both(f: PairFleet, path: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
    over_pair, alone = await f.call(path, body), await f.direct(path, body)
    assert (over_pair.status, alone.status) == (200, 200)
    assert over_pair.headers["x-forebay-worker"] == f.decodes[0].url.removeprefix("http://")
    assert over_pair.headers["x-forebay-prefill-worker"] == f.prefills[0].url.removeprefix("http://")
    return over_pair, alone


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_openai_answers_are_those_of_one_engine(path: str, is_stream: bool, engine: str) -> None:
    async with pair_fleet(engine=engine) as f:
        body: dict[str, Any] = {"model": f.alone.options.model, "max_tokens": 8, "stream": is_stream, "seed": 5}
        body |= {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
        over_pair, alone = await both(f, path, body)
        assert same_everywhere(over_pair.body) == same_everywhere(alone.body)


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("is_batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_native_answers_are_those_of_one_engine(
    ranks: int, samples: int, is_batch: bool, is_stream: bool
) -> None:
    async with pair_fleet(prefill={"dp_size": ranks}, decode={"dp_size": ranks}) as f:
        body = {
            "input_ids": [IDS, IDS[:20]] if is_batch else IDS,
            "sampling_params": {"max_new_tokens": 6, "n": samples, "temperature": 0},
            "stream": is_stream,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        over_pair, alone = await both(f, "/generate", body)
        ours, theirs = by_item(over_pair, is_stream=is_stream), by_item(alone, is_stream=is_stream)
        assert sorted(ours) == sorted(theirs)
        # The simulated engine gives each sample a text of its own by its number, which single requests do not have.
        assert [ours[at] for at in range(0, len(ours), samples)] == [theirs[at] for at in range(0, len(ours), samples)]


def by_item(answer: Answer, *, is_stream: bool) -> dict[int, list[Any]]:
    """What each item came to: the last event of each in a stream, the items of a document."""
    found: dict[int, list[Any]] = {}
    if is_stream:
        items = [orjson.loads(event) for event in answer.events() if event != b"[DONE]"]
        assert answer.body.endswith(b"data: [DONE]\n\n")
    else:
        whole = answer.json()
        items = whole if isinstance(whole, list) else [whole]
    for position, item in enumerate(items):
        meta = item["meta_info"]
        index = item.get("index", 0 if is_stream else position)
        found[index] = [item["text"], item["output_ids"], *(meta.get(name) for name in _META)]
    return found


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_an_echoed_prompt_is_told_once(is_stream: bool) -> None:
    async with pair_fleet() as f:
        body = {"model": f.alone.options.model, "prompt": TEXT, "max_tokens": 4, "echo": True, "logprobs": 1}
        over_pair, alone = await both(f, "/v1/completions", {**body, "stream": is_stream})
        assert same_everywhere(over_pair.body) == same_everywhere(alone.body)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_what_prefill_says_of_its_failure_is_said_in_the_clients_terms(path: str) -> None:
    async with pair_fleet(gateway={"max_attempts": 1}) as f:
        f.prefills[0].add_fault(at="headers", do="abort_finish")
        body: dict[str, Any] = (
            {"text": TEXT} if path == "/generate" else {"messages": [{"role": "user", "content": TEXT}]}
        )
        answer = await f.call(path, {"model": f.alone.options.model, **body}, headers={"X-Request-Id": "mine"})
        assert answer.status == 502
        assert "req.rid='mine'" in answer.json()["error"]["message"]
        record = await f.gateway.record()
        assert record.outcome == "prefill_failed"
        assert not any(id.encode() in answer.body for id in record.engine_ids)


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a_transfer_that_fails_at_vllm_is_counted(is_stream: bool) -> None:
    """Decode says so inside an answer of status 200, which is no sign that it has taken the prompt over."""
    async with pair_fleet(engine="vllm", gateway={"max_attempts": 1}, transfer_lease_s=0.3 * TIME_SCALE) as f:
        f.decodes[0].add_fault(at="transfer", do="fail")
        body = {"model": f.alone.options.model, "prompt": TEXT, "max_tokens": 4, "stream": is_stream}
        answer = await f.call("/v1/completions", body)
        assert answer.status == 502
        assert "forebay_handoff_abandoned_total 1.0" in (await f.gateway.client.get("/metrics")).text


async def test_an_end_marker_alone_is_no_answer() -> None:
    """So vLLM ends a stream that it aborts by itself; the client is told once, and nothing before that."""
    async with pair_fleet(engine="vllm", gateway={"max_attempts": 1}, transfer_lease_s=0.3 * TIME_SCALE) as f:
        f.decodes[0].add_fault(at="headers", do="abort_finish")
        body = {"model": f.alone.options.model, "prompt": TEXT, "max_tokens": 4, "stream": True}
        answer = await f.call("/v1/completions", body)
        assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")
        assert (await f.gateway.record()).outcome == "engine_error"
        assert "forebay_handoff_abandoned_total 1.0" in (await f.gateway.client.get("/metrics")).text


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_nothing_of_a_request_waits_for_the_garbage_collector(engine: str) -> None:
    """Mutation tried: a leg goes on holding what it tells of a lost handoff, which is the run that holds the leg."""
    async with pair_fleet(engine=engine) as f:
        body = {"model": f.alone.options.model, "prompt": TEXT, "max_tokens": 3, "n": 2, "stream": True}
        gc.collect()
        gc.disable()
        try:
            assert (await f.call("/v1/completions", body)).status == 200
            await f.settle()
            await until(lambda: not any(isinstance(one, PairRun) for one in gc.get_objects()), "no run is left")
        finally:
            gc.enable()

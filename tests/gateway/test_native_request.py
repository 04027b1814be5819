"""What vLLM workers can be asked for of a native request, and what they turned out to lack."""

import json
from dataclasses import replace
from typing import Any

import pytest

from backends.json_body import JsonBody
from backends.types import EngineFacts, EngineKind, Worker
from backends.upstream.base import Origin
from gateway.errors import NO_TOKEN_ROUTE, ErrorReport, InvalidRequest, WorkerUnfit
from gateway.native_request import MAX_LEGS, NativeRequest, NativeWorkers, native_obstacle, speaks_native
from gateway.outcome import Outcome
from routers.member import Member

FACTS = EngineFacts(EngineKind.VLLM, (0, 32), "0.32.0", "m", boot_id="one")
NO_TOKENIZER = ErrorReport(400, "invalid_request", "output_mode", Outcome.REJECTED)
TEXTS = {"return_logprob": True, "return_text_in_logprobs": True}


def worker(engine: EngineKind = EngineKind.VLLM, name: str = "w") -> Member:
    one = Member(Worker(name, f"http://{name}", Origin("http", name, 80)))
    one.identified(replace(FACTS, engine=engine))
    return one


def asked(workers: NativeWorkers | None = None, batch_size: int | None = None, **body: Any) -> NativeRequest:
    raw = json.dumps({"input_ids": [1], **body}).encode()
    return NativeRequest(JsonBody.parse(raw), batch_size, (), workers or NativeWorkers())


def test_it_is_translated_once() -> None:
    native, one = asked(), worker()
    assert native.plan(one) is native.plan(one)
    assert native.obstacle(one) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"image_data": "x"}, "image_data", id="field"),
        pytest.param({"batch_size": MAX_LEGS + 1}, "input_ids", id="prompts"),
        pytest.param({"batch_size": MAX_LEGS + 1, "input_ids": None, "text": "a"}, "text", id="texts"),
        pytest.param(
            {"sampling_params": {"n": MAX_LEGS + 1, "temperature": 0}}, "sampling_params.n", id="greedy samples"
        ),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    native = asked(**body)
    with pytest.raises(InvalidRequest) as caught:
        native.plan(worker())
    assert caught.value.report.param == param
    assert native.pool == (True, True)
    assert not speaks_native(worker(), native)


def test_what_a_worker_lacks_is_remembered_until_it_is_another_process() -> None:
    workers, one, other = NativeWorkers(), worker(), worker(name="other")
    native = asked(workers, **TEXTS)
    assert native.pool == (False, True)
    workers.lacks(one, WorkerUnfit(NO_TOKENIZER))
    obstacle = native.obstacle(one)
    assert obstacle is not None
    assert obstacle.report.param == "return_text_in_logprobs"
    assert native.obstacle(other) is None
    workers.lacks(one, WorkerUnfit(NO_TOKEN_ROUTE))
    obstacle = native.obstacle(one)
    assert obstacle is not None
    assert obstacle.report is NO_TOKEN_ROUTE
    one.identified(replace(FACTS, boot_id="two"))
    assert native.obstacle(one) is None


def test_without_a_tokenizer_nothing_else_changes() -> None:
    workers, one = NativeWorkers(), worker()
    native = asked(workers)
    assert b"output_mode" in native.plan(one).legs[0].body
    workers.lacks(one, WorkerUnfit(NO_TOKENIZER))
    assert b"output_mode" not in native.plan(one).legs[0].body


def test_who_may_be_given_it() -> None:
    sglang, vllm, unknown = worker(EngineKind.SGLANG), worker(), Member(worker().worker)
    native, refused = asked(), asked(image_data="x")
    assert [speaks_native(one, native) for one in (sglang, vllm, unknown, None)] == [True] * 4
    assert [speaks_native(one, refused) for one in (sglang, vllm, unknown)] == [True, False, True]
    assert not speaks_native(vllm, None)
    assert native_obstacle([vllm, sglang], refused) is None
    assert native_obstacle([vllm], None) is None
    assert native_obstacle([], refused) is None
    assert isinstance(native_obstacle([vllm, vllm], refused), InvalidRequest)


def test_the_requests_own_fault_is_told_first() -> None:
    workers, one, other = NativeWorkers(), worker(), worker(name="other")
    workers.lacks(one, WorkerUnfit(NO_TOKEN_ROUTE))
    refused = asked(workers, image_data="x")
    assert isinstance(native_obstacle([one, other], refused), InvalidRequest)
    found = native_obstacle([one], refused)
    assert found is not None
    assert found.report is NO_TOKEN_ROUTE

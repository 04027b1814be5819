"""The shortest way through: one request of each kind, exact answers, nothing left behind."""

import json

from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway
from tests.fakes.wire import call, request_bytes, wire


async def test_a_unary_request_gets_the_engines_answer_under_the_clients_id(
    gateway: RunningGateway, engine: SimulatedEngine
) -> None:
    answer = await call(gateway.address, "/generate", {"input_ids": [5, 6], "rid": "mine", "sampling_params": {}})
    assert answer.status == 200
    assert answer.json()["meta_info"]["id"] == "mine"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-length"] == str(len(answer.body))
    seen = engine.log.requests_to("/generate")[-1]
    assert len(seen.rids[0]) == 32
    assert seen.rids[0] not in answer.body.decode()


async def test_a_stream_ends_with_its_marker(gateway: RunningGateway) -> None:
    body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 3}, "rid": "s"}
    answer = await call(gateway.address, "/generate", body)
    *events, done = answer.events()
    assert done == b"[DONE]"
    assert [json.loads(event)["meta_info"]["id"] for event in events] == ["s", "s", "s"]
    assert (await gateway.record()).outcome == "complete"


async def test_pipelined_requests_are_answered_in_order(gateway: RunningGateway) -> None:
    first = request_bytes("/generate", {"text": "a", "rid": "one", "sampling_params": {"max_new_tokens": 2}})
    second = request_bytes("/generate", {"text": "b", "rid": "two", "sampling_params": {"max_new_tokens": 2}})
    async with wire(gateway.address) as connection:
        await connection.send(first + second)
        assert (await connection.answer()).headers["x-request-id"] == "one"
        assert (await connection.answer()).headers["x-request-id"] == "two"

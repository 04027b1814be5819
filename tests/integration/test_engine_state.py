"""Requests that refer to state inside one engine (decision 10): only where there is no other engine."""

import json
from typing import Any

import pytest

from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import call

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
STATEFUL: list[tuple[str, str, Any]] = [
    ("/generate", "session_params", {"id": "s", "rid": None}),
    ("/generate", "session_id", "s"),
    ("/generate", "background", True),
    (CHAT, "session_params", {"id": "s"}),
    (CHAT, "session_id", "s"),
    (RESPONSES, "previous_response_id", "resp_1"),
    (RESPONSES, "background", True),
    (RESPONSES, "background", 1),
    (RESPONSES, "background", "yes"),
]
STATELESS: list[tuple[str, str, Any]] = [
    ("/generate", "session_params", None),
    ("/generate", "session_id", None),
    (RESPONSES, "previous_response_id", None),
    (RESPONSES, "background", False),
    (RESPONSES, "background", None),
    ("/generate", "conversation_id", "c"),
]


async def answer_anything(request: SeenRequest, reply: Reply) -> None:
    """Answer without a look at the request."""
    await reply.whole(b'{"text":"a"}')


def body_of(name: str, value: Any) -> dict[str, Any]:
    """A body for any route, with the field."""
    return {"model": "model", "text": "a", "input": "a", "messages": [], name: value}


@pytest.mark.parametrize(("path", "name", "value"), STATEFUL + STATELESS)
async def test_one_engine_has_its_own_state(
    front: RunningGateway, scripted: ScriptEngine, path: str, name: str, value: Any
) -> None:
    scripted.script = answer_anything
    assert (await call(front.address, path, body_of(name, value))).status == 200
    assert json.loads(scripted.requests[0].body)[name] == value


async def test_several_engines_do_not_share_theirs() -> None:
    async with (
        script_engine(answer_anything) as one,
        script_engine(answer_anything) as other,
        running_gateway(one.url, other.url) as front,
    ):
        for path, name, value in STATEFUL:
            for stream in (False, True):
                answer = await call(front.address, path, {**body_of(name, value), "stream": stream})
                assert answer.status == 400
                error = answer.json()["error"]
                assert (error["type"], error["param"]) == ("unsupported", name)
                assert name in error["message"]
        assert one.requests + other.requests == []
        assert {record.outcome for record in front.records} == {"rejected"}
        for path, name, value in STATELESS:
            assert (await call(front.address, path, body_of(name, value))).status == 200


async def test_engines_of_another_model_do_not_count() -> None:
    async with (
        script_engine(answer_anything) as one,
        script_engine(answer_anything) as other,
    ):
        other.metadata = {
            **METADATA,
            "/model_info": {"model_path": "another", "served_model_name": "another"},
            "/v1/models": {"data": [{"id": "another"}]},
        }
        async with running_gateway(one.url, other.url) as front:
            for path, name, value in STATEFUL:
                assert (await call(front.address, path, body_of(name, value))).status == 200
            assert len(one.requests) == len(STATEFUL)


async def test_a_worker_that_is_down_is_one_that_may_come_back() -> None:
    async with (
        script_engine(answer_anything) as one,
        script_engine(answer_anything) as other,
        running_gateway(one.url, other.url, health_interval_s=60) as front,
    ):
        await other.stop()
        answer = await call(front.address, "/generate", body_of("session_id", "s"))
        assert (answer.status, answer.json()["error"]["type"]) == (400, "unsupported")

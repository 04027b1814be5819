"""What the template's input is not made of: requests that engines refuse, or whose prompt only they can tell."""

from typing import Any

import pytest

from gateway.tokens.chat import NotKnown
from gateway.tokens.content_format import ContentFormat
from gateway.tokens.sglang_chat import sglang_chat
from gateway.tokens.vllm_chat import vllm_chat

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def _with(*messages: object, **fields: object) -> dict[str, Any]:
    return {"messages": [*messages, HELLO], **fields}


def _calls(calls: object) -> dict[str, Any]:
    return _with({"role": "assistant", "content": "", "tool_calls": calls})


BOTH = [
    pytest.param({"messages": "x"}, id="messages"),
    pytest.param({"messages": [1]}, id="message"),
    pytest.param(_with({"role": "assistant", "content": [{"type": []}]}), id="type of a part"),
    pytest.param(_with({"role": 1, "content": "x"}), id="role"),
    pytest.param(_with({"role": "user", "content": None}), id="no content"),
    pytest.param(_with({"role": "user", "content": 1}), id="content"),
    pytest.param(_with({"role": "user", "content": ["x"]}), id="part"),
    pytest.param(_with({"role": "user", "content": [{"type": "text", "text": 1}]}), id="text of a part"),
    pytest.param(_with(tools=1), id="tools"),
    pytest.param(_with(tools=[1]), id="tool"),
    pytest.param(_with(tools=[{"function": {}}]), id="tool without a name"),
    pytest.param(_with(tools=[TOOL | {"defer_loading": True}]), id="deferred tool"),
    pytest.param(_with(chat_template_kwargs=1), id="variables"),
    pytest.param(_with(continue_final_message="yes"), id="flag"),
    pytest.param(_with(reasoning_effort=[]), id="effort"),
    pytest.param(_calls(1), id="calls"),
    pytest.param(_calls([1]), id="call"),
    pytest.param(_calls([CALL | {"type": "custom"}]), id="custom call"),
    pytest.param(_calls([CALL | {"function": 1}]), id="function of a call"),
]


@pytest.mark.parametrize("body", BOTH)
@pytest.mark.parametrize("chat", [sglang_chat, vllm_chat])
def test_neither_is_known(chat: Any, body: dict[str, Any]) -> None:
    with pytest.raises(NotKnown):
        chat(body, ContentFormat.STRING, "content")


@pytest.mark.parametrize(
    ("body", "template"),
    [
        pytest.param(_with(input_ids=[1]), "", id="ids"),
        pytest.param(_with({"role": "critic", "content": "x"}), "", id="role"),
        pytest.param(_with({"role": "system", "content": "x", "tools": [TOOL]}), "", id="tools of a message"),
        pytest.param(_with({"role": "assistant", "content": "x", "name": 1}), "", id="name"),
        pytest.param(_calls([CALL | {"function": {"arguments": "{"}}]), "", id="broken arguments"),
        pytest.param(_calls([CALL | {"function": {"arguments": "1"}}]), "", id="arguments that are no object"),
        pytest.param(_with(tools=[TOOL], tool_choice=1), "", id="tool choice"),
        pytest.param(_with(tools=[TOOL], tool_choice={"function": 1}), "", id="named tool"),
        pytest.param(_with(reasoning={"effort": "low"}), "", id="reasoning"),
        pytest.param(_with(reasoning_effort=1), "", id="effort too high"),
        pytest.param(_with(reasoning_effort="low"), "low_effort", id="effort by another name"),
        pytest.param(
            {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True}, "", id="nothing left"
        ),
    ],
)
def test_sglang_is_not_guessed(body: dict[str, Any], template: str) -> None:
    with pytest.raises(NotKnown):
        sglang_chat(body, ContentFormat.OPENAI, template)


@pytest.mark.parametrize(
    ("body", "template"),
    [
        pytest.param(_with(mm_processor_kwargs={}), "", id="media options"),
        pytest.param(_with(continue_final_message=True), "content", id="continued and opened"),
        pytest.param(
            _with(continue_final_message=True, add_generation_prompt=False), "m", id="template without content"
        ),
        pytest.param(_with({"role": "developer", "content": "x"}), "", id="developer"),
        pytest.param(_with({"role": "developer", "content": "x", "tools": [TOOL]}), "'developer'", id="its tools"),
        pytest.param(_with({"role": "system", "content": "x-anthropic-billing-header: 1"}), "", id="billing header"),
        pytest.param(_calls([CALL | {"index": 0}]), "", id="more in a call"),
        pytest.param(_calls([CALL | {"function": {"name": "f"}}]), "", id="less in a call"),
    ],
)
def test_vllm_is_not_guessed(body: dict[str, Any], template: str) -> None:
    with pytest.raises(NotKnown):
        vllm_chat(body, ContentFormat.OPENAI, template)


def test_the_request_stays_as_it_was() -> None:
    body = _with({"role": "assistant", "content": "x", "tool_calls": [CALL]}, tools=[TOOL], chat_template_kwargs={})
    before = repr(body)
    for chat in (sglang_chat, vllm_chat):
        assert chat(body, ContentFormat.STRING, "").tools is not None
    assert repr(body) == before


def test_the_task_of_a_message_is_kept() -> None:
    found = vllm_chat(_with({"role": "user", "content": "x", "task": "title"}), ContentFormat.STRING, "")
    assert found.messages[0] == {"role": "user", "content": "x", "task": "title"}

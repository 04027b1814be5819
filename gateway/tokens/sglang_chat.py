"""How SGLang (0.5.23) makes a template's input from a chat request. Pure."""

from typing import Any

import orjson

from gateway.tokens.chat import ChatPrompt, NotKnown, messages_of, template_variables, tools_of
from gateway.tokens.content_format import ContentFormat

_ROLES = frozenset({"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"})
# Tuples, since anything may be looked up in them.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
# In the order in which SGLang writes them, since a template may write a whole message.
_FIELDS = ("role", "content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls")
# Dropped by SGLang from what a template sees.
_THOUGHTS = ("thinking", "reasoning")


def sglang_chat(body: dict[str, Any], content_format: ContentFormat, template: str) -> ChatPrompt:
    """The template's input for ``body``.

    Args:
        body: The request's fields.
        content_format: What SGLang finds the template to want.
        template: Source of the template.

    Raises:
        NotKnown: Media, or options whose effect on the prompt is not known here.
    """
    if body.get("input_ids") is not None:
        raise NotKnown("input_ids")
    messages = [_message(one, content_format) for one in messages_of(body)]
    continues = body.get("continue_final_message", False)
    if not isinstance(continues, bool):
        raise NotKnown("continue_final_message")
    prefix = ""
    last = messages[-1]
    if last["role"] == "assistant" and isinstance(last["content"], str):
        if continues:
            prefix = last["content"]
            messages.pop()
        else:
            messages[-1] = {"role": "user", "content": last["content"]}
    if not messages:
        raise NotKnown("messages")
    return ChatPrompt(messages, _tools(body), _variables(body, template), assistant_prefix=prefix)


def _message(raw: dict[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    role, content = raw.get("role"), raw.get("content")
    if not isinstance(role, str):
        raise NotKnown("role")
    if role == "user":  # SGLang keeps nothing else of a user's message
        if content is None:
            raise NotKnown("content")
        message = {"role": role, "content": content}
    else:
        role = role.lower()
        if role not in _ROLES or raw.get("tools") or raw.get("prefix") is not None:
            raise NotKnown("role")
        message = {name: raw[name] for name in _FIELDS if raw.get(name) is not None}
        message["role"] = role
        message.setdefault("content", "")
        if not all(isinstance(message.get(name, ""), str) for name in ("tool_call_id", "name", "reasoning_content")):
            raise NotKnown("message")
        message = {name: message[name] for name in _FIELDS if name in message}
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], parse=role == "assistant")
    if isinstance(message["content"], list):
        parts = _texts(message.pop("content"), role)
        if content_format is ContentFormat.STRING or role == "tool":
            message["content"] = " ".join(parts)
        else:
            message["content"] = [{"type": "text", "text": text} for text in parts]
        if content_format is ContentFormat.STRING:
            message = {name: message[name] for name in _FIELDS if name in message}
    elif not isinstance(message["content"], str):
        raise NotKnown("content")
    return message


def _texts(parts: list[Any], role: str) -> list[str]:
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _THOUGHTS and role == "assistant":
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            raise NotKnown("content parts")
        texts.append(part["text"])
    return texts


def _tool_calls(calls: Any, *, parse: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise NotKnown("tool_calls")
    written: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise NotKnown("tool_calls")
        arguments = function.get("arguments")
        if parse and isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except orjson.JSONDecodeError as exc:
                raise NotKnown("tool_calls") from exc
            if not isinstance(arguments, dict):
                raise NotKnown("tool_calls")
        told = {"name": function.get("name"), "arguments": arguments}
        written.append({"id": call.get("id"), "index": call.get("index"), "type": "function", "function": told})
    return written


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = tools_of(body)
    choice = body.get("tool_choice")
    if not tools or choice == "none":
        return None
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict):
            raise NotKnown("tool_choice")
        tools = [tool for tool in tools if tool["function"]["name"] == function.get("name")]
    elif choice not in (None, "auto", "required"):
        raise NotKnown("tool_choice")
    return [_tool(tool) for tool in tools] or None


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """SGLang keeps the client's order of fields and adds those that are missing."""
    given = tool["function"]
    known = {name: given.get(name) for name in ("description", "name", "parameters")}
    if given.get("strict") is not None:
        known["strict"] = given["strict"]
    function = {name: known[name] for name in [*given, *known] if name in known}
    return {"type": tool.get("type", "function"), "function": function, "defer_loading": None}


def _variables(body: dict[str, Any], template: str) -> dict[str, Any]:
    if body.get("reasoning") is not None:
        raise NotKnown("reasoning")
    variables = template_variables(body)
    effort = body.get("reasoning_effort")
    if effort is None:
        return variables
    if isinstance(effort, int | float) and not isinstance(effort, bool) and 0 <= effort <= 0.99:
        effort = float(effort)
    elif effort not in _EFFORTS or "low_effort" in template:
        raise NotKnown("reasoning_effort")
    thinks = effort != "none"
    return {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks} | variables

"""How vLLM (0.32) makes a template's input from a chat request. Pure."""

import json
from typing import Any

from gateway.tokens.chat import ChatPrompt, NotKnown, messages_of, template_variables, tools_of
from gateway.tokens.content_format import ContentFormat

# A line that vLLM takes out of system messages, since it differs from request to request.
_BILLING_HEADER = "x-anthropic-billing-header"
_UNSET = (None, "auto")


def vllm_chat(body: dict[str, Any], content_format: ContentFormat, template: str) -> ChatPrompt:
    """The template's input for ``body``.

    Args:
        body: The request's fields.
        content_format: What vLLM finds the template to want.
        template: Source of the template.

    Raises:
        NotKnown: Media, or options whose effect on the prompt is not known here.
    """
    for name in ("chat_template", "truncate_prompt_tokens", "media_io_kwargs", "mm_processor_kwargs"):
        if body.get(name) is not None:
            raise NotKnown(name)
    raw = messages_of(body)
    if any(one.get("role") == "developer" for one in raw) and not _knows_developer(template):
        raise NotKnown("developer")
    add_generation_prompt = _flag(body, "add_generation_prompt", default=True)
    continues_last = _flag(body, "continue_final_message", default=False)
    if continues_last and (add_generation_prompt or "content" not in template):
        raise NotKnown("continue_final_message")
    return ChatPrompt(
        [_message(one, content_format) for one in raw],
        [_tool(tool) for tool in tools_of(body)] or None,
        _variables(body),
        add_generation_prompt=add_generation_prompt,
        continues_last=continues_last,
        add_special_tokens=_flag(body, "add_special_tokens", default=False),
    )


def _flag(body: dict[str, Any], name: str, *, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise NotKnown(name)
    return value


def _knows_developer(template: str) -> bool:
    return '"developer"' in template or "'developer'" in template


def _message(raw: dict[str, Any], content_format: ContentFormat) -> dict[str, Any]:
    role = raw.get("role")
    if not isinstance(role, str):
        raise NotKnown("role")
    if raw.get("content") is None and role != "assistant":
        raise NotKnown("content")
    texts = _texts(raw.get("content"))
    if role == "system" and any(text.startswith(_BILLING_HEADER) for text in texts):
        raise NotKnown("billing header")
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if content_format is ContentFormat.OPENAI and role != "tool":
        message["content"] = [{"type": "text", "text": text} for text in texts]
    if role == "assistant":
        if raw.get("tool_calls"):
            message["tool_calls"] = _tool_calls(raw["tool_calls"])
        reasoning = raw.get("reasoning")
        if reasoning is None:
            reasoning = raw.get("reasoning_content")
        if reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in raw:
        message["tool_call_id"] = raw["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(raw.get(name), str):
            message[name] = raw[name]
    if role == "developer":
        if raw.get("tools") is not None:
            raise NotKnown("tools of a message")
        message["tools"] = None
    return message


def _texts(content: Any) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise NotKnown("content")
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise NotKnown("content parts")
        if not isinstance(part["text"], str):
            raise NotKnown("content parts")
        texts.append(part["text"])
    return texts


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """The calls in vLLM's own order of fields."""
    if not isinstance(calls, list):
        raise NotKnown("tool_calls")
    written: list[dict[str, Any]] = []
    for call in calls:
        if not isinstance(call, dict) or call.keys() != {"id", "function", "type"} or call["type"] != "function":
            raise NotKnown("tool_calls")
        function = call["function"]
        if not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
            raise NotKnown("tool_calls")
        told = {"arguments": _arguments(function["arguments"]), "name": function["name"]}
        written.append({"id": call["id"], "function": told, "type": "function"})
    return written


def _arguments(arguments: Any) -> dict[str, Any]:
    """Whatever is not an object becomes an empty one."""
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """vLLM writes the fields that it knows, in its own order."""
    given = tool["function"]
    function = {"name": given["name"], "description": given.get("description"), "parameters": given.get("parameters")}
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}


def _variables(body: dict[str, Any]) -> dict[str, Any]:
    variables = template_variables(body)
    effort, documents = body.get("reasoning_effort"), body.get("documents")
    if effort is not None:
        if not isinstance(effort, str):
            raise NotKnown("reasoning_effort")
        variables.setdefault("enable_thinking", effort != "none")
    own = {"documents": documents, "reasoning_effort": effort}
    return variables | {name: value for name, value in own.items() if value not in _UNSET}

"""A conversation as a chat template gets it, and what cannot be said of it here. Pure."""

from dataclasses import dataclass, field, replace
from typing import Any

# What a template's caller takes as its own arguments: as template variables these names mean something else.
CALLER_ARGUMENTS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class NotKnown(Exception):
    """The ids of a prompt cannot be told here. The message says why and never holds any of the prompt."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What an engine hands to its chat template, and what it does with the text.

    Attributes:
        messages: The conversation, in the engine's own form.
        tools: Tool descriptions, ``None`` without any.
        variables: Further variables of the template.
        add_generation_prompt: The text ends with the opening of the assistant's turn.
        continues_last: The text ends inside the last message, which is the assistant's.
        assistant_prefix: Text whose ids follow those of the rendered text.
        add_special_tokens: Ids of the tokenizer's own beginning and end are added.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues_last: bool = False
    assistant_prefix: str = ""
    add_special_tokens: bool = False

    def with_bare_tools(self) -> "ChatPrompt":
        """The same with tools as functions alone, without what wraps them."""
        return replace(self, tools=[tool.get("function", tool) for tool in self.tools or []])


def messages_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The request's messages.

    Raises:
        NotKnown: There are none, or they are no objects.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise NotKnown("messages")
    return messages


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The request's tools, empty without any; each has a function that has a name.

    Raises:
        NotKnown: Some are of another kind.
    """
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise NotKnown("tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise NotKnown("tools")
        if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
            raise NotKnown("deferred tools")
    return tools


def template_variables(body: dict[str, Any]) -> dict[str, Any]:
    """``chat_template_kwargs``, as a new object.

    Raises:
        NotKnown: They are no object, or would change how the template is called.
    """
    variables = body.get("chat_template_kwargs")
    if variables is None:
        return {}
    if not isinstance(variables, dict) or not CALLER_ARGUMENTS.isdisjoint(variables):
        raise NotKnown("chat_template_kwargs")
    return dict(variables)

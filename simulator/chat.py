"""How the simulated model's chat template writes a conversation. Pure.

Both engine kinds use it, so that the same messages are the same prompt on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GENERATION_PROMPT = "<|assistant|>"


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return ""


def render(messages: Iterable[dict[str, Any]]) -> str:
    """Return the conversation as text, without the generation prompt."""
    return "".join(f"<|{message.get('role')}|>{text_of(message.get('content'))}\n" for message in messages)

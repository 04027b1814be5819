"""Whether an event of vLLM's streams shows that decoding has begun. Pure."""

import msgspec

from backends.errors import AnswerMalformed
from backends.sse import DONE_DATA, data_of, events


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_event = msgspec.json.Decoder(_Event)


def has_output(event_data: bytes) -> bool:
    """Whether the engine has generated a token, or has ended a choice.

    An error shows neither that nor that the prompt's blocks were taken over. Chat streams begin with an event that
    names the role and holds no token.

    Args:
        event_data: Payload of one event of ``/v1/chat/completions``, ``/v1/completions`` or ``/inference/v1/generate``.

    Raises:
        AnswerMalformed: It is no JSON, or not of that shape.
    """
    if event_data in (b"", DONE_DATA):
        return False
    try:
        event = _event.decode(event_data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise AnswerMalformed(f"an event of the engine's stream cannot be read: {exc}") from exc
    if bytes(event.error) != b"null":
        return False
    if event.usage is not None and event.usage.completion_tokens:
        return True
    return any(_shows(choice) for choice in event.choices)


def is_silent(block: bytes) -> bool:
    """Whether whole events of a stream, of either engine, have no part of an answer but the roles of OpenAI choices.

    vLLM ends its OpenAI streams with nothing else, usage aside, where a request was aborted before its first token.
    """
    payloads = [data for event in events(block) if (data := data_of(event)) not in (b"", DONE_DATA)]
    try:
        return all(b'"choices":' in data and not has_output(data) for data in payloads)
    except AnswerMalformed:
        return False


def _shows(choice: _Choice) -> bool:
    delta = choice.delta
    in_delta = delta is not None and bool(
        delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls
    )
    return bool(choice.text or choice.token_ids or choice.finish_reason or in_delta)

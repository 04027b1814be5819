"""What a client sees in an answer: whole, stopped, an error, or visibly cut; anything else is a complaint. Pure."""

import enum
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from backends.sse import DONE_DATA, data_of, events, name_of
from gateway.routes import LAST_EVENTS, Dialect
from tests.fakes.wire import Answer
from tests.soak.plan import Plan

# What only engines refuse; a fault may answer in their place.
REFUSED_BY_ENGINES = "no prompt"
# What the simulated engine's faults put into answers.
_GARBAGE = b"garbage"
_HUGE = "x" * 1000
_HUGE_BODY = b'{"text":"' + _HUGE.encode()
# An engine's own id; the clients' ids look different.
# vLLM's ids are these and the client's. It ends what is aborted without a finish reason.
_VLLM_IDS = (b'"id":"chatcmpl-', b'"id":"cmpl-')
_ENGINE_ID = re.compile(rb'"id":"(?:chatcmpl-|cmpl-|resp_|embd-)?[0-9a-f]{32}')
# In what an engine says of itself; generated texts have no such length of these.
_ENGINE_ID_IN_TEXT = re.compile(rb"\b[0-9a-f]{32}\b")


class Kind(enum.Enum):
    """How an answer ended, as the client sees it."""

    WHOLE = "whole"
    STOPPED = "stopped"
    ERROR = "error"
    CUT = "visibly cut"


@dataclass(slots=True)
class Reading:
    """What one answer says.

    Attributes:
        kind: How it ended.
        texts: Generated texts by sequence, where they can be compared with those of other answers.
        prompts: What is told of the prompts, likewise; empty where it is not, or comes in pieces.
        complaints: What must not be.
    """

    kind: Kind = Kind.WHOLE
    texts: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    complaints: list[str] = field(default_factory=list)


class _Wrong(Exception):
    """The answer is not what it must be."""


def read_answer(plan: Plan, answer: Answer) -> Reading:
    """Judge the answer to a client that stayed."""
    reading = Reading()
    if not answer.is_whole:
        reading.kind = Kind.CUT
        return reading
    try:
        told = answer.headers.get("x-request-id", "")
        if not told or (plan.is_http and told != plan.id):
            raise _Wrong(f"x-request-id is {told!r}")
        # The gateway's own ids, for what tells none, look like engines'.
        body = answer.body.replace(told.encode("latin-1"), b"")
        if found := _ENGINE_ID.search(body) or _ENGINE_ID_IN_TEXT.search(body):
            raise _Wrong(f"an engine's id is in the answer: {found[0]!r}")
        if answer.status >= 400:
            _read_error(plan, answer, reading)
        elif plan.wrong and not (plan.wrong == REFUSED_BY_ENGINES and _is_huge(answer)):
            raise _Wrong(f"{plan.wrong}, and the status is {answer.status}")
        elif plan.is_stream and not _is_huge(answer):
            _read_stream(plan, answer, reading)
        else:
            _read_unary(plan, answer, reading)
    except _Wrong as exc:
        reading.complaints.append(str(exc))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as exc:
        reading.complaints.append(f"not as the route answers: {exc!r}")
    if reading.complaints:
        reading.complaints.append(f"status {answer.status}, body {answer.body[:200]!r} … {answer.body[-400:]!r}")
    return reading


def _read_error(plan: Plan, answer: Answer, reading: Reading) -> None:
    """An error of the gateway's is in its shape; an engine's own has some message."""
    body = answer.json()
    error = body.get("error")
    is_own = isinstance(error, dict) and "request_id" in error
    if is_own and (error["code"] != answer.status or not error["message"] or not error["type"]):
        raise _Wrong("an error that does not say what it is")
    if is_own and plan.is_http and error["request_id"] != plan.id:
        raise _Wrong("an error with another request's id")
    if not is_own and not (error or body.get("message") or body.get("detail")):
        raise _Wrong("an error without a message")
    is_abort = is_own and error["type"] == "aborted"
    reading.kind = Kind.STOPPED if is_abort else Kind.ERROR
    if is_abort and plan.aborts is None:
        raise _Wrong("aborted, and nobody had asked for that")


@dataclass(slots=True)
class _Sequence:
    """One generated sequence as it grows: text, tokens, why it ended, and what is told of the prompt."""

    text: str = ""
    tokens: int = 0
    reason: str | None = None
    prompt: str = ""


def _is_huge(answer: Answer) -> bool:
    """Whether this is the document with which a fault answers whatever was asked."""
    return answer.headers.get("content-type") == "application/json" and answer.body.startswith(_HUGE_BODY)


def _read_unary(plan: Plan, answer: Answer, reading: Reading) -> None:
    body = answer.json()
    if _is_huge(answer):
        return
    found = _UNARY[plan.route.dialect](body) if plan.ask.sequences else []
    _conclude(plan, answer, found, reading)


def _conclude(plan: Plan, answer: Answer, found: list[_Sequence], reading: Reading) -> None:
    """Every sequence has ended: at its length, since the simulated engine's answers never end sooner by themselves."""
    if len(found) != plan.ask.sequences:
        raise _Wrong(f"{len(found)} sequences instead of {plan.ask.sequences}")
    if any(one.reason is None for one in found) and not any(id in answer.body for id in _VLLM_IDS):
        raise _Wrong(f"a sequence without an end: {[one.reason for one in found]}")
    if all(one.reason in ("length", "max_tokens", "max_output_tokens") for one in found):
        # Without a seed, samples of one request differ on one engine, and are alike where each is a request of its own.
        if plan.ask.samples == 1:
            reading.texts = tuple(one.text for one in found)
            reading.prompts = tuple(one.prompt for one in found if one.prompt)
    else:
        reading.kind = Kind.STOPPED


def _native(body: Any) -> list[_Sequence]:
    found = []
    for item in body if isinstance(body, list) else [body]:
        meta = item["meta_info"]
        if len(item["output_ids"]) != meta["completion_tokens"]:
            raise _Wrong("output_ids and completion_tokens differ")
        reason = meta["finish_reason"]
        told = _told(meta.get("input_token_logprobs"))
        found.append(_Sequence(item["text"], meta["completion_tokens"], reason and reason["type"], told))
    return found


def _choices(body: Any) -> list[_Sequence]:
    rows = sorted(body["choices"], key=lambda row: int(row["index"]))
    return [
        _Sequence(
            row["message"]["content"] or "" if "message" in row else row["text"],
            0,
            row["finish_reason"],
            _told(row.get("prompt_logprobs") or row.get("logprobs")),
        )
        for row in rows
    ]


def _told(of_prompt: Any) -> str:
    return json.dumps(of_prompt) if of_prompt else ""


def _response(body: Any) -> list[_Sequence]:
    if body["status"] not in ("completed", "incomplete", "failed", "cancelled"):
        raise _Wrong(f"a response in the state {body['status']!r}")
    text = "".join(part["text"] for item in body["output"] for part in item.get("content") or ())
    return [_Sequence(text, 0, (body.get("incomplete_details") or {}).get("reason") or body["status"])]


def _message(body: Any) -> list[_Sequence]:
    return [_Sequence("".join(part["text"] for part in body["content"]), 0, body["stop_reason"])]


_UNARY: dict[Dialect, Callable[[Any], list[_Sequence]]] = {
    Dialect.NATIVE: _native,
    Dialect.CHAT: _choices,
    Dialect.COMPLETIONS: _choices,
    Dialect.RESPONSES: _response,
    Dialect.MESSAGES: _message,
}


def read_alone(plan: Plan, answer: Answer) -> Reading:
    """The document with which an engine has answered without a gateway.

    Raises:
        ValueError: It is none.
    """
    reading = Reading()
    try:
        _conclude(plan, answer, _UNARY[plan.route.dialect](answer.json()), reading)
    except (_Wrong, KeyError, TypeError) as exc:
        raise ValueError(f"{answer.status} {answer.body[:300]!r}: {exc!r}") from exc
    return reading


# Streams.


def _read_stream(plan: Plan, answer: Answer, reading: Reading) -> None:
    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
        raise _Wrong(f"a stream of type {answer.headers.get('content-type')!r}")
    if not answer.body.endswith(b"\n\n"):
        raise _Wrong("the last event is not whole")
    named = LAST_EVENTS.get(plan.route.dialect)
    found = [(name_of(event), data_of(event)) for event in events(answer.body)]
    found = [(name, data) for name, data in found if data]
    data = [payload for _, payload in found]
    if named is None and (data[-1] != DONE_DATA or data.count(DONE_DATA) != 1):
        raise _Wrong("not ended by one [DONE]")
    if named is not None and (found[-1][0] not in named or sum(name in named for name, _ in found) != 1):
        raise _Wrong("not ended by the route's last event")
    payloads = [json.loads(one) for one in data if one != DONE_DATA and _GARBAGE not in one]
    errors = [one for one in payloads if _is_error(one)]
    if errors:
        reading.kind = Kind.ERROR
        if not _is_error(payloads[-1]) or not _message_of(payloads[-1]):
            raise _Wrong("an error event that is not the last, or says nothing")
        return
    payloads = [one for one in payloads if not str(one.get("text", "")).startswith(_HUGE)]
    if not payloads:  # [DONE] alone: stopped before the first token
        reading.kind = Kind.STOPPED
        return
    _conclude(plan, answer, _STREAMS[plan.route.dialect](payloads), reading)


def _is_error(payload: Any) -> bool:
    return bool(payload.get("error")) or payload.get("type") in ("error", "response.failed")


def _message_of(payload: Any) -> Any:
    error = payload.get("error") or payload.get("response", payload)
    return error.get("message") or error.get("status") if isinstance(error, dict) else error


def _native_stream(payloads: list[Any]) -> list[_Sequence]:
    found: dict[int, _Sequence] = {}
    for item in payloads:
        one = found.setdefault(item.get("index", 0), _Sequence())
        ids, meta = item["output_ids"], item["meta_info"]
        is_everything = len(ids) == meta["completion_tokens"]
        one.text = item["text"] if is_everything else one.text + item["text"]
        one.tokens = len(ids) if is_everything else one.tokens + len(ids)
        if one.tokens != meta["completion_tokens"]:
            raise _Wrong(f"{one.tokens} tokens came of {meta['completion_tokens']}")
        one.reason = meta["finish_reason"] and meta["finish_reason"]["type"]
        one.prompt = _told(meta.get("input_token_logprobs")) or one.prompt
    return [found[index] for index in sorted(found)]


def _choice_stream(payloads: list[Any]) -> list[_Sequence]:
    found: dict[int, _Sequence] = {}
    for row in (row for payload in payloads for row in payload["choices"]):
        one = found.setdefault(row["index"], _Sequence())
        one.text += (row["delta"].get("content") if "delta" in row else row["text"]) or ""
        one.reason = row["finish_reason"] or one.reason
    return [found[index] for index in sorted(found)]


def _response_stream(payloads: list[Any]) -> list[_Sequence]:
    (ended,) = _response(payloads[-1]["response"])
    deltas = "".join(one["delta"] for one in payloads if one["type"] == "response.output_text.delta")
    if deltas != ended.text:
        raise _Wrong(f"the pieces are {deltas!r}, the whole is {ended.text!r}")
    return [ended]


def _message_stream(payloads: list[Any]) -> list[_Sequence]:
    one = _Sequence()
    for payload in payloads:
        if payload["type"] == "content_block_delta":
            one.text += payload["delta"]["text"]
        elif payload["type"] == "message_delta":
            one.reason = payload["delta"]["stop_reason"]
    return [one]


_STREAMS: dict[Dialect, Callable[[list[Any]], list[_Sequence]]] = {
    Dialect.NATIVE: _native_stream,
    Dialect.CHAT: _choice_stream,
    Dialect.COMPLETIONS: _choice_stream,
    Dialect.RESPONSES: _response_stream,
    Dialect.MESSAGES: _message_stream,
}

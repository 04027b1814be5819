"""What the check of real pairs asks for, and what answers must have in common."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.real_engines import Answer, Call

_TOKENS: Final = 24
# Of what is computed in another order.
_NEAR: Final = 0.02
_PROMPT_FIELDS = frozenset({"input_token_logprobs", "input_top_logprobs", "prompt_logprobs", "token_logprobs"})

Body = dict[str, Any]
Request = tuple[str, Body]


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request.

    Attributes:
        is_cancelled: It is one of those that are cancelled.
        is_alone: No pair can serve it.
    """

    name: str
    path: str
    body: Body
    is_cancelled: bool = False
    is_alone: bool = False

    @property
    def is_streamed(self) -> bool:
        """Whether it asks for events."""
        return bool(self.body.get("stream"))

    def longer(self, tokens: int, prompt: list[int]) -> Body:
        """The same kind with so many tokens of output, and another prompt."""
        body = dict(self.body)
        if "sampling_params" in body:
            body["sampling_params"] = {**body["sampling_params"], "max_new_tokens": tokens}
        else:
            body["max_tokens"] = tokens
        if "messages" in body:
            words = " ".join(f"{token}" for token in prompt[: len(prompt) // 4])
            return {**body, "messages": [{"role": "user", "content": words}]}
        if "prompt" in body:
            return {**body, "prompt": prompt}
        is_batch = isinstance(body.pop("text", None), list)
        return {**body, "input_ids": [prompt, prompt[1:], prompt[2:]] if is_batch else prompt}


def cases(*, sglang: bool, model: str) -> list[Case]:
    """Every kind of request, in both stream modes."""
    found = []
    for stream in (False, True):
        kind = "stream" if stream else "unary"
        greedy: Body = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        native: Body = {"stream": stream, "text": "Hello world, how are you", "sampling_params": greedy}
        plain: Body = {"model": model, "stream": stream, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        chat: Body = {**plain, "messages": [{"role": "user", "content": "Say something about the weather"}]}
        text: Body = {**plain, "prompt": "One two three four five"}
        several: Body = {**native, "sampling_params": {**greedy, "n": 2}}
        # vLLM refuses greedy samples; of one seed its samples have one each.
        two: Body = {"n": 2} if sglang else {"n": 2, "temperature": 1, "seed": 7}
        batch = ["Hello world", "how are you", "One two three"]
        found += [
            Case(f"generate, {kind}", "/generate", native, is_cancelled=sglang, is_alone=not sglang),
            Case(f"generate, {kind}, n = 2", "/generate", several, is_alone=not sglang),
            Case(f"chat, {kind}", "/v1/chat/completions", chat, is_cancelled=True),
            Case(f"chat, {kind}, n = 2", "/v1/chat/completions", {**chat, **two}),
            Case(f"completions, {kind}", "/v1/completions", text, is_cancelled=not sglang),
            Case(f"completions, {kind}, n = 2", "/v1/completions", {**text, **two}, is_cancelled=True),
            Case(f"completions, {kind}, batch of 3", "/v1/completions", {**text, "prompt": batch}, is_alone=not sglang),
        ]
        if sglang:
            telling = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
            found += [
                Case(f"generate, {kind}, batch of 3", "/generate", {**native, "text": batch}, is_cancelled=not stream),
                Case(f"generate, {kind}, prompt log-probabilities", "/generate", {**native, **telling}),
                Case(f"completions, {kind}, echo", "/v1/completions", {**text, "echo": True, "logprobs": 2}),
            ]
        elif not stream:
            telling = {"prompt_logprobs": 2}
            found += [
                Case("completions, unary, prompt log-probabilities", "/v1/completions", {**text, **telling}),
                Case("chat, unary, prompt log-probabilities", "/v1/chat/completions", {**chat, **telling}),
            ]
    return found


def differs(case: Case, answer: Answer, alone: Answer) -> str:
    """What of an answer is not as one engine alone has answered; empty if nothing is."""
    if (answer.status, alone.status) != (200, 200):
        return f"status {answer.status}, alone {alone.status}: {(answer if answer.status != 200 else alone).body!r}"
    ours, theirs = _items(case, answer), _items(case, alone)
    if _texts(ours) != _texts(theirs):
        return f"texts {_texts(ours)}, alone {_texts(theirs)}"
    told, wanted = list(_numbers(ours)), list(_numbers(theirs))
    if len(told) != len(wanted) or not all(math.isclose(*two, abs_tol=_NEAR) for two in zip(told, wanted, strict=True)):
        return f"log-probabilities {told[:8]} ({len(told)}), alone {wanted[:8]} ({len(wanted)})"
    return ""


def _items(case: Case, answer: Answer) -> list[Any]:
    items = answer.events() if case.is_streamed else [answer.json()]
    return [one for item in items for one in (item if isinstance(item, list) else [item])]


def _texts(items: list[Any]) -> dict[int, str]:
    """Text and finish reason of each sequence; native streams repeat their text in each event."""
    found: dict[int, str] = {}
    natives = 0
    for item in items:
        if "choices" not in item:
            reason = item["meta_info"]["finish_reason"]
            index = item.get("index", natives if reason else 0)
            natives += bool(reason)
            found[index] = item["text"] + (reason["type"] if reason else "")
            continue
        for choice in item["choices"]:
            part = choice.get("delta") or choice.get("message") or choice
            text = (part.get("content") or part.get("text") or "") + (choice.get("finish_reason") or "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def _numbers(value: Any, *, is_told: bool = False) -> Iterator[float]:
    """All numbers in what tells of log-probabilities of prompts; of a stream's repetitions each."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, is_told=is_told or name in _PROMPT_FIELDS)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, is_told=is_told)
    elif is_told and isinstance(value, int | float):
        yield value


@dataclass(frozen=True, slots=True)
class Legs:
    """One request's legs, as one sends them by hand.

    Attributes:
        prefill: Path and body.
        decode: The same, made from the handoff.
        alone: What a client sends.
    """

    prefill: Request
    decode: Callable[[Any], Request]
    alone: Request


def legs(prompt: list[int], *, sglang: bool, model: str, port: int = 0, room: int = 0) -> Legs:
    """A streamed request for a few tokens.

    Args:
        prompt: Its token ids.
        sglang: For SGLang, else vLLM.
        model: Its name.
        port: Of SGLang's bootstrap server.
        room: Its room there.
    """
    if sglang:
        native: Body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 4}}
        paired = {**native, "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
        return Legs(("/generate", paired), lambda _: ("/generate", paired), ("/generate", native))
    path, body = "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 4, "stream": True}
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    return Legs(
        (path, {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": asked}),
        lambda params: (path, {**body, "kv_transfer_params": params}),
        (path, body),
    )


async def first_output(call: Call) -> float:
    """Read an answer to its end; when its first event came, monotonic seconds."""
    await call.wait_for(b"data: ", 1)
    at = time.monotonic()
    await call.answer()
    return at

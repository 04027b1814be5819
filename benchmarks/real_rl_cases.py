"""What the check of real trainers' requests asks for, and both sides' answers in one form, digit by digit."""

import base64
import json
import struct
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.real_engines import Answer

Body = dict[str, Any]
Form = dict[str, Any]

IDS: Final = [7, *range(100, 139)]
_OTHERS: Final = ([7, 300, 301, 302, 303], [7, *range(500, 570)])
_TOKENS: Final = 16
_TOP: Final = 4
# What vLLM is asked for to tell so many, since the sampled token counts. Asked for fewer it would name others of tokens
# that are equally likely.
_ASKED: Final = _TOP + 1
TOKEN_ROUTE: Final = "/inference/v1/generate"
_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_FLAT: Final = {"return_flat_raw_output_top_logprobs": True}
_FLAT_PROMPT: Final = {"return_flat_raw_top_logprobs": True}
_BASE64: Final = {"return_flat_raw_top_logprobs_b64": True}


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of request.

    Attributes:
        body: What the gateway is asked for.
        direct: What the engine is asked for by itself, in its own words; the answers are one after the other.
        direct_path: Its route, the same as the gateway's if empty.
        top: Likeliest tokens of a position that the client sees.
        chosen: Tokens whose log-probabilities it asks for.
        start: First position of the prompt that it sees, ``None`` for none.
        is_binary: Arrays come in Base64, so that numbers are those of float32.
    """

    name: str
    path: str
    body: Body
    direct: tuple[Body, ...]
    direct_path: str = ""
    top: int = 0
    chosen: tuple[int, ...] = ()
    start: int | None = None
    is_binary: bool = False

    @property
    def is_streamed(self) -> bool:
        """Whether the client asks for events."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True)
class _Kind:
    """A native request, and the same in the words of vLLM's token route."""

    name: str
    more: Body = field(default_factory=dict)
    sampling: Body = field(default_factory=dict)
    theirs: Body = field(default_factory=dict)
    top: int = 0
    chosen: tuple[int, ...] = ()
    start: int | None = None
    is_unary_only: bool = False
    prompts: tuple[list[int], ...] = (IDS,)
    times: int = 1
    has_text: bool = False


_LIKELIEST: Final[Body] = {"return_logprob": True, "top_logprobs_num": _TOP}
_SEEDED: Final[Body] = {"temperature": 1.0, "top_p": 0.9}
_KINDS: Final = (
    _Kind("ids", has_text=True),
    _Kind("batch of 3", {"return_logprob": True}, theirs={"logprobs": 0}, prompts=(IDS, *_OTHERS), has_text=True),
    _Kind("greedy, n = 2", {"return_logprob": True}, {"n": 2}, {"logprobs": 0}, times=2, has_text=True),
    _Kind("seeded, n = 2", _LIKELIEST, {**_SEEDED, "n": 2, "sampling_seed": 5},
          {**_SEEDED, "n": 2, "seed": 5, "logprobs": _ASKED}, top=_TOP),
    _Kind("log-probabilities", {"return_logprob": True}, theirs={"logprobs": 0}, has_text=True),
    _Kind("likeliest tokens", _LIKELIEST, theirs={"logprobs": _ASKED}, top=_TOP),
    _Kind("likeliest tokens of a batch", _LIKELIEST, theirs={"logprobs": _ASKED}, top=_TOP, prompts=(IDS, *_OTHERS)),
    _Kind("chosen tokens", {"return_logprob": True, "token_ids_logprob": [5, 900, 17]},
          theirs={"logprobs": 4, "logprob_token_ids": [5, 900, 17, 6]}, chosen=(5, 900, 17)),
    _Kind("of the prompt", {"return_logprob": True, "logprob_start_len": 3},
          theirs={"logprobs": 0, "prompt_logprobs": 0}, start=3, is_unary_only=True, has_text=True),
    _Kind("likeliest tokens of the prompt", {**_LIKELIEST, "logprob_start_len": 0},
          theirs={"logprobs": _ASKED, "prompt_logprobs": _TOP}, top=_TOP, start=0, is_unary_only=True),
    _Kind("flat arrays", {**_LIKELIEST, **_FLAT}, theirs={"logprobs": _ASKED}, top=_TOP, is_unary_only=True),
    _Kind("flat arrays in Base64", {**_LIKELIEST, **_FLAT, **_BASE64},
          theirs={"logprobs": _ASKED}, top=_TOP, is_unary_only=True),
    _Kind("flat arrays of the prompt", {**_LIKELIEST, **_FLAT_PROMPT, "logprob_start_len": 0},
          theirs={"logprobs": _ASKED, "prompt_logprobs": _TOP}, top=_TOP, start=0, is_unary_only=True),
    _Kind("both flat arrays in Base64", {**_LIKELIEST, **_FLAT, **_FLAT_PROMPT, **_BASE64, "logprob_start_len": 2},
          theirs={"logprobs": _ASKED, "prompt_logprobs": _TOP}, top=_TOP, start=2, is_unary_only=True),
    _Kind("no output", {"return_logprob": True, "logprob_start_len": 0}, {"max_new_tokens": 0},
          {"logprobs": 0, "prompt_logprobs": 0, "max_tokens": 1}, start=0, is_unary_only=True, has_text=True),
)  # fmt: skip


def native_cases(*, sglang: bool, stops: Body) -> list[Case]:
    """Requests of ``/generate``, in both stream modes where there are both.

    Args:
        sglang: For SGLang, whose own answer is the measure; else for vLLM, whose token route is.
        stops: Sampling parameters by name of the condition, at which the output of ``IDS`` ends early.
    """
    kinds = [
        *_KINDS,
        *(_Kind(name, {"return_logprob": True}, one, {**one, "logprobs": 0}, has_text=True)
          for name, one in stops.items()),
    ]  # fmt: skip
    found = []
    for kind in kinds:
        sampling = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, **kind.sampling}
        prompts = list(kind.prompts) if len(kind.prompts) > 1 else kind.prompts[0]
        for stream in (False,) if kind.is_unary_only and not sglang else (False, True):
            if stream and sglang and any("flat" in name for name in kind.more):
                continue  # it has them in unary answers only
            if sglang and "sampling_seed" in kind.sampling:
                continue  # it draws anew unless it was started for that
            body = {"input_ids": prompts, "sampling_params": sampling, "stream": stream, **kind.more}
            found.append(
                Case(
                    f"generate, {'stream' if stream else 'unary'}, {kind.name}",
                    "/generate",
                    body,
                    (body,) if sglang else _token_route(kind),
                    "" if sglang else TOKEN_ROUTE,
                    top=kind.top,
                    chosen=kind.chosen,
                    start=kind.start,
                    is_binary="return_flat_raw_top_logprobs_b64" in kind.more,
                )
            )
    return found


def _token_route(kind: _Kind) -> tuple[Body, ...]:
    params = {"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True, **kind.theirs}
    mode = {"output_mode": "text"} if kind.has_text else {}
    return tuple(
        {"token_ids": ids, "sampling_params": params, **mode} for ids in kind.prompts for _ in range(kind.times)
    )


def openai_cases(*, sglang: bool, model: str) -> list[Case]:
    """Flat arrays on the OpenAI routes; the engine is asked for nested lists."""
    plain: Body = {"model": model, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    chat: Body = {**plain, "messages": [{"role": "user", "content": "Say something about the weather"}]}
    chat |= {"logprobs": True, "top_logprobs": _TOP}
    text: Body = {**plain, "prompt": IDS, "logprobs": _TOP}
    found = []
    kinds: tuple[tuple[str, Body, bool], ...] = (
        ("flat arrays", {}, False),
        ("flat arrays in Base64", _BASE64, True),
        ("flat arrays, seeded", {**_SEEDED, "seed": 5}, False),
    )
    for name, more, binary in kinds:
        if sglang and "seed" in more:
            continue  # as above
        for path, body in ((_CHAT, chat),) if sglang else ((_CHAT, chat), (_COMPLETIONS, text)):
            # SGLang tells no ids in nested lists, so that it is asked for the arrays, as numbers.
            own = {**_FLAT, "return_meta_info": True, "return_flat_raw_top_logprobs_b64": False}
            direct = {**body, **more, **(own if sglang else {"return_tokens_as_token_ids": True})}
            if path == _CHAT and not sglang:
                direct["top_logprobs"] = _ASKED
            case = Case(f"{path[4:]}, {name}", path, {**body, **_FLAT, **more}, (direct,), top=_TOP, is_binary=binary)
            found.append(case)
    return found


def parsed(case: Case, answer: Answer) -> list[Any]:
    """Items of an answer, numbers with a point as they are written; of a stream the last state of each item."""
    if not case.is_streamed or answer.headers.get("content-type", "").startswith("application/json"):
        found = json.loads(answer.body, parse_float=str)
        return found if isinstance(found, list) else [found]
    items: dict[int, Any] = {}
    for part in answer.body.split(b"\n\n"):
        if part.startswith(b"data: {"):
            event = json.loads(part[6:], parse_float=str)
            index = event.pop("index", 0)
            items[index] = _grown(items.get(index), event)
    return [items[index] for index in sorted(items)]


def _grown(before: Any, event: Any) -> Any:
    """An item with one more event, which holds everything so far or what is new, as its length tells."""
    if before is None or len(event["output_ids"]) == event["meta_info"]["completion_tokens"]:
        return event
    meta, known = event["meta_info"], before["meta_info"]
    grown = {name: known[name] + meta[name] for name in meta if name.startswith("output_") and name in known
             and isinstance(meta[name], list)}  # fmt: skip
    event["output_ids"] = before["output_ids"] + event["output_ids"]
    if "text" in event:
        event["text"] = before["text"] + event["text"]
    event["meta_info"] = {**meta, **grown}
    return event


def forms(case: Case, items: list[Any]) -> list[Form]:
    """Answers in one form, whoever gave them."""
    found: list[Form] = []
    for item in items:
        if "output_ids" in item:
            found.append(_native_form(case, item["meta_info"], item["output_ids"], item.get("text")))
        elif case.direct_path == TOKEN_ROUTE:
            found += [_token_form(case, choice, item) for choice in item["choices"]]
        else:
            found += [_choice_form(case, choice) for choice in item["choices"]]
    return found


def _value(case: Case, text: Any) -> Any:
    return struct.unpack("<f", struct.pack("<f", float(text)))[0] if case.is_binary else text


def _native_form(case: Case, meta: Any, ids: list[int], text: str | None) -> Form:
    reason = meta["finish_reason"]
    form: Form = {"ids": ids, "finish": (reason["type"], reason.get("matched")), "text": text}
    for side in ("input", "output"):
        told = meta.get(f"{side}_token_logprobs", [])
        form[side] = [(_value(case, value) if value is not None else None, token) for value, token, _ in told]
        form[f"{side} likeliest"] = _rows(case, meta, f"{side}_top_logprobs")
    form["chosen"] = [
        [(value, token) for value, token, _ in row] for row in meta.get("output_token_ids_logprobs") or []
    ]
    return form


def _rows(case: Case, meta: Any, name: str) -> list[Any]:
    if f"{name}_shape" not in meta:
        nested = meta.get(name) or []
        return [row and [(_value(case, value), token) for value, token, _ in row] for row in nested]
    if f"{name}_val_flat_b64" in meta:
        packed = (base64.b64decode(meta[f"{name}_{part}_flat_b64"]) for part in ("val", "idx"))
        values, tokens = (
            [one for (one,) in struct.iter_unpack(kind, raw)] for kind, raw in zip(("<f", "<i"), packed, strict=True)
        )
    else:
        values, tokens = [_value(case, one) for one in meta[f"{name}_val_flat"]], meta[f"{name}_idx_flat"]
    rows, width = meta[f"{name}_shape"]
    pairs = list(zip(values, tokens, strict=True))
    return [None] * meta[f"{name}_null_prefix"] + [pairs[at * width : (at + 1) * width] for at in range(rows)]


def _token_form(case: Case, choice: Any, answer: Any) -> Form:
    """A choice of vLLM's token route as SGLang would tell it."""
    has_output = case.body["sampling_params"].get("max_new_tokens") != 0
    content = (choice["logprobs"] or {}).get("content") or [] if has_output else []
    ids = choice["token_ids"] if has_output else []
    tops = [sorted(one["top_logprobs"], key=lambda top: top["rank"])[: case.top] for one in content if case.top]
    chosen = [{top["token_id"]: top["logprob"] for top in one["top_logprobs"]} for one in content if case.chosen]
    matched = choice["stop_reason"] if choice["finish_reason"] == "stop" else None
    form: Form = {"ids": ids, "finish": (choice["finish_reason"], matched)}
    form["text"] = (choice["text"] if has_output else "") if has_text(case) else None
    form["output"] = [(_value(case, one["logprob"]), token) for token, one in zip(ids, content, strict=bool(content))]
    form["output likeliest"] = [[(_value(case, t["logprob"]), t["token_id"]) for t in row] for row in tops]
    form["chosen"] = [[(row[token], token) for token in case.chosen] for row in chosen]
    form["input"], form["input likeliest"] = [], []
    if case.start is not None:
        prompt, told = case.direct[0]["token_ids"], answer["prompt_logprobs"]
        form["input"] = [(None, prompt[case.start])]
        form["input likeliest"] = [None] if case.top else []
        for token, likely in list(zip(prompt, told, strict=True))[case.start + 1 :]:
            form["input"].append((_value(case, likely[str(token)]["logprob"]), token))
            if case.top:
                ranked = sorted(likely.items(), key=lambda one: one[1]["rank"])[: case.top]
                form["input likeliest"].append([(_value(case, one["logprob"]), int(name)) for name, one in ranked])
    return form


def has_text(case: Case) -> bool:
    """Whether the engine was asked for text."""
    return "output_mode" in case.direct[0]


def _choice_form(case: Case, choice: Any) -> Form:
    """A choice of an OpenAI route, with flat arrays or with tokens named by their ids."""
    if "meta_info" in choice:
        meta = choice["meta_info"]
        tokens = [(_value(case, value), token) for value, token, _ in meta["output_token_logprobs"]]
        return {"output": tokens, "likeliest": _rows(case, meta, "output_top_logprobs"), "end": choice["finish_reason"]}
    told = choice["logprobs"]
    if "content" in told:
        named = [(one["token"], one["logprob"]) for one in told["content"]]
        rows = [[(top["token"], top["logprob"]) for top in one["top_logprobs"]] for one in told["content"]]
    else:
        named = list(zip(told["tokens"], told["token_logprobs"], strict=True))
        rows = [list(row.items()) for row in told["top_logprobs"]]

    def pair(name: str, value: Any) -> tuple[Any, int]:
        return _value(case, value), int(name.removeprefix("token_id:"))

    # The sampled token comes first, wherever it belongs.
    rows = [sorted(row, key=lambda one: -float(one[1]))[: case.top] for row in rows]
    likeliest = [[pair(*one) for one in row] for row in rows]
    return {"output": [pair(*one) for one in named], "likeliest": likeliest, "end": choice["finish_reason"]}

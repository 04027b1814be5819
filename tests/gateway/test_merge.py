"""Answers for one sample each, merged, against the answers of SGLang to the same requests with ``n``."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import AnswerMalformed
from backends.types import EngineKind
from gateway.answer import unary_verdict
from gateway.merge import merge
from gateway.routes import Dialect
from tests.fakes.replay_engine import captured_answer
from tests.simulator.wire import load_capture, load_vllm_capture

NATIVE, CHAT, COMPLETIONS = Dialect.NATIVE, Dialect.CHAT, Dialect.COMPLETIONS
# Clocks, ids and cache hits differ between any two answers, in type too: null or an object.
VARYING = re.compile(r"_ts$|_time$|_wait$|latency$|throughput$|^id$|^created$|cached_tokens")
KEYS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def body_of(name: str) -> bytes:
    """The body of a captured answer; vLLM's have a folder in their names."""
    answer = captured_answer(load_vllm_capture(name) if "/" in name else load_capture(f"http/{name}"))
    assert answer is not None
    return answer.body


def comparable(value: Any) -> Any:
    """Members in their order, without what differs between any two answers."""
    if isinstance(value, dict):
        return [(name, "varies" if VARYING.search(name) else comparable(one)) for name, one in value.items()]
    return [comparable(one) for one in value] if isinstance(value, list) else value


def shape(value: Any) -> Any:
    """Names and types, in their order."""
    if isinstance(value, dict):
        return [(name, shape(one)) for name, one in value.items()]
    return list(map(shape, value)) if isinstance(value, list) else type(value)


def parsed(body: bytes) -> Any:
    """JSON with the spelling of its numbers."""
    return json.loads(body, parse_float=str, parse_int=str)


def an_object(
    texts: list[str], *, extra: dict[str, Any] | None = None, usage: Any = None, in_choice: dict[str, Any] | None = None
) -> bytes:
    """A made-up answer of chat or completions."""
    choices = [{"index": index, "text": text, **(in_choice or {})} for index, text in enumerate(texts)]
    return json.dumps({"id": texts[0], "choices": choices, "usage": usage, **(extra or {})}).encode()


def counts(prompt: int, completion: int | None, reasoning: int | None = 0, **more: Any) -> dict[str, Any]:
    """A usage as the engine gives it."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + (completion or 0),
        "completion_tokens": completion,
        "prompt_tokens_details": None,
        "reasoning_tokens": reasoning,
        "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
        **more,
    }


# Against captures.


@pytest.mark.parametrize(
    ("dialect", "legs", "batch_size", "whole"),
    [
        pytest.param(NATIVE, ["gen_val_n0", "gen_cached"], None, "gen_n2", id="native"),
        pytest.param(NATIVE, ["gen_batch2", "gen_batch2_rid_list"], 2, "gen_batch2_n2", id="native batch"),
        pytest.param(CHAT, ["chat_unary", "chat_rid"], None, "chat_n2", id="chat"),
        pytest.param(COMPLETIONS, ["comp_unary", "comp_best_of"], None, "comp_n2", id="completions"),
    ],
)
def test_legs_make_the_answer_of_the_engine(
    dialect: Dialect, legs: list[str], batch_size: int | None, whole: str
) -> None:
    merged = merge(dialect, [body_of(name) for name in legs], batch_size=batch_size)
    assert comparable(parsed(merged)) == comparable(parsed(body_of(whole)))


@pytest.mark.parametrize(
    ("name", "count", "batch_size"),
    [
        pytest.param("gen_n2", 2, None, id="one prompt"),
        pytest.param("gen_batch2_n2", 2, 2, id="batch"),
        pytest.param("gen_n2", 1, 2, id="batch with one sample"),
    ],
)
def test_a_native_answer_taken_apart_and_merged_is_the_same_bytes(
    name: str, count: int, batch_size: int | None
) -> None:
    body = body_of(name)
    items = re.split(rb"(?<=\}\}),(?=\{\"text\")", body[1:-1])
    assert len(items) == count * (batch_size or 1)
    legs = [items[choice::count] for choice in range(count)]
    answers = [leg[0] if batch_size is None else b"[%b]" % b",".join(leg) for leg in legs]
    assert merge(NATIVE, answers, batch_size=batch_size) == body


@pytest.mark.parametrize(
    ("dialect", "leg", "whole"), [(CHAT, "chat_unary", "chat_n2"), (COMPLETIONS, "comp_unary", "comp_n2")]
)
def test_two_equal_legs_are_the_engines_answer_byte_for_byte(dialect: Dialect, leg: str, whole: str) -> None:
    one, expected = body_of(leg), body_of(whole)
    merged = merge(dialect, [one, one], batch_size=None)
    head = re.compile(rb'"id":"[0-9a-f]{32}"|"created":\d+')
    assert head.findall(merged) == head.findall(one)
    assert head.sub(b"", merged) == head.sub(b"", expected)


def vllm_leg(whole: bytes, choice: int) -> bytes:
    """The answer that one of two samples would have had of vLLM."""
    answer = json.loads(whole)
    answer["choices"] = [{**answer["choices"][choice], "index": 0}]
    usage = answer["usage"]
    usage["completion_tokens"] //= 2
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    answer["metrics"] = {"speculative_decoding": {}}
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("dialect", "whole"),
    [
        pytest.param(CHAT, "chat/n2", id="chat"),
        pytest.param(COMPLETIONS, "completions/n2", id="completions"),
        pytest.param(COMPLETIONS, "pd/decode-n2", id="completions of a decode worker"),
        pytest.param(NATIVE, "generate/n2", id="tokens"),
    ],
)
def test_an_answer_of_vllm_taken_apart_and_merged_is_the_same_bytes(dialect: Dialect, whole: str) -> None:
    body = body_of(whole)
    legs = [vllm_leg(body, choice) for choice in range(2)]
    assert merge(dialect, legs, engine=EngineKind.VLLM) == body


@pytest.mark.parametrize(
    ("dialect", "leg", "whole"),
    [
        pytest.param(CHAT, "chat/unary", "chat/n2", id="chat"),
        pytest.param(COMPLETIONS, "completions/unary", "completions/n2", id="completions"),
        pytest.param(NATIVE, "generate/unary", "generate/n2", id="tokens"),
    ],
)
def test_two_answers_of_vllm_have_the_shape_of_one(dialect: Dialect, leg: str, whole: str) -> None:
    merged = parsed(merge(dialect, [body_of(leg)] * 2, engine=EngineKind.VLLM))
    assert shape(merged) == shape(parsed(body_of(whole)))


def test_what_vllm_tells_of_the_prompt_is_told_once_or_with_each_choice() -> None:
    chat, completion = body_of("chat/return-token-ids"), body_of("completions/prompt-logprobs")
    merged = json.loads(merge(CHAT, [chat, chat], engine=EngineKind.VLLM))
    assert merged["prompt_token_ids"] == json.loads(chat)["prompt_token_ids"]
    assert [choice["token_ids"] for choice in merged["choices"]] == [json.loads(chat)["choices"][0]["token_ids"]] * 2
    (alone,) = json.loads(completion)["choices"]
    merged = json.loads(merge(COMPLETIONS, [completion, completion], engine=EngineKind.VLLM))
    assert merged["choices"] == [alone, {**alone, "index": 1}]
    assert alone["prompt_logprobs"]


def test_a_batch_of_vllm_has_each_prompts_samples_together() -> None:
    one = body_of("completions/prompt-list-2")
    merged = json.loads(merge(COMPLETIONS, [one, one], batch_size=2, engine=EngineKind.VLLM))
    first, second = json.loads(one)["choices"]
    assert merged["choices"] == [
        {**choice, "index": index} for index, choice in enumerate([first, first, second, second])
    ]
    assert (merged["usage"]["prompt_tokens"], merged["usage"]["completion_tokens"]) == (4, 10)


def test_a_batch_of_completions_has_each_prompts_samples_together() -> None:
    one = body_of("comp_batch")
    merged = json.loads(merge(COMPLETIONS, [one, one, one], batch_size=2))
    first, second = (choice["text"] for choice in json.loads(one)["choices"])
    assert [choice["text"] for choice in merged["choices"]] == [first] * 3 + [second] * 3
    assert [choice["index"] for choice in merged["choices"]] == list(range(6))
    assert merged["usage"] == counts(8, 24)


def test_an_aborted_sample_keeps_its_place_beside_a_whole_one() -> None:
    whole, aborted = body_of("gen_text"), body_of("abort_unary_0")
    merged = merge(NATIVE, [whole, aborted], batch_size=None)
    assert merged == b"[%b,%b]" % (whole, aborted)
    assert str(unary_verdict(merged).outcome) == "aborted"


# Made-up answers.


@pytest.mark.parametrize(
    ("usages", "merged"),
    [
        pytest.param([counts(6, 4), counts(6, 5), counts(6, 0)], counts(6, 9), id="sums"),
        pytest.param([counts(6, 4, 0), counts(6, 5, 3), counts(6, 5, 2)], counts(6, 14, 5), id="reasoning"),
        pytest.param([counts(6, None, None), counts(6, None, None)], counts(6, None, None), id="nulls"),
        pytest.param([counts(6, None), counts(6, 7)], counts(6, 7), id="null beside a count"),
        pytest.param(
            [counts(6, 1, prompt_tokens_details={"cached_tokens": 4}), counts(6, 1, prompt_tokens_details=None)],
            counts(6, 2, prompt_tokens_details={"cached_tokens": 4}),
            id="cached tokens of the first",
        ),
        pytest.param([counts(6, 1, later=2.50), counts(6, 1, later=3)], counts(6, 2, later=2.5), id="unknown counts"),
        pytest.param([{"completion_tokens": 3}, {"completion_tokens": 4}], {"completion_tokens": 7}, id="bare"),
        pytest.param([{"total_tokens": None}, {}], {"total_tokens": 0}, id="null total"),
        pytest.param([None, counts(6, 1)], None, id="none"),
    ],
)
def test_usage_counts_the_prompt_once(usages: list[Any], merged: Any) -> None:
    answers = [an_object(["x"], usage=usage) for usage in usages]
    usage = json.loads(merge(CHAT, answers, batch_size=None))["usage"]
    assert usage == merged
    assert usage is None or list(usage) == list(merged)


@pytest.mark.parametrize(
    ("extensions", "merged"),
    [
        pytest.param(
            [{"routed_experts": "A", "zz": 1}, {"routed_experts": "B"}],
            {"routed_experts": "A", "spec_tokens_details": [], "zz": 1},
            id="first",
        ),
        pytest.param([None, {"routed_experts": "B"}], None, id="not of the first"),
        pytest.param(
            [{"spec_tokens_details": {"a": 1}}, {"spec_tokens_details": {"a": 2}}],
            {"spec_tokens_details": [{"a": 1}, {"a": 2}]},
            id="speculation of each",
        ),
        pytest.param([None, {"spec_tokens_details": {"a": 2}}], {"spec_tokens_details": [{"a": 2}]}, id="of one alone"),
        pytest.param(
            [
                {"cached_tokens_details": {"device": 4}, "input_ids": [1, 2], "output_ids": [[3]]},
                {"input_ids": [1, 2], "output_ids": [[4, 5]]},
            ],
            {
                "cached_tokens_details": {"device": 4},
                "spec_tokens_details": [],
                "input_ids": [1, 2],
                "output_ids": [[3], [4, 5]],
            },
            id="ids of each",
        ),
    ],
)
def test_the_extension_holds_what_the_engine_tells_of_each_sample(extensions: list[Any], merged: Any) -> None:
    answers = [an_object(["x"], extra={"sglext": one, "end": 1} if one else {"end": 1}) for one in extensions]
    answer = json.loads(merge(CHAT, answers, batch_size=None))
    assert answer.get("sglext") == merged
    assert merged is None or list(answer["sglext"]) == list(merged)
    assert answer["end"] == 1


GOOD = an_object(["x"], usage=counts(6, 1), extra={"sglext": {"output_ids": [[1]]}})


@pytest.mark.parametrize(
    ("dialect", "second", "batch_size"),
    [
        pytest.param(NATIVE, b"", None, id="nothing"),
        pytest.param(NATIVE, b'{"meta_info":{}', None, id="cut"),
        pytest.param(NATIVE, b"[" * 100_000, None, id="deep"),
        pytest.param(NATIVE, b'[{"meta_info":{}}]', None, id="a list for one prompt"),
        pytest.param(NATIVE, b'{"error":{"message":"no"}}', None, id="an error"),
        pytest.param(NATIVE, b'{"meta_info":{}}', 1, id="an object for a batch"),
        pytest.param(NATIVE, b'[{"meta_info":{}}]', 2, id="an item too few"),
        pytest.param(NATIVE, b'[{"meta_info":{}},1]', 2, id="an item of another kind"),
        pytest.param(CHAT, b'{"id":"x"}', None, id="no choices"),
        pytest.param(CHAT, b'{"choices":{}}', None, id="choices of another kind"),
        pytest.param(CHAT, b'{"choices":[]}', None, id="no choice"),
        pytest.param(CHAT, b'{"choices":[{"text":"x"}]}', None, id="no index"),
        pytest.param(CHAT, b'{"choices":[{"index":1}]}', None, id="another index"),
        pytest.param(COMPLETIONS, b'{"choices":[{"index":0},{"index":1}]}', 1, id="a choice too many"),
        pytest.param(CHAT, an_object(["x"]), None, id="no usage"),
        pytest.param(CHAT, an_object(["x"], usage={"completion_tokens": 1.5}), None, id="no count"),
        pytest.param(CHAT, an_object(["x"], usage={"completion_tokens": -1}), None, id="below nothing"),
        pytest.param(CHAT, an_object(["x"], usage=counts(6, 1)), None, id="no ids"),
        pytest.param(
            CHAT,
            an_object(["x"], usage=counts(6, 1), extra={"sglext": {"output_ids": [[1], [2]]}}),
            None,
            id="ids of two samples",
        ),
    ],
)
def test_other_shapes_are_refused(dialect: Dialect, second: bytes, batch_size: int | None) -> None:
    first = GOOD
    if dialect is NATIVE:
        first = b'{"meta_info":{}}' if batch_size is None else b"[%b]" % b",".join([b'{"meta_info":{}}'] * batch_size)
    merge(dialect, [first, first], batch_size=batch_size)
    with pytest.raises(AnswerMalformed, match="one of several samples"):
        merge(dialect, [first, second], batch_size=batch_size)


@given(
    batch_size=st.none() | st.integers(1, 4),
    count=st.integers(1, 5),
    extra=st.dictionaries(KEYS, VALUES, max_size=4),
    in_choice=st.dictionaries(KEYS, VALUES, max_size=4),
    completion=st.integers(0, 1000),
)
def test_order_usage_and_unknown_fields(
    batch_size: int | None, count: int, extra: dict[str, Any], in_choice: dict[str, Any], completion: int
) -> None:
    ours = {"id", "choices", "usage", "sglext", "metrics", "index", "text"}
    extra, in_choice = ({k: v for k, v in fields.items() if k not in ours} for fields in (extra, in_choice))
    prompts = range(batch_size or 1)
    answers = [
        an_object(
            [f"{prompt}-{choice}" for prompt in prompts], extra=extra, usage=counts(6, completion), in_choice=in_choice
        )
        for choice in range(count)
    ]
    merged = json.loads(merge(COMPLETIONS, answers, batch_size=batch_size))
    expected = [f"{prompt}-{choice}" for prompt in prompts for choice in range(count)]
    assert merged == {
        "id": "0-0",
        "choices": [{"index": index, "text": text, **in_choice} for index, text in enumerate(expected)],
        "usage": counts(6, completion * count),
        **extra,
    }
    assert list(merged) == ["id", "choices", "usage", *extra]


def test_numbers_and_escapes_keep_their_spelling() -> None:
    choice = b'"x":[ 1.50, "\\u00e9" ]}'
    answer = b'{"a":1.0E+2,"choices":[{"index":0,%b],"z":12345678901234567890123}' % choice
    merged = b'{"a":1.0E+2,"choices":[{"index":0,%b,{"index":1,%b],"z":12345678901234567890123}' % (choice, choice)
    assert merge(CHAT, [answer, answer], batch_size=None) == merged

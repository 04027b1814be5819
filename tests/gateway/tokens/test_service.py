"""Token ids of requests: what is known, what is not, and that nobody waits for long."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from blockbuster import BlockBuster
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.json_body import JsonBody
from backends.types import EngineKind
from gateway.routes import ROUTES
from gateway.tokens.chat import ChatPrompt
from gateway.tokens.files import load_tokenizer
from gateway.tokens.service import MAX_BODY_BYTES, PromptTokenizers
from gateway.tokens.template import Budget, ChatTemplate
from tests.conftest import TIME_SCALE
from tests.fakes.running import until
from tests.gateway.tokens.tiny import CHAT, TOKENIZERS, ids_of, json_body, listed

SGLANG, VLLM = EngineKind
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}]}]


class _Waiting(ChatTemplate):
    """Renders once its gate is open."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.gate = threading.Event()

    def render(self, prompt: ChatPrompt, special_tokens: Mapping[str, str], budget: Budget) -> str:
        assert self.gate.wait(20 * TIME_SCALE)
        return super().render(prompt, special_tokens, budget)


def _with_template(template: ChatTemplate, **options: Any) -> PromptTokenizers:
    one = load_tokenizer("tiny", TOKENIZERS / "vllm-tiny")
    return PromptTokenizers([dataclasses.replace(one, templates={"default": template})], **options)


@pytest.mark.parametrize(
    ("engine", "path", "body", "expected"),
    [
        pytest.param(SGLANG, "/generate", {"text": "Hello"}, [[352]], id="text"),
        pytest.param(SGLANG, "/generate", {"text": ["Hello", "Paris is"]}, [[352], [335, 314]], id="batch"),
        pytest.param(SGLANG, "/generate", {"text": "", "input_ids": None}, [[]], id="no text at all"),
        pytest.param(SGLANG, "/v1/completions", {"prompt": "Hello"}, [[352]], id="completions of SGLang"),
        pytest.param(VLLM, "/v1/completions", {"prompt": ["Hello", ","]}, [[784], [15]], id="completions of vLLM"),
        pytest.param(SGLANG, "/generate", {"text": "Hello", "input_ids": [1]}, None, id="ids beside text"),
        pytest.param(SGLANG, "/generate", {"input_ids": [1]}, None, id="ids"),
        pytest.param(SGLANG, "/generate", {"text": "Hello", "image_data": "x"}, None, id="image"),
        pytest.param(SGLANG, "/generate", {"text": "Hello", "session_params": {"id": "x"}}, None, id="session"),
        pytest.param(SGLANG, "/generate", {"text": ["Hello", 1]}, None, id="mixed batch"),
        pytest.param(SGLANG, "/generate", {"text": []}, None, id="empty batch"),
        pytest.param(VLLM, "/generate", {"text": "Hello"}, None, id="native route of another engine"),
        pytest.param(VLLM, "/v1/completions", {"prompt": [1, 2]}, None, id="prompt of ids"),
        pytest.param(VLLM, "/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 1}, None, id="truncated"),
        pytest.param(VLLM, "/v1/completions", {"prompt": "a", "add_special_tokens": "no"}, None, id="no flag"),
        pytest.param(SGLANG, "/v1/completions", {"prompt": "a", "suffix": "b"}, None, id="suffix"),
        pytest.param(SGLANG, "/v1/embeddings", {"input": "a"}, None, id="other route"),
        pytest.param(SGLANG, CHAT, {"messages": IMAGE}, None, id="image in a chat of SGLang"),
        pytest.param(VLLM, CHAT, {"messages": IMAGE}, None, id="image in a chat of vLLM"),
        pytest.param(SGLANG, CHAT, {"messages": HELLO, "input_ids": [1]}, None, id="ids beside messages"),
        pytest.param(VLLM, CHAT, {"messages": HELLO, "chat_template": "x"}, None, id="template of a request"),
        pytest.param(
            SGLANG, CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, None, id="hidden"
        ),
        pytest.param(
            VLLM, CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, None, id="hidden messages"
        ),
        pytest.param(VLLM, CHAT, {"messages": []}, None, id="no messages"),
        pytest.param(SGLANG, CHAT, {"messages": HELLO, "max_tokens": 2**70, "n": 1}, ..., id="unread field"),
        pytest.param(SGLANG, CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": 2**70}}, ..., id="huge number"),
    ],
)  # fmt: skip
async def test_what_is_known(
    tokenizers: PromptTokenizers, engine: EngineKind, path: str, body: dict[str, Any], expected: object
) -> None:
    found = await ids_of(tokenizers, engine, path, body)
    assert found == expected if expected is not ... else found is not None


async def test_names_of_models(tokenizers: PromptTokenizers) -> None:
    body = json_body({"text": "Hello"})
    for model in ("model", "model:adapter"):
        found = await tokenizers.token_ids(model, SGLANG, ROUTES["/generate"], body)
        assert found is not None
        assert (found.model, found.count, list(map(listed, found.prompts))) == ("model", 1, [[352]])
        assert (tokenizers.knows(model), tokenizers.vocab_size(model)) == (True, 1024)
    assert await tokenizers.token_ids("other", SGLANG, ROUTES["/generate"], body) is None
    assert (tokenizers.knows("other"), tokenizers.vocab_size("other")) == (False, None)


async def test_the_loop_is_not_blocked(blockbuster: BlockBuster, tokenizers: PromptTokenizers) -> None:
    assert await ids_of(tokenizers, VLLM, CHAT, {"messages": HELLO}) is not None


async def test_engines_with_code_of_their_own_are_not_guessed() -> None:
    one = load_tokenizer("tiny", TOKENIZERS / "vllm-tiny")
    tokenizers = PromptTokenizers([dataclasses.replace(one, own_code=frozenset({VLLM}))], time_limit_s=20 * TIME_SCALE)
    assert await ids_of(tokenizers, VLLM, CHAT, {"messages": HELLO}) is None
    assert await ids_of(tokenizers, VLLM, "/v1/completions", {"prompt": "Hello"}) == [[784]]
    tokenizers.close()


async def test_a_loop_without_end_is_not_waited_for() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizers = _with_template(ChatTemplate(endless), time_limit_s=0.1)
    async with asyncio.timeout(20 * TIME_SCALE):
        assert await ids_of(tokenizers, VLLM, CHAT, {"messages": HELLO}) is None
    await until(lambda: tokenizers.pending == 0, "the thread has given up too")
    tokenizers.close()


async def test_no_more_than_a_few_are_taken() -> None:
    template = _Waiting("a")
    tokenizers = _with_template(template, time_limit_s=20 * TIME_SCALE, threads=1, max_pending=2)
    body = {"messages": HELLO}
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ids_of(tokenizers, VLLM, CHAT, body))
        second = group.create_task(ids_of(tokenizers, VLLM, CHAT, body))
        await until(lambda: tokenizers.pending == 2, "both are taken")
        assert await ids_of(tokenizers, VLLM, CHAT, body) is None
        second.cancel()
        await until(lambda: tokenizers.pending == 1, "what waits for a thread leaves at once")
        third = group.create_task(ids_of(tokenizers, VLLM, CHAT, body))
        await until(lambda: tokenizers.pending == 2, "there is room again")
        template.gate.set()
    assert second.cancelled()
    assert first.result() == third.result()
    assert first.result() is not None
    assert tokenizers.pending == 0
    tokenizers.close()


async def test_cancelled_work_ends_unseen() -> None:
    template = _Waiting("a")
    tokenizers = _with_template(template, time_limit_s=20 * TIME_SCALE, threads=1)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ids_of(tokenizers, VLLM, CHAT, {"messages": HELLO}))
        await until(lambda: tokenizers.pending == 1, "it is taken")
        task.cancel()
    assert tokenizers.pending == 1
    template.gate.set()
    await until(lambda: tokenizers.pending == 0, "the thread is done")
    tokenizers.close()
    assert await ids_of(tokenizers, VLLM, CHAT, {"messages": HELLO}) is None


async def test_long_bodies_are_not_taken(tokenizers: PromptTokenizers) -> None:
    assert await ids_of(tokenizers, VLLM, "/v1/completions", {"prompt": "a" * MAX_BODY_BYTES}) is None
    assert await ids_of(tokenizers, VLLM, "/v1/completions", {"prompt": ["a " * 300_000] * 2}) is None


async def test_field_case_131_the_loop_goes_on_meanwhile(tokenizers: PromptTokenizers) -> None:
    loop = asyncio.get_running_loop()
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        handle[0] = loop.call_later(0.001, turn)

    handle = [loop.call_soon(turn)]
    found = await ids_of(tokenizers, VLLM, "/v1/completions", {"prompt": "The quick brown fox. " * 20_000})
    handle[0].cancel()
    assert found is not None
    assert turns > 3


_scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
_names = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "function",
        "name",
        "arguments",
        "tool_calls",
        "id",
        "user",
        "assistant",
        "tool",
    ]
)
_keys = st.one_of(_names, st.text(max_size=4))
_values = st.recursive(
    st.one_of(_scalars, _names),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_keys, inner, max_size=4)),
    max_leaves=12,
)
_message = st.fixed_dictionaries(
    {"role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool", "developer"]), _values)},
    optional=dict.fromkeys(("content", "tool_calls", "name", "reasoning_content", "tools", "tool_call_id"), _values),
)
_bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.one_of(st.lists(_message, max_size=3), _values),
        **dict.fromkeys(("text", "prompt", "tools", "tool_choice", "chat_template_kwargs", "documents"), _values),
        **dict.fromkeys(("reasoning_effort", "continue_final_message", "add_generation_prompt"), _values),
    },
)
_property = PromptTokenizers(
    [
        dataclasses.replace(load_tokenizer(model, TOKENIZERS / name), templates={"default": ChatTemplate(source)})
        for source in [(TOKENIZERS / "templates" / "parts.jinja").read_text()]
        for model, name in (("model", "sglang-tiny"), ("tiny", "vllm-tiny"))
    ],
    threads=1,
)


@given(body=_bodies, engine=st.sampled_from(EngineKind), path=st.sampled_from(["/generate", "/v1/completions", CHAT]))
@settings(max_examples=150)
def test_nothing_in_a_request_raises(body: dict[str, Any], engine: EngineKind, path: str) -> None:
    raw = json.dumps(body).replace("NaN", "1").replace("-Infinity", "2").replace("Infinity", "3")
    found = asyncio.run(ids_of(_property, engine, path, JsonBody.parse(raw.encode())))
    assert found is None or all(0 <= one < 1024 for ids in found for one in ids)


@pytest.mark.parametrize("raw", [b'{"text":"\xff"}', b'{"text":"a","input_ids":1e999}'])
async def test_odd_bytes_are_not_known(tokenizers: PromptTokenizers, raw: bytes) -> None:
    assert await ids_of(tokenizers, SGLANG, "/generate", JsonBody.parse(raw)) is None

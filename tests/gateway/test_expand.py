"""Requests for several samples as requests for one each: which can be, what is sent, and whose ids come back."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sglang.backend import SGLangBackend
from backends.types import EngineKind
from backends.upstream.h1 import H1Client
from gateway.expand import (
    MAX_LEGS,
    choice_changes,
    choice_ids,
    expands,
    pair_choice_changes,
    pair_expands,
    pair_obstacle,
)
from gateway.routes import ROUTES, Dialect, Route
from tests.gateway.envelopes import CHAT, COMPLETIONS, NATIVE, parsed

SGLANG, VLLM = EngineKind.SGLANG, EngineKind.VLLM
TOKENS = Route("/inference/v1/generate", Dialect.NATIVE)
MOST, LEAST = 2**63 - 1, -(2**63)
CHAT_BODY: dict[str, Any] = {"messages": [], "n": 2}
BATCH: dict[str, Any] = {"text": ["a", "b"], "sampling_params": {"n": 2}}


def native(**sampling: Any) -> dict[str, Any]:
    """A request for two samples of one prompt."""
    return {"text": "a", "sampling_params": {"n": 2, **sampling}}


def expanded(
    path: str,
    body: dict[str, Any] | bytes,
    engine: EngineKind = EngineKind.SGLANG,
    *,
    is_streamed: bool = False,
    native_n: bool = False,
) -> bool:
    """What ``expands`` says of a request."""
    return expands(ROUTES[path], engine, parsed(body, path=path), is_streamed=is_streamed, native_n=native_n)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(NATIVE, native(), id="one prompt"),
        pytest.param(NATIVE, native(temperature=1.0, sampling_seed=MOST, beam_width=1, stop=["x"]), id="sampling"),
        pytest.param(NATIVE, native(sampling_seed=None, beam_width=None), id="nulls"),
        pytest.param(NATIVE, {"input_ids": [1, 2], "sampling_params": {"n": MAX_LEGS}}, id="the most"),
        pytest.param(NATIVE, BATCH, id="batch"),
        pytest.param(NATIVE, {**BATCH, "text": ["a"]}, id="batch of one"),
        pytest.param(NATIVE, {**BATCH, "sampling_params": [{"n": 2}, {"n": 2, "top_k": 1}]}, id="listed sampling"),
        pytest.param(NATIVE, {**BATCH, "lora_path": ["x", None], "extra_key": ["a", "b"]}, id="values for each item"),
        pytest.param(NATIVE, {**BATCH, "image_data": [["u", "v"], ["w"]]}, id="images for each item"),
        pytest.param(NATIVE, {**native(), "image_data": ["u"], "token_ids_logprob": [1, 2]}, id="lists for all"),
        pytest.param(NATIVE, {**native(), "stream": False, "session_params": None}, id="not asked for"),
        pytest.param(CHAT, {**CHAT_BODY, "seed": -7, "logprobs": True, "tools": [{}]}, id="chat"),
        pytest.param(CHAT, {**CHAT_BODY, "return_spec_tokens_details": True}, id="chat with speculation"),
        pytest.param(COMPLETIONS, {"prompt": "a", "n": 3, "echo": True, "logprobs": 1}, id="echo"),
        pytest.param(COMPLETIONS, {"prompt": ["a", "b"], "n": 2}, id="batch of completions"),
    ],
)
def test_what_is_expanded(path: str, body: dict[str, Any]) -> None:
    assert expanded(path, body)
    assert not expanded(path, body, EngineKind.VLLM)
    assert not expanded(path, body, is_streamed=True)
    assert not expanded(path, body, native_n=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(NATIVE, native(n=1), id="one sample"),
        pytest.param(NATIVE, {"text": "a"}, id="no n"),
        pytest.param(NATIVE, native(n=MAX_LEGS + 1), id="too many"),
        pytest.param(NATIVE, native(n="2"), id="n as text"),
        pytest.param(NATIVE, native(n=2.0), id="n as fraction"),
        pytest.param(CHAT, {"messages": [], "n": "2"}, id="chat n as text"),
        pytest.param(CHAT, {"messages": [], "n": 2.0}, id="chat n as fraction"),
        pytest.param(NATIVE, b'{"text":"a","sampling_params":{"n":3,"n":2}}', id="n twice"),
        pytest.param(NATIVE, native(sampling_seed=1.5), id="seed as fraction"),
        pytest.param(NATIVE, native(sampling_seed=MOST + 1), id="seed too large"),
        pytest.param(NATIVE, native(sampling_seed=LEAST - 1), id="seed too small"),
        pytest.param(NATIVE, native(sampling_seed=10**30), id="seed without end"),
        pytest.param(CHAT, {**CHAT_BODY, "seed": "1"}, id="seed as text"),
        pytest.param(NATIVE, native(beam_width=4), id="beam search"),
        pytest.param(NATIVE, native(beam_width="4"), id="beam search as text"),
        pytest.param(COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 4}, id="best of"),
        pytest.param(COMPLETIONS, {"prompt": "a", "n": 2, "use_beam_search": True}, id="use beam search"),
        pytest.param(NATIVE, {**native(), "session_params": {"id": "s"}}, id="session"),
        pytest.param(CHAT, {**CHAT_BODY, "session_id": "s"}, id="session id"),
        pytest.param(NATIVE, {**native(), "background": True}, id="background"),
        pytest.param(NATIVE, {**BATCH, "sampling_params": [{"n": 2}, {"n": 3}]}, id="different n"),
        pytest.param(NATIVE, {**BATCH, "sampling_params": [{"n": 2}, {}]}, id="n for one item only"),
        pytest.param(NATIVE, {"text": "a", "sampling_params": [{"n": 2}]}, id="listed sampling of one prompt"),
        pytest.param(NATIVE, {**BATCH, "return_logprob": [True, False]}, id="refused beside n"),
        pytest.param(NATIVE, {**BATCH, "token_ids_logprob": [[1], [2]]}, id="token ids refused beside n"),
        pytest.param(NATIVE, {**native(), "lora_path": ["x"]}, id="an item's value for one prompt"),
        pytest.param(NATIVE, {**native(), "image_data": [["u", "v"]]}, id="an item's images for one prompt"),
        pytest.param(
            COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "return_spec_tokens_details": True}, id="batch's speculation"
        ),
        pytest.param("/v1/responses", {"input": "a", "n": 2}, id="responses"),
    ],
)
def test_what_stays_one_request(path: str, body: dict[str, Any] | bytes) -> None:
    assert not expanded(path, body)


@pytest.mark.parametrize(
    ("path", "raw", "sent"),
    [
        pytest.param(
            NATIVE,
            b'{"text":"a","sampling_params":{"temperature":1.0e0,"n":3,"x":{ "y" : [1,  2.50] }},"top":1E2}',
            b'{"text":"a","sampling_params":{"temperature":1.0e0,"n":1,"x":{ "y" : [1,  2.50] }},"top":1E2}',
            id="all else as it came",
        ),
        pytest.param(
            NATIVE,
            b'{"text":"a","sampling_params":{"sampling_seed":40,"n":3}}',
            b'{"text":"a","sampling_params":{"sampling_seed":42,"n":1}}',
            id="seed",
        ),
        pytest.param(
            NATIVE,
            b'{"text":["a","b"],"sampling_params":[{"n":3,"sampling_seed":-1},{"n":3,"sampling_seed":null}]}',
            b'{"text":["a","b"],"sampling_params":[{"n":1,"sampling_seed":1},{"n":1,"sampling_seed":null}]}',
            id="listed sampling",
        ),
        pytest.param(
            CHAT,
            b'{"seed":9223372036854775807,"n":3,"messages":[],"temperature":0.70}',
            b'{"seed":-9223372036854775807,"n":1,"messages":[],"temperature":0.70}',
            id="behind the largest seed",
        ),
        pytest.param(COMPLETIONS, b'{"prompt":"a","n":3}', b'{"prompt":"a","n":1}', id="no seed"),
    ],
)
def test_what_the_third_leg_sends(path: str, raw: bytes, sent: bytes) -> None:
    body = parsed(raw, path=path).body
    assert expanded(path, raw)
    assert b"".join(body.with_fields(choice_changes(ROUTES[path], body, 2))) == sent


@given(seed=st.integers(LEAST, MOST), count=st.integers(2, MAX_LEGS))
def test_seeds_are_different_and_the_engine_takes_them(seed: int, count: int) -> None:
    body = parsed(native(sampling_seed=seed, n=count)).body
    sent = [choice_changes(ROUTES[NATIVE], body, choice)["sampling_params"] for choice in range(count)]
    seeds = [json.loads(text)["sampling_seed"] for text in sent]
    assert seeds[0] == seed
    assert len(set(seeds)) == count
    assert all(LEAST <= one <= MOST for one in seeds)
    assert all((later - seed - choice) % 2**64 == 0 for choice, later in enumerate(seeds))


@pytest.mark.parametrize(
    ("path", "batch_size", "public"),
    [
        pytest.param(NATIVE, None, ["R_1"], id="one prompt"),
        pytest.param(NATIVE, 1, ["R_1"], id="batch of one"),
        pytest.param(NATIVE, 3, ["R_1", "R_3", "R_5"], id="batch"),
        pytest.param(CHAT, None, ["R"], id="chat"),
        pytest.param(COMPLETIONS, None, ["R"], id="completion"),
        pytest.param(COMPLETIONS, 1, ["R"], id="batch of one completion"),
        pytest.param(COMPLETIONS, 3, ["R", "R", "R"], id="batch of completions"),
    ],
)
async def test_the_second_of_two_legs_names_its_samples(path: str, batch_size: int | None, public: list[str]) -> None:
    client = H1Client()
    backend = SGLangBackend(client)
    await client.aclose()  # nothing is sent here
    ids = backend.engine_ids(path, "0123456789abcdef" * 2, batch_size=batch_size, samples=1)
    assert len(ids.abortable) == len(public)
    rewriting = choice_ids(ids, "R", batch_size=batch_size, choice=1, count=2, has_one_id=path != NATIVE)
    answer = b",".join(b'{"id":"%b"}' % one.encode() for one in ids.sent)
    assert rewriting.apply(answer) == b",".join(b'{"id":"%b"}' % one.encode() for one in public)


# Over prefill and decode workers.


def obstacle(path: str, body: dict[str, Any] | bytes, engine: EngineKind) -> str | None:
    """What stands in the way of a request, which is told whenever it is not taken apart."""
    route, envelope = ROUTES.get(path, TOKENS), parsed(body, path=path if path in ROUTES else NATIVE)
    found = pair_obstacle(route, engine, envelope)
    assert pair_expands(route, engine, envelope) == (found is None and envelope.samples > 1)
    return found


@pytest.mark.parametrize(
    ("path", "body", "engine"),
    [
        pytest.param(NATIVE, {**native(sampling_seed=7), "stream": True}, SGLANG, id="native stream"),
        pytest.param(NATIVE, {**BATCH, "lora_path": ["x", None]}, SGLANG, id="batch"),
        pytest.param(CHAT, {**CHAT_BODY, "stream": True, "temperature": 0}, SGLANG, id="sglang greedy"),
        pytest.param(CHAT, {**CHAT_BODY, "n": "2"}, SGLANG, id="n as text"),
        pytest.param(CHAT, {**CHAT_BODY, "n": 2.0}, VLLM, id="n as fraction"),
        pytest.param(CHAT, {**CHAT_BODY, "stream": True, "seed": -1}, VLLM, id="vllm chat"),
        pytest.param(CHAT, {**CHAT_BODY, "seed": -3, "session_id": "s", "background": True}, VLLM, id="vllm names"),
        pytest.param(COMPLETIONS, {"prompt": ["a", "b"], "n": MAX_LEGS, "echo": True}, VLLM, id="vllm batch"),
        pytest.param(COMPLETIONS, {"prompt": "a", "n": 2, "use_beam_search": False}, VLLM, id="vllm no beam search"),
        pytest.param(COMPLETIONS, {"prompt": "a", "n": 2, "temperature": "warm"}, VLLM, id="the engine's to refuse"),
        pytest.param(TOKENS.path, {"token_ids": [1], "sampling_params": {"n": 2, "seed": 3}}, VLLM, id="vllm tokens"),
    ],
)
def test_what_is_taken_apart_for_pairs(path: str, body: dict[str, Any], engine: EngineKind) -> None:
    assert obstacle(path, body, engine) is None
    route = ROUTES.get(path, TOKENS)
    assert pair_expands(route, engine, parsed(body, path=path if path in ROUTES else NATIVE))


@pytest.mark.parametrize("engine", EngineKind)
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": []}), (CHAT, {"messages": [], "n": 1, "best_of": 2})])
def test_one_sample_is_not_taken_apart(path: str, body: dict[str, Any], engine: EngineKind) -> None:
    assert obstacle(path, body, engine) is None


@pytest.mark.parametrize(
    ("path", "body", "engine", "named"),
    [
        pytest.param(CHAT, {**CHAT_BODY, "n": MAX_LEGS + 1}, SGLANG, "above 128", id="too many"),
        pytest.param(NATIVE, native(n=MAX_LEGS + 1), SGLANG, "above 128", id="too many natively"),
        pytest.param(CHAT, {**CHAT_BODY, "n": MAX_LEGS + 1}, VLLM, "above 128", id="too many of vllm"),
        pytest.param("/v1/responses", {"input": "a", "n": 2}, VLLM, "route", id="responses"),
        pytest.param(NATIVE, native(), VLLM, "route", id="a route that vllm has not"),
        pytest.param(CHAT, {**CHAT_BODY, "session_id": "s"}, SGLANG, "'session_id'", id="session"),
        pytest.param(NATIVE, {**BATCH, "return_logprob": [True, False]}, SGLANG, "'return_logprob' for", id="list"),
        pytest.param(NATIVE, {**native(), "image_data": [["u"]]}, SGLANG, "'image_data' for", id="nested list"),
        pytest.param(
            COMPLETIONS,
            {"prompt": ["a", "b"], "n": 2, "return_spec_tokens_details": True},
            SGLANG,
            "'return_spec_tokens_details' for a batch",
            id="batch's speculation",
        ),
        pytest.param(NATIVE, native(beam_width=2), SGLANG, "'beam_width'", id="beam width"),
        pytest.param(NATIVE, native(sampling_seed=1.5), SGLANG, "'sampling_seed' that is not", id="native seed"),
        pytest.param(
            NATIVE, {**BATCH, "sampling_params": [{"n": 2}, {"n": 3}]}, SGLANG, "'n' that is not", id="different n"
        ),
        pytest.param(
            NATIVE, b'{"text":"a","sampling_params":{"n":3,"n":2}}', SGLANG, "'n' is given more than once", id="n twice"
        ),
        pytest.param(CHAT, {**CHAT_BODY, "seed": "1"}, SGLANG, "'seed' that is not", id="seed as text"),
        pytest.param(CHAT, {**CHAT_BODY, "seed": MOST + 1}, VLLM, "'seed' that is not", id="seed too large"),
        pytest.param(CHAT, {**CHAT_BODY, "seed": -2}, VLLM, "'seed' from -2 to -2", id="second seed is none"),
        pytest.param(CHAT, {**CHAT_BODY, "n": 9, "seed": -9}, VLLM, "'seed' from -9 to -2", id="last seed is none"),
        pytest.param(CHAT, {**CHAT_BODY, "best_of": 2}, VLLM, "'best_of'", id="best of"),
        pytest.param(CHAT, {**CHAT_BODY, "use_beam_search": True}, VLLM, "'use_beam_search'", id="beam search"),
        pytest.param(COMPLETIONS, {"prompt_embeds": "x", "n": 2}, VLLM, "'prompt_embeds'", id="embeddings"),
        pytest.param(CHAT, {**CHAT_BODY, "temperature": 0}, VLLM, "'temperature' of 0", id="greedy"),
        pytest.param(CHAT, {**CHAT_BODY, "temperature": "0.0"}, VLLM, "'temperature' of 0", id="greedy as text"),
        pytest.param(
            TOKENS.path,
            {"token_ids": [1], "sampling_params": {"n": 2, "temperature": 1e-6}},
            VLLM,
            "'temperature' of 0",
            id="nearly greedy tokens",
        ),
    ],
)
def test_what_is_refused_for_pairs(path: str, body: dict[str, Any] | bytes, engine: EngineKind, named: str) -> None:
    found = obstacle(path, body, engine)
    assert found is not None
    assert named in found


@pytest.mark.parametrize(
    ("path", "raw", "engine", "sent"),
    [
        pytest.param(CHAT, b'{"n":3,"seed":40}', SGLANG, b'{"n":1,"seed":42}', id="sglang"),
        pytest.param(CHAT, b'{"n":3,"seed":-1}', SGLANG, b'{"n":1,"seed":1}', id="a seed like any other"),
        pytest.param(CHAT, b'{"n":"3","seed":40,"x":1.0}', VLLM, b'{"n":1,"seed":42,"x":1.0}', id="vllm"),
        pytest.param(CHAT, b'{"n":3,"seed":-1}', VLLM, b'{"n":1,"seed":-1}', id="no seed"),
        pytest.param(
            TOKENS.path,
            b'{"sampling_params":{"n":3,"seed":7,"top_p":1.0},"token_ids":[1]}',
            VLLM,
            b'{"sampling_params":{"n":1,"seed":9,"top_p":1.0},"token_ids":[1]}',
            id="tokens",
        ),
    ],
)
def test_what_the_third_pair_sends(path: str, raw: bytes, engine: EngineKind, sent: bytes) -> None:
    body = parsed(raw, path=path if path in ROUTES else NATIVE).body
    assert obstacle(path, raw, engine) is None
    assert b"".join(body.with_fields(pair_choice_changes(ROUTES.get(path, TOKENS), engine, body, 2))) == sent


@given(seed=st.integers(LEAST, MOST), count=st.integers(2, MAX_LEGS))
def test_pairs_have_the_seeds_of_the_samples_of_vllm(seed: int, count: int) -> None:
    body = {**CHAT_BODY, "n": count, "seed": seed}
    if obstacle(CHAT, body, VLLM) is not None:
        assert -count <= seed < -1
        return
    envelope = parsed(body, path=CHAT)
    sent = [int(pair_choice_changes(ROUTES[CHAT], VLLM, envelope.body, i).get("seed", b"-1")) for i in range(count)]
    assert all(LEAST <= one <= MOST for one in sent)
    if seed == -1:
        assert set(sent) == {-1}
    else:
        assert -1 not in sent
        assert all((one - seed - choice) % 2**64 == 0 for choice, one in enumerate(sent))

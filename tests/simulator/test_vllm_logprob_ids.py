"""``logprob_token_ids``, as the real server 0.32.0 answered with each of these bodies."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.text import logprob
from tests.simulator.conftest import StartEngine
from tests.simulator.vllm_requests import CHAT, COMPLETIONS, GENERATE, started
from tests.simulator.wire import ask

PROMPT = [5, 6, 7]
SAMPLED = -1
"""Stands for the token that the engine chooses."""


def generate(**sampling: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "temperature": 0, **sampling}}


async def sampled(start_engine: StartEngine) -> tuple[int, int]:
    """Start an engine; its port, and the token that it answers ``PROMPT`` with."""
    engine = await started(start_engine)
    answer = await ask(engine.port, GENERATE, generate())
    return engine.port, answer.json()["choices"][0]["token_ids"][0]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        pytest.param([300, 301], [(SAMPLED, 1), (300, 1)], id="the sampled one counts"),
        pytest.param([300, 301, 301], [(SAMPLED, 1), (300, 1), (301, 3)], id="twice counts twice"),
        pytest.param([301, 300, 7], [(SAMPLED, 1), (301, 1), (300, 2)], id="in the order of the list"),
        pytest.param([300, SAMPLED, 301], [(SAMPLED, 2), (300, 1), (301, 3)], id="the sampled one among them"),
        pytest.param([SAMPLED], [(SAMPLED, 1)], id="the sampled one alone"),
    ],
)
async def test_chosen_tokens_in_place_of_the_likeliest(
    start_engine: StartEngine, ids: list[int], told: list[tuple[int, int]]
) -> None:
    port, own = await sampled(start_engine)
    ids = [own if item == SAMPLED else item for item in ids]
    answer = await ask(port, GENERATE, generate(logprobs=len(ids), logprob_token_ids=ids))
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    wanted = [
        {"token_id": item, "logprob": logprob(item, len(PROMPT)), "rank": rank}
        for item, rank in [(own if item == SAMPLED else item, rank) for item, rank in told]
    ]
    assert entry["top_logprobs"] == wanted
    assert {**entry, "top_logprobs": None} == {**wanted[0], "top_logprobs": None}


async def test_nothing_is_told_unasked(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    answer = await ask(engine.port, GENERATE, generate(logprob_token_ids=[300]))
    assert answer.json()["choices"][0]["logprobs"] is None


async def test_a_completion_tells_all_of_them_whatever_its_count(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    wanted = {"prompt": [70, 71], "max_tokens": 1, "logprobs": 1, "logprob_token_ids": [80, 81], "echo": True}
    wanted["return_tokens_as_token_ids"] = True
    answer = await ask(engine.port, COMPLETIONS, wanted)
    first, second, third = answer.json()["choices"][0]["logprobs"]["top_logprobs"]
    assert first is None
    assert list(second) == ["token_id:71"]  # the prompt's are the likeliest ones
    assert list(third)[1:] == ["token_id:80", "token_id:81"]


async def test_a_chat_likewise(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logprobs": True}
    answer = await ask(engine.port, CHAT, {**chat, "logprob_token_ids": [80, 81], "return_tokens_as_token_ids": True})
    (entry,) = answer.json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in entry["top_logprobs"]] == [entry["token"], "token_id:80", "token_id:81"]


_MISMATCH = (
    "When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). "
    "Got logprobs={}, len(logprob_token_ids)={}. (parameter=logprob_token_ids, value={})"
)


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        pytest.param(GENERATE, {"logprobs": 5, "logprob_token_ids": [1, 2]}, _MISMATCH.format(5, 2, 2), id="more"),
        pytest.param(GENERATE, {"logprobs": 1, "logprob_token_ids": []}, _MISMATCH.format(1, 0, 0), id="none"),
        pytest.param(
            GENERATE,
            {"logprobs": 1, "logprob_token_ids": [9999]},
            "token_id(s) [9999] in logprob_token_ids contain out-of-vocab token ids. Vocabulary size: 1024 "
            "(parameter=logprob_token_ids, value=[9999])",
            id="outside the vocabulary",
        ),
        pytest.param(
            GENERATE,
            {"logprobs": 1, "logprob_token_ids": list(range(129))},
            "Requested logprob_token_ids of length 129, which is greater than max allowed: 128 "
            "(parameter=logprob_token_ids, value=129)",
            id="too many",
        ),
        pytest.param(
            GENERATE,
            {"logprobs": 25, "logprob_token_ids": list(range(25))},
            "Requested sample logprobs of 25, which is greater than max allowed: 20 (parameter=logprobs, value=25)",
            id="more than the engine tells",
        ),
        pytest.param(
            COMPLETIONS,
            {"logprob_token_ids": [1]},
            "when using `logprob_token_ids`, `logprobs` must be set. (parameter=logprob_token_ids)",
            id="completion without log-probabilities",
        ),
        pytest.param(
            CHAT,
            {"logprob_token_ids": [1]},
            "when using `logprob_token_ids`, `logprobs` must be set to true. (parameter=logprob_token_ids)",
            id="chat without log-probabilities",
        ),
    ],
)
async def test_refusals(start_engine: StartEngine, path: str, more: dict[str, Any], message: str) -> None:
    engine = await started(start_engine)
    body = generate(**more) if path == GENERATE else {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = await ask(engine.port, path, body if path == GENERATE else {**body, **more})
    assert (answer.status, answer.json()["error"]["message"]) == (400, message)


async def test_what_is_no_list(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    answer = await ask(engine.port, COMPLETIONS, {"prompt": "a", "logprobs": 2, "logprob_token_ids": "x"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "body.logprob_token_ids")

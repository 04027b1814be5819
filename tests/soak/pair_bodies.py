"""What the clients of the soak over pairs ask for: what others ask for, of two models, and the prompt's part. Pure."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.soak.bodies import ASKS, GENERATING, MODEL, VLLM_MODEL, Ask

# Prompts of at most so many tokens, which are known where they come as ids, go to one worker.
SHORT_PROMPT_TOKENS = 3
# What pairs of one engine at least serve.
OFTEN = ("/generate", "/v1/chat/completions", "/v1/completions")
_TELLING = 0.2
_VLLM = {"/generate": 0.1}  # one of its workers answers that alone


def _over_pairs(path: str) -> Callable[[Random, int], Ask]:
    def ask(chance: Random, tokens: int) -> Ask:
        one = ASKS[path](chance, tokens)
        model = VLLM_MODEL if chance.random() < _VLLM.get(path, 0.5) else MODEL
        body: dict[str, Any] = {**one.body, "model": model}
        if "input_ids" in body and chance.random() < 0.5:
            body["input_ids"] = [*body["input_ids"], *range(20, 20 + chance.randint(1, 40))]
        one = replace(one, body=body)
        return _with_prompt(path, model, one) if chance.random() < _TELLING else one

    return ask


def _with_prompt(path: str, model: str, one: Ask) -> Ask:
    """The same, and what the prompt's log-probabilities are, where they can be asked for."""
    if model == VLLM_MODEL:
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return one
        return replace(one, body={**one.body, "prompt_logprobs": 1}, is_unary=True)
    if path == "/generate":
        return replace(one, body={**one.body, "return_logprob": True, "logprob_start_len": 0})
    return replace(one, body={**one.body, "echo": True, "logprobs": 1}) if path == "/v1/completions" else one


PAIR_ASKS: dict[str, Callable[[Random, int], Ask]] = {path: _over_pairs(path) for path in GENERATING}

"""What the clients of the soak ask for, by route. Pure."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

MODEL = "model"
VLLM_MODEL = "vllm-model"
EMBEDDER = "embedder"
# Few prompts and lengths, so that equal requests come again and their answers can be compared.
PROMPTS = ("hi", "The water rises", "a\nb", "Größe λ", "x" * 40, "one two three four five six seven eight")
TOKENS = (1, 4, 12, 40)
# Long enough for an abort, or a client's leaving, to find it running.
LONG_TOKENS = 400

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request's body, and what its answer must hold.

    Attributes:
        body: Without ``stream`` and ids.
        sequences: Generated sequences, 0 where nothing is generated.
        batch: Prompts of a batch whose items can have ids, 0 for a single request.
        samples: Sequences for each prompt.
        is_unary: Not to be had as a stream.
    """

    body: Body
    sequences: int = 0
    batch: int = 0
    samples: int = 1
    is_unary: bool = False


def _messages(chance: Random) -> list[Body]:
    return [{"role": "user", "content": chance.choice(PROMPTS)}]


def _texts(chance: Random) -> list[str]:
    return [chance.choice(PROMPTS) for _ in range(chance.randint(2, 4))]


def _samples(chance: Random) -> int:
    return chance.choice((1, 1, 1, 2, 3))


def _generate(chance: Random, tokens: int) -> Ask:
    n = _samples(chance)
    sampling: Body = {"max_new_tokens": tokens} if n == 1 else {"max_new_tokens": tokens, "n": n}
    kind = chance.randrange(4)
    if kind == 0:
        texts = _texts(chance)
        return Ask({"text": texts, "sampling_params": sampling}, len(texts) * n, len(texts) if n == 1 else 0, n)
    if kind == 1:
        return Ask({"input_ids": [5 + chance.randrange(3), 11, 12], "sampling_params": sampling}, n, samples=n)
    return Ask({"text": chance.choice(PROMPTS), "sampling_params": sampling}, n, samples=n)


def _chat(chance: Random, tokens: int) -> Ask:
    n = _samples(chance)
    return Ask({"model": MODEL, "messages": _messages(chance), "max_tokens": tokens, "n": n}, n, samples=n)


def _completions(chance: Random, tokens: int) -> Ask:
    n = _samples(chance)
    prompt: Any = _texts(chance) if chance.random() < 0.3 else chance.choice(PROMPTS)
    count = len(prompt) if isinstance(prompt, list) else 1
    return Ask({"model": MODEL, "prompt": prompt, "max_tokens": tokens, "n": n}, count * n, samples=n)


def _responses(chance: Random, tokens: int) -> Ask:
    return Ask({"model": MODEL, "input": chance.choice(PROMPTS), "max_output_tokens": tokens}, 1)


def _anthropic(chance: Random, tokens: int) -> Ask:
    return Ask({"model": MODEL, "messages": _messages(chance), "max_tokens": tokens}, 1)


def _plain(make: Callable[[Random], Body], model: str = MODEL) -> Callable[[Random, int], Ask]:
    return lambda chance, tokens: Ask({"model": model, **make(chance)})


# Every forwarded route; a new one needs an entry here.
ASKS: dict[str, Callable[[Random, int], Ask]] = {
    "/generate": lambda chance, tokens: _with_model(_generate(chance, tokens)),
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/responses": _responses,
    "/v1/messages": _anthropic,
    "/v1/messages/count_tokens": _plain(lambda chance: {"messages": _messages(chance)}),
    "/v1/embeddings": _plain(lambda chance: {"input": _texts(chance)}, EMBEDDER),
    "/v1/classify": _plain(lambda chance: {"input": chance.choice(PROMPTS)}, EMBEDDER),
    "/v1/score": _plain(lambda chance: {"query": "q", "items": _texts(chance), "label_token_ids": [7, 9]}),
    "/v1/rerank": _plain(lambda chance: {"query": "q", "documents": _texts(chance)}, EMBEDDER),
    "/encode": _plain(lambda chance: {"text": _texts(chance)}, EMBEDDER),
    "/classify": _plain(lambda chance: {"text": chance.choice(PROMPTS)}, EMBEDDER),
    "/tokenize": _plain(lambda chance: {"prompt": chance.choice(PROMPTS)}),
    "/detokenize": _plain(lambda chance: {"tokens": [70 + chance.randrange(9), 71]}),
}
# Where most of the traffic goes, and where ``stream`` means something.
GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def _with_model(ask: Ask) -> Ask:
    return replace(ask, body={"model": MODEL, **ask.body})


def spoiled(body: Body, chance: Random) -> tuple[str, bytes]:
    """A body that must be refused, by the gateway or by the engine; what is wrong with it comes first."""
    whole = json.dumps(body)
    kinds: dict[str, str] = {
        "not JSON": whole[: chance.randrange(1, len(whole))],
        "no object": "[1, 2]",
        "empty": "",
        "key twice": whole[:-1] + ', "model": "other"}',
        "internal field": whole[:-1] + ', "bootstrap_room": 1}',
        "unknown model": json.dumps({**body, "model": "nobody"}),
        "model is a number": json.dumps({**body, "model": 7}),
        "no prompt": json.dumps({"model": body["model"]}),
    }
    kind = chance.choice(list(kinds))
    return kind, kinds[kind].encode()

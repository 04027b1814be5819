"""The tokenizers of the recorded engines, and requests for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from backends.json_body import JsonBody
from backends.types import EngineKind
from gateway.routes import ROUTES
from gateway.tokens.service import PromptTokenizers

TOKENIZERS = Path(__file__).parent.parent.parent / "data" / "tokenizers"
DIRECTORIES = {"model": TOKENIZERS / "sglang-tiny", "tiny": TOKENIZERS / "vllm-tiny"}
SERVED = {EngineKind.SGLANG: "model", EngineKind.VLLM: "tiny"}
CHAT = "/v1/chat/completions"


def json_body(fields: object) -> JsonBody:
    """A request's body."""
    return JsonBody.parse(json.dumps(fields).encode())


def listed(ids: bytes) -> list[int]:
    """Ids as numbers."""
    numbers: list[int] = np.frombuffer(ids, "<u4").tolist()
    return numbers


async def ids_of(
    tokenizers: PromptTokenizers, engine: EngineKind, path: str, body: JsonBody | dict[str, Any]
) -> list[list[int]] | None:
    """Ids of each prompt, as numbers."""
    if isinstance(body, dict):
        body = json_body(body)
    found = await tokenizers.token_ids(SERVED[engine], engine, ROUTES[path], body)
    return None if found is None else [listed(ids) for ids in found.prompts]

"""Conversations of many forms, with templates like those of real models, as the engines' own code encoded them.

``engine_ids.json`` was made by running the chat code of SGLang 0.5.23 and vLLM 0.32.0, with the tokenizer
``vllm-tiny`` and each of the templates; where ``ids`` is null, the engine refuses the request.
"""

import dataclasses
import json
from typing import Any

import pytest

from backends.types import EngineKind
from gateway.tokens.files import load_tokenizer
from gateway.tokens.service import PromptTokenizers
from gateway.tokens.template import ChatTemplate
from tests.conftest import TIME_SCALE
from tests.gateway.tokens.tiny import CHAT, TOKENIZERS, ids_of

RECORDED: dict[str, list[dict[str, Any]]] = json.loads((TOKENIZERS / "engine_ids.json").read_text())
BASE = load_tokenizer("tiny", TOKENIZERS / "vllm-tiny")
# What is left to the engine although it answers.
LEFT_OUT = {
    ("vllm", "developer"): {"qwen", "whole", "flat_tools"},
    ("vllm", "extra in part"): {"qwen", "parts", "whole", "flat_tools"},
    ("vllm", "thinking part"): {"qwen", "parts", "whole", "flat_tools"},
}


@pytest.mark.parametrize("template", ["qwen", "parts", "whole", "flat_tools"])
@pytest.mark.parametrize("engine", list(EngineKind))
async def test_ids_are_the_engines(engine: EngineKind, template: str) -> None:
    source = (TOKENIZERS / "templates" / f"{template}.jinja").read_text()
    one = dataclasses.replace(BASE, templates={"default": ChatTemplate(source)})
    tokenizers = PromptTokenizers(
        [one, dataclasses.replace(one, model="model")], time_limit_s=20 * TIME_SCALE, threads=1
    )
    cases = [case for case in RECORDED[engine] if case["template"] == template]
    assert len(cases) > 30
    wrong = []
    for case in cases:
        found = await ids_of(tokenizers, engine, CHAT, case["body"])
        if template in LEFT_OUT.get((engine, case["case"]), ()):
            assert found is None
        elif found != (case["ids"] and [case["ids"]]):
            wrong.append((case["case"], case["text"], found and BASE.tokenizer.decode(found[0], False)))
    tokenizers.close()
    assert wrong == []

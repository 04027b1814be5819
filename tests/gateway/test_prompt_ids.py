"""Prompts that come as token ids, from the body to four bytes for each."""

import json

import pytest

from backends.types import EngineKind
from gateway.envelope import parse_envelope
from gateway.prompts import prompt_in_ids
from gateway.routes import ROUTES
from kv_events.hashing import pack_tokens

SHORT = [5, 0, 127_999]
# Long enough for the body's own check of lists of ids.
LONG = [index * 40_009 % 128_000 for index in range(20_000)]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        pytest.param("/generate", "input_ids", id="native"),
        pytest.param("/v1/completions", "prompt", id="completions"),
        pytest.param("/v1/chat/completions", "input_ids", id="chat"),
    ],
)
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(LONG, id="long"),
        pytest.param([*LONG, 2_147_483_647], id="long, an id of ten digits"),
    ],
)
def test_ids_are_read_from_bodies_of_all_lengths(path: str, field: str, ids: list[int]) -> None:
    raw = json.dumps({"model": "m", field: ids}).encode()
    envelope = parse_envelope(ROUTES[path], raw, [], {}, fallback_id="0", max_response_bytes=1 << 30)
    prompt = prompt_in_ids(ROUTES[path], envelope, "m")
    assert prompt is not None
    assert prompt.tokens == len(ids)
    assert prompt.ids == dict.fromkeys(EngineKind, pack_tokens(ids))

"""Rooms, and the bodies of the two legs of a request over a pair of SGLang workers."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.json_body import JsonBody
from backends.sglang.pd import BodyUnfit, Bootstrap, decode_body, draw_room, prefill_body
from tests.backends.captured_pair import sglang_request

PAIR = Bootstrap("10.0.0.1", 8998, 77)
PLACE = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body_of(value: object) -> JsonBody:
    return JsonBody.parse(value if isinstance(value, bytes) else json.dumps(value).encode())


def prefill(path: str, value: object, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(prefill_body(path, body_of(value), [PAIR], is_batch=False, **more).raw)
    return made


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        pytest.param({}, {"n": 1, "max_new_tokens": 1}, id="none"),
        pytest.param({"sampling_params": None}, {"n": 1, "max_new_tokens": 1}, id="null counts as empty"),
        pytest.param(
            {"sampling_params": {"n": None, "max_new_tokens": 90, "min_new_tokens": 5, "temperature": 0}},
            {"n": 1, "max_new_tokens": 1, "temperature": 0},
            id="S0.6",
        ),
    ],
)
def test_prefill_makes_one_token(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    made = prefill("/generate", {"input_ids": [1, 2], "stream": False, **given_})
    assert made == {"input_ids": [1, 2], "stream": True, "sampling_params": expected, **PLACE}


def test_the_clients_spelling_survives() -> None:
    raw = b'{"input_ids": [1,  2], "sampling_params":{"top_p" : 1.0e0,"max_new_tokens":9}, "x":12345678901234567890}'
    made = prefill_body("/generate", body_of(raw), [PAIR], is_batch=False).raw
    assert b'"sampling_params":{"top_p":1.0e0,"max_new_tokens":1,"n":1}' in made
    assert b'"input_ids":[1,  2]' in made
    assert b'"x":12345678901234567890' in made


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[]", "must be an object"),
        (b'"x"', "must be an object"),
        (b"5", "must be an object"),
        (b'{"n":1,"n":2}', "'n' more than once"),
    ],
)
def test_other_sampling_parameters_are_refused(text: bytes, match: str) -> None:
    with pytest.raises(BodyUnfit, match=match) as caught:
        prefill_body("/generate", body_of(b'{"sampling_params":%b}' % text), [PAIR], is_batch=False)
    assert caught.value.param == "sampling_params"


FLAT = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        pytest.param({"return_flat_raw_output_top_logprobs": True}, {}, id="A2.5: output-flat goes"),
        pytest.param(
            {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True},
            {},
            id="and Base64 with it",
        ),
        pytest.param(
            {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True},
            {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True},
            id="A2.6: prompt-flat and its Base64 stay",
        ),
        pytest.param(
            {
                "return_flat_raw_top_logprobs": True,
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_output_top_logprobs_b64": True,
                "return_flat_raw_top_logprobs_b64": True,
            },
            {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True},
            id="both sides",
        ),
        pytest.param(
            {"return_flat_raw_top_logprobs": False, "return_flat_raw_top_logprobs_b64": True},
            {"return_flat_raw_top_logprobs": False},
            id="Base64 of nothing",
        ),
    ],
)
def test_flat_logprobs(options: dict[str, bool], kept: dict[str, bool]) -> None:
    made = prefill("/generate", {"text": "x", **FLAT, **options})
    assert {name: value for name, value in made.items() if "flat" in name} == kept
    assert {name: made[name] for name in FLAT} == FLAT  # the first token's are prefill's to tell
    decode = json.loads(decode_body(body_of({"text": "x", **FLAT, **options}), [PAIR], is_batch=False).raw)
    assert decode == {"text": "x", **FLAT, **options, **PLACE}


def test_chat_for_one_token() -> None:
    asked = {
        "model": "m", "messages": [], "max_tokens": 50, "max_completion_tokens": 60, "min_tokens": 3, "n": 1,
        "logprobs": True, "top_logprobs": 2, "return_meta_info": True, "return_token_ids": True,
        "return_flat_raw_output_top_logprobs": True, "stream_options": {"include_usage": False}, "temperature": 0,
    }  # fmt: skip
    assert prefill(CHAT, asked) == {
        "model": "m", "messages": [], "max_tokens": 1, "max_completion_tokens": 1, "n": 1, "logprobs": True,
        "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, **PLACE,
    }  # fmt: skip


def test_completions_for_one_token() -> None:
    assert prefill(COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1, "min_tokens": 3}) == {
        "prompt": "x", "echo": True, "logprobs": 1, "n": 1, "max_tokens": 1, "stream": True,
        "stream_options": {"include_usage": True}, **PLACE,
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/generate", CHAT])
def test_ranks_are_the_gateways(path: str) -> None:
    nulls = dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "bootstrap_room"))
    assert not nulls.keys() & prefill(path, nulls).keys() - {"bootstrap_room"}
    assert prefill(path, nulls, prefill_rank=3)["disagg_prefill_dp_rank"] == 3
    made = json.loads(decode_body(body_of({**nulls, "x": 1}), [PAIR], is_batch=False, prefill_rank=3).raw)
    assert made == {"x": 1, "disagg_prefill_dp_rank": 3, **PLACE}


def test_a_batch_has_a_room_for_each_prompt() -> None:
    """As it was sent to a real pair."""
    asked = sglang_request("http_pd/batch_prefill")
    sent = json.loads(asked.raw)
    pairs = [Bootstrap("127.0.0.1", 36601, room) for room in (1004, 1005)]
    bare = {name: value for name, value in sent.items() if not name.startswith("bootstrap_")}
    assert json.loads(decode_body(body_of(bare), pairs, is_batch=True).raw) == sent
    made = json.loads(prefill_body("/generate", body_of(bare), pairs, is_batch=True).raw)
    assert made["sampling_params"] == {**sent["sampling_params"], "max_new_tokens": 1, "n": 1}
    listed = {**bare, "sampling_params": [{"max_new_tokens": 5}, None]}
    made = json.loads(prefill_body("/generate", body_of(listed), pairs, is_batch=True).raw)
    assert made["sampling_params"] == [{"max_new_tokens": 1, "n": 1}] * 2


def test_a_batch_of_one_is_a_batch() -> None:
    made = json.loads(decode_body(body_of({"text": ["x"]}), [PAIR], is_batch=True).raw)
    assert made["bootstrap_room"] == [77]


@pytest.mark.parametrize("name", ["unary", "stream", "chat", "logprob"])
def test_bodies_as_a_real_pair_took_them(name: str) -> None:
    sent = json.loads(sglang_request(f"http_pd/{name}_decode").raw)
    pair = Bootstrap(sent["bootstrap_host"], sent["bootstrap_port"], sent["bootstrap_room"])
    bare = {name: value for name, value in sent.items() if not name.startswith("bootstrap_")}
    assert json.loads(decode_body(body_of(bare), [pair], is_batch=False).raw) == sent


def test_decode_is_never_made_without_a_handoff() -> None:
    with pytest.raises(ValueError, match="without a handoff"):
        decode_body(body_of({}), [], is_batch=False)


@pytest.mark.parametrize(
    ("host", "port", "room"),
    [("", 8998, 1), ("h", 0, 1), ("h", 65536, 1), ("h", 1, 0), ("h", 1, -1), ("h", 1, 1 << 63)],
)
def test_places_that_cannot_be(host: str, port: int, room: int) -> None:
    with pytest.raises(ValueError, match="no prompt can be handed over"):
        Bootstrap(host, port, room)


@given(st.integers(0), st.integers(1, 600), st.data())
def test_rooms_lead_to_their_rank(seed: int, dp_size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, dp_size - 1))
    live: set[int] = set()
    rng = random.Random(seed)
    rooms = [draw_room(rng, live, dp_size, rank) for _ in range(5)]
    assert len(live) == 5
    assert all(0 < room < 1 << 63 and room % dp_size == rank for room in rooms)
    assert draw_room(rng, live) in live


class Scripted:
    def __init__(self, *bits: int) -> None:
        self.bits = list(bits)

    def getrandbits(self, k: int, /) -> int:
        assert k == 63
        return self.bits.pop(0) if len(self.bits) > 1 else self.bits[0]


def test_rooms_are_drawn_again() -> None:
    top = (1 << 63) - 1
    live = {5}
    assert draw_room(Scripted(0, 5, 9), live) == 9
    assert live == {5, 9}
    # The largest room with this rank would be beyond 63 bits.
    assert draw_room(Scripted(top, 12), live, 8, 7) == top
    assert draw_room(Scripted(top, 12), live, 5, 4) == 14
    assert draw_room(Scripted(3, 12), live, 8, 0) == 8


def test_a_broken_source_of_rooms_ends() -> None:
    with pytest.raises(RuntimeError, match="repeats itself"):
        draw_room(Scripted(5), {5})


@pytest.mark.parametrize("rank", [-1, 2])
def test_rooms_of_no_rank(rank: int) -> None:
    with pytest.raises(ValueError, match="no rank"):
        draw_room(random.Random(0), set(), 2, rank)

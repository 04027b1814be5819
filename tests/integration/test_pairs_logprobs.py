"""Log-probabilities over pairs: the prompt's are prefill's, the output's are decode's."""

import asyncio
from typing import Any

import orjson
import pytest

from tests.fakes.running import TIME_SCALE
from tests.fakes.scripted_pair import (
    BODY,
    CHAT,
    DONE,
    ScriptedPair,
    Turn,
    aborted,
    answer_of,
    chat_chunk,
    prefilled,
    scripted_pair,
    terminal,
    token,
)
from tests.fakes.wire import request_bytes, wire

WANTED: dict[str, Any] = {**BODY, "return_logprob": True, "logprob_start_len": 0}
NESTED: dict[str, Any] = {
    "input_token_logprobs": [[None, 1, None], [-0.5, 2, None]],
    "input_top_logprobs": [None, [[-0.5, 2, None]]],
}
TOKEN_IDS: dict[str, Any] = {"input_token_ids_logprobs": [None, [[-2.5, 9, None]]]}
FLAT: dict[str, Any] = {
    "input_top_logprobs_val_flat": [-0.5],
    "input_top_logprobs_idx_flat": [2],
    "input_top_logprobs_shape": [1, 1],
}
BASE64: dict[str, Any] = {
    "input_top_logprobs_val_flat_b64": "AAAAvw==",
    "input_top_logprobs_val_flat_b64_dtype": "float32",
}
OURS: dict[str, Any] = {"output_token_logprobs": [[-0.25, 7, None]], "output_top_logprobs_val_flat": [-0.25]}
FORMS = [
    pytest.param({}, NESTED, id="nested"),
    pytest.param({"token_ids_logprob": [9]}, {**NESTED, **TOKEN_IDS}, id="token ids"),
    pytest.param({"return_flat_raw_top_logprobs": True, "top_logprobs_num": 1}, {**NESTED, **FLAT}, id="flat"),
    pytest.param(
        {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True, "top_logprobs_num": 1},
        {**NESTED, **BASE64},
        id="Base64",
    ),
]


async def both_open(s: ScriptedPair) -> tuple[Turn, Turn]:
    p = await s.prefill.turn()
    await p.open()
    return p, await s.decode.turn()


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(("asked", "told"), FORMS)
async def test_s2_7_the_prompts_are_prefills_in_every_form(
    asked: dict[str, Any], told: dict[str, Any], is_stream: bool
) -> None:
    """Also A2.6. Mutation: only nested fields are merged; then the flat ones are decode's empty ones."""
    async with scripted_pair() as s:
        client = s.begin("/generate", {**WANTED, **asked, "stream": is_stream})
        p, d = await both_open(s)
        assert {name: p.body[name] for name in asked} == asked
        empty: dict[str, Any] = {name: [] for name in told}
        if is_stream:
            await d.stream(token(d.rid, **empty, **OURS), terminal(d.rid, **empty, **OURS), DONE)
        else:
            await d.whole(terminal(d.rid, **empty, **OURS).removeprefix(b"data: ").strip())
        wrong: dict[str, Any] = dict.fromkeys(OURS, "prefill's")
        await p.finish(terminal(p.rid, **told, **wrong), DONE)
        answer = await answer_of(client)
        metas = [orjson.loads(one)["meta_info"] for one in answer.events() if one != b"[DONE]"]
        if not is_stream:
            metas = [answer.json()["meta_info"]]
        assert answer.status == 200
        for meta in metas:
            assert {name: meta[name] for name in (*told, *OURS)} == {**told, **OURS}


async def test_a2_5_output_flat_is_asked_of_decode_alone() -> None:
    """Mutation: prefill's body keeps the option; then the engine refuses prefill's stream."""
    asked = {"return_flat_raw_output_top_logprobs": True, "top_logprobs_num": 1, "return_logprob": True}
    async with scripted_pair(upstream_mode="incremental") as s:
        client = s.begin("/generate", {**BODY, **asked})
        p, d = await both_open(s)
        assert "return_flat_raw_output_top_logprobs" not in p.body
        assert (p.body["stream"], p.body["return_logprob"]) == (True, True)
        assert d.body["return_flat_raw_output_top_logprobs"] is True
        assert d.body.get("stream", False) is False
        assert d.request.header("accept") == "application/json"
        flat: dict[str, Any] = {"output_top_logprobs_val_flat": [-0.125], "output_top_logprobs_shape": [1, 1]}
        await p.finish(terminal(p.rid, output_top_logprobs_val_flat="prefill's"), DONE)
        await d.whole(terminal(d.rid, **flat).removeprefix(b"data: ").strip())
        meta = (await answer_of(client)).json()["meta_info"]
        assert {name: meta[name] for name in flat} == flat


async def test_a2_5_output_flat_in_a_stream_reaches_no_engine() -> None:
    """Mutation: it is refused by the engine; then prefill has a request."""
    async with scripted_pair() as s:
        body = {**BODY, "return_flat_raw_output_top_logprobs": True, "stream": True}
        assert (await answer_of(s.begin("/generate", body))).status == 400
        assert (s.prefill.count, s.decode.count) == (0, 0)


async def test_a2_6_prompt_flat_and_base64_stay_on_prefill_where_output_flat_goes() -> None:
    """Mutation: all flat options are taken from prefill; then it is not asked for the prompt's."""
    asked = {
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
        "return_flat_raw_output_top_logprobs": True,
        "top_logprobs_num": 1,
    }
    async with scripted_pair() as s:
        client = s.begin("/generate", {**WANTED, **asked})
        p, d = await both_open(s)
        assert (p.body["return_flat_raw_top_logprobs"], p.body["return_flat_raw_top_logprobs_b64"]) == (True, True)
        assert "return_flat_raw_output_top_logprobs" not in p.body
        assert all(d.body[name] == value for name, value in asked.items())
        await p.finish(terminal(p.rid, **BASE64), DONE)
        await d.whole(terminal(d.rid, output_top_logprobs_val_flat_b64="AA==").removeprefix(b"data: ").strip())
        meta = (await answer_of(client)).json()["meta_info"]
        assert meta["input_top_logprobs_val_flat_b64"] == "AAAAvw=="
        assert meta["output_top_logprobs_val_flat_b64"] == "AA=="


async def test_decision_21_such_a_streams_first_event_waits_for_prefills_end() -> None:
    """Mutation: only the last event waits; then the first comes without the prompt's."""
    async with scripted_pair() as s, wire(s.gateway.address) as client:
        await client.send(request_bytes("/generate", {**WANTED, "stream": True}))
        p, d = await both_open(s)
        await d.open()
        await d.send(token(d.rid, "a"), token(d.rid, "b"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2 * TIME_SCALE):
                await client.reader.read(1)
        await p.finish(terminal(p.rid, **NESTED), DONE)
        await client.head()
        first = await client.event()
        assert orjson.loads(first)["meta_info"]["input_token_logprobs"] == NESTED["input_token_logprobs"]
        await d.finish(terminal(d.rid), DONE)
        while await client.chunk():
            pass


async def test_decision_21_prefills_failure_still_has_a_status() -> None:
    """Mutation: the head goes out with decode's first event; then the status is 200."""
    async with scripted_pair(max_attempts=1) as s:
        client = s.begin("/generate", {**WANTED, "stream": True})
        p, d = await both_open(s)
        await d.open()
        await d.send(token(d.rid))
        await p.finish(aborted(p.rid, "lost"), DONE)
        answer = await answer_of(client)
        assert (answer.status, answer.json()["error"]["message"]) == (502, "lost")
        await s.decode.told(d.rid)
        await d.finish(aborted(d.rid), DONE)


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_vllms_prompt_logprobs_are_prefills(is_stream: bool) -> None:
    """Mutation: decode's null is kept; then the client has none."""
    async with scripted_pair(engine="vllm") as s:
        client = s.begin("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1, "stream": is_stream})
        p = await s.prefill.turn()
        assert p.body["prompt_logprobs"] == 1
        params, told = b'"kv_transfer_params"', b'"prompt_logprobs":[null,{"1":{"logprob":-1}}]'
        await p.whole(prefilled().replace(params, told + b"," + params))
        d = await s.decode.turn()
        await d.stream(chat_chunk(role=True), chat_chunk("a"), chat_chunk("", "stop"), DONE)
        answer = await answer_of(client)
        assert answer.status == 200
        assert told in answer.body

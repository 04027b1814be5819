"""Several samples over pairs, and what clients may not say: every sample has a pair of legs and a room of its own."""

from typing import Any

import orjson
import pytest

from tests.fakes.pair_fleet import IDS, TEXT, pair_fleet
from tests.fakes.running import PATIENCE_S, TIME_SCALE, until
from tests.fakes.scripted_pair import BODY, CHAT, DONE, Turn, aborted, answer_of, scripted_pair, terminal, token
from tests.fakes.wire import call, request_bytes, wire


def with_samples(count: int, **more: Any) -> dict[str, Any]:
    return {**BODY, "sampling_params": {"max_new_tokens": 4, "n": count}, **more}


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a0_13_each_sample_has_legs_and_a_room_of_its_own(is_stream: bool) -> None:
    """As decision 9 has it. Mutation: the samples share a room; then two bodies have the same."""
    async with scripted_pair() as s:
        client = s.begin("/generate", with_samples(3, stream=is_stream))
        prefills = [await s.prefill.turn() for _ in range(3)]
        for p in prefills:
            await p.open()
        decodes = [await s.decode.turn() for _ in range(3)]
        rooms = {p.rid: p.body["bootstrap_room"] for p in prefills}
        assert len(set(rooms.values())) == 3
        assert {d.rid: d.body["bootstrap_room"] for d in decodes} == rooms
        assert {one.body["sampling_params"]["n"] for one in (*prefills, *decodes)} == {1}
        for d in decodes:
            if is_stream:
                await d.stream(token(d.rid), terminal(d.rid), DONE)
            else:
                await d.whole(terminal(d.rid).removeprefix(b"data: ").strip())
        for p in prefills:
            await p.finish(terminal(p.rid), DONE)
        answer = await answer_of(client)
        assert answer.status == 200
        if is_stream:
            items = [orjson.loads(one) for one in answer.events() if one != b"[DONE]"]
            assert {one["index"] for one in items} == {0, 1, 2}
        else:
            items = answer.json()
            assert len(items) == 3
        assert {one["meta_info"]["id"] for one in items} == {"public_0", "public_1", "public_2"}
        assert answer.body.count(b"[DONE]") == int(is_stream)


@pytest.mark.parametrize("part", ["prefill", "decode"])
async def test_a0_13_the_others_are_stopped_when_one_fails(part: str) -> None:
    """Mutation: a failing sample ends alone; then the others' engines are told nothing."""
    async with scripted_pair(max_attempts=1) as s:
        client = s.begin("/generate", with_samples(2))
        prefills = [await s.prefill.turn() for _ in range(2)]
        for p in prefills:
            await p.open()
        decodes = [await s.decode.turn() for _ in range(2)]
        turns = prefills if part == "prefill" else decodes
        bad = turns[1]
        await (
            bad.finish(aborted(bad.rid), DONE) if part == "prefill" else bad.whole(b'{"error":"broken"}', status=500)
        )
        answer = await answer_of(client)
        assert answer.status == 502
        for stage, all_of in ((s.prefill, prefills), (s.decode, decodes)):
            for turn in all_of:
                if turn is not bad:
                    await stage.told(turn.rid)
                    await end_aborted(turn, has_opened=turn in prefills)


async def end_aborted(turn: Turn, *, has_opened: bool) -> None:
    """End as an engine does that was told to stop."""
    if has_opened:
        await turn.finish(aborted(turn.rid), DONE)
    else:
        await turn.whole(aborted(turn.rid).removeprefix(b"data: ").strip())


CANNOT = [
    pytest.param("sglang", "/generate", with_samples(2, token_ids_logprob=[[1], [2]]), id="lists for each prompt"),
    pytest.param("sglang", "/generate", {**BODY, "sampling_params": {"n": 2, "sampling_seed": "x"}}, id="a seed"),
    pytest.param("sglang", "/generate", with_samples(10_000), id="too many"),
    pytest.param("vllm", "/v1/chat/completions", {**CHAT, "n": 2, "temperature": 0}, id="greedy samples"),
]


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(("engine", "path", "body"), CANNOT)
async def test_a0_13_what_cannot_be_taken_apart_is_refused(
    engine: str, path: str, body: dict[str, Any], is_stream: bool
) -> None:
    """Mutation: it is sent as it is; then an engine has a request that hangs."""
    async with scripted_pair(engine=engine) as s:
        answer = await answer_of(s.begin(path, {**body, "stream": is_stream}))
        assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request")
        assert (s.prefill.count, s.decode.count) == (0, 0)
        assert s.gateway.state()["live_rooms"] == 0


FOREIGN = [
    pytest.param({"bootstrap_room": 42}, id="room"),
    pytest.param({"bootstrap_host": "10.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}, id="host"),
    pytest.param({"bootstrap_pair_key": "x"}, id="pair key"),
    pytest.param({"kv_transfer_params": {"do_remote_prefill": True}}, id="transfer"),
    pytest.param({"routed_dp_rank": 7}, id="rank that is not there"),
    pytest.param({"disagg_prefill_dp_rank": 1}, id="prefill's rank"),
]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("fields", FOREIGN)
async def test_what_only_the_gateway_says_is_refused_from_clients(fields: dict[str, Any], engine: str) -> None:
    """Field case 88. Mutation: they are overwritten; then the request is served."""
    async with scripted_pair(engine=engine) as s:
        path, body = ("/generate", BODY) if engine == "sglang" else ("/v1/chat/completions", CHAT)
        client = s.begin(path, {**body, **fields})
        if engine == "vllm" and fields.keys() & {"routed_dp_rank", "disagg_prefill_dp_rank"}:
            await until(lambda: client.done() or s.prefill.count > 0, "an answer or a request")
            if not client.done():  # such fields mean nothing to vLLM
                p = await s.prefill.turn()
                await p.whole(b'{"error":{"message":"no"}}', status=400)
        answer = await answer_of(client)
        assert answer.status == 400
        assert s.decode.count == 0


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("missing", ["prefill", "decode"])
async def test_a_missing_role_is_told_at_once(missing: str, engine: str) -> None:
    """Mutation: requests wait for the role; then there is no answer within the queue's age."""
    there = "decode" if missing == "prefill" else "prefill"
    if (engine, missing) == ("vllm", "prefill"):
        pytest.skip("a vLLM decode worker serves alone")
    path, body = ("/generate", BODY) if engine == "sglang" else ("/v1/chat/completions", CHAT)
    async with pair_fleet(engine=engine, gateway={"queue_max_age_s": 600}) as f:
        gone = f.prefills[0] if missing == "prefill" else f.decodes[0]
        body = {**body, "model": f.alone.options.model}
        answer = await f.call(f"/workers/{gone.url.removeprefix('http://')}", None, method="DELETE")
        await until(lambda: len(list(f.gateway.gateway.services.fleet)) == 1, f"only {there} is left")
        answer = await f.call(path, body)
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
        assert f"no {missing} worker" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
        ready = await f.call("/ready", None, method="GET")
        assert ready.status == 503
        assert missing.encode() in ready.body


@pytest.mark.parametrize("part", ["prefill", "decode"])
async def test_a_request_waits_for_a_paused_side_and_then_goes_on(part: str) -> None:
    """Mutation: only decode's pause holds requests; then one is sent to the paused prefill."""
    async with pair_fleet(gateway={"pause_hold_s": PATIENCE_S}) as f:
        engine = f.prefills[0] if part == "prefill" else f.decodes[0]
        member = f.gateway.gateway.services.fleet.get(engine.url.removeprefix("http://"))
        assert member is not None
        await call(("127.0.0.1", engine.port), "/pause_generation", {})
        await until(lambda: member.is_paused, "the pause is known")
        async with wire(f.gateway.address) as client:
            body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 3}}
            await client.send(request_bytes("/generate", body))
            await until(lambda: f.gateway.state()["queued_requests"] == 1, "it waits")
            await call(("127.0.0.1", engine.port), "/continue_generation", {})
            assert (await client.answer()).status == 200


async def test_a_pause_that_lasts_too_long_is_503() -> None:
    """Mutation: the wait has no limit; then there is no answer."""
    async with pair_fleet(gateway={"pause_hold_s": 0.2 * TIME_SCALE}) as f:
        member = f.gateway.gateway.services.fleet.get(f.prefills[0].url.removeprefix("http://"))
        assert member is not None
        await call(("127.0.0.1", f.prefills[0].port), "/pause_generation", {})
        await until(lambda: member.is_paused, "the pause is known")
        answer = await f.call("/generate", {"text": TEXT})
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
        await call(("127.0.0.1", f.prefills[0].port), "/continue_generation", {})

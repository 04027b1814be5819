"""Requests go where their prompts' beginnings are: by the engines' events, by prediction, by guess."""

import json

import pytest

from tests.fakes.kv_fleet import BLOCK, PROMPT, TEXT, fleet
from tests.fakes.running import until
from tests.fakes.wire import call


async def test_a_prefix_goes_where_it_is_cached() -> None:
    async with fleet(3) as f:
        first = await f.generate(PROMPT)
        assert first.headers["x-forebay-overlap-blocks"] == "0"
        await f.settled()
        for tail in range(5):
            again = await f.generate([*PROMPT, *range(1000 + 100 * tail, 1050 + 100 * tail)])
            assert again.headers["x-forebay-worker"] == first.headers["x-forebay-worker"]
            assert again.headers["x-forebay-overlap-blocks"] == "10"
            assert again.json()["meta_info"]["cached_tokens"] == 160
            await f.settled()
        text = (await f.gateway.client.get("/metrics")).text
        assert "forebay_route_overlap_blocks_count 6.0" in text
        assert "forebay_route_zero_blocks_total 1.0" in text


async def test_each_rank_is_a_cache_of_its_own() -> None:
    async with fleet(1, dp_size=3) as f:
        first = await f.generate(PROMPT)
        rank = first.headers["x-forebay-dp-rank"]
        assert first.json()["meta_info"]["dp_rank"] == int(rank)
        await f.settled()
        for _ in range(4):
            again = await f.generate([*PROMPT, 7])
            assert (again.headers["x-forebay-dp-rank"], again.headers["x-forebay-overlap-blocks"]) == (rank, "10")
            await f.settled()


async def test_q_13_what_was_just_sent_is_predicted_before_the_events_come() -> None:
    async with fleet(3) as f:
        for engine in f.engines:
            engine.add_fault(at="kv", do="silence", times=1)
        await f.generate([5, 6, 7])
        first = await f.generate(PROMPT)
        for tail in range(1000, 1003):
            again = await f.generate([*PROMPT, tail])
            assert again.headers["x-forebay-worker"] == first.headers["x-forebay-worker"]
            assert again.headers["x-forebay-overlap-blocks"] == "10"


async def test_salts_and_adapters_are_not_mixed_up() -> None:
    async with fleet(3) as f:
        salted = await f.generate(PROMPT, cache_salt="tenant-a")
        await f.settled()
        again = await f.generate(PROMPT, cache_salt="tenant-a")
        other = await f.generate(PROMPT, cache_salt="tenant-b")
        plain = await f.generate(PROMPT)
        assert again.headers["x-forebay-worker"] == salted.headers["x-forebay-worker"]
        overlaps = [one.headers["x-forebay-overlap-blocks"] for one in (again, other, plain)]
        assert overlaps == ["10", "0", "0"]


async def test_text_is_hashed_by_the_ids_that_the_engine_makes_of_it() -> None:
    async with fleet(2) as f:
        body = {"text": TEXT, "sampling_params": {"max_new_tokens": 1}}
        first = await call(f.gateway.address, "/generate", body)
        await f.settled()
        again = await call(f.gateway.address, "/generate", body)
        assert again.headers["x-forebay-worker"] == first.headers["x-forebay-worker"]
        assert int(again.headers["x-forebay-overlap-blocks"]) >= 10
        assert (
            int(again.headers["x-forebay-overlap-blocks"]) * BLOCK - again.json()["meta_info"]["cached_tokens"] <= BLOCK
        )
        assert any(entry.path == "/tokenize" for engine in f.engines for entry in engine.log.requests)


async def test_chats_of_which_nobody_tells_the_ids_are_matched_as_text() -> None:
    async with fleet(2) as f:
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
        first = await call(f.gateway.address, "/v1/chat/completions", body)
        await f.settled()
        again = await call(f.gateway.address, "/v1/chat/completions", body)
        assert again.headers["x-forebay-worker"] == first.headers["x-forebay-worker"]
        assert int(again.headers["x-forebay-overlap-blocks"]) >= 1


async def test_a9_12_an_index_that_fails_costs_the_overlap_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(2) as f:

        def broken(*_: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(f.gateway.gateway.kv.index, "overlap", broken)
        answer = await f.generate(PROMPT)
        assert "x-forebay-overlap-blocks" not in answer.headers


async def test_a_flush_through_the_gateway_is_known_at_once() -> None:
    async with fleet(1) as f:
        worker = (await f.generate(PROMPT)).headers["x-forebay-worker"]
        await f.settled()
        kv = f.gateway.gateway.kv
        assert kv.blocks(worker, 0) >= 10
        answer = await call(f.gateway.address, f"/workers/{worker}/call/flush_cache", {})
        assert answer.status == 200
        assert kv.blocks(worker, 0) == 0
        assert (await f.generate(PROMPT)).headers["x-forebay-overlap-blocks"] == "0"


async def test_a_request_that_failed_before_its_first_token_leaves_no_prediction() -> None:
    async with fleet(1) as f:
        f.engines[0].add_fault(at="headers", do="status:500", times=1)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        assert (await call(f.gateway.address, "/generate", body)).status == 502
        assert (await f.generate(PROMPT)).headers["x-forebay-overlap-blocks"] == "0"


async def test_q_12_without_events_what_was_sent_is_remembered() -> None:
    async with fleet(3, has_events=False, gateway={"policy": "prefix-approximate"}) as f:
        first = await f.generate(PROMPT)
        for tail in range(3):
            again = await f.generate([*PROMPT, 2000 + tail])
            assert again.headers["x-forebay-worker"] == first.headers["x-forebay-worker"]
            assert again.headers["x-forebay-overlap-blocks"] == "10"
        texts = [await call(f.gateway.address, "/generate", {"text": TEXT + tail}) for tail in ("a", "b")]
        assert len({answer.headers["x-forebay-worker"] for answer in texts}) == 1


async def test_texts_of_other_namespaces_are_not_mixed_up() -> None:
    async with fleet(3, has_events=False, gateway={"policy": "prefix-approximate"}) as f:
        overlaps = []
        for salt in ("a", "b", "a", ""):
            body = {"text": TEXT, "cache_salt": salt or None, "sampling_params": {"max_new_tokens": 1}}
            answer = await call(f.gateway.address, "/generate", body)
            overlaps.append(int(answer.headers["x-forebay-overlap-blocks"]) > 0)
        assert overlaps == [False, False, True, False]


async def test_without_events_the_default_looks_at_no_prompt() -> None:
    async with fleet(2, has_events=False) as f:
        answer = await f.generate(PROMPT)
        assert "x-forebay-overlap-blocks" not in answer.headers
        text = await call(f.gateway.address, "/generate", {"text": TEXT})
        assert text.status == 200
        assert all(entry.path != "/tokenize" for engine in f.engines for entry in engine.log.requests)


async def test_q_14_a_source_that_is_not_trusted_is_guessed_for_that_rank_alone() -> None:
    async with fleet(2) as f:
        silent = f.engines[0]
        silent.add_fault(at="kv", do="wrong_block_size", times=1000)
        kv = f.gateway.gateway.kv
        name = silent.url.removeprefix("http://")
        for start in range(500, 900, 10):  # what is published before the subscription has arrived comes as a replay
            await call(("127.0.0.1", silent.port), "/generate", {"input_ids": [*range(start, start + 100)]})
            if kv.state(name, 0) == "misconfigured":
                break
        await until(lambda: kv.state(name, 0) == "misconfigured", "the source is misconfigured")
        for _ in range(2):
            for ids in (PROMPT, [*range(3000, 3200)]):
                await f.generate(ids)
        again = await f.generate(PROMPT)
        assert again.headers["x-forebay-overlap-blocks"] == "10"


async def test_explain_says_what_would_happen_and_sends_nothing() -> None:
    async with fleet(2) as f:
        worker = (await f.generate(PROMPT)).headers["x-forebay-worker"]
        await f.settled()
        seen = sum(len(engine.log.requests_to("/generate")) for engine in f.engines)
        answer = await call(f.gateway.address, "/route/explain", {"input_ids": PROMPT})
        found = answer.json()
        assert answer.status == 200
        assert (found["policy"], found["blocks_hashed"], found["chosen"]["worker_id"]) == ("kv-aware", 10, worker)
        assert found["chosen"]["overlap_blocks"] == 10
        assert {one["worker_id"] for one in found["candidates"]} == {
            engine.url.removeprefix("http://") for engine in f.engines
        }
        fields = {"worker_id", "dp_rank", "overlap_blocks", "prompt_blocks", "active_blocks", "active_prefill_tokens",
                  "in_flight", "cost", "excluded"}  # fmt: skip
        assert all(fields <= set(one) for one in found["candidates"])
        assert "10 of 10 blocks are cached there" in found["reason"]
        assert sum(len(engine.log.requests_to("/generate")) for engine in f.engines) == seen


@pytest.mark.parametrize("guard", ["all", "shared"])
async def test_explain_says_why_the_winner_is_passed_over_or_is_not(guard: str) -> None:
    async with fleet(3, gateway={"kv_guard": guard}) as f:
        worker = (await f.generate(PROMPT)).headers["x-forebay-worker"]
        await f.settled()
        member = f.gateway.gateway.services.fleet.get(worker)
        assert member is not None
        booking = member.load_of(0).book(requests=9, blocks=0, prefill_tokens=0)
        found = (await call(f.gateway.address, "/route/explain", {"input_ids": PROMPT})).json()
        sent_to = (await f.generate(PROMPT)).headers["x-forebay-worker"]
        booking.release()
        assert found["chosen"]["worker_id"] == sent_to
        excluded = {one["worker_id"]: one["excluded"] for one in found["candidates"] if one["excluded"]}
        if guard == "all":
            assert sent_to != worker
            assert excluded == {worker: "crowded"}
            why = f"; {worker} rank 0 would cost 10 and has 10, but is passed over: crowded, with 9 requests"
        else:
            assert sent_to == worker
            assert excluded == {}
            why = "10 of 10 blocks are cached there; it is crowded, with 9 requests, but no other rank has half of that"
        assert found["reason"].startswith("the lowest cost, ")
        assert found["reason"].endswith(why)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b'{"text":"a","model":"nobody"}', 200, id="unknown model"),
        pytest.param(b"{", 400, id="no JSON"),
        pytest.param(b'{"text":"a","bootstrap_room":1}', 400, id="refused field"),
    ],
)
async def test_explain_of_what_cannot_be_placed(body: bytes, status: int) -> None:
    async with fleet(1) as f:
        answer = await call(f.gateway.address, "/route/explain", body)
        assert answer.status == status
        if status == 200:
            found = answer.json()
            assert found["chosen"] is None
            assert "nobody" in found["reason"]
        else:
            assert json.loads(answer.body)["error"]["type"] == "invalid_request"

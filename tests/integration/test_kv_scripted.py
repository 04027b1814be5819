"""What publishers of KV events may do that the simulated engines do not, seen through a running gateway."""

import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq

from gateway.parity import MISMATCHES_IN_A_ROW, Parity
from kv_events.hashing import block_hashes, pack_tokens
from kv_events.types import AllBlocksCleared, BlockStored
from tests.fakes.kv_fleet import BLOCK, PROMPT, announces
from tests.fakes.kv_publisher import KvPublisher, kv_publisher
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import ScriptEngine, script_engine
from tests.fakes.wire import Answer, call

BLOCKS = len(PROMPT) // BLOCK


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@asynccontextmanager
async def scripted_fleet(
    context: zmq.Context[zmq.Socket[bytes]], *, ranks: int = 1, has_replay: bool = True, **gateway: Any
) -> AsyncIterator[tuple[list[ScriptEngine], list[KvPublisher], RunningGateway]]:
    """Two workers; the first has publishers, one for each rank, and the second has no events at all."""
    publishers = [KvPublisher(context, has_replay=has_replay) for _ in range(ranks)]
    try:
        async with script_engine() as first, script_engine() as second:
            announces(first, *publishers)
            announces(second, kv_event_sources=[], dp_size=1)
            async with running_gateway(first.url, second.url, seed=1, **gateway) as running:
                for publisher in publishers:
                    await until(lambda one=publisher: one.subscriptions >= 1, "subscribed")  # type: ignore[misc]
                kv = running.gateway.kv
                await until(lambda: kv.trusts_all(kv.index.ranks()), "all sources trusted")
                yield [first, second], publishers, running
    finally:
        for publisher in publishers:
            publisher.stop()


def worker_of(engine: ScriptEngine) -> str:
    return engine.url.removeprefix("http://")


def stored(ids: Sequence[int], *, first_name: int = 1, is_eagle: bool = False) -> BlockStored:
    """A store of a prompt's whole blocks, named by numbers from ``first_name``."""
    count = (len(ids) - is_eagle) // BLOCK
    names = tuple(range(first_name, first_name + count))
    return BlockStored(names, None, pack_tokens(list(ids)), BLOCK, is_eagle=is_eagle)


async def generate(gateway: RunningGateway, ids: Sequence[int], **more: Any) -> Answer:
    answer = await call(gateway.address, "/generate", {"input_ids": list(ids)}, **more)
    assert answer.status == 200
    return answer


def placed(answer: Answer) -> tuple[str, int]:
    return answer.headers["x-forebay-worker"], int(answer.headers["x-forebay-overlap-blocks"])


async def metric(gateway: RunningGateway, name: str, **labels: str) -> float:
    """The sum of a metric's series that have these labels."""
    lines = (await gateway.client.get("/metrics")).text.splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.startswith(name + "{") and all(label in line for label in wanted)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


async def known(gateway: RunningGateway, engine: ScriptEngine, blocks: int, dp_rank: int = 0) -> None:
    kv = gateway.gateway.kv
    await until(lambda: kv.blocks(worker_of(engine), dp_rank) == blocks, f"{blocks} blocks on rank {dp_rank}")


async def test_field_case_56_and_a8_7_pairs_of_tokens_are_found(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with scripted_fleet(context) as (engines, (publisher,), gateway):
        pairs = [[left, right] for left, right in itertools.pairwise(PROMPT)][: 9 * BLOCK]
        event = {"type": "BlockStored", "block_hashes": list(range(1, 10)), "parent_block_hash": None,
                 "token_ids": pairs, "block_size": BLOCK, "lora_id": None, "medium": "GPU"}  # fmt: skip
        publisher.publish_payload(msgspec.msgpack.encode([1.0, [event], 0]))
        await known(gateway, engines[0], 9)
        assert gateway.gateway.kv.index.eagle_ranks == {(worker_of(engines[0]), 0)}
        # 160 tokens are 10 plain blocks, and 9 that cover one token more.
        assert placed(await generate(gateway, [*PROMPT, 7000])) == (worker_of(engines[0]), 9)
        # Plain blocks again, as after a restart without speculation.
        other = [2000 + token for token in PROMPT]
        publisher.publish(AllBlocksCleared(), stored(other))
        await known(gateway, engines[0], BLOCKS)
        assert not gateway.gateway.kv.index.eagle_ranks
        assert placed(await generate(gateway, other)) == (worker_of(engines[0]), BLOCKS)


async def test_field_case_58_announcements_that_differ_are_told_and_not_used(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_fleet(context, health_interval_s=0.01) as (engines, (publisher,), gateway):
        prefixes = gateway.gateway.services.prefixes
        prefixes.parity = Parity(gateway.gateway.kv, gateway.gateway.kv_metrics.mismatch, check_after_s=0.02)
        worker = worker_of(engines[0])
        # The engine's tokenizer puts a token in front that nobody here knows of.
        publisher.publish(stored([99_999, *PROMPT]))
        await known(gateway, engines[0], BLOCKS)
        with caplog.at_level(logging.ERROR, "forebay.kv_events"):
            for at in range(MISMATCHES_IN_A_ROW):
                headers = {"x-forebay-worker": worker}
                await generate(gateway, [100 * at + 10_000 + token for token in PROMPT], headers=headers)
                await until(lambda at=at: prefixes.parity._in_a_row.get(worker, 0) == at + 1, "compared")  # type: ignore[misc]
        (told,) = [record.getMessage() for record in caplog.records if "other blocks" in record.getMessage()]
        assert worker in told
        assert await metric(gateway, "forebay_kv_parity_mismatches_total", worker=worker) == MISMATCHES_IN_A_ROW
        # What it announces is no reason any more, not even where it would match.
        publisher.publish(stored(PROMPT, first_name=100))
        await known(gateway, engines[0], 2 * BLOCKS)
        assert placed(await generate(gateway, PROMPT))[1] == 0
        # Another process is judged anew.
        publisher.sent = []
        announces(engines[0], publisher, random_seed=8)
        await until(lambda: not prefixes.parity.is_mismatched(worker), "the worker has restarted")
        publisher.publish(stored(PROMPT, first_name=500))
        await known(gateway, engines[0], BLOCKS)
        assert placed(await generate(gateway, PROMPT)) == (worker, BLOCKS)


@pytest.mark.parametrize("by", ["the engine", "a flush", "an update"])
async def test_prompts_that_a_clearing_has_overtaken_are_no_mismatch(
    context: zmq.Context[zmq.Socket[bytes]], by: str
) -> None:
    async with scripted_fleet(context) as (engines, (publisher,), gateway):
        kv, worker = gateway.gateway.kv, worker_of(engines[0])
        parity = gateway.gateway.services.prefixes.parity = Parity(
            kv, gateway.gateway.kv_metrics.mismatch, check_after_s=2.0 * TIME_SCALE
        )
        publisher.publish(stored([99_999, *PROMPT]))
        await known(gateway, engines[0], BLOCKS)
        for at in range(MISMATCHES_IN_A_ROW):
            await generate(
                gateway, [100 * at + 10_000 + token for token in PROMPT], headers={"x-forebay-worker": worker}
            )
        timers = parity._timers[worker]
        assert len(timers) == MISMATCHES_IN_A_ROW
        if by == "the engine":
            publisher.publish(AllBlocksCleared())
        else:
            path = "/flush_cache" if by == "a flush" else "/update_weights_from_disk"
            assert (await call(gateway.address, path, {})).status == 200
        await known(gateway, engines[0], 0)
        publisher.publish(stored([99_998, *PROMPT], first_name=100))
        await known(gateway, engines[0], BLOCKS)
        await until(lambda: not parity._timers.get(worker), "compared, or not")
        assert not parity._in_a_row.get(worker)
        # An engine whose weights were changed may go on holding blocks that it will not announce again.
        await generate(gateway, [20_000 + token for token in PROMPT], headers={"x-forebay-worker": worker})
        assert bool(parity._timers.get(worker)) is (by != "an update")


async def test_field_case_58_one_prompt_that_agrees_ends_the_check(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with scripted_fleet(context) as (engines, (publisher,), gateway):
        prefixes = gateway.gateway.services.prefixes
        prefixes.parity = Parity(gateway.gateway.kv, gateway.gateway.kv_metrics.mismatch, check_after_s=0.02)
        publisher.publish(stored(PROMPT))
        await known(gateway, engines[0], BLOCKS)
        assert placed(await generate(gateway, PROMPT)) == (worker_of(engines[0]), BLOCKS)
        await until(lambda: worker_of(engines[0]) in prefixes.parity._agreed, "they agree")
        assert await metric(gateway, "forebay_kv_parity_mismatches_total") == 0


async def test_k_26_and_field_case_59_a_source_that_never_speaks_is_told_of_and_guessed(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first rank's publisher is there; of the second one the address is right and nobody listens."""
    async with kv_publisher(context) as there, script_engine() as engine:
        absent = KvPublisher(context, has_replay=False)
        absent.stop()
        announces(engine, there, absent)
        async with running_gateway(engine.url, seed=1) as gateway:
            worker = worker_of(engine)
            kv, prefixes = gateway.gateway.kv, gateway.gateway.services.prefixes
            await until(lambda: kv.state(worker, 0) == "live", "rank 0 is live")
            assert kv.state(worker, 1) == "cold"
            page = (await gateway.client.get("/workers")).json()["workers"][0]
            assert [rank["kv"]["state"] for rank in page["ranks"]] == ["live", "cold"]
            now = 1000.0
            prefixes._clock = lambda: now
            rank = {"x-data-parallel-rank": "1"}
            with caplog.at_level(logging.WARNING, "forebay.kv_events"):
                for at in range(4):
                    await generate(gateway, [500 * at + token for token in PROMPT], headers=rank)
                    now += 11.0
            (told,) = [record.getMessage() for record in caplog.records if "no KV event" in record.getMessage()]
            assert worker in told
            assert absent.endpoint in told
            assert f"{worker} rank 1" in told
            # It is not a cold cache for ever: what was sent there is remembered.
            again = await generate(gateway, [500 * 3 + token for token in PROMPT])
            assert (again.headers["x-forebay-dp-rank"], placed(again)[1]) == ("1", BLOCKS)


async def test_field_case_50_a_clear_empties_that_rank_alone(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with scripted_fleet(context, ranks=2) as (engines, publishers, gateway):
        for number, publisher in enumerate(publishers):
            publisher.publish(stored(PROMPT), dp_rank=number)
            await known(gateway, engines[0], BLOCKS, number)
        publishers[0].publish(AllBlocksCleared(), dp_rank=0)
        await known(gateway, engines[0], 0)
        await known(gateway, engines[0], BLOCKS, 1)
        again = await generate(gateway, PROMPT)
        assert (again.headers["x-forebay-dp-rank"], placed(again)[1]) == ("1", BLOCKS)


@pytest.mark.parametrize("keeps", [10_000, 2], ids=["replay has it", "replay begins too late"])
async def test_field_case_52_and_53_a_gap_is_mended_once_or_costs_the_rank(
    context: zmq.Context[zmq.Socket[bytes]], keeps: int
) -> None:
    async with scripted_fleet(context) as (engines, (publisher,), gateway):
        publisher.publish(stored(PROMPT))
        await known(gateway, engines[0], BLOCKS)
        asked = len(publisher.asked)
        publisher.keeps = keeps
        for number in range(20):  # lost removals and stores
            publisher.publish(stored([9000 + number] * BLOCK, first_name=1000 + number), is_lost=True)
        publisher.publish(stored([8000] * BLOCK, first_name=2000))
        await known(gateway, engines[0], BLOCKS + 21 if keeps > 20 else 2)
        for number in range(5):  # each of these would ask again if the position had been set too low
            publisher.publish(stored([7000 + number] * BLOCK, first_name=3000 + number))
        await known(gateway, engines[0], BLOCKS + 26 if keeps > 20 else 7)
        assert len(publisher.asked) == asked + 1
        resets = await metric(gateway, "forebay_kv_resets_total", worker=worker_of(engines[0]))
        assert resets == (0 if keeps > 20 else 1)


async def test_field_case_55_names_need_no_common_seed(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with scripted_fleet(context, ranks=2) as (engines, publishers, gateway):
        worker = worker_of(engines[0])
        for number, publisher in enumerate(publishers):  # the same content under names that have nothing in common
            publisher.publish(stored(PROMPT, first_name=10**9 * (number + 1)), dp_rank=number)
            await known(gateway, engines[0], BLOCKS, number)
        assert gateway.gateway.kv.index.overlap(block_hashes(PROMPT, BLOCK)).device == {
            (worker, 0): BLOCKS,
            (worker, 1): BLOCKS,
        }


async def test_field_case_55_names_without_tokens_are_counted_and_told(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_fleet(context) as (engines, (publisher,), gateway):
        now = 1000.0
        gateway.gateway.services.prefixes._clock = lambda: now
        with caplog.at_level(logging.WARNING, "forebay.kv_events"):
            for at in range(4):
                event = {"type": "BlockStored", "block_hashes": [at], "parent_block_hash": None, "token_ids": [],
                         "block_size": BLOCK, "lora_id": None, "medium": "GPU"}  # fmt: skip
                publisher.publish_payload(msgspec.msgpack.encode([float(at), [event], 0]))
                headers = {"x-forebay-worker": worker_of(engines[0])}
                await generate(gateway, [500 * at + token for token in PROMPT], headers=headers)
                now += 11.0
        (told,) = [record.getMessage() for record in caplog.records if "no KV event" in record.getMessage()]
        assert "with token ids" in told
        dropped = gateway.gateway.kv_metrics._dropped
        await until(lambda: dropped.get("incomplete_blocks") == 4, "each is counted")


async def test_field_case_61_ranks_of_which_nobody_tells_are_alarmed(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async with kv_publisher(context) as publisher, script_engine() as engine:
        announces(engine, publisher, dp_size=3)
        with caplog.at_level(logging.WARNING, "forebay.kv_events"):
            async with running_gateway(engine.url) as gateway:
                await until(lambda: gateway.gateway.kv.state(worker_of(engine), 0) == "live", "rank 0 is live")
                assert [gateway.gateway.kv.state(worker_of(engine), rank) for rank in range(3)] == [
                    "live",
                    "off",
                    "off",
                ]
        assert "[1, 2]" in caplog.text


async def test_field_case_62_addresses_are_read_again_after_a_restart(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with kv_publisher(context) as before, kv_publisher(context) as after, script_engine() as engine:
        announces(engine, before)
        async with running_gateway(engine.url, health_interval_s=0.01) as gateway:
            before.publish(stored(PROMPT))
            await known(gateway, engine, BLOCKS)
            announces(engine, after, random_seed=8)  # another process, on other ports
            await until(lambda: after.subscriptions >= 1, "the new address is subscribed to")
            await known(gateway, engine, 0)
            after.publish(stored(PROMPT[: 3 * BLOCK]))
            await known(gateway, engine, 3)


async def test_field_case_65_queued_events_do_not_bring_a_removed_worker_back(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with scripted_fleet(context, drain_timeout_s=0) as (engines, (publisher,), gateway):
        for number in range(10_000):
            publisher.publish(stored([number] * BLOCK, first_name=number + 1))
        await until(lambda: gateway.gateway.kv.blocks(worker_of(engines[0]), 0) > 0, "the first of them")
        answer = await call(gateway.address, f"/workers/{worker_of(engines[0])}", method="DELETE")
        assert answer.status in (200, 202)
        await until(lambda: len(gateway.gateway.services.fleet) == 1, "the worker is gone", 2 * PATIENCE_S)
        index = gateway.gateway.kv.index
        assert index.ranks() == ()
        await until(lambda: index.distinct_blocks() == 0, "its memory is given back")
        assert index.overlap(block_hashes([9_999] * BLOCK, BLOCK)).device == {}
        text = (await gateway.client.get("/metrics")).text
        assert not [
            line for line in text.splitlines() if line.startswith("forebay_kv") and worker_of(engines[0]) in line
        ]


async def test_requests_that_are_explained_wait_for_no_engine(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with scripted_fleet(context) as (engines, (publisher,), gateway):
        publisher.publish(stored(PROMPT))
        await known(gateway, engines[0], BLOCKS)
        answer = await call(gateway.address, "/route/explain", {"input_ids": PROMPT})
        assert json.loads(answer.body)["chosen"]["overlap_blocks"] == BLOCKS
        assert not engines[0].requests

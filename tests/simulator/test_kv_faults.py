"""Scripted faults of KV events, as a subscriber and a replay client see them."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.faulting import GARBAGE
from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.kv_clients import ANY, NaiveIndex, Subscriber, replay, replayed, sockets, subscribe, true_index
from tests.simulator.wire import ask


async def started(start_engine: StartEngine, **options: Any) -> SimulatedEngine:
    return await start_engine(kv_events=ANY, replay=ANY, page_size=4, **options)


async def fault(engine: SimulatedEngine, do: str, times: int | None = 1, at: str = "kv", **match: Any) -> None:
    answer = await ask(engine.port, "/_fault", {"at": at, "do": do, "times": times, "match": match})
    assert answer.status == 200, answer.body


async def publish(engine: SimulatedEngine, count: int = 1) -> None:
    """Make the engine publish batches, each of one stored block."""
    for _ in range(count):
        _, number = await true_index(engine)
        fields = {"input_ids": [300 + number, 1, 2, 3, 4], "sampling_params": {"max_new_tokens": 1}}
        assert (await ask(engine.port, "/generate", fields)).status == 200


async def numbers(subscriber: Subscriber, start: int, count: int) -> list[int]:
    """Return the numbers of the next batches, counted from ``start``."""
    return [batch.sequence - start for batch in await subscriber.take(count)]


@pytest.mark.parametrize(
    ("do", "times", "published", "seen", "kept"),
    [
        pytest.param("drop", 2, 4, [2, 3], [0, 1, 2, 3], id="gap"),
        pytest.param("lose", 2, 4, [2, 3], [2, 3], id="gap for ever"),
        pytest.param("duplicate", 1, 2, [0, 0, 1], [0, 1], id="duplicate"),
        pytest.param("reorder", 1, 3, [1, 0, 2], [0, 1, 2], id="reorder"),
        pytest.param("reorder", 2, 3, [2, 0, 1], [0, 1, 2], id="overtaken twice"),
        pytest.param("delay:80", 1, 3, [0, 1, 2], [0, 1, 2], id="delay"),
    ],
)
async def test_what_arrives(
    start_engine: StartEngine, do: str, times: int, published: int, seen: list[int], kept: list[int]
) -> None:
    engine = await started(start_engine)
    with sockets() as context:
        subscriber = await subscribe(context, engine)
        _, start = await true_index(engine)
        await fault(engine, do, times)
        await publish(engine, published)
        assert await numbers(subscriber, start, len(seen)) == seen
        assert [batch.sequence - start for batch in await replayed(context, engine, start)] == kept
        assert await subscriber.is_quiet()


@pytest.mark.parametrize("do", ["garbage", "unknown_tag", "wrong_rank", "wrong_block_size"])
async def test_a_spoilt_batch_is_whole_in_the_replay(start_engine: StartEngine, do: str) -> None:
    engine = await started(start_engine)
    with sockets() as context:
        subscriber = await subscribe(context, engine)
        _, start = await true_index(engine)
        await fault(engine, do)
        await publish(engine, 2)
        spoilt, good = await subscriber.take(2)
        true, same = await replayed(context, engine, start)
    assert (spoilt.sequence, good) == (true.sequence, same)
    if do == "garbage":
        assert spoilt.payload == GARBAGE
        return
    at_s, events, rank = true.decoded
    expected = {
        "unknown_tag": [at_s, [{"type": "BlockPondered"}, *events], rank],
        "wrong_rank": [at_s, events, 1],
        "wrong_block_size": [at_s, [{**events[0], "block_size": 8}], rank],
    }
    assert spoilt.decoded == expected[do]


async def test_silence_until_a_reset(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    with sockets() as context:
        subscriber = await subscribe(context, engine)
        _, start = await true_index(engine)
        await fault(engine, "silence")
        await publish(engine, 3)
        assert await subscriber.is_quiet()
        with pytest.raises(TimeoutError):
            await replay(context, engine, start, timeout_s=0.2)
        await ask(engine.port, "/_reset")
        # The reset empties the cache, and says so.
        cleared = await subscriber.next()
        assert (cleared.sequence, cleared.types) == (start + 3, ["AllBlocksCleared"])
        assert [batch.sequence for batch in await replayed(context, engine, start)] == [*range(start, start + 4)]


async def test_a_reset_lets_go_what_is_held_back(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    with sockets() as context:
        subscriber = await subscribe(context, engine)
        _, start = await true_index(engine)
        await fault(engine, "reorder")
        await publish(engine)
        assert await subscriber.is_quiet()
        await fault(engine, "drop", None)
        await ask(engine.port, "/_reset")
        assert await numbers(subscriber, start, 2) == [0, 1]
        await fault(engine, "delay:600000")
        await publish(engine, 2)
        assert await subscriber.is_quiet()
        await ask(engine.port, "/_reset")
        assert await numbers(subscriber, start, 3) == [2, 3, 4]


async def test_a_number_series_begins_again_with_the_cache_kept(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    with sockets() as context:
        subscriber = await subscribe(context, engine)
        await publish(engine, 3)
        await subscriber.take(3)
        boot = engine.boot_id
        await fault(engine, "renumber")
        await publish(engine, 2)
        assert await numbers(subscriber, 0, 2) == [0, 1]
        assert [batch.sequence for batch in await replayed(context, engine)] == [0, 1]
    index, following = await true_index(engine)
    assert (len(index.blocks), following, engine.boot_id) == (5, 2, boot)


async def test_a_restart_at_a_batch(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    await publish(engine, 3)
    boot = engine.boot_id
    await fault(engine, "restart")
    await ask_lost(engine)
    await engine.wait_for(lambda e: e.boot_id != boot)
    with sockets() as context:
        assert [batch.types for batch in await replayed(context, engine)] == [["AllBlocksCleared"]]
    assert await true_index(engine) == (NaiveIndex(), 1)


async def ask_lost(engine: SimulatedEngine) -> None:
    """Send a request whose connection may go with the engine."""
    try:
        await publish(engine)
    except (AssertionError, ConnectionError):
        pass


async def test_a_fault_of_one_rank_leaves_the_other_alone(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=2)
    with sockets() as context:
        first, second = [await subscribe(context, engine, rank) for rank in (0, 1)]
        starts = [(await true_index(engine, rank))[1] for rank in (0, 1)]
        await fault(engine, "drop", 1, dp_rank=1)
        for _ in range(2):
            await ask(engine.port, "/flush_cache")
        assert await numbers(first, starts[0], 2) == [0, 1]
        assert await numbers(second, starts[1], 1) == [1]


async def test_an_unanswered_replay(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    await fault(engine, "ignore", at="replay")
    with sockets() as context:
        with pytest.raises(TimeoutError):
            await replay(context, engine, 0, timeout_s=0.2)
        assert len(await replayed(context, engine)) == 1


async def test_the_log_lists_batches(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    await fault(engine, "drop")
    await publish(engine, 2)
    entries = (await ask(engine.port, "/_log", method="GET")).json()["kv_batches"]
    assert [(e["dp_rank"], e["sequence"], e["events"], e["is_sent"], e["fault"]) for e in entries] == [
        (0, 0, 1, True, None),
        (0, 1, 1, False, "drop"),
        (0, 2, 1, True, None),
    ]

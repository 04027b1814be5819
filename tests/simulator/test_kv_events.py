"""KV events of the simulated engines over real sockets, against records and against the cache itself."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.kv_clients import (
    ANY,
    END,
    NaiveIndex,
    at_rank,
    replay,
    replayed,
    sockets,
    subscribe,
    true_index,
)
from tests.simulator.wire import CAPTURES, VLLM_CAPTURES, ask, load_capture, load_vllm_capture, parse_answer, send


async def started(start_engine: StartEngine, engine: str = "sglang", **options: Any) -> SimulatedEngine:
    return await start_engine(engine=engine, kv_events=ANY, replay=ANY, **{"page_size": 4, **options})


async def generate(engine: SimulatedEngine, tokens: list[int], count: int = 1, **more: Any) -> dict[str, Any]:
    """Generate and return what the engine says of the request: ``cached_tokens`` and ``dp_rank`` where known."""
    if engine.options.engine == "sglang":
        fields = {"input_ids": tokens, "sampling_params": {"max_new_tokens": count, "temperature": 0}, **more}
        answer = await ask(engine.port, "/generate", fields)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json()["meta_info"]
        return found
    rank = more.pop("routed_dp_rank", None)
    headers = {} if rank is None else {"X_data_parallel_rank": str(rank)}
    answer = await ask(engine.port, "/v1/completions", {"prompt": tokens, "max_tokens": count, **more}, **headers)
    assert answer.status == 200, answer.body
    return {"cached_tokens": answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], "dp_rank": None}


# -- what is published -----------------------------------------------------------------------------


async def test_sglang_publishes_what_the_recorded_server_did(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=2)
    body = json.loads(load_capture("http_dp2/extra_key").body)
    record = (CAPTURES / "kv_events_dp2_rank0.jsonl").read_text().splitlines()
    recorded = next(
        event for line in record for event in json.loads(line)["decoded"][1] if event.get("session_id") == "sess-1"
    )
    assert (await ask(engine.port, "/generate", body)).status == 200
    with sockets() as context:
        start, first = await replayed(context, engine)
    assert (start.topic, start.sequence, start.types) == (b"kv-events", 0, ["AllBlocksCleared"])
    assert first.sequence == 1
    assert first.decoded[2] == 0
    assert first.events == [recorded]
    assert list(first.events[0]) == list(recorded)


async def test_vllm_publishes_what_the_recorded_server_did(start_engine: StartEngine) -> None:
    engine = await started(start_engine, "vllm", page_size=32, num_blocks=79, model="tiny")
    record = json.loads((VLLM_CAPTURES / "kv-events/frames-int-hash.json").read_text())
    names = ["store80", "extend", "salt", "exact64", "exact64again", "session"]
    requests = ["store-80", "store-130", "salted", "exact-64", "exact-64-again", "session-id"]
    for name in requests:
        answer = parse_answer(await send(engine.port, _closing(load_vllm_capture(f"kv/{name}").request)))
        assert answer is not None
        assert answer.status == 200, (name, answer.body)
    with sockets() as context:
        batches = await replayed(context, engine)
    recorded = [_decoded(record[name]) for name in names]
    assert [batch.sequence for batch in batches] == list(range(len(names)))
    for batch, expected in zip(batches, recorded, strict=True):
        assert batch.decoded[2] == 0
        assert batch.events == [event for event in expected if event["type"] != "AllBlocksCleared"]


def _closing(request: bytes) -> bytes:
    return request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)


def _decoded(part: dict[str, Any]) -> list[dict[str, Any]]:
    (batch,) = part["batches"]
    events: list[dict[str, Any]] = msgspec.msgpack.decode(bytes.fromhex(batch["frames_hex"][2]))[1]
    return events


async def test_sglang_publishes_the_prompt_first_and_the_answer_at_its_end(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    tokens = list(range(10, 22))
    answer = await ask(engine.port, "/generate", {"input_ids": tokens, "sampling_params": {"max_new_tokens": 9}})
    with sockets() as context:
        _, prompt, output = await replayed(context, engine)
    assert prompt.events[0]["token_ids"] == tokens
    # The last token's own entry is never computed.
    assert output.events[0]["token_ids"] == answer.json()["output_ids"][:8]
    assert output.events[0]["parent_block_hash"] == prompt.events[0]["block_hashes"][-1]


async def test_vllm_publishes_blocks_of_the_answer_one_by_one(start_engine: StartEngine) -> None:
    engine = await started(start_engine, "vllm")
    await generate(engine, list(range(10, 16)), 9)
    with sockets() as context:
        batches = await replayed(context, engine)
    assert [len(event["token_ids"]) for batch in batches for event in batch.events] == [4, 4, 4]
    assert [batch.sequence for batch in batches] == [0, 1, 2]


async def test_evictions_come_before_the_blocks_that_needed_the_room(start_engine: StartEngine) -> None:
    for kind, removals in (("sglang", 1), ("vllm", 2)):
        engine = await started(start_engine, kind, num_blocks=7)
        await generate(engine, list(range(10, 30)))
        await generate(engine, list(range(30, 42)))
        with sockets() as context:
            last = (await replayed(context, engine))[-1]
        assert last.types == ["BlockRemoved"] * removals + ["BlockStored"]
        assert sum(len(event["block_hashes"]) for event in last.events[:-1]) == 2
        recorded = {"type", "block_hashes", "medium"} | ({"group_idx"} if kind == "vllm" else set())
        assert set(last.events[0]) == recorded


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_a_flush_is_told_as_by_the_engine(start_engine: StartEngine, kind: str) -> None:
    engine = await started(start_engine, kind, dp_size=2, dev_mode=kind == "vllm")
    for rank in (0, 1):
        await generate(engine, [5, 6, 7, 8, 9], routed_dp_rank=rank)
    path = "/flush_cache" if kind == "sglang" else "/reset_prefix_cache"
    assert (await ask(engine.port, path)).status == 200
    with sockets() as context:
        for rank in (0, 1):
            index, following = await true_index(engine, rank)
            assert index == NaiveIndex()
            batches = await replayed(context, engine, rank=rank)
            assert [batch.decoded[2] for batch in batches] == [rank] * following
            if kind == "sglang":
                assert batches[-1].types == ["AllBlocksCleared"]
            else:  # nothing is published until there is something else to tell
                assert batches[-1].types == ["BlockStored"]
                await generate(engine, [5, 6, 7, 8, 9], routed_dp_rank=rank)
                (batch,) = await replayed(context, engine, following, rank)
                assert batch.types == ["AllBlocksCleared", "BlockStored"]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_who_applies_the_events_knows_the_cache(start_engine: StartEngine, kind: str) -> None:
    engine = await started(start_engine, kind, dp_size=2, num_blocks=24, kv_byte_hashes=True)
    chance = random.Random(7)
    stems = [[10 * stem + offset for offset in range(1, 9)] for stem in range(1, 5)]
    with sockets() as context:
        subscribers = [await subscribe(context, engine, rank) for rank in (0, 1)]
        starts = [(await true_index(engine, rank))[1] for rank in (0, 1)]
        requests = []
        for _ in range(120):
            stem = chance.choice(stems)
            tokens = [*stem, *(chance.randrange(300, 303) for _ in range(chance.randrange(9)))]
            salt = {"cache_salt": chance.choice("ab")} if chance.random() < 0.3 else {}
            requests.append(generate(engine, tokens, chance.randrange(1, 9), **salt))
        for begin in range(0, 120, 6):
            async with asyncio.TaskGroup() as group:
                for request in requests[begin : begin + 6]:
                    group.create_task(request)
        evictions = 0
        for rank, (subscriber, start) in enumerate(zip(subscribers, starts, strict=True)):
            truth, following = await true_index(engine, rank)
            live = await subscriber.until(following - 1)
            assert [batch.sequence for batch in live] == list(range(start, following))
            index = NaiveIndex()
            for batch in live:
                index.apply(batch)
            assert index == truth
            assert await replayed(context, engine, start, rank) == live
            evictions += sum("BlockRemoved" in batch.types for batch in live)
        assert evictions


async def test_events_are_out_before_the_answer(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    with sockets() as context:
        subscriber = await subscribe(context, engine)
        for start in range(20):
            _, before = await true_index(engine)
            await generate(engine, list(range(50 * start, 50 * start + 8)))
            assert (await true_index(engine))[1] > before
            assert (await subscriber.next()).events[0]["token_ids"] == list(range(50 * start, 50 * start + 8))


# -- namespaces and ranks --------------------------------------------------------------------------


async def test_each_rank_has_a_cache_of_its_own(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=2)
    prompt = list(range(10, 30))
    assert [(await generate(engine, prompt))["dp_rank"] for _ in range(4)] == [0, 1, 0, 1]
    await ask(engine.port, "/flush_cache")
    cached = [(await generate(engine, prompt, routed_dp_rank=rank))["cached_tokens"] for rank in (0, 1, 0, 1)]
    assert cached == [0, 0, 16, 16]
    found = await generate(engine, prompt, data_parallel_rank=1)
    assert (found["dp_rank"], found["cached_tokens"]) == (1, 16)
    for rank in (0, 1):
        index, _ = await true_index(engine, rank)
        assert len(index.blocks) == 5


async def test_namespaces_are_the_same_on_all_routes(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    prompt = list(range(10, 30))

    async def cached(path: str, **more: Any) -> int:
        if path == "/generate":
            return int((await generate(engine, prompt, **more))["cached_tokens"])
        answer = await ask(engine.port, path, {"model": "model", "prompt": prompt, "max_tokens": 1, **more})
        await ask(engine.port, path, {"model": "model", "prompt": prompt, "max_tokens": 1, **more})
        assert answer.status == 200
        return 0

    assert await cached("/generate", extra_key="x") == 0
    assert await cached("/generate", cache_salt="x") == 0
    assert await cached("/generate", extra_key="x") == 16
    await cached("/v1/completions", cache_salt="y")
    assert await cached("/generate", cache_salt="y") == 16
    assert await cached("/generate", extra_key="y") == 0
    assert await cached("/generate") == 0
    with sockets() as context:
        stored = [e for b in await replayed(context, engine) for e in b.events if e["type"] == "BlockStored"]
    assert [event.get("cache_salt") for event in stored] == [None, "x", "y", None, None]
    # Tenants separated by an extra key publish the same names.
    assert stored[0]["block_hashes"] == stored[3]["block_hashes"] == stored[4]["block_hashes"]


# -- replay ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["new", "old"])
async def test_replay_framing(start_engine: StartEngine, framing: str) -> None:
    engine = await started(start_engine, kv_replay_framing=framing)
    recorded = json.loads((CAPTURES / "kv_replay_dealer_0.json").read_text())["replies"]
    first, end = ([bytes.fromhex(frame) for frame in recorded[index]["frames_hex"]] for index in (0, -1))
    with sockets() as context:
        replies = await replay(context, engine, 0)
        beyond = await replay(context, engine, 100_000)
    if framing == "new":
        assert [reply[:3] for reply in replies] == [first[:3], end[:3]]
        assert beyond == [end]
        # All but the time is the same.
        assert (replies[0][3][:2], replies[0][3][10:]) == (first[3][:2], first[3][10:])
    else:
        assert [frame[:2] for frame in replies] == [[b"", first[2]], [b"", END]]
        assert beyond == [[b"", END, b""]]


async def test_a_req_socket_gets_one_reply_and_a_bare_request_none(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    recorded = json.loads((CAPTURES / "kv_replay_req_38.json").read_text())["replies"][0]["frames_hex"]
    with sockets() as context:
        plain = context.socket(zmq.DEALER)
        plain.connect(at_rank(engine.options.replay, 0))
        await plain.send_multipart([bytes(8)])
        asking = context.socket(zmq.REQ)
        asking.connect(at_rank(engine.options.replay, 0))
        await asking.send((38).to_bytes(8, "big"))
        async with asyncio.timeout(10):
            assert [frame.hex() for frame in await asking.recv_multipart()] == recorded
        assert not await plain.poll(50)


async def test_a_long_replay_is_whole_and_old_batches_are_forgotten(start_engine: StartEngine) -> None:
    engine = await started(start_engine, kv_buffer_batches=700)
    for _ in range(1000):
        engine.core.clear_caches()
    with sockets() as context:
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(replayed(context, engine)) for _ in range(3)]
    for reader in readers:
        assert [batch.sequence for batch in reader.result()] == list(range(301, 1001))


# -- what is said about it, and its life -----------------------------------------------------------


async def test_sglang_tells_where_its_events_are(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=2)
    body = load_capture("http_dp2/server_info").response.partition(b"\r\n\r\n")[2]
    recorded = json.loads(body)["kv_events"]
    found = (await ask(engine.port, "/server_info", method="GET")).json()
    block = found["kv_events"]
    for name in ("load_endpoint_port_base", "load_topic"):
        del recorded[name]  # no load is published here
    assert list(block) == list(recorded)
    assert (block["publisher"], block["topic"], block["dp_size"], block["block_size"]) == ("zmq", "kv-events", 2, 4)
    endpoint = f"tcp://{block['endpoint_host']}:{block['endpoint_port_base']}"
    assert engine.options.kv_events == endpoint
    assert json.loads(found["kv_events_config"])["endpoint"] == endpoint
    assert engine.options.replay == f"tcp://127.0.0.1:{block['replay_endpoint_port_base']}"
    silent = (await ask((await start_engine()).port, "/server_info", method="GET")).json()
    assert (silent["kv_events"], silent["kv_events_config"]) == (None, None)


async def test_vllm_tells_where_its_events_are(start_engine: StartEngine) -> None:
    engine = await started(start_engine, "vllm", dp_size=2)
    recorded = json.loads(load_vllm_capture("dp2/kv_event_sources").response.partition(b"\r\n\r\n")[2])
    found = (await ask(engine.port, "/kv_event_sources", method="GET")).json()
    for rank in ("0", "1"):
        mine, theirs = found[rank], recorded[rank]
        assert list(mine) == list(theirs)
        assert mine["endpoint"] == at_rank(engine.options.kv_events, int(rank))
        assert mine["replay_endpoint"] == at_rank(engine.options.replay, int(rank))
        assert {**mine, "endpoint": "", "replay_endpoint": ""} == {**theirs, "endpoint": "", "replay_endpoint": ""}
    assert (await ask((await start_engine(engine="vllm")).port, "/kv_event_sources", method="GET")).status == 404


async def test_a_restart_begins_again_at_the_same_ports(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=2)
    await generate(engine, list(range(10, 30)), routed_dp_rank=1)
    boot, where = engine.boot_id, engine.options
    assert (await ask(engine.port, "/_restart")).json()["random_seed"] != boot
    assert engine.options == where
    with sockets() as context:
        for rank in (0, 1):
            assert [batch.types for batch in await replayed(context, engine, rank=rank)] == [["AllBlocksCleared"]]
            assert await true_index(engine, rank) == (NaiveIndex(), 1)
        subscriber = await subscribe(context, engine, 1)
        assert (await generate(engine, list(range(10, 30)), routed_dp_rank=1))["cached_tokens"] == 0
        assert (await subscriber.next()).types == ["BlockStored"]


async def test_ports_are_free_after_the_end_and_taken_before(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=3)
    options = engine.options
    other = SimulatedEngine(EngineOptions(kv_events=at_rank(options.kv_events, 1)))
    with pytest.raises(OSError, match="in use"):
        await other.start()
    await other.stop()
    await engine.stop()
    again = await start_engine(kv_events=options.kv_events, replay=options.replay, dp_size=3)
    assert (again.options.kv_events, again.options.replay) == (options.kv_events, options.replay)


async def test_a_dead_engine_publishes_nothing_and_comes_back(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=2)
    await ask(engine.port, "/_die")
    with sockets() as context:
        with pytest.raises(TimeoutError):
            await replay(context, engine, 0, timeout_s=0.2)
        await ask(engine.port, "/_reset")
        assert [batch.sequence for batch in await replayed(context, engine)] == [0]

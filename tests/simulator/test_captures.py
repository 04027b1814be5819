"""The simulated engine against bytes of a real SGLang 0.5.23 server.

Compared are status, header names and order, content type, event framing, key order and JSON
types; values, message texts and the lengths of generated arrays are not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.simulator.shapes import event_problems, problems
from tests.simulator.wire import CAPTURES, CUT, Answer, Capture, ask, load_capture, parse_answer, send

SINGLE = EngineOptions(page_size=4, num_blocks=1024, context_length=2048, health_min_s=0.01, health_timeout_s=0.05)
TWO_RANKS = EngineOptions(
    page_size=4,
    num_blocks=64,
    context_length=2048,
    dp_size=2,
    max_running=2,
    max_queued=1,
    incremental_streaming_output=True,
    inter_token_ms=1,
)
# Slow enough that a request is still running when the test acts on it.
SLOW = EngineOptions(page_size=4, num_blocks=1024, context_length=2048, inter_token_ms=2)

NOT_SIMULATED = {
    "http/gen_regex": "grammars are checked, not obeyed: the answer ends by length",
    "http/get_get_server_info": "556 keys; test_server_info checks the ones that gateways read",
    "http/get_server_info": "as get_get_server_info",
    "http_dp2/server_info": "as get_get_server_info",
    "http/get_model_info": "the embedding part is shortened; test_model_info checks the rest",
    "http/get_get_model_info": "as get_model_info",
}
# Captures that a scenario below replays together.
IN_SCENARIOS = {
    "http/gen_dup_inflight",
    "http/gen_dup_inflight_first",
    "http/flush_busy",
    "http/flush_busy_timeout",
    "http/get_health_paused",
    "http/gen_val_toplogprob_big",
    "http/get_health_after_toplogprob_big",
    "http/abort_batch_item_stream_0",
    *(f"http/abort_{name}" for name in ("all_0", "all_1", "batch_base_0", "batch_item_0", "n2_0", "prefix_0")),
    *(f"http/abort_{name}" for name in ("prefix_1", "prefix_only_0", "stream_0", "unary_0")),
    *(f"http_dp2/{name}" for name in ("incr_abort", "incr_abort_logprob", "incr_waiting_0", "incr_waiting_1")),
    *(f"http_dp2/{name}" for name in ("incr_retract_abort", "incr_retract_abort_logprob", "retract_abort_unary")),
    *(f"http_dp2/{name}" for name in ("retract_abort_unary_logprob", "abort_queued_call")),
    *(f"http_dp2/{name}" for name in ("queue_0_unary", "queue_1_unary", "queue_2_unary", "queue_3_unary")),
    *(f"http_dp2/{name}" for name in ("queue_4_chat", "queue_5_chatstream")),
    *(f"http_dp2/incr_retracted_{name}" for name in ("0", "1", "0_logprob", "1_logprob")),
}
# The engine's tokens differ, so these stops are replaced by text or tokens that it produces.
STOPS = {
    "http/gen_stop_str": "text",
    "http/gen_stream_stop": "text",
    "http/gen_stop_token": "token",
    "http/chat_stop": "chat",
}

ALL = sorted(
    f"{path.parent.name}/{path.stem}" for path in CAPTURES.glob("http*/*.http") if "pd" not in path.parent.name
)
PLAIN = [name for name in ALL if name not in NOT_SIMULATED and name not in IN_SCENARIOS and name not in STOPS]


@asynccontextmanager
async def running(options: EngineOptions) -> AsyncIterator[SimulatedEngine]:
    """Run an engine."""
    engine = SimulatedEngine(options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def assert_same_shape(capture: Capture, raw: bytes) -> None:
    """Fail with a list of differences."""
    expected, actual = parse_answer(capture.response), parse_answer(raw)
    if expected is None or actual is None:
        assert expected is None, f"{capture.name}: no answer"
        assert actual is None, f"{capture.name}: an answer where the real server gave none"
        return
    assert actual.status_line == expected.status_line
    assert _header_shape(actual) == _header_shape(expected)
    if expected.is_stream:
        _assert_same_stream(capture, expected, actual)
    elif expected.body[:1] in (b"{", b"["):
        body = expected.body if expected.body[-1:] in b"}]" else expected.body.rstrip(b"\n")
        assert problems(json.loads(body), actual.json()) == []
    else:
        assert actual.body == expected.body


def _header_shape(answer: Answer) -> list[tuple[str, str]]:
    varying = ("date", "content-length")
    return [(name, "" if name in varying else value) for name, value in answer.headers]


def _assert_same_stream(capture: Capture, expected: Answer, actual: Answer) -> None:
    for chunk in actual.chunks:
        assert chunk.endswith(b"\n\n")
        assert chunk.count(b"\n\n") == 1, "more than one event in a chunk"
        assert chunk.startswith((b"data: ", b"event: "))
    is_cut = CUT.search(capture.response) is not None
    wanted, got = expected.events(), actual.events()
    if not is_cut:
        assert (wanted[-1] == "[DONE]") == (got[-1] == "[DONE]")
    if capture.name == "http/responses_stream":
        # The captured answer had no text at all, so it lacks the events between.
        assert [problems(w, g) for w, g in zip(wanted[:2], got[:2], strict=True)] == [[], []]
        assert problems(wanted[-1], got[-1]) == []
        return
    if is_cut:
        # Only the beginning is known.
        begun = [g for g in got if isinstance(g, dict) and g["meta_info"]["finish_reason"] is None]
        assert event_problems(wanted, begun) == []
        return
    assert event_problems(wanted, got) == []


def engine_options(name: str) -> EngineOptions:
    """Return the options of the server that the capture came from."""
    return TWO_RANKS if name.startswith("http_dp2/") else SINGLE


@pytest.mark.parametrize("name", PLAIN)
async def test_capture(name: str) -> None:
    capture = load_capture(name)
    async with running(engine_options(name)) as engine:
        assert_same_shape(capture, await send(engine.port, capture.request))


@pytest.mark.parametrize("name", sorted(STOPS))
async def test_stop(name: str) -> None:
    capture = load_capture(name)
    body = json.loads(capture.body)
    async with running(SINGLE) as engine:
        if STOPS[name] == "chat":
            first = await ask(engine.port, "/v1/chat/completions", {**body, "stop": None})
            text = first.json()["choices"][0]["message"]["content"]
            raw = await send(engine.port, capture.with_json(stop=[text[3:5]]))
        else:
            params = {**body["sampling_params"], "stop": None, "stop_token_ids": None}
            first = await ask(engine.port, "/generate", {**body, "sampling_params": params, "stream": False})
            found = first.json()
            if STOPS[name] == "token":
                params["stop_token_ids"] = [found["output_ids"][2]]
            else:
                params["stop"] = [found["text"][3:5]]
            raw = await send(engine.port, capture.with_json(sampling_params=params))
        assert_same_shape(capture, raw)


def test_every_capture_is_accounted_for() -> None:
    listed = {*NOT_SIMULATED, *IN_SCENARIOS, *STOPS}
    assert listed <= set(ALL)
    assert len(PLAIN) + len(listed) == len(ALL)


# -- several requests at once ----------------------------------------------------------------------


async def replay_together(
    engine: SimulatedEngine, names: list[str], is_ready: Callable[[SimulatedEngine], object], abort: dict[str, object]
) -> None:
    """Send the captured requests, wait until ``is_ready``, abort, and compare all answers."""
    captures = [load_capture(name) for name in names]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(engine.port, capture.request)) for capture in captures]
        await engine.wait_for(is_ready)
        assert (await ask(engine.port, "/abort_request", abort)).status == 200
        engine.thaw()
    for capture, task in zip(captures, tasks, strict=True):
        assert_same_shape(capture, task.result())


def decoding(count: int, tokens: int = 5) -> Callable[[SimulatedEngine], object]:
    """Return a predicate: ``count`` sequences run, and some tokens exist; time then stands still."""

    def is_decoding(engine: SimulatedEngine) -> bool:
        produced = sum(s.totals.generated_tokens for s in engine.core.schedulers)
        if engine.running != count or produced < tokens:
            return False
        engine.freeze()
        return True

    return is_decoding


def frozen(engine: SimulatedEngine) -> bool:
    """Be true once one sequence runs, and let time stand still then."""
    if engine.running != 1:
        return False
    engine.freeze()
    return True


@pytest.mark.parametrize(
    ("names", "count"),
    [
        pytest.param(["all_0", "all_1"], 2, id="all"),
        pytest.param(["batch_base_0"], 2, id="batch by its base name"),
        pytest.param(["batch_item_0"], 2, id="batch by one item"),
        pytest.param(["batch_item_stream_0"], 2, id="streaming batch by one item"),
        pytest.param(["n2_0"], 2, id="n=2 by its name"),
        pytest.param(["prefix_0", "prefix_1"], 2, id="prefix of a live id"),
        pytest.param(["prefix_only_0"], 1, id="prefix alone"),
        pytest.param(["stream_0"], 1, id="stream"),
        pytest.param(["unary_0"], 1, id="unary"),
    ],
)
async def test_abort_while_running(names: list[str], count: int) -> None:
    full = [f"http/abort_{name}" for name in names]
    remark = load_capture(full[0]).remark
    abort = json.loads(remark[remark.index("{") : remark.index("}") + 1])
    async with running(SLOW) as engine:
        await replay_together(engine, full, decoding(count), abort)


@pytest.mark.parametrize("name", ["incr_abort", "incr_abort_logprob"])
async def test_abort_of_an_incremental_stream(name: str) -> None:
    async with running(TWO_RANKS) as engine:
        await replay_together(engine, [f"http_dp2/{name}"], decoding(1), {"rid": "inc-1"})


@pytest.mark.parametrize("name", ["retract_abort_unary", "retract_abort_unary_logprob"])
async def test_abort_of_a_unary_call_that_met_the_running_state(name: str) -> None:
    # Captured around a retraction, but the abort was taken up before it.
    async with running(SLOW) as engine:
        await replay_together(engine, [f"http_dp2/{name}"], decoding(1), {"rid": "ra-1"})


@pytest.mark.parametrize("name", ["incr_retract_abort", "incr_retract_abort_logprob"])
async def test_abort_while_retracted(name: str) -> None:
    capture = load_capture(f"http_dp2/{name}")
    options = EngineOptions(page_size=4, incremental_streaming_output=True, inter_token_ms=2)
    async with running(options) as engine, asyncio.TaskGroup() as group:
        task = group.create_task(send(engine.port, capture.request))
        await engine.wait_for(decoding(1))
        engine.thaw()
        assert (await ask(engine.port, "/pause_generation", {"mode": "retract"})).status == 200
        assert (engine.running, engine.waiting) == (0, 1)
        await ask(engine.port, "/abort_request", {"rid": "ra-1"})
        raw = await task
        answer = parse_answer(raw)
        assert answer is not None
        last = answer.events()[-2]
        texts = "".join(event["text"] for event in answer.events()[:-2])
        assert last["text"] == texts
        assert last["output_ids"] == answer.events()[-3]["output_ids"]
        if name == "incr_retract_abort":
            assert_same_shape(capture, raw)
        else:
            # The captured stream had one chunk before it was retracted; the shapes of both are compared.
            expected = parse_answer(capture.response)
            assert expected is not None
            assert problems(expected.events()[0], answer.events()[0]) == []
            assert problems(expected.events()[-2], last) == []


async def test_full_queue() -> None:
    names = ["queue_0_unary", "queue_1_unary", "queue_2_unary", "queue_3_unary", "queue_4_chat", "queue_5_chatstream"]
    captures = [load_capture(f"http_dp2/{name}") for name in names]
    async with running(TWO_RANKS) as engine, asyncio.TaskGroup() as group:
        first = group.create_task(send(engine.port, captures[0].request))
        await engine.wait_for(frozen)
        second = group.create_task(send(engine.port, captures[1].request))
        await engine.wait_for(lambda e: e.waiting == 1)
        for capture in captures[2:]:
            assert_same_shape(capture, await send(engine.port, capture.request))
        abort = load_capture("http_dp2/abort_queued_call")
        assert_same_shape(abort, await send(engine.port, abort.request))
        assert_same_shape(captures[1], await second)
        engine.thaw()
        assert_same_shape(captures[0], await first)


async def test_two_streams_of_which_one_is_aborted() -> None:
    captures = [load_capture(f"http_dp2/incr_waiting_{index}") for index in (0, 1)]
    async with running(TWO_RANKS) as engine, asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(engine.port, capture.request)) for capture in captures]
        await engine.wait_for(lambda e: e.core.is_busy and len(e.core.live_rids) == 2)
        await engine.wait_for(decoding(2, tokens=10), timeout_s=5)
        await ask(engine.port, "/abort_request", {"rid": "w1"})
        engine.thaw()
        for capture, task in zip(captures, tasks, strict=True):
            assert_same_shape(capture, await task)


@pytest.mark.parametrize("names", [("0", "1"), ("0_logprob", "1_logprob")])
async def test_two_streams_and_room_for_one(names: tuple[str, str]) -> None:
    first, second = (load_capture(f"http_dp2/incr_retracted_{name}") for name in names)
    options = TWO_RANKS
    async with running(options) as engine, asyncio.TaskGroup() as group:
        task = group.create_task(send(engine.port, first.request))
        await engine.wait_for(frozen)
        if "logprob" in names[1]:
            # The captured one found the queue full: another request waited.
            other = {"text": "wait", "sampling_params": {"max_new_tokens": 240}, "routed_dp_rank": 0}
            waiting = group.create_task(ask(engine.port, "/generate", other))
            await engine.wait_for(lambda e: e.waiting == 1)
            assert_same_shape(second, await send(engine.port, second.request))
            await ask(engine.port, "/abort_request", {"abort_all": True})
            engine.thaw()
            await waiting
            await task
            return
        engine.thaw()
        assert_same_shape(second, await send(engine.port, second.request))
        assert_same_shape(first, await task)


async def test_duplicate_id_in_flight() -> None:
    first, second = load_capture("http/gen_dup_inflight_first"), load_capture("http/gen_dup_inflight")
    async with running(SLOW) as engine, asyncio.TaskGroup() as group:
        task = group.create_task(send(engine.port, first.request))
        await engine.wait_for(frozen)
        assert_same_shape(second, await send(engine.port, second.request))
        engine.thaw()
        assert_same_shape(first, await task)


async def test_flush_while_busy() -> None:
    async with running(SLOW) as engine, asyncio.TaskGroup() as group:
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 50}}
        task = group.create_task(ask(engine.port, "/generate", body))
        await engine.wait_for(frozen)
        capture = load_capture("http/flush_busy")
        assert_same_shape(capture, await send(engine.port, capture.request))
        capture = load_capture("http/flush_busy_timeout")
        late = group.create_task(send(engine.port, capture.request))
        await engine.wait_for(lambda e: len(e.log.requests_to("/flush_cache")) == 2)
        engine.thaw()
        assert_same_shape(capture, await late)
        assert (await task).status == 200


async def test_health_while_paused() -> None:
    capture = load_capture("http/get_health_paused")
    async with running(SINGLE) as engine:
        await ask(engine.port, "/pause_generation", {"mode": "in_place"})
        assert_same_shape(capture, await send(engine.port, capture.request))


async def test_deadly_request() -> None:
    capture, after = load_capture("http/gen_val_toplogprob_big"), load_capture("http/get_health_after_toplogprob_big")
    async with running(SINGLE) as engine:
        assert_same_shape(capture, await send(engine.port, capture.request))
        assert engine.is_dead
        assert_same_shape(after, await send(engine.port, after.request))
        engine.restart()
        assert (await ask(engine.port, "/ready", method="GET")).status == 200


# -- long bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["http/get_server_info", "http_dp2/server_info"])
async def test_server_info(name: str) -> None:
    expected = parse_answer(load_capture(name).response)
    assert expected is not None
    real = expected.json()
    async with running(engine_options(name)) as engine:
        info = (await ask(engine.port, "/server_info", method="GET")).json()
        assert set(info) <= set(real)
        assert problems({key: real[key] for key in info}, info) == [] or _only_shortened(real, info)
        assert len(info["internal_states"]) == engine.options.dp_size
        assert info["random_seed"] == engine.boot_id
        assert [key for key in real if key in info] == list(info)


def _only_shortened(real: dict[str, object], info: dict[str, object]) -> bool:
    found = problems({key: real[key] for key in info}, info)
    shortened = ("$.internal_states", "$.startup_time", "$.hicache_object_layout")
    return all(line.startswith(shortened) for line in found)


async def test_model_info() -> None:
    expected = parse_answer(load_capture("http/get_model_info").response)
    assert expected is not None
    real = expected.json()
    async with running(SINGLE) as engine:
        info = (await ask(engine.port, "/model_info", method="GET")).json()
    assert list(info) == list(real)
    del info["embedding"], real["embedding"]
    assert problems(real, info) == []

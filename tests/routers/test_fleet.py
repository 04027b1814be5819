"""The fleet: states of workers as transcripts, pools by model, pins, and the words for what is not there."""

import math
from dataclasses import replace

import pytest

from backends.types import EngineFacts, EngineKind, ProbeResult, Role, Worker
from backends.upstream.base import Origin
from routers.errors import ModelRequired, NoReadyWorker, NoRoom, NoSuchRank, UnknownModel
from routers.fleet import Fleet, Member, WorkerState
from routers.types import BlockGroup, RankKey

FACTS = EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", "m")
UP, PAUSED, FAILED = ProbeResult.UP, ProbeResult.PAUSED, ProbeResult.FAILED
U, R, P, D, N = (
    WorkerState.UNHEALTHY,
    WorkerState.READY,
    WorkerState.PAUSED,
    WorkerState.DRAINING,
    WorkerState.UNIDENTIFIED,
)


def member(worker_id: str = "w", **options: object) -> Member:
    """A worker that nobody has reached yet."""
    return Member(Worker(worker_id, f"http://{worker_id}", Origin("http", worker_id, 80)), **options)  # type: ignore[arg-type]


def ready(worker_id: str = "w", **facts: object) -> Member:
    """A worker that is ready."""
    one = member(worker_id)
    one.identified(replace(FACTS, **facts))  # type: ignore[arg-type]
    return one


def fleet_of(*members: Member) -> Fleet:
    """A fleet."""
    fleet = Fleet()
    for one in members:
        fleet.add(one)
    return fleet


def apply(one: Member, event: object) -> None:
    """One line of a transcript."""
    if isinstance(event, ProbeResult):
        one.probed(event, is_busy=False)
    elif event == "busy and failed":
        one.probed(FAILED, is_busy=True)
    elif event == "identified":
        one.identified(FACTS)
    elif event == "not identified":
        one.identify_failed("no answer")
    elif event == "lost":
        one.lost_contact("connection refused")
    else:
        assert event == "draining"
        one.is_draining = True


@pytest.mark.parametrize(
    "transcript",
    [
        pytest.param([("not identified", N), ("identified", R), (UP, R)], id="comes up"),
        pytest.param([("identified", R), (FAILED, R), (FAILED, R), (FAILED, U)], id="three failures in a row"),
        pytest.param([("identified", R), (FAILED, R), (FAILED, R), (UP, R), (FAILED, R), (FAILED, R), (FAILED, U)],
                     id="a success begins the count anew"),
        pytest.param([("identified", R), ("busy and failed", R), ("busy and failed", R), ("busy and failed", R),
                      ("busy and failed", R), (FAILED, R)], id="a busy worker is not dead"),
        pytest.param([("identified", R), (FAILED, R), (FAILED, R), ("busy and failed", R), (FAILED, U)],
                     id="being busy forgives nothing"),
        pytest.param([("identified", R), ("lost", U), (UP, U), (UP, U), ("identified", R)],
                     id="what was lost is read again before it is used"),
        pytest.param([("identified", R), ("lost", U), (UP, U), (FAILED, U), (UP, U), (UP, U), ("identified", R)],
                     id="two successes in a row"),
        pytest.param([("identified", R), ("lost", U), ("lost", U), (FAILED, U), (UP, U), (UP, U),
                      ("not identified", U), ("identified", R)], id="comes back slowly"),
        pytest.param([("identified", R), (PAUSED, P), (PAUSED, P), (UP, R)], id="pause"),
        pytest.param([("identified", R), (PAUSED, P), (FAILED, P), (FAILED, P), (FAILED, U), (UP, U), (UP, U),
                      ("identified", R)], id="dies in a pause"),
        pytest.param([("identified", R), (FAILED, R), (FAILED, R), (PAUSED, P), (FAILED, P)],
                     id="a pause is a success"),
        pytest.param([("identified", R), ("draining", D), (PAUSED, D), ("lost", D)], id="draining comes first"),
    ],
)  # fmt: skip
def test_transcripts(transcript: list[tuple[object, WorkerState]]) -> None:
    one = member()
    assert one.state is N
    seen = []
    for event, _ in transcript:
        apply(one, event)
        seen.append((event, one.state))
    assert seen == transcript


def test_hysteresis_is_configurable() -> None:
    one = member(unhealthy_after=1, healthy_after=1)
    one.identified(FACTS)
    one.probed(FAILED, is_busy=False)
    assert one.state is U
    assert one.detail == "1 health checks in a row failed"
    one.probed(UP, is_busy=False)
    assert not one.is_identified


def test_changes_are_told_once() -> None:
    one = member()
    changes: list[WorkerState] = []
    one.on_change = lambda changed: changes.append(changed.state)
    for event in ("identified", UP, PAUSED, PAUSED, UP, FAILED, FAILED, FAILED, FAILED, UP, UP, "lost", "identified"):
        apply(one, event)
    assert changes == [R, P, R, U, R]


def test_a_pause_of_our_own_counts_at_once_and_until_the_next_probe() -> None:
    one = ready()
    changes: list[WorkerState] = []
    one.on_change = lambda changed: changes.append(changed.state)
    for is_paused in (True, True, False, True):
        one.paused_by_us(is_paused)
    apply(one, UP)
    assert changes == [P, R, P, R]


def test_a_pause_of_a_draining_worker_is_told_too() -> None:
    one = ready()
    one.is_draining = True
    changes: list[bool] = []
    one.on_change = lambda changed: changes.append(changed.is_paused)
    one.paused_by_us(True)
    one.paused_by_us(False)
    assert (changes, one.state) == ([True, False], D)


def test_draining_takes_a_worker_out_at_once_and_back() -> None:
    one = ready()
    fleet = fleet_of(one)
    one.is_draining = True
    one.is_draining = True
    assert not fleet.has_ready("m")
    one.is_draining = False
    assert fleet.has_ready("m")


def test_details_are_the_last_reason() -> None:
    one = member()
    assert one.detail == "not reached yet"
    one.identify_failed("no answer")
    assert one.detail == "no answer"
    one.identified(FACTS)
    assert one.detail == ""
    one.lost_contact("reset")
    assert one.detail == "reset"


def test_pins_of_the_operator_win() -> None:
    one = member(pinned_model="alias", pinned_role=Role.DECODE)
    assert (one.model_id, one.role, one.dp_size) == ("alias", Role.DECODE, 0)
    one.identified(FACTS)
    assert (one.model_id, one.role) == ("alias", Role.DECODE)
    other = member()
    assert (other.model_id, other.role) == (None, Role.REGULAR)
    other.identified(replace(FACTS, role=Role.PREFILL))
    assert (other.model_id, other.role) == ("m", Role.PREFILL)


@pytest.mark.parametrize(
    ("given", "engine", "told", "expected"),
    [
        pytest.param(Role.DECODE, "sglang", Role.PREFILL, "given as decode, but its engine says prefill", id="another"),
        pytest.param(Role.REGULAR, "sglang", Role.PREFILL, "given as regular, but its engine says prefill", id="none"),
        pytest.param(Role.DECODE, "sglang", Role.DECODE, "", id="the same"),
        pytest.param(None, "sglang", Role.DECODE, "", id="not given"),
        pytest.param(Role.DECODE, "vllm", Role.REGULAR, "", id="vLLM tells none"),
    ],
)
def test_a_role_against_the_engines_word_is_told(given: Role | None, engine: str, told: Role, expected: str) -> None:
    one = member(pinned_role=given)
    assert one.role_conflict == ""
    one.identified(replace(FACTS, engine=EngineKind(engine), role=told))
    assert one.role_conflict == expected


def test_loads_survive_a_restart_with_fewer_ranks() -> None:
    one = ready(dp_size=3)
    booking = one.load_of(2).book(requests=4, blocks=1, prefill_tokens=1)
    one.identified(replace(FACTS, dp_size=1))
    assert (one.in_flight, len(one.loads)) == (4, 3)
    fleet = fleet_of(one)
    assert [candidate.key.dp_rank for candidate in fleet.candidates("m")] == [0]
    booking.release()
    assert one.in_flight == 0


# Pools.


def test_candidates_are_all_ranks_of_ready_workers() -> None:
    down = member("c")
    fleet = fleet_of(ready("a", dp_size=2), ready("b"), down, ready("d", model_id="other"))
    keys = [candidate.key for candidate in fleet.candidates("m")]
    assert keys == [RankKey("a", 0), RankKey("a", 1), RankKey("b", 0)]
    first = fleet.get("a")
    assert first is not None
    assert fleet.candidates("m")[1].load is first.load_of(1)
    assert {candidate.group for candidate in fleet.candidates("m")} == {BlockGroup(EngineKind.SGLANG, 1)}
    assert len(fleet) == 4
    assert fleet.get("x") is None
    assert [one.worker.id for one in fleet] == ["a", "b", "c", "d"]


def test_candidates_follow_states() -> None:
    told: list[str] = []
    fleet = Fleet(lambda changed: told.append(changed.worker.id))
    one, two = ready("a"), member("b")
    fleet.add(one)
    fleet.add(two)
    assert fleet.has_ready("m")
    before = fleet.candidates("m")
    two.identified(FACTS)
    assert len(before) == 1  # a snapshot
    assert len(fleet.candidates("m")) == 2
    one.lost_contact("reset")
    two.probed(PAUSED, is_busy=False)
    assert not fleet.has_ready("m")
    assert told == ["a", "b", "b", "a", "b"]


@pytest.mark.parametrize(
    ("requested", "served", "model"),
    [
        pytest.param(None, ["m"], "m", id="g_2_absent and one model"),
        pytest.param("m", ["m", "n"], "m", id="named"),
        pytest.param("m:lora", ["m", "n"], "m", id="adapter"),
        pytest.param("m:lora:2", ["m"], "m", id="adapter with a colon"),
        pytest.param("m:7b:lora", ["m", "m:7b"], "m:7b", id="the longest base"),
        pytest.param("m:7b", ["m", "m:7b"], "m:7b", id="a name with a colon"),
        pytest.param(None, ["m", "m"], "m", id="one model on two workers"),
    ],
)
def test_g_2_the_model_selects_the_pool(requested: str | None, served: list[str], model: str) -> None:
    fleet = fleet_of(*(ready(f"w{index}", model_id=name) for index, name in enumerate(served)))
    assert fleet.model_of(requested) == model


@pytest.mark.parametrize(
    ("requested", "served", "error"),
    [
        pytest.param(None, ["m", "n"], ModelRequired, id="absent and several"),
        pytest.param("x", ["m"], UnknownModel, id="unknown"),
        pytest.param("", ["m"], UnknownModel, id="empty"),
        pytest.param("x:m", ["m"], UnknownModel, id="adapter of an unknown base"),
        pytest.param(":", ["m"], UnknownModel, id="colon"),
        pytest.param("m", [], NoReadyWorker, id="no workers"),
    ],
)
def test_g_2_what_selects_none(requested: str | None, served: list[str], error: type[Exception]) -> None:
    fleet = fleet_of(*(ready(f"w{index}", model_id=name) for index, name in enumerate(served)))
    with pytest.raises(error):
        fleet.model_of(requested)


def test_g_2_a_model_stays_known_when_its_workers_are_gone() -> None:
    one = ready("a")
    fleet = fleet_of(one)
    one.lost_contact("reset")
    assert fleet.model_of("m") == "m"
    with pytest.raises(NoReadyWorker, match=r"'m' is ready \(unhealthy\)"):
        fleet.candidates("m")


def test_nobody_reached_yet() -> None:
    with pytest.raises(NoReadyWorker, match="no worker has been reached yet"):
        fleet_of(member()).model_of("m")
    with pytest.raises(NoReadyWorker, match="there are no workers"):
        fleet_of().model_of(None)


def test_reasons_are_said() -> None:
    paused, draining, decode = ready("a"), ready("b"), ready("c", role=Role.DECODE)
    paused.probed(PAUSED, is_busy=False)
    draining.is_draining = True
    fleet = fleet_of(paused, draining, decode)
    with pytest.raises(NoReadyWorker, match="decode alone, draining, paused"):
        fleet.candidates("m")
    with pytest.raises(NoReadyWorker, match="none left"):
        fleet.candidates("gone")
    assert fleet.reason(paused) == "paused"


# Pins.


@pytest.mark.parametrize(
    ("dp_rank", "worker_id", "keys"),
    [
        pytest.param(1, None, [RankKey("a", 1), RankKey("b", 1)], id="rank"),
        pytest.param(3, None, [RankKey("b", 3)], id="a rank that one of them has"),
        pytest.param(None, "a", [RankKey("a", 0), RankKey("a", 1)], id="worker"),
        pytest.param(0, "b", [RankKey("b", 0)], id="both"),
        pytest.param(None, None, [RankKey("a", 0), RankKey("a", 1), *(RankKey("b", rank) for rank in range(4))],
                     id="neither"),
    ],
)  # fmt: skip
def test_pins(dp_rank: int | None, worker_id: str | None, keys: list[RankKey]) -> None:
    fleet = fleet_of(ready("a", dp_size=2), ready("b", dp_size=4))
    pinned = fleet.pinned(fleet.candidates("m"), "m", dp_rank, worker_id)
    assert [candidate.key for candidate in pinned] == keys


@pytest.mark.parametrize(
    ("dp_rank", "worker_id", "header", "says"),
    [
        pytest.param(4, None, "x-data-parallel-rank", "valid ranks are 0 to 3", id="no worker has the rank"),
        pytest.param(2, "a", "x-data-parallel-rank", "valid ranks are 0 to 1", id="the worker does not have it"),
        pytest.param(None, "x", "x-forebay-worker", "no worker 'x'", id="no such worker"),
        pytest.param(None, "c", "x-forebay-worker", "'c' does not serve 'm'", id="worker of another model"),
    ],
)
def test_g_4_pins_to_what_does_not_exist(dp_rank: int | None, worker_id: str | None, header: str, says: str) -> None:
    fleet = fleet_of(ready("a", dp_size=2), ready("b", dp_size=4), ready("c", model_id="other"))
    with pytest.raises(NoSuchRank, match=says) as caught:
        fleet.pinned(fleet.candidates("m"), "m", dp_rank, worker_id)
    assert caught.value.header == header


def test_pins_to_what_is_not_ready() -> None:
    down, unknown = ready("b", dp_size=2), member("c")
    fleet = fleet_of(ready("a"), down, unknown)
    down.lost_contact("reset")
    for dp_rank, worker_id in ((1, None), (None, "b"), (1, "b"), (7, "c")):
        with pytest.raises(NoReadyWorker, match="pinned to is not ready"):
            fleet.pinned(fleet.candidates("m"), "m", dp_rank, worker_id)


def test_valid_ranks() -> None:
    fleet = fleet_of(ready("a", dp_size=2), ready("b", dp_size=4), ready("c", model_id="other", dp_size=8), member("d"))
    assert (fleet.valid_ranks("m"), fleet.valid_ranks("other"), fleet.valid_ranks("x")) == (4, 8, 0)


# --- room


@pytest.mark.parametrize(
    ("given", "running", "ranks", "expected"),
    [
        pytest.param(None, None, 1, math.inf, id="nobody says"),
        pytest.param(None, 8, 1, 10, id="a quarter more than the engine runs"),
        pytest.param(None, 1, 1, 2, id="rounded up"),
        pytest.param(None, 8, 4, 3, id="spread over the ranks"),
        pytest.param(None, 0, 1, 1, id="never none"),
        pytest.param(5, 8, 1, 5, id="the operator's word counts"),
        pytest.param(5, None, 2, 3, id="the operator's word, spread"),
    ],
)
def test_what_a_rank_gets_at_once(given: int | None, running: int | None, ranks: int, expected: float) -> None:
    one = member(max_in_flight=given)
    assert one.max_in_flight_per_rank == (math.inf if given is None else given)
    one.identified(replace(FACTS, max_running_requests=running, dp_size=ranks))
    assert one.max_in_flight_per_rank == expected
    for load in one.loads if expected < math.inf else ():
        for _ in range(int(expected)):
            assert not load.is_full
            load.book(requests=1, blocks=0, prefill_tokens=0)
        assert load.is_full


def test_full_ranks_are_no_candidates() -> None:
    told: list[str] = []
    fleet = Fleet(on_room=lambda: told.append("room"))
    for name in ("v", "w"):
        one = member(name, max_in_flight=1)
        fleet.add(one)
        one.identified(FACTS)
    assert (fleet.full, told) == (set(), [])
    ranks = fleet.candidates("m")
    first = ranks[0].load.book(requests=1, blocks=0, prefill_tokens=0)
    assert fleet.full == {ranks[0].load}
    assert [candidate.key for candidate in fleet.with_room(ranks)] == [RankKey("w", 0)]
    second = ranks[1].load.book(requests=1, blocks=0, prefill_tokens=0)
    with pytest.raises(NoRoom):
        fleet.with_room(ranks)
    assert told == []
    first.release()
    assert (fleet.full, told) == ({ranks[1].load}, ["room"])
    fleet.remove("w")
    assert fleet.full == set()
    second.release()  # of a worker that is gone
    assert (fleet.full, told) == (set(), ["room"])


def test_a_full_worker_that_is_added_is_full() -> None:
    one = member(max_in_flight=1)
    one.identified(FACTS)
    booking = one.load_of(0).book(requests=1, blocks=0, prefill_tokens=0)
    fleet = fleet_of(one)
    assert fleet.full == {one.load_of(0)}
    booking.release()
    assert fleet.full == set()


def test_a_breaker_that_closes_gives_room() -> None:
    told: list[str] = []
    fleet = Fleet(on_room=lambda: told.append("room"))
    one = ready()
    fleet.add(one)
    fleet.succeeded(one)
    assert told == []
    for _ in range(5):
        fleet.failed(one, 0.0)
    assert fleet.tripped == {"w"}
    fleet.succeeded(one)
    assert (fleet.tripped, told) == (set(), ["room"])


@pytest.mark.parametrize("is_known_first", [True, False])
def test_prefills_are_timed_on_all_ranks_where_the_fleet_has_a_clock(is_known_first: bool) -> None:
    one = ready(dp_size=2) if is_known_first else member()
    fleet = Fleet(prefill_clock=lambda: 1.0)
    fleet.add(one)
    one.identified(replace(FACTS, dp_size=3))
    assert [load.pace is not None for load in one.loads] == [True] * 3
    other = ready("v")
    fleet_of(other)
    assert other.load_of(0).pace is None

"""The sequence machine: transcripts, and random histories in which it must never know more than the cache holds."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events import sequence
from kv_events.sequence import Command, Deliver, RequestReplay, Reset, SequenceMachine, SourceState


def payload(seq: int, life: int = 0) -> bytes:
    """What publisher number ``life`` sends under ``seq``."""
    return b"%d/%d" % (life, seq)


def live(*seqs: int, life: int = 0) -> list[tuple[str, int, bytes]]:
    return [("on_message", seq, payload(seq, life)) for seq in seqs]


def replayed(*seqs: int, life: int = 0) -> list[tuple[str, int, bytes]]:
    return [("on_replayed", seq, payload(seq, life)) for seq in seqs]


UP = [("on_connected",)]
DOWN = [("on_disconnected",)]
END = [("on_replay_end",)]
FAILED = [("on_replay_failed",)]
JOINED = [*UP, *END]


def run(machine: SequenceMachine, facts: list[tuple]) -> list[str]:  # type: ignore[type-arg]
    """Tell the machine facts; its commands in short: ``0/3`` delivered, ``?4`` replay from 4, ``!why`` reset."""
    said = []
    for name, *args in facts:
        commands: list[Command] = getattr(machine, name)(*args) or []
        for command in commands:
            if isinstance(command, Deliver):
                said.append(command.payload.decode())
            else:
                said.append(f"?{command.start}" if isinstance(command, RequestReplay) else f"!{command.reason}")
    return said


@pytest.mark.parametrize(
    ("facts", "commands", "state"),
    [
        pytest.param([*JOINED, *live(0, 1, 2)], "?0 0/0 0/1 0/2", "live", id="from the start"),
        pytest.param([*UP, *replayed(0, 1), *END, *live(2)], "?0 0/0 0/1 0/2", "live", id="A8.4 late join"),
        pytest.param([*UP, *replayed(0, 1), *live(2, 3), *replayed(2), *END], "?0 0/0 0/1 0/2 0/3", "live",
                     id="late join while messages come"),
        pytest.param([*UP, *replayed(0, 1), *FAILED, *live(2)], "?0 0/0 0/1 !replay_failed 0/2", "cold",
                     id="late join, the replay is cut short"),
        pytest.param([*JOINED, *DOWN, *UP, *FAILED, *live(1)], "?0 ?0 ?0", "replaying",
                     id="nothing came, and the second replay failed"),
        pytest.param([*UP, *replayed(5, 6), *END, *live(7)], "?0 !history_lost 0/5 0/6 0/7", "cold",
                     id="late join, history lost"),
        pytest.param([*UP, *replayed(0, 1, 4), *replayed(2, 3, 4), *END], "?0 0/0 0/1 ?2 0/2 0/3 0/4", "live",
                     id="replies lost"),
        pytest.param([*JOINED, *live(0, 1), *DOWN, *UP, *replayed(0, 1, 2), *END], "?0 0/0 0/1 ?1 0/2", "live",
                     id="a replay from before what was asked for"),
        pytest.param([*UP, *live(7), *FAILED, *live(8)], "?0 0/7 0/8", "cold", id="late join, no answer"),
        pytest.param([*UP, *live(0), *FAILED, *live(1)], "?0 0/0 0/1", "live", id="early join, no answer"),
        pytest.param([*JOINED, *live(0, 1, 3), *replayed(2, 3), *END, *live(4)], "?0 0/0 0/1 ?2 0/2 0/3 0/4", "live",
                     id="A8.4 gap"),
        pytest.param([*JOINED, *live(0, 3)], "?0 0/0 ?1", "gap", id="in a gap"),
        pytest.param([*JOINED, *live(0, 3, 4, 6), *replayed(1, 2, 3), *END, *replayed(5, 6), *END],
                     "?0 0/0 ?1 0/1 0/2 0/3 0/4 ?5 0/5 0/6", "live", id="gap in a gap"),
        pytest.param([*JOINED, *live(0, 5), *replayed(3, 4, 5), *END], "?0 0/0 ?1 !history_lost 0/3 0/4 0/5", "cold",
                     id="gap, the replay begins too late"),
        pytest.param([*JOINED, *live(0, 5, 6), *FAILED, *live(7)], "?0 0/0 ?1 !replay_failed !gap 0/5 0/6 0/7", "cold",
                     id="gap, no answer"),
        pytest.param([*JOINED, *live(0, 5), *END, *END, *END, *live(6)], "?0 0/0 ?1 ?1 ?1 !gap 0/5 0/6", "cold",
                     id="gap, replays without it"),
        pytest.param([*JOINED, *live(0, 1, 1, 0, 2)], "?0 0/0 0/1 0/2", "live", id="A8.4 duplicates"),
        pytest.param([*JOINED, *live(0, 1, 2), *live(0, 1, life=1)], "?0 0/0 0/1 0/2 !restart 1/0 1/1", "live",
                     id="A8.4 restart, the connection holds"),
        pytest.param([*JOINED, *live(0, 1, 2), *live(1, life=1)], "?0 0/0 0/1 0/2 !restart ?0", "replaying",
                     id="restart, seen late"),
        pytest.param([*JOINED, *live(0, 1), *DOWN], "?0 0/0 0/1", "gap", id="connection lost"),
        pytest.param([*JOINED, *live(0, 1), *DOWN, *UP, *replayed(1, 2), *END, *live(3)], "?0 0/0 0/1 ?1 0/2 0/3",
                     "live", id="the same publisher again"),
        pytest.param([*JOINED, *live(0, 1), *DOWN, *UP, *replayed(1, life=1), *replayed(0, 1, 2, life=1), *END],
                     "?0 0/0 0/1 ?1 !restart ?0 1/0 1/1 1/2", "live", id="restart under the same numbers"),
        pytest.param([*JOINED, *live(0, 1, 2), *DOWN, *UP, *END, *live(1, life=1), *replayed(0, 1, life=1), *END],
                     "?0 0/0 0/1 0/2 ?2 !restart ?0 1/0 1/1", "live", id="restart, fewer numbers"),
        pytest.param([*JOINED, *live(0, 1), *DOWN, *UP, *replayed(9), *END, *live(10)],
                     "?0 0/0 0/1 ?1 !history_lost 0/9 0/10", "cold", id="away for too long"),
        pytest.param([*JOINED, *live(0), *DOWN, *UP, *live(1), *FAILED, *live(2)], "?0 0/0 ?0 !replay_failed 0/1 0/2",
                     "cold", id="back, no answer"),
        pytest.param([*UP, *replayed(0, 1), *DOWN, *END, *UP, *replayed(1), *END], "?0 0/0 0/1 ?1", "live",
                     id="connection lost during the replay"),
        pytest.param([*JOINED, *live(0), *DOWN, *UP, *DOWN, *replayed(0, 1), *END, *UP, *replayed(0, life=1)],
                     "?0 0/0 ?0 ?0 !restart ?0", "replaying", id="connection lost while it was checked"),
        pytest.param([*UP, *replayed(0), *DOWN, *FAILED, *UP, *replayed(0), *END], "?0 0/0 ?0",
                     "live", id="connection and replay lost"),
        pytest.param([*JOINED, *live(0), *DOWN, ("on_unreachable",), *UP, *replayed(0), *END],
                     "?0 0/0 !unreachable ?0 0/0", "live", id="away, forgotten, back"),
        pytest.param([*JOINED, *live(0), ("on_boot", "x"), ("on_boot", "x"), ("on_boot", "y"), *END],
                     "?0 0/0 !boot ?0", "live", id="another process"),
        pytest.param([*JOINED, *live(0), ("on_suspect", "malformed"), *live(1)], "?0 0/0 !malformed 0/1", "cold",
                     id="suspect"),
        pytest.param([*JOINED, *live(0), ("on_suspect", "malformed"), *live(1), ("on_complete",)],
                     "?0 0/0 !malformed 0/1", "live", id="suspect, then cleared"),
        pytest.param([*JOINED, *live(0), ("on_history_wanted", "orphans"), *replayed(0), *END, *live(1)],
                     "?0 0/0 !orphans ?0 0/0 0/1", "live", id="all of it once more"),
        pytest.param([*JOINED, *live(0), ("on_misconfigured",), *live(1), *DOWN, *UP, ("on_boot", "y"),
                      ("on_unreachable",), ("on_suspect", "x")], "?0 0/0 !misconfigured", "misconfigured",
                     id="misconfigured is final"),
        pytest.param([*DOWN, *UP, *DOWN, *UP, *END], "?0 ?0", "live", id="lost before anything came"),
    ],
)  # fmt: skip
def test_transcripts_with_replay(facts: list[tuple], commands: str, state: str) -> None:  # type: ignore[type-arg]
    machine = SequenceMachine(has_replay=True)
    assert " ".join(run(machine, facts)) == commands
    assert machine.state == state


@pytest.mark.parametrize(
    ("facts", "commands", "state"),
    [
        pytest.param([*UP], "", "cold", id="nothing yet"),
        pytest.param([*UP, *live(0, 1)], "0/0 0/1", "live", id="from the start"),
        pytest.param([*UP, *live(7, 8)], "0/7 0/8", "cold", id="late join"),
        pytest.param([*UP, *live(0, 1, 5)], "0/0 0/1 !gap 0/5", "cold", id="A8.4 gap"),
        pytest.param([*UP, *live(0, 5), ("on_complete",)], "0/0 !gap 0/5", "live", id="gap, then cleared"),
        pytest.param([*UP, *live(0, 1), *DOWN, *UP, *live(2)], "0/0 0/1 !reconnect 0/2", "cold", id="reconnect"),
        pytest.param([*UP, *live(0, 1), *DOWN, *UP, *live(0, life=1)], "0/0 0/1 !reconnect 1/0", "live", id="restart"),
        pytest.param([*UP, *live(0, 1, 2, 0, 1)], "0/0 0/1 0/2", "live", id="A8.4 duplicates"),
        pytest.param([*UP, *live(0, 1, 2), *live(0, life=1)], "0/0 0/1 0/2 !restart 1/0", "live", id="A8.4 restart"),
        pytest.param([*UP, *live(7), *live(3, life=1)], "0/7", "cold", id="older than the first is ignored"),
        pytest.param([*UP, *live(20_000), *live(3, life=1)], "0/20000 !restart 1/3", "cold", id="far below"),
        pytest.param([*UP, *live(0), ("on_boot", "x"), ("on_boot", "y"), *live(4, life=1)], "0/0 !boot 1/4", "cold",
                     id="another process"),
        pytest.param([*UP, *live(0), ("on_history_wanted", "orphans")], "0/0", "live", id="no history to be had"),
        pytest.param([*UP, *replayed(3), *END, *FAILED, *live(0)], "0/0", "live", id="replies that nobody asked for"),
    ],
)  # fmt: skip
def test_transcripts_without_replay(facts: list[tuple], commands: str, state: str) -> None:  # type: ignore[type-arg]
    machine = SequenceMachine(has_replay=False)
    assert " ".join(run(machine, facts)) == commands
    assert machine.state == state


def test_epochs_count_the_lives_of_the_publisher() -> None:
    machine = SequenceMachine(has_replay=False)
    run(machine, [*UP, *live(0, 1, 3)])
    assert (machine.epoch, machine.last_seq) == (0, 3)
    run(machine, live(0, life=1))
    assert (machine.epoch, machine.last_seq) == (1, 0)


def test_duplicates_and_replays_are_counted() -> None:
    machine = SequenceMachine(has_replay=True)
    run(machine, [*JOINED, *live(0, 0, 0, 2)])
    assert (machine.duplicates, machine.replays) == (2, 2)


@pytest.mark.parametrize("bound", ["MAX_BUFFERED", "MAX_BUFFERED_BYTES"])
def test_a_replay_that_is_too_slow_is_given_up(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, bound, 3)
    machine = SequenceMachine(has_replay=True)
    said = run(machine, [*JOINED, *live(0, *range(5, 10))])
    assert said[:4] == ["?0", "0/0", "?1", "!replay_failed"]
    assert said[-1] == "0/9"
    assert machine.state == "cold"


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_dump_is_continued(has_replay: bool) -> None:
    first = SequenceMachine(has_replay=has_replay)
    run(first, [*UP, *END, *live(0, 1, 2)])
    second = SequenceMachine(has_replay=has_replay)
    assert first.last_seq is not None
    second.resume(first.epoch, first.last_seq, first.last_digest, is_complete=True)
    assert second.state == ("gap" if has_replay else "live")
    said = run(second, [*UP, *replayed(2), *END, *live(2, 3)])
    assert said == (["?2", "0/3"] if has_replay else ["0/3"])
    assert second.state == "live"


def test_a_dump_of_another_life_is_forgotten() -> None:
    machine = SequenceMachine(has_replay=True)
    machine.resume(3, 2, 12345, is_complete=True)
    assert run(machine, [*UP, *replayed(2, life=1)]) == ["?2", "!restart", "?0"]
    assert machine.epoch == 4


@dataclass
class Publisher:
    """A cache, and the publisher of what happens to it; each message stores one block and may remove one."""

    window: int
    life: int = 0
    sent: list[bytes] = field(default_factory=list)
    cache: set[str] = field(default_factory=set)

    def publish(self, is_removal: bool) -> tuple[int, bytes]:
        seq = len(self.sent)
        block = f"{self.life}-{seq}"
        gone = sorted(self.cache)[0] if is_removal and self.cache else ""
        self.cache.discard(gone)
        self.cache.add(block)
        self.sent.append(f"{block} {gone}".encode())
        return seq, self.sent[-1]

    def restart(self) -> None:
        self.life, self.sent, self.cache = self.life + 1, [], set()


class World:
    """A publisher, a bad network, the machine, and an index that is a set."""

    def __init__(self, has_replay: bool, window: int) -> None:
        self.publisher = Publisher(window)
        self.machine = SequenceMachine(has_replay=has_replay, replay_window=window)
        self.index: set[str] = set()
        self.replay: list[tuple[int, bytes]] | None = None
        self.is_up = True
        self.execute(self.machine.on_connected())

    def execute(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                block, _, gone = command.payload.decode().partition(" ")
                self.index.add(block)
                self.index.discard(gone)
            elif isinstance(command, Reset):
                self.index.clear()
            else:
                sent = list(enumerate(self.publisher.sent))
                self.replay = [item for item in sent[-self.publisher.window :] if item[0] >= command.start]

    def step(self, action: str) -> None:
        if action in ("deliver", "lose", "twice", "remove"):
            message = self.publisher.publish(action == "remove")
            if self.is_up and action != "lose":
                self.execute(self.machine.on_message(*message))
                if action == "twice":
                    self.execute(self.machine.on_message(*message))
        elif action == "replay":
            self.answer()
        elif action == "replay lost" and self.replay is not None:
            self.replay = None
            self.execute(self.machine.on_replay_failed())
        elif action in ("down", "restart"):
            if self.is_up:
                self.is_up = False
                self.execute(self.machine.on_disconnected())
            if action == "restart":
                self.publisher.restart()
        elif action == "up" and not self.is_up:
            self.is_up = True
            self.execute(self.machine.on_connected())

    def answer(self) -> None:
        if self.replay is None:
            return
        if self.replay:
            self.execute(self.machine.on_replayed(*self.replay.pop(0)))
        else:
            self.replay = None
            self.execute(self.machine.on_replay_end())

    def settle(self) -> None:
        self.step("up")
        for _ in range(10):
            while self.replay is not None:
                self.answer()
            self.step("deliver")


ACTIONS = ["deliver", "deliver", "deliver", "remove", "remove", "lose", "twice", "down", "up", "restart", "replay"]


@settings(max_examples=400, deadline=None)
@given(
    actions=st.lists(st.sampled_from([*ACTIONS, "replay", "replay", "replay lost"]), max_size=60),
    has_replay=st.booleans(),
    window=st.integers(1, 12),
)
def test_a8_4_no_stale_block_after_losses_duplicates_and_restarts(
    actions: list[str], has_replay: bool, window: int
) -> None:
    world = World(has_replay, window)
    for action in actions:
        world.step(action)
        # Losses show with the next message only.
        if world.machine.state in (SourceState.LIVE, SourceState.COLD) and "lose" not in actions:
            assert world.index <= world.publisher.cache
            assert world.machine.state is SourceState.COLD or world.index == world.publisher.cache
    world.settle()
    assert world.machine.state in (SourceState.LIVE, SourceState.COLD)
    assert world.index <= world.publisher.cache
    if world.machine.state is SourceState.LIVE:
        assert world.index == world.publisher.cache


def test_every_fact_is_harmless_at_every_time() -> None:
    """Whatever comes in whatever order, the machine answers and is in one of its states."""
    facts: list[Callable[[SequenceMachine], object]] = [
        lambda m: m.on_connected(),
        lambda m: m.on_disconnected(),
        lambda m: m.on_replay_end(),
        lambda m: m.on_replay_failed(),
        lambda m: m.on_message(3, b"x"),
        lambda m: m.on_replayed(1, b"y"),
        lambda m: m.on_unreachable(),
        lambda m: m.on_suspect("x"),
        lambda m: m.on_history_wanted("x"),
        lambda m: m.on_boot("b"),
        lambda m: m.on_complete(),
    ]
    for has_replay in (True, False):
        for first in facts:
            for second in facts:
                for third in facts:
                    machine = SequenceMachine(has_replay=has_replay)
                    for fact in (first, second, third):
                        fact(machine)
                    assert machine.state is not SourceState.MISCONFIGURED

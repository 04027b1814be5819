"""Every order of events for a request over a pair, up to a length: what must hold in each, and when all has ended."""

from collections.abc import Iterator

import pytest

from backends.pair_events import Tick
from backends.pair_types import PairCapability
from tests.backends.test_disaggregation import NEVER, SGLANG, VLLM, VLLM_NEVER, Shell
from tests.fakes.running import TIME_SCALE

LEGS = ("open", "done", "p fails", "role", "item", "ending", "ended", "d fails", "unsent", "ready")
# What comes from elsewhere may come at any time, and so may the time that was asked for.
ELSEWHERE = ("gone", "call off", "shutdown", "tick")
LENGTH = 4
LONG = 6  # minutes
# Whatever is left then: each leg ends in one of the ways that are open to it.
ENDINGS = (("ready", "open", "done", "ended"), ("d fails", "open", "p fails"), ("p fails", "d fails", "ended"))

Path = tuple[str, ...]
CASES = [
    pytest.param(SGLANG, False, False, id="sglang, headers"),
    pytest.param(SGLANG, True, False, id="sglang, immediate"),
    pytest.param(SGLANG, False, True, id="sglang, headers, waits for prefill"),
    pytest.param(VLLM, False, False, id="vllm"),
    pytest.param(NEVER, False, False, id="headers, prefill is never stopped"),
    pytest.param(VLLM_NEVER, False, False, id="completion, prefill is never stopped"),
]


class Frozen(Shell):
    """Time goes on only to where it was asked for, so that different ways lead to the same states."""

    def step(self, kind: str) -> None:
        if kind == "tick":
            self.now = max(self.now, self.woken_at or 0.0)
        event = Tick(self.now) if kind == "tick" else self.event(kind)
        if kind == "ready":
            self.is_wanted = False  # it is looked for once
        if event is not None and not self.machine.is_over:
            self.execute(self.machine.on(event))

    def key(self) -> str:
        """What the rest of a transcript depends on."""
        machine = {name: value for name, value in vars(self.machine).items() if name != "_capability"}
        mine = {name: value for name, value in vars(self).items() if name not in ("machine", "capability")}
        return repr((machine, mine))


def paths(capability: PairCapability, length: int, *, is_early: bool, waits: bool) -> Iterator[tuple[Path, Frozen]]:
    """Every state that up to ``length`` events can lead to, once, with a way that leads there."""

    def played(path: Path) -> Frozen:
        shell = Frozen(capability, is_early=is_early, waits=waits)
        for kind in path:
            shell.step(kind)
        return shell

    first: Path = ()
    yield first, played(first)
    seen = {played(first).key()}
    left = [first]
    for _ in range(length):
        before, left = left, []
        for path in ((*one, kind) for one in before for kind in (*LEGS, *ELSEWHERE)):
            shell = played(path)
            if (key := shell.key()) not in seen:
                seen.add(key)
                yield path, shell
                if not shell.machine.is_over:
                    left.append(path)


def check(capability: PairCapability, length: int, *, is_early: bool, waits: bool) -> None:
    """Each command is checked by the shell: none for a leg that is not live, no success after prefill's failure."""
    count = 0
    for path, state in paths(capability, length, is_early=is_early, waits=waits):
        count += 1
        assert len(state.terminals) <= 1, path
        if path[-1:] == ("shutdown",):
            assert state.machine.is_over, path
        for ending in ENDINGS if not state.machine.is_over else ((),):
            one = Frozen(capability, is_early=is_early, waits=waits)
            for kind in (*path, *ending, "tick", "tick", "tick"):
                one.step(kind)
            assert one.machine.is_over, (path, ending)
            assert not one.live, (path, ending)
            assert one.told == one.sent, (path, ending)
            assert len(one.terminals) == (0 if one.is_cancelled else 1), (path, ending)
    assert count > 100 * length  # states


@pytest.mark.parametrize(("capability", "is_early", "waits"), CASES)
def test_every_order_keeps_the_rules(capability: PairCapability, is_early: bool, waits: bool) -> None:
    check(capability, LENGTH, is_early=is_early, waits=waits)


@pytest.mark.soak
@pytest.mark.timeout(1800 * TIME_SCALE)
@pytest.mark.parametrize(("capability", "is_early", "waits"), CASES)
def test_every_longer_order_keeps_the_rules(capability: PairCapability, is_early: bool, waits: bool) -> None:
    check(capability, LONG, is_early=is_early, waits=waits)

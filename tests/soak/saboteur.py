"""What goes wrong with the engines of a soak: scripted faults, deaths and returns, freezes, removals."""

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote

from gateway.routes import ROUTES
from tests.fakes.running import TIME_SCALE
from tests.fakes.wire import call
from tests.soak.processes import MAX_RESPONSE_BYTES, START_S, Engine, Gateway

# So many requests end between two acts, or this much time passes.
_REQUESTS_PER_FAULT = 4
_REQUESTS_PER_DISTURBANCE = 30
_AT_MOST_S = 0.5 * TIME_SCALE

_HEAD = ("reset", "close", "garbage", "delay:100", "restart")
_STATUS = ("status:400", "status:429", "status:500", "status:503")
_ANSWER = (*_HEAD, "status:500", "abort_finish", f"huge:{MAX_RESPONSE_BYTES // 2}", f"huge:{MAX_RESPONSE_BYTES + 1000}")
_FAULTS: dict[str, tuple[str, ...]] = {
    "connect": _HEAD,
    "headers": (*_ANSWER, *_STATUS),
    "first_event": _ANSWER,
    "event:1": _ANSWER,
    "event:3": _ANSWER,
    "end": (*_HEAD, "status:500"),
    "abort": ("hang", "reset", "close", "status:500", "garbage", "delay:100", "ignore"),
}
# Every engine may have three faults that strike a call.
_CALLS = 10
# Places that are struck whatever the request.
_MATCHLESS = ("connect", "abort", "transfer")
_HANGS = ("connect", "headers", "first_event", "event:2", "end")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What can go wrong.

    Attributes:
        faults: What can be done, by the place.
        hangs: Where an engine can hang.
        pauses: Generation is paused now and then.
    """

    faults: Mapping[str, tuple[str, ...]]
    hangs: tuple[str, ...]
    pauses: bool = False


TROUBLE = Trouble(_FAULTS, _HANGS)
PAIR_TROUBLE = Trouble({**_FAULTS, "transfer": ("delay:200", "fail", "drop")}, (*_HANGS, "transfer"), pauses=True)


class Saboteur:
    """Does one thing after the other while requests run.

    What hangs is killed soon after, since the gateway has no deadline of its own by default.

    Args:
        engines: Whom it does it to.
        gateway: In front of them.
        seed: Decides what is done in which order; when, the requests decide.
        trouble: What is done.

    Attributes:
        acts: What was done, after how many requests.
    """

    def __init__(self, engines: Sequence[Engine], gateway: Gateway, seed: int, trouble: Trouble = TROUBLE) -> None:
        self._engines = engines
        self._trouble = trouble
        self._gateway = gateway
        self._seed = seed
        self._ended = 0
        self._next_end = asyncio.Event()
        self.acts: list[str] = []

    def request_ended(self) -> None:
        """Count one; called by the clients."""
        self._ended += 1
        self._next_end.set()
        self._next_end = asyncio.Event()

    async def script_faults(self) -> None:
        """Have single requests fail; goes on until cancelled."""
        chance = Random(f"faults:{self._seed}")
        while True:
            await self._pause(_REQUESTS_PER_FAULT)
            at = chance.choice(list(self._trouble.faults))
            await self._script(chance, chance.choice(self._engines), at, chance.choice(self._trouble.faults[at]))

    async def disturb(self) -> None:
        """Have one engine after the other fail as a whole; goes on until cancelled."""
        chance = Random(f"engines:{self._seed}")
        while True:
            await self._pause(_REQUESTS_PER_DISTURBANCE)
            acts = [self._hang, self._die, self._freeze, self._remove]
            act = chance.choice([*acts, self._hold] if self._trouble.pauses else acts)
            await act(chance, chance.choice(self._engines))

    async def make_peace(self) -> None:
        """Take all faults back, and see that every engine serves."""
        for engine in self._engines:
            if engine.is_running:
                engine.send(signal.SIGCONT)
            await engine.serve()
            await engine.keep_log()
            # The faults of new connections strike this one too.
            while not await engine.control("/_reset"):
                engine.kill()
                await engine.serve()
        await self._go_on()

    async def _pause(self, requests: int) -> None:
        """Let that many requests end, or some time pass where none does."""
        last = self._ended + requests
        try:
            async with asyncio.timeout(_AT_MOST_S):
                while self._ended < last:
                    await self._next_end.wait()
        except TimeoutError:
            pass

    def _note(self, engine: Engine, text: str) -> None:
        self.acts.append(f"{self._ended:6} {engine.name}: {text}")

    async def _script(self, chance: Random, engine: Engine, at: str, do: str) -> None:
        fault: dict[str, Any] = {"at": at, "do": do, "times": chance.randint(1, 3)}
        kind = chance.randrange(4)
        if at not in _MATCHLESS and kind == 0:
            fault["match"] = {"path": chance.choice(list(ROUTES))}
        elif at not in _MATCHLESS and kind == 1:
            fault["match"] = {"stream": chance.random() < 0.5}
        self._note(engine, f"{fault}")
        await engine.control("/_fault", fault)

    async def _hang(self, chance: Random, engine: Engine) -> None:
        await self._script(chance, engine, chance.choice(self._trouble.hangs), "hang")
        await self._pause(_REQUESTS_PER_DISTURBANCE)
        await self._die(chance, engine)

    async def _die(self, chance: Random, engine: Engine) -> None:
        await engine.keep_log()
        engine.kill()
        self._note(engine, "killed")
        await self._pause(chance.randint(0, _REQUESTS_PER_DISTURBANCE))
        await engine.serve()
        self._note(engine, "is back")

    async def _freeze(self, chance: Random, engine: Engine) -> None:
        engine.send(signal.SIGSTOP)
        self._note(engine, "frozen")
        await self._pause(chance.randint(1, _REQUESTS_PER_DISTURBANCE))
        engine.send(signal.SIGCONT)
        self._note(engine, "goes on")

    async def _remove(self, chance: Random, engine: Engine) -> None:
        """Take it out of the fleet, and in again."""
        address = self._gateway.address
        path = f"/workers/{engine.worker_id}?drain_timeout_s={chance.choice((0.0, 0.2))}"
        removed = await call(address, path, method="DELETE", patience_s=START_S)
        await self._pause(chance.randint(1, _REQUESTS_PER_DISTURBANCE))
        if engine.role == "regular":
            added = await call(address, f"/add_worker?url={quote(engine.url)}", patience_s=START_S)
        else:
            body = {"url": engine.url, "worker_type": engine.role}
            added = await call(address, "/workers", body, patience_s=START_S)
        self._note(engine, f"removed ({removed.status}) and added ({added.status})")

    async def _hold(self, chance: Random, engine: Engine) -> None:
        """Pause generation everywhere, as for new weights."""
        with contextlib.suppress(TimeoutError, OSError, EOFError):  # an engine that hangs does not answer
            paused = await call(self._gateway.address, "/pause_generation", {"mode": "in_place"})
            self._note(engine, f"and others paused ({paused.status})")
        await self._pause(chance.randint(1, _REQUESTS_PER_DISTURBANCE))
        await self._go_on()
        self._note(engine, "and others generate again")

    async def _go_on(self) -> None:
        """End the pause at all of them; a fault may strike that too."""
        for _ in range(_CALLS):
            with contextlib.suppress(TimeoutError, OSError, EOFError):
                if (await call(self._gateway.address, "/continue_generation", {})).status == 200:
                    break

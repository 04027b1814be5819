"""What every client of a soak does: the same for the same seed and number. Pure."""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from gateway.routes import ROUTES, Route
from tests.fakes.wire import request_bytes
from tests.soak.bodies import ASKS, GENERATING, LONG_TOKENS, TOKENS, Ask, spoiled

Asks = Mapping[str, Callable[[Random, int], Ask]]

MAX_BODY_BYTES = 100_000
_LEAVING = 0.2
_BAD = 0.08
_ABORTING = 0.06


class Leave(enum.Enum):
    """Where a client goes."""

    NEVER = "stays"
    IN_HEAD = "before its head is complete"
    IN_BODY = "inside its body"
    BEFORE_ANSWER = "before the answer's head"
    AFTER_HEAD = "before the first event"
    MIDWAY = "inside the answer"
    LAST_EVENT = "in the last event"


class Manner(enum.Enum):
    """How a client goes."""

    CLOSE = "close"
    RESET = "reset"
    HALF_CLOSE = "half-close"


@dataclass(frozen=True, slots=True)
class Plan:
    """One client's request.

    Attributes:
        number: Place in the run.
        id: Public id, in the header or the body.
        route: Route that is asked.
        raw: Bytes of the whole request.
        head_bytes: Length of its head.
        is_stream: It asks for events.
        ask: What the answer must hold.
        key: Equal for requests whose generated texts must be equal.
        leave: Where the client goes.
        manner: How it goes.
        share: How far it gets in what it leaves inside of, from 0 to 1; also a delay in units of 50 ms.
        aborts: Id that it has aborted meanwhile, ``None`` for none.
        wrong: What is wrong with the request; empty if nothing is.
        is_http: It can be read as a request, and so is counted.
    """

    number: int
    id: str
    route: Route
    raw: bytes
    head_bytes: int
    is_stream: bool
    ask: Ask
    key: str
    leave: Leave = Leave.NEVER
    manner: Manner = Manner.CLOSE
    share: float = 0.0
    aborts: str | None = None
    wrong: str = ""
    is_http: bool = True

    def __str__(self) -> str:
        """One line for the history."""
        end = f"{self.leave.value}, {self.manner.value}" if self.leave is not Leave.NEVER else self.leave.value
        abort = f", aborts {self.aborts}" if self.aborts else ""
        mode = "stream" if self.is_stream else "unary"
        return f"{self.id} {self.route.path} {mode} {self.wrong or 'good'}; {end}{abort}; {self.key[:300]}"


def plan(seed: int, number: int, asks: Asks = ASKS, often: Sequence[str] = GENERATING) -> Plan:
    """The request with that number; ``asks`` makes its body, by route, of which two thirds go to those of ``often``."""
    chance = Random(f"{seed}:{number}")
    # Every route in turn, whatever the dice say, and the generating ones beside.
    paths = list(asks)
    path = paths[number // 3 % len(paths)] if number % 3 == 0 else chance.choice(often)
    public_id = f"soak-{seed}-{number}"
    if chance.random() < _BAD:
        return _bad(number, public_id, path, chance, asks)
    does_abort = path in GENERATING and chance.random() < _ABORTING
    leave, manner = Leave.NEVER, Manner.CLOSE
    if not does_abort and chance.random() < _LEAVING / (1 - _BAD - _ABORTING):
        leave, manner = chance.choice([one for one in Leave if one is not Leave.NEVER]), chance.choice(list(Manner))
    # Most of those that want to go from a running answer must find it running.
    is_long = does_abort or (leave not in (Leave.NEVER, Leave.LAST_EVENT) and chance.random() < 0.8)
    ask = asks[path](chance, LONG_TOKENS if is_long else chance.choice(TOKENS))
    is_stream = path in GENERATING and not ask.is_unary and chance.random() < 0.6
    body, headers = dict(ask.body), {"X-Request-Id": public_id}
    if is_stream:
        body["stream"] = True
    if path == "/generate" and chance.random() < 0.4:
        body["rid"] = [f"{public_id}_{index}" for index in range(ask.batch)] if ask.batch else public_id
        headers = headers if ask.batch else {}
    aborts = None
    if does_abort:
        aborts = f"{public_id}_1" if ask.batch and chance.random() < 0.5 else public_id
    raw = request_bytes(path, body, method=chance.choice(ROUTES[path].methods), headers=headers)
    return Plan(
        number=number,
        id=public_id,
        route=ROUTES[path],
        raw=raw,
        head_bytes=raw.index(b"\r\n\r\n") + 4,
        is_stream=is_stream,
        ask=ask,
        key=f"{path} {json.dumps(ask.body, ensure_ascii=False)}",
        leave=leave,
        manner=manner,
        share=chance.random(),
        aborts=aborts,
    )


def _bad(number: int, public_id: str, path: str, chance: Random, asks: Asks) -> Plan:
    route = ROUTES[path]
    headers = {"X-Request-Id": public_id}
    wrong, body = spoiled(asks[path](chance, 1).body, chance)
    method, is_http = "POST", True
    raw = b""
    kind = chance.randrange(8)
    if kind == 0:
        wrong, method = "wrong method", "PATCH"
    elif kind == 1:
        wrong, body = "too large", b" " * (MAX_BODY_BYTES + 1)
    elif kind == 2:
        wrong, is_http = "no HTTP", False
        raw = b"NONSENSE \x01\r\n\r\n"
    raw = raw or request_bytes(route.path, body, method=method, headers=headers)
    head_bytes = raw.index(b"\r\n\r\n") + 4
    return Plan(number, public_id, route, raw, head_bytes, False, Ask({}), "", wrong=wrong, is_http=is_http)

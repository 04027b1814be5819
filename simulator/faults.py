"""Scripted faults: what goes wrong, where, how often, and for which requests.

Pure: the shells ask ``FaultTable.take`` at each named point and carry out what they get.

Points of one exchange, in order: ``connect`` (a connection was accepted), ``headers`` (the request
was read, nothing has been answered), ``first_event`` (the response head is out; same as
``event:0``), ``event:N`` (after N events; a unary body counts as cut in the middle), ``end`` (before
the last bytes). ``abort`` is the abort route.

Points of the KV events, matched by ``dp_rank`` only: ``kv`` (a batch is about to be published) and
``replay`` (past batches were asked for: ``ignore`` leaves that unanswered). Replays bring back what
a fault has kept or spoilt at ``kv``, except after these:

- ``drop``: the batch is not sent. ``lose``: nor can a replay bring it back.
- ``duplicate``: it is sent twice. ``reorder``: it is sent after the next one.
- ``delay:MS``: it and those behind it are sent later.
- ``garbage``: no msgpack. ``unknown_tag``: a further event, of an unknown type, in front.
- ``wrong_rank``, ``wrong_block_size``: one rank up, twice the size.
- ``silence``: from here on nothing is sent and no replay answered, until ``POST /_reset`` or a restart.
- ``renumber``: this batch is number 0 and past ones are forgotten, the cache is not.
- ``restart``: the engine restarts and the batch is lost.

The point ``transfer``, matched by ``rid`` only, is where the two engines of a prefill/decode pair meet: on
prefill when the blocks are to be sent, on decode when they are to be asked for.

- ``hang``: it is never begun. ``delay:MS``: it is begun later. ``fail``: it fails at once.
- ``drop``: on one side it looks done and the other hears nothing of it. A prefill engine of SGLang has sent and
  decode waits for ever; one of vLLM cuts the connection. A decode engine of SGLang lets prefill go and waits for
  ever; one of vLLM goes on without telling prefill, which keeps the blocks until its lease ends.

Without ``match.path``, the points after ``connect`` strike generation requests only, so that a
gateway's probes do not use them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KV_KINDS = (
    *("drop", "lose", "duplicate", "reorder", "delay", "garbage", "unknown_tag", "wrong_rank", "wrong_block_size"),
    *("silence", "renumber", "restart"),
)
_WITH_NUMBER = ("status", "delay", "huge")
_ALLOWED: dict[str, tuple[str, ...]] = {
    "connect": ("hang", "reset", "close", "garbage", "delay", "restart"),
    "headers": ("hang", "reset", "close", "status", "garbage", "delay", "abort_finish", "huge", "restart"),
    "event": ("hang", "reset", "close", "status", "garbage", "delay", "abort_finish", "huge", "restart"),
    "end": ("hang", "reset", "close", "status", "garbage", "delay", "huge", "restart"),
    "abort": ("hang", "reset", "close", "status", "garbage", "delay", "ignore", "restart"),
    "kv": _KV_KINDS,
    "replay": ("ignore",),
    "transfer": ("hang", "drop", "delay", "fail"),
}
_KINDS = tuple(dict.fromkeys(kind for kinds in _ALLOWED.values() for kind in kinds))
_KV_POINTS = ("kv", "replay")
_MATCH_TYPES: dict[str, type] = {"path": str, "rid": str, "model": str, "stream": bool, "method": str, "dp_rank": int}


class FaultError(ValueError):
    """A fault description that means nothing."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a fault may be matched with."""

    method: str
    path: str
    is_generation: bool = False
    rids: tuple[str, ...] = ()
    model: str | None = None
    stream: bool = False


@dataclass(slots=True, eq=False)
class Fault:
    """One fault; ``remaining`` counts down, ``None`` means for ever."""

    point: str
    event: int
    kind: str
    number: int
    remaining: int | None
    match: dict[str, Any]
    body: bytes | None = None

    def describe(self) -> dict[str, Any]:
        """Return the fault as ``POST /_fault`` takes and lists it."""
        at = f"event:{self.event}" if self.point == "event" else self.point
        do = f"{self.kind}:{self.number}" if self.kind in _WITH_NUMBER else self.kind
        return {"at": at, "do": do, "times": self.remaining, "match": self.match}

    def fits(self, facts: RequestFacts) -> bool:
        """Return whether ``facts`` is a request that this fault is meant for."""
        match = self.match
        if self.point != "abort" and "path" not in match and not facts.is_generation:
            return False
        if "path" in match and match["path"] != facts.path:
            return False
        if "method" in match and match["method"].upper() != facts.method:
            return False
        if "model" in match and match["model"] != facts.model:
            return False
        if "stream" in match and match["stream"] != facts.stream:
            return False
        return "rid" not in match or match["rid"] in facts.rids


def parse_fault(raw: object) -> Fault:
    """Read one fault description.

    Raises:
        FaultError: With a message for the author of the description.
    """
    if not isinstance(raw, Mapping):
        raise FaultError("a fault is an object")
    unknown = set(raw) - {"at", "do", "times", "match", "body"}
    if unknown:
        raise FaultError(f"unknown key {sorted(unknown)[0]!r}")
    point, event = _parse_point(raw.get("at"))
    kind, number = _parse_kind(raw.get("do"))
    if kind not in _ALLOWED[point]:
        raise FaultError(f"{kind!r} is not possible at {point!r}; possible: {', '.join(_ALLOWED[point])}")
    times = raw.get("times", 1)
    if times is not None and (not isinstance(times, int) or isinstance(times, bool) or times < 1):
        raise FaultError("'times' is a number from 1, or null for ever")
    match = _parse_match(raw.get("match"))
    if point in _KV_POINTS and set(match) - {"dp_rank"}:
        raise FaultError(f"{point!r} is matched by 'dp_rank' only")
    if point not in _KV_POINTS and "dp_rank" in match:
        raise FaultError("'match.dp_rank' is for KV events only")
    if point == "transfer" and set(match) - {"rid"}:
        raise FaultError("'transfer' is matched by 'rid' only")
    if point == "connect" and match:
        raise FaultError("'connect' happens before there is a request to match")
    body = raw.get("body")
    if body is not None and not isinstance(body, str):
        raise FaultError("'body' is a string")
    return Fault(point, event, kind, number, times, match, None if body is None else body.encode())


def _parse_point(at: object) -> tuple[str, int]:
    if at == "first_event":
        return "event", 0
    if isinstance(at, str) and at.startswith("event:") and at[6:].isdecimal():
        return "event", int(at[6:])
    if isinstance(at, str) and at in _ALLOWED and at != "event":
        return at, 0
    raise FaultError(
        f"unknown 'at': {at!r}; known: connect, headers, first_event, event:N, end, abort, kv, replay, transfer"
    )


def _parse_kind(do: object) -> tuple[str, int]:
    name, _, number = do.partition(":") if isinstance(do, str) else ("", "", "")
    if name not in _KINDS:
        raise FaultError(f"unknown 'do': {do!r}; known: {', '.join(_KINDS)}")
    if name in _WITH_NUMBER:
        if not number.isdecimal():
            raise FaultError(f"{name!r} needs a number: {name}:N")
        if name == "status" and not 200 <= int(number) <= 599:
            raise FaultError("'status' needs a number from 200 to 599")
        return name, int(number)
    if number:
        raise FaultError(f"{name!r} takes no number")
    return name, 0


def _parse_match(match: object) -> dict[str, Any]:
    if match is None:
        return {}
    if not isinstance(match, Mapping):
        raise FaultError("'match' is an object")
    for key, value in match.items():
        if key not in _MATCH_TYPES:
            raise FaultError(f"unknown 'match' key {key!r}; known: {', '.join(_MATCH_TYPES)}")
        if type(value) is not _MATCH_TYPES[key]:
            raise FaultError(f"'match.{key}' has the wrong type")
    return dict(match)


class FaultTable:
    """The faults that are still to come, in the order in which they were given."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def __bool__(self) -> bool:
        return bool(self._faults)

    def add(self, fault: Fault) -> None:
        """Append ``fault``."""
        self._faults.append(fault)

    def clear(self) -> None:
        """Forget all faults."""
        self._faults.clear()

    def describe(self) -> list[dict[str, Any]]:
        """Return the remaining faults as they were given, ``times`` counted down."""
        return [fault.describe() for fault in self._faults]

    def take(self, point: str, facts: RequestFacts | None = None, event: int = 0) -> Fault | None:
        """Return the first fault for this point and request, counting it as used."""
        for fault in self._faults:
            if fault.point != point or (point == "event" and fault.event != event):
                continue
            if facts is not None and not fault.fits(facts):
                continue
            self._use(fault)
            return fault
        return None

    def take_for_rank(self, point: str, rank: int) -> Fault | None:
        """Return the first fault for this point of ``rank``'s KV events, counting it as used."""
        for fault in self._faults:
            if fault.point == point and fault.match.get("dp_rank", rank) == rank:
                self._use(fault)
                return fault
        return None

    def _use(self, fault: Fault) -> None:
        if fault.remaining is not None:
            fault.remaining -= 1
            if not fault.remaining:
                self._faults.remove(fault)

    def expects(self, facts: RequestFacts) -> bool:
        """Return whether any fault after the head may strike this request: the slow path is needed."""
        return any(fault.point in ("event", "end") and fault.fits(facts) for fault in self._faults)

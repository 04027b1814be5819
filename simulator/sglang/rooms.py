"""Where the two engines of an SGLang pair meet: reading it from a body, and the errors of not meeting.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.api import FatalRequest
from simulator.options import EngineOptions
from simulator.sequence import Finish, FinishKind
from simulator.sglang.errors import InvalidRequest

# Health checks of pairs name this host: nothing is transferred.
_FAKE_HOST = "2.2.2.2"
_DEFAULT_PORT = 8998

ABORTED_BY_REQUEST = "Aborted by AbortReq."


@dataclass(frozen=True, slots=True)
class Room:
    """One prompt's meeting point; ``prefill_rank`` is the rank that the body says prefill runs on."""

    number: int
    host: str
    port: int
    prefill_rank: int | None

    @property
    def is_fake(self) -> bool:
        """Whether nothing is to be transferred."""
        return self.host == _FAKE_HOST


def rooms_of(raw: Mapping[str, Any], options: EngineOptions, rids: list[str]) -> list[Room | None]:
    """Return the meeting point of every prompt, of which ``rids`` has one id each; ``None``: no role.

    A single number stands for itself and the ones after it.

    Raises:
        InvalidRequest: There is none, or too few.
        FatalRequest: Prefill ranks go by the room, and a request without one ends the engine.
    """
    if options.role == "regular":
        return [None] * len(rids)
    numbers = _spread(raw.get("bootstrap_room"), len(rids), is_counted=True)
    if None in numbers or not all(type(number) is int for number in numbers):
        if options.role == "prefill" and options.dp_size > 1 and options.die_on_bad_input:
            raise FatalRequest
        rid = rids[numbers.index(None) if None in numbers else 0]
        raise InvalidRequest(
            f"Invalid request: Disaggregated request received without bootstrap room id. req.rid='{rid}'"
        )
    hosts = _spread(raw.get("bootstrap_host"), len(rids))
    ports = _spread(raw.get("bootstrap_port"), len(rids))
    rank = raw.get("disagg_prefill_dp_rank")
    return [
        Room(number, str(host or ""), port if type(port) is int else _DEFAULT_PORT, rank if type(rank) is int else None)
        for number, host, port in zip(numbers, hosts, ports, strict=True)
    ]


def _spread(value: Any, count: int, *, is_counted: bool = False) -> list[Any]:
    if isinstance(value, list):
        if len(value) < count:
            raise InvalidRequest("The length of the bootstrap lists should be equal to the batch size.")
        return value[:count]
    if is_counted and type(value) is int:
        return [value + index for index in range(count)]
    return [value] * count


def prefill_failure(stage: str, rid: str, room: int, reason: str) -> Finish:
    """Return the end of a prefill whose ``stage``, ``bootstrap`` or ``transfer``, failed."""
    request = f"rank=0 req.rid={rid!r} req.bootstrap_room={room}"
    return _failure(f"Prefill {stage} failed for request {request}", room, reason)


def decode_failure(stage: str, rid: str, room: int, reason: str) -> Finish:
    """Return the end of a decode whose ``stage``, ``handshake`` or ``transfer``, failed."""
    request = f"rank=0 decode_req.req.rid={rid!r} decode_req.req.bootstrap_room={room}"
    return _failure(f"Decode {stage} failed for request {request}", room, reason)


def _failure(what: str, room: int, reason: str) -> Finish:
    message = f"{what} with exception KVTransferError(bootstrap_room={room}): {reason}"
    return Finish(FinishKind.ABORT, message=message, status_code=500)

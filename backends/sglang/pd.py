"""SGLang's part of a request over a pair: rooms, and the bodies of the two legs. Pure.

Decode fetches the prompt's blocks from the prefill worker, which both know by a host, a port and a room. The gateway
draws the room, so both bodies can be made before anything is sent.

Log-probabilities are asked of both legs: the first token is prefill's, and decode takes that token's from what prefill
transfers, which is empty unless prefill was asked for them too (0.5.23).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import orjson

from backends.body_edit import edited
from backends.json_body import JsonBody, JsonBodyError
from backends.pair_types import Part

# Routes that take the fields of a pair.
PAIRED_PATHS: Final = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})
ROOM_BITS: Final = 63
MAX_PORT: Final = 65535
# Of an engine that does not tell its own.
DEFAULT_BOOTSTRAP_PORT: Final = 8998

# How the one half says that it cannot reach the other one; its own process answers (0.5.23).
_UNREACHED: Final = {
    Part.PREFILL: ("Failed to send kv chunk",),
    Part.DECODE: ("Lost connection with prefill instance", "Decode handshake failed"),
}
_ABORTED: Final = "Aborted by AbortReq"
# Nothing of a client's may be left of what says where a leg runs; null passes the refusal of internal fields.
_RANK_FIELDS = frozenset(
    {"bootstrap_pair_key", "data_parallel_rank", "decode_tp_size", "disagg_prefill_dp_rank", "routed_dp_rank"}
)
_PROMPT_FLAT = "return_flat_raw_top_logprobs"
_SHARED_BASE64 = "return_flat_raw_top_logprobs_b64"
_OUTPUT_FLAT = frozenset({"return_flat_raw_output_top_logprobs", "return_flat_raw_output_top_logprobs_b64"})
# Refused in streams, and of no use from a leg whose output is dropped.
_UNARY_ONLY = frozenset({"return_meta_info", "return_prompt_token_ids", "return_token_ids"})
_SAMPLING = "sampling_params"
_items = msgspec.json.Decoder(list[msgspec.Raw])


def part_at_fault(part: Part, message: str) -> Part:
    """The half that is to be blamed when one has failed: the other one, if this one says that it cannot reach it.

    Args:
        part: The half that has failed.
        message: What it said.
    """
    if _ABORTED in message or not any(one in message for one in _UNREACHED[part]):
        return part
    return Part.DECODE if part is Part.PREFILL else Part.PREFILL


class RandomBits(Protocol):
    """A source of randomness, such as ``random.SystemRandom``."""

    def getrandbits(self, k: int, /) -> int:
        """An integer of ``k`` random bits."""


class BodyUnfit(ValueError):
    """The client's body cannot be made into the bodies of two legs.

    Attributes:
        param: The field at fault.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where decode finds one prompt's blocks.

    Attributes:
        host: The prefill worker's, as decode workers reach it.
        port: Of its bootstrap server.
        room: Never that of another live request, since engines die of that.

    Raises:
        ValueError: One of them cannot be; nothing may be sent then.
    """

    host: str
    port: int
    room: int

    def __post_init__(self) -> None:
        """Refuse what would leave decode waiting for a transfer that cannot come."""
        if not self.host or not 1 <= self.port <= MAX_PORT or not 0 < self.room < 1 << ROOM_BITS:
            raise ValueError(f"no prompt can be handed over at {self.host!r}:{self.port} in room {self.room}")


def draw_room(rng: RandomBits, live: set[int], dp_size: int = 1, prefill_rank: int | None = None) -> int:
    """Draw a room and put it into ``live``; whoever ends the request takes it out.

    Args:
        rng: Its numbers must not be foreseeable, nor repeat after a restart.
        live: Rooms of all live requests.
        dp_size: Ranks of the prefill worker, ``>= 1``.
        prefill_rank: The rank that was chosen, where the worker takes ``room % dp_size`` for it; ``None`` for any.

    Raises:
        ValueError: There is no such rank.
        RuntimeError: The source repeats itself.
    """
    if prefill_rank is not None and not 0 <= prefill_rank < dp_size:
        raise ValueError(f"no rank {prefill_rank} among {dp_size}")
    for _ in range(100):
        room = rng.getrandbits(ROOM_BITS)
        if prefill_rank is not None:
            room += prefill_rank - room % dp_size
        if 0 < room < 1 << ROOM_BITS and room not in live:  # 0 is the engine's own, for its health checks
            live.add(room)
            return room
    raise RuntimeError("the source of rooms repeats itself")


def prefill_body(
    path: str, body: JsonBody, pairs: Sequence[Bootstrap], *, is_batch: bool, prefill_rank: int | None = None
) -> JsonBody:
    """The prefill leg's body, but for its id and rank: one token, streamed so that its headers come at once.

    Args:
        path: One of ``PAIRED_PATHS``.
        body: The client's, for one sample.
        pairs: One for each prompt.
        is_batch: The prompts are a batch, even if there is only one.
        prefill_rank: The rank that was chosen, ``None`` where the worker has one or chooses.

    Raises:
        BodyUnfit: The sampling parameters are not of the engine's shape.
    """
    changes = {**_pair_fields(pairs, prefill_rank, is_batch=is_batch), "stream": b"true"}
    removed = _RANK_FIELDS | _OUTPUT_FLAT
    if body.text(_PROMPT_FLAT) in (b"", b"false"):
        removed |= {_SHARED_BASE64}  # refused without either of the options that it is for
    if path == "/generate":
        changes[_SAMPLING] = _one_token(body.text(_SAMPLING), is_batch=is_batch)
    else:
        changes |= {"n": b"1", "max_tokens": b"1", "stream_options": b'{"include_usage":true}'}
        if path == "/v1/chat/completions":
            changes["max_completion_tokens"] = b"1"
        removed |= _UNARY_ONLY | {"min_tokens"}
    return edited(body, changes, removed - changes.keys())


def decode_body(
    body: JsonBody, pairs: Sequence[Bootstrap], *, is_batch: bool, prefill_rank: int | None = None
) -> JsonBody:
    """The decode leg's body, but for its id, its rank and the mode of its answer: the client's, with the handoff.

    Args:
        body: The client's, for one sample.
        pairs: What the prefill leg was given.
        is_batch: The same.
        prefill_rank: The same; decode asks that rank for the blocks.

    Raises:
        ValueError: There is no handoff.
    """
    if not pairs:
        raise ValueError("decode without a handoff would wait for ever")
    changes = _pair_fields(pairs, prefill_rank, is_batch=is_batch)
    return edited(body, changes, _RANK_FIELDS - changes.keys())


def _pair_fields(pairs: Sequence[Bootstrap], prefill_rank: int | None, *, is_batch: bool) -> dict[str, bytes]:
    hosts, ports, rooms = [one.host for one in pairs], [one.port for one in pairs], [one.room for one in pairs]
    values: tuple[object, ...] = (hosts, ports, rooms) if is_batch else (hosts[0], ports[0], rooms[0])
    names = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
    fields = {name: orjson.dumps(value) for name, value in zip(names, values, strict=True)}
    if prefill_rank is not None:
        fields["disagg_prefill_dp_rank"] = b"%d" % prefill_rank
    return fields


def _one_token(text: bytes, *, is_batch: bool) -> bytes:
    """Sampling parameters for one token; the rest of them, and their spelling, is the client's."""
    if is_batch and text.startswith(b"["):
        return b"[%b]" % b",".join(_one_token_of(bytes(item)) for item in _items.decode(text))
    return _one_token_of(text)


def _one_token_of(text: bytes) -> bytes:
    if text in (b"", b"null"):
        text = b"{}"
    try:
        sampling = JsonBody.parse(text, frozenset({"n", "max_new_tokens", "min_new_tokens"}))
    except JsonBodyError as exc:
        fault = f"has the field {exc.key!r} more than once" if exc.key else "must be an object"
        raise BodyUnfit(f"{_SAMPLING!r} {fault}", _SAMPLING) from exc
    return edited(sampling, {"n": b"1", "max_new_tokens": b"1"}, ("min_new_tokens",)).raw

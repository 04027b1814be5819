"""What a policy sees and what it answers. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from routers.load import RankLoad


class RankKey(NamedTuple):
    """One KV cache: a data-parallel rank of a worker."""

    worker_id: str
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that may serve the request.

    Attributes:
        key: Worker and rank.
        load: What is booked there now; policies read it, only bookings change it.
    """

    key: RankKey
    load: RankLoad


@dataclass(slots=True)
class RouteRequest:
    """What a policy knows of a request.

    Not changed after it is made; not frozen, since making a frozen one takes several times as long.

    Attributes:
        prompt_tokens: Length of the prompt, 0 if it is not known without tokenizing.
        stickiness_key: Key that keeps a session together, ``None`` if the client gave none.
        overlap_blocks: Leading prompt blocks cached by rank; ranks without any are absent.
    """

    prompt_tokens: int = 0
    stickiness_key: str | None = None
    overlap_blocks: Mapping[RankKey, int] = field(default_factory=dict)


@dataclass(slots=True)
class Placement:
    """A policy's choice.

    Not changed after it is made; not frozen, since making a frozen one takes several times as long.

    Attributes:
        candidate: The rank chosen.
        overlap_blocks: Leading prompt blocks that it holds, ``None`` when the policy does not look.
    """

    candidate: Candidate
    overlap_blocks: int | None = None

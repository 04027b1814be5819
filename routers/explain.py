"""Why a policy would choose what it chooses. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from routers.cost import Cost
from routers.types import Candidate, RouteRequest


@dataclass(frozen=True, slots=True)
class Explained:
    """What a policy makes of one candidate.

    Attributes:
        worker_id: Worker.
        dp_rank: Rank of it.
        overlap_blocks: Leading prompt blocks on its device, ``None`` when the policy does not look.
        prompt_blocks: Full blocks of the prompt, ``None`` when they are not known.
        active_blocks: Blocks in use there.
        active_prefill_tokens: Prompt tokens that its requests still have to prefill.
        in_flight: Its requests.
        cost: What the choice compares, in blocks of the smallest size among the candidates; ``None`` if the policy
            computes none.
        excluded: Why it is passed over whatever it costs, ``None`` if it is not.
        parts: Parts of the cost, in its own blocks; ``None`` without a cost.
        is_kept: It is crowded, and not passed over for that, since what it has of the prompt nobody else has.
    """

    worker_id: str
    dp_rank: int
    overlap_blocks: int | None
    prompt_blocks: int | None
    active_blocks: int
    active_prefill_tokens: int
    in_flight: int
    cost: float | None
    excluded: str | None
    parts: Cost | None = None
    is_kept: bool = False


def explain_load(request: RouteRequest, candidates: Sequence[Candidate]) -> list[Explained]:
    """Explain a choice that looks at no cost: the load of each candidate."""
    explained = []
    for candidate in candidates:
        prompt, load = request.prompts.get(candidate.group) if candidate.group else None, candidate.load
        blocks = prompt.full_blocks if prompt else None
        explained.append(
            Explained(*candidate.key, None, blocks, load.blocks, load.prefill_tokens, load.in_flight, None, None)
        )
    return explained

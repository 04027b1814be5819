"""What a request would cost on a rank: its prefill there, and the blocks that decoding then keeps in use. Pure."""

from dataclasses import dataclass, fields
from typing import Final, NamedTuple

MAX_WEIGHT: Final = 1e6


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Weights of the cost, each in [0, 10^6].

    Attributes:
        overlap_score_credit: Blocks of prefill that a block cached on the device saves.
        overlap_score_credit_decay: How fast the savings lose weight on a rank that has more prefill to do than others,
            counted in prompts as long as this one; 0 for never.
        prefill_load_scale: Decode blocks that one block of prefill is worth; 0 ignores prefill, and with it the cache.
        recompute_weight: Further blocks that each block counts for that a rank would compute anew though another one
            has it: waiting for others' prefill delays one request, computing delays all that come behind it.
        host_cache_hit_weight: What a block saves that must come from host memory.
        disk_cache_hit_weight: The same for disk and remote storage.
        shared_cache_multiplier: The same for a cache that all workers share; 0 without one, 0.5 is usual.
        decode_active_request_weight: Blocks that each request in flight counts for.
        track_prefill_tokens: Prefill counts; not so where it is done elsewhere.
        track_active_blocks: Blocks in use count; not so where decoding is done elsewhere.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    recompute_weight: float = 16.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    shared_cache_multiplier: float = 0.0
    decode_active_request_weight: float = 0.0
    track_prefill_tokens: bool = True
    track_active_blocks: bool = True

    def __post_init__(self) -> None:
        """Refuse what would make costs meaningless.

        Raises:
            ValueError: A weight is negative, too high, or no number.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= MAX_WEIGHT:
                raise ValueError(f"{field.name} is {value}, must be in [0, {MAX_WEIGHT:.0f}]")


DEFAULT_COST: Final = CostParameters()
# Of the two ranks of a disaggregated pair. The decode rank gets all blocks sent, whatever it has cached.
PREFILL_COST: Final = CostParameters(track_active_blocks=False)
DECODE_COST: Final = CostParameters(
    overlap_score_credit=0.0, host_cache_hit_weight=0.0, disk_cache_hit_weight=0.0, track_prefill_tokens=False
)


class Cost(NamedTuple):
    """A cost and the parts that it is made of, all in blocks.

    Attributes:
        total: The cost, finite and ``>= 0``; lower is better.
        raw_prefill_blocks: Prompt tokens to prefill on the rank, this request's included, the cache not considered.
        credit_blocks: What the cache saves of it.
        prefill_term: Part of the total that is for prefill.
        decode_blocks: Distinct blocks in use on the rank with this request.
        request_term: Part of the total that is for the number of requests.
    """

    total: float
    raw_prefill_blocks: float
    credit_blocks: float
    prefill_term: float
    decode_blocks: int
    request_term: float


def placement_cost(
    parameters: CostParameters,
    block_size: int,
    prompt_tokens: int,
    active_prefill_tokens: int,
    least_prefill_tokens: int,
    decode_blocks: int,
    in_flight: int,
    device_blocks: int = 0,
    host_blocks: int = 0,
    disk_blocks: int = 0,
    shared_blocks: int = 0,
) -> tuple[float, float, float, float, int, float]:
    """Estimate the work that a rank faces if it is given a request. Prefill counts in tokens, decode in full blocks.

    Args:
        parameters: Weights.
        block_size: Tokens per block, ``>= 1``.
        prompt_tokens: Of the request.
        active_prefill_tokens: Of the rank: tokens that its live requests still have to prefill.
        least_prefill_tokens: The same on the candidate that has the fewest.
        decode_blocks: Distinct blocks in use on the rank after the request's own are added.
        in_flight: Requests on the rank, this one not included.
        device_blocks: Leading prompt blocks that the rank has on its device.
        host_blocks: Further ones that it has in host memory.
        disk_blocks: Further ones on its disk.
        shared_blocks: Further ones in a cache that all workers share.

    Returns:
        The fields of a ``Cost``, not named, since naming them costs as much as computing them.
    """
    credit = parameters.overlap_score_credit * device_blocks
    if parameters.overlap_score_credit_decay and credit:
        behind_blocks = (active_prefill_tokens - least_prefill_tokens) / block_size
        prompts = behind_blocks / max(1, prompt_tokens // block_size)
        credit /= 1.0 + parameters.overlap_score_credit_decay * prompts
    if host_blocks or disk_blocks or shared_blocks:
        credit += (
            parameters.host_cache_hit_weight * host_blocks
            + parameters.disk_cache_hit_weight * disk_blocks
            + parameters.shared_cache_multiplier * shared_blocks
        )
    if not parameters.track_active_blocks:
        decode_blocks = 0
    request_term = parameters.decode_active_request_weight * in_flight
    if parameters.track_prefill_tokens:
        raw_prefill = (active_prefill_tokens + prompt_tokens) / block_size
        prefill_term = raw_prefill - credit if raw_prefill > credit else 0.0
        prefill_term *= parameters.prefill_load_scale
        total = prefill_term + decode_blocks + request_term
    else:
        raw_prefill = prefill_term = 0.0
        total = max(0.0, decode_blocks - credit) + request_term
    return total, raw_prefill, credit, prefill_term, decode_blocks, request_term


def recompute_weight(parameters: CostParameters) -> float:
    """What each block adds to a total that would be computed anew though another rank has it."""
    if not parameters.track_prefill_tokens:
        return 0.0
    return parameters.prefill_load_scale * parameters.recompute_weight


def with_recompute(
    parameters: CostParameters, cost: tuple[float, float, float, float, int, float], blocks: float
) -> tuple[float, float, float, float, int, float]:
    """A cost with what counts for blocks that would be computed anew.

    Where nobody has anything cached, and for who has most, it is what it was.

    Args:
        parameters: Weights.
        cost: What ``placement_cost`` says.
        blocks: How many fewer the cache saves here than where it saves most.
    """
    total, raw_prefill, credit, prefill_term, decode_blocks, request_term = cost
    term = recompute_weight(parameters) * blocks
    return total + term, raw_prefill, credit, prefill_term + term, decode_blocks, request_term

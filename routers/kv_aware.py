"""Policy ``kv-aware``: the rank where the request costs least, its cache considered. Pure."""

import math
import random
from collections.abc import Sequence
from typing import Final, Literal, TypedDict

from routers.cost import DEFAULT_COST, Cost, CostParameters, placement_cost, recompute_weight, with_recompute
from routers.explain import Explained, explain_load
from routers.least_loaded import LeastLoaded
from routers.types import BlockGroup, Candidate, Placement, PromptBlocks, RouteRequest

# A rank that has this many requests more than the mean, and this many times the mean, is not chosen for its cache.
CROWDED_ABOVE_MEAN: Final = 4
CROWDED_TIMES_MEAN: Final = 1.5
CROWDED: Final = "crowded"
LATE: Final = "late"

# Which crowded ranks are passed over: all that have a part of the prompt, or those that have what others have or use.
Guard = Literal["all", "shared"]
# Which blocks count for more where they would be computed anew: all that another rank has, or those that most have not.
Recompute = Literal["all", "rare"]

_Parts = tuple[float, float, float, float, int, float]
_RAW: Final = Cost._fields.index("raw_prefill_blocks")
_CREDIT: Final = Cost._fields.index("credit_blocks")


class KvOptions(TypedDict, total=False):
    """Options of ``KvAware``; what they mean is said there."""

    temperature: float
    guard: Guard
    max_wait_tokens: int
    max_wait_ratio: float
    recompute: Recompute


class KvAware:
    """The lowest cost; of those, the fewest requests in flight; of those, any.

    A rank whose cache holds a part of the prompt is passed over while it is crowded, so that a prefix that all requests
    share does not gather them on one rank. Where nothing is known of the prompt's blocks, the least loaded is chosen.

    Args:
        rng: Breaks ties, and draws where there is a temperature.
        parameters: Weights of the cost.
        temperature: 0 for the lowest cost; above, ranks are drawn, the cheaper the likelier: by the softmax of their
            costs' negatives, which are divided by their range and by this.
        guard: ``"all"`` passes over every crowded rank whose cache holds a part of the prompt; ``"shared"`` those of
            which at least half of that part is held by another rank too, or is used by requests that run there now.
            It leaves a session with its history, which nobody else has.
        max_wait_tokens: Prefill, in prompt tokens, that the first token may wait for longer than on the rank where
            the least is to be computed until then; ranks where it is more are passed over. 0 for no limit.
        max_wait_ratio: The same for a rank whose cache saves more than that of the rank where it is soonest, in tokens
            that it may wait for each of those that are saved more. 0 for no limit.
        recompute: What ``recompute_weight`` counts for: ``"all"`` blocks that another rank has, or ``"rare"`` ones,
            which at most half of the ranks have. A prompt that all requests share is soon of use where it is computed
            anew, so that it should keep nobody from a rank which has just started.

    Raises:
        ValueError: The temperature or the ratio is negative, infinite, or no number, or the tokens are negative.
    """

    name = "kv-aware"

    def __init__(
        self,
        rng: random.Random,
        parameters: CostParameters = DEFAULT_COST,
        *,
        temperature: float = 0.0,
        guard: Guard = "all",
        max_wait_tokens: int = 0,
        max_wait_ratio: float = 0.0,
        recompute: Recompute = "all",
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature is {temperature}, must be finite and at least 0")
        if not (math.isfinite(max_wait_ratio) and max_wait_ratio >= 0):
            raise ValueError(f"max_wait_ratio is {max_wait_ratio}, must be finite and at least 0")
        if max_wait_tokens < 0:
            raise ValueError(f"max_wait_tokens is {max_wait_tokens}, must be at least 0")
        self._rng = rng
        self._parameters = parameters
        self._temperature = temperature
        self._guard = guard
        self._max_wait_tokens = max_wait_tokens or math.inf
        self._max_wait_ratio = max_wait_ratio or math.inf
        self._recompute = recompute
        self._without_blocks = LeastLoaded(rng)

    def select(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Placement:
        """Choose by cost; what is wrong with overlaps makes the choice worse, never impossible."""
        if not candidates:
            raise ValueError("no candidates")
        if not request.prompts:
            return self._without_blocks.select(request, candidates)
        totals = self._weigh(request, candidates)[0]
        index = self._draw(totals) if self._temperature else self._cheapest(totals, candidates)
        chosen = candidates[index]
        prompt = _prompt_for(request, chosen.group)
        return Placement(chosen, _on_device(prompt, chosen), prompt)

    def explain(self, request: RouteRequest, candidates: Sequence[Candidate]) -> list[Explained]:
        """Say what ``select`` would compare, candidate by candidate."""
        if not request.prompts or not candidates:
            return explain_load(request, candidates)
        explained = []
        smallest = _smallest_block(request)
        totals, costs, missing, crowded, late = self._weigh(request, candidates)
        for index, candidate in enumerate(candidates):
            prompt, load = _prompt_for(request, candidate.group), candidate.load
            cost = Cost(*with_recompute(self._parameters, costs[index], missing[index]))
            explained.append(
                Explained(
                    *candidate.key,
                    overlap_blocks=_on_device(prompt, candidate),
                    prompt_blocks=prompt.full_blocks,
                    active_blocks=load.blocks,
                    active_prefill_tokens=load.left_tokens(),
                    in_flight=load.in_flight,
                    cost=cost.total * prompt.block_size / smallest,
                    excluded=LATE if index in late else CROWDED if totals[index] == math.inf else None,
                    parts=cost,
                    is_kept=index in crowded and totals[index] < math.inf,
                )
            )
        return explained

    def _weigh(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> tuple[list[float], list[_Parts], list[float], list[int], list[int]]:
        """Compute what is compared, and what is behind it, by number of the candidate.

        Returns:
            Blocks of the smallest size among the prompts, since one of 64 tokens is not to be compared with one of 16,
            and infinity where a candidate is passed over; costs; blocks that would be computed anew though another one
            has them, and count for it; numbers of those that are crowded, and of those that would be too late.
        """
        parameters = self._parameters
        costs: list[_Parts] = []
        saved: list[float] = []
        sizes: list[int] = []
        least_prefill = 0
        if parameters.overlap_score_credit_decay:
            least_prefill = min([candidate.load.left_tokens() for candidate in candidates])
        prompt, group = None, None
        for candidate in candidates:
            # Workers that cut alike mostly have the same object for it.
            if candidate.group is not group or prompt is None:
                group = candidate.group
                prompt = _prompt_for(request, group)
                block_size, tokens, full = prompt.block_size, prompt.prompt_tokens, prompt.full_blocks
                hashes, device = prompt.sequence_hashes, prompt.overlap.device
                has_lower_tiers = prompt.overlap.host or prompt.overlap.disk
            load = candidate.load
            on_device = device.get(candidate.key, 0)
            if not 0 <= on_device <= full:
                on_device = _within(on_device, full)
            on_host = on_disk = 0
            if has_lower_tiers:
                on_host, on_disk = _lower_tiers(prompt, candidate, on_device)
            new = full - load.shared_blocks(hashes)
            cost = placement_cost(
                parameters,
                block_size,
                tokens,
                load.prefill_tokens if load.pace is None else load.left_tokens(),
                least_prefill,
                load.blocks + new if new > 0 else load.blocks,
                load.in_flight,
                on_device,
                on_host,
                on_disk,
            )
            costs.append(cost)
            saved.append(cost[_CREDIT] * block_size)
            sizes.append(block_size)
        most = max(saved)
        # What more than half of the ranks save, if that is what not to count.
        common = sorted(saved)[(len(saved) - 1) // 2] if self._recompute == "rare" else 0.0
        missing = [(most - max(tokens, common)) / size for tokens, size in zip(saved, sizes, strict=True)]
        weight, smallest = recompute_weight(parameters), _smallest_block(request)
        totals = [
            (cost[0] + weight * blocks) * size / smallest
            for cost, blocks, size in zip(costs, missing, sizes, strict=True)
        ]
        crowded = _crowded(request, candidates)
        for index in crowded:
            if self._guard == "all" or _is_shared(request, candidates, candidates[index]):
                totals[index] = math.inf
        late: list[int] = []
        if self._max_wait_tokens < math.inf or self._max_wait_ratio < math.inf:
            late = self._late(totals, costs, saved, sizes)
        for index in late:
            totals[index] = math.inf
        return totals, costs, missing, crowded, late

    def _late(self, totals: list[float], costs: list[_Parts], saved: list[float], sizes: list[int]) -> list[int]:
        """Which of those that are not passed over would have to wait too long; never all of them."""
        ahead = [(cost[_RAW] - cost[_CREDIT]) * size for cost, size in zip(costs, sizes, strict=True)]
        open_ = [index for index, total in enumerate(totals) if total < math.inf]
        if not open_:
            return []
        soonest = min(open_, key=ahead.__getitem__)
        late = []
        for index in open_:
            limit, gain = self._max_wait_tokens, saved[index] - saved[soonest]
            if gain > 0:
                limit = min(limit, self._max_wait_ratio * gain)
            if ahead[index] - ahead[soonest] > limit:
                late.append(index)
        return late

    def _cheapest(self, totals: list[float], candidates: Sequence[Candidate]) -> int:
        least = min(totals)
        if totals.count(least) == 1:
            return totals.index(least)
        ties = [index for index, total in enumerate(totals) if total == least]
        fewest = min([candidates[index].load.in_flight for index in ties])
        return self._rng.choice([index for index in ties if candidates[index].load.in_flight == fewest])

    def _draw(self, totals: list[float]) -> int:
        lowest = min(totals)
        span = max([total for total in totals if total < math.inf]) - lowest or 1.0
        weights = [math.exp((lowest - total) / span / self._temperature) for total in totals]
        return self._rng.choices(range(len(totals)), weights)[0]


def _smallest_block(request: RouteRequest) -> int:
    return min([prompt.block_size for prompt in request.prompts.values()])


def _prompt_for(request: RouteRequest, group: BlockGroup | None) -> PromptBlocks:
    """The prompt as a group has it; where its blocks are not known, it is as long as it is elsewhere."""
    prompt = request.prompts.get(group) if group else None
    if prompt is None:
        known = max(request.prompts.values(), key=lambda one: one.prompt_tokens)
        prompt = PromptBlocks(group.block_size if group else known.block_size, known.prompt_tokens)
    return prompt


def _on_device(prompt: PromptBlocks, candidate: Candidate) -> int:
    return _within(prompt.overlap.device.get(candidate.key, 0), prompt.full_blocks)


def _crowded(request: RouteRequest, candidates: Sequence[Candidate]) -> list[int]:
    """Numbers of the candidates that have a part of the prompt, and more requests than is good for them."""
    in_flight = [candidate.load.in_flight for candidate in candidates]
    mean = sum(in_flight) / len(in_flight)
    limit = max(mean + CROWDED_ABOVE_MEAN, mean * CROWDED_TIMES_MEAN)
    if max(in_flight) < limit:
        return []
    return [
        index for index, count in enumerate(in_flight) if count >= limit and _held_tokens(request, candidates[index])
    ]


def _is_shared(request: RouteRequest, candidates: Sequence[Candidate], one: Candidate) -> bool:
    """At least half of what a rank has of the prompt is on another one too, or in use here."""
    prompt = _prompt_for(request, one.group)
    held_tokens = _held_tokens(request, one)
    used_tokens = one.load.shared_blocks(prompt.sequence_hashes) * prompt.block_size
    elsewhere_tokens = max([_held_tokens(request, other) for other in candidates if other is not one], default=0)
    return 2 * max(used_tokens, elsewhere_tokens) >= held_tokens


def _held_tokens(request: RouteRequest, candidate: Candidate) -> int:
    """Leading tokens of the prompt that a rank has, in all tiers."""
    prompt = _prompt_for(request, candidate.group)
    on_device = _on_device(prompt, candidate)
    return (on_device + sum(_lower_tiers(prompt, candidate, on_device))) * prompt.block_size


def _lower_tiers(prompt: PromptBlocks, candidate: Candidate, on_device: int) -> tuple[int, int]:
    """Blocks in host memory and on disk that are not on the device; tiers count from the first block, too."""
    full, overlap = prompt.full_blocks, prompt.overlap
    on_host = max(0, _within(overlap.host.get(candidate.key, 0), full) - on_device)
    return on_host, max(0, _within(overlap.disk.get(candidate.key, 0), full) - on_device - on_host)


def _within(blocks: int, limit: int) -> int:
    return max(0, min(blocks, limit))

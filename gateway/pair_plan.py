"""What a run over a pair is to do, beside its legs; and the machine that sees to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from backends.cancel_policy import abort_capability
from backends.disaggregation import PairMachine
from backends.pair_types import Overlap, pair_capability
from backends.vllm.pd import MOONCAKE_LEASE_S
from gateway.decode_reader import DecodeWants
from gateway.pair_legs import PairLegs
from gateway.routes import Dialect
from gateway.services import Services
from routers.types import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """What a run needs to know beside its legs.

    Attributes:
        wants: How decode's answer is read.
        keeps_logprobs: The client wants what prefill tells of the prompt.
        find_decode: Chooses another decode rank for a handoff whose worker could not be reached.
        public_id: For the log.
    """

    wants: DecodeWants
    keeps_logprobs: bool
    find_decode: Callable[[PairLegs], Placement]
    public_id: str


def new_machine(services: Services, legs: PairLegs, plan: PairPlan) -> PairMachine:
    """The machine of a run.

    SGLang's native streams begin with headers at once. On its other routes headers wait for the first output (0.5.23),
    and prefill has none before decode is there: so there both are sent at once, and headers tell nothing.
    """
    facts, times, overlap = legs.prefill.facts, services.limits.pair_times, services.limits.overlap
    if plan.wants.dialect is not Dialect.NATIVE:
        times, overlap = replace(times, header_timeout_s=0.0), Overlap.IMMEDIATE
    if legs.is_mooncake:
        times = replace(times, lease_s=MOONCAKE_LEASE_S)
    return PairMachine(
        pair_capability(facts.engine, abort_capability(facts.engine, facts.version)),
        times,
        overlap=overlap,
        waits_for_prefill=plan.keeps_logprobs,
    )

"""``python -m benchmarks.routing_quality``: how well each policy places requests, on one virtual clock.

Simulated engines with limited caches get the same traffic under every policy: a recorded chat service (``--trace``),
agents that call tools, and groups of samples. Nothing is timed but virtual seconds, so that a busy machine changes
nothing; equal arguments give equal figures. ``oracle`` is ``kv-aware`` that sees the engines' caches themselves instead
of their events, and bounds what knowing can do, not what another choice could; ``kv-aware:4:1:64`` is ``kv-aware`` with
a ``prefill_load_scale`` of 4, a ``recompute_weight`` of 1 and a ``decode_active_request_weight`` of 64;
``kv-aware/shared`` is it with that guard; ``kv-aware@80000`` with ``--kv-max-wait-tokens 80000``; ``kv-aware+observed``
with that prefill load model; ``kv-aware+rare`` with ``--kv-recompute rare``; ``kv-aware~512`` with
``--kv-coalesce-tokens 512``; ``kv-aware@80000x16`` with ``--kv-max-wait-ratio 16`` besides;
``kv-aware/shared:4:1:64@80000x16+observed+rare~512`` is all of it, and ``kv-aware/tuned`` is ``--kv-profile tuned``.
``--http`` sends a small traffic through real processes besides, to compare.
"""

import argparse
import asyncio
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast, get_args

from benchmarks.routing_engine import Setup
from benchmarks.routing_http import measure_over_http
from benchmarks.routing_sim import Figures, Run
from benchmarks.routing_traffic import Traffic, recorded, sample_groups, tool_agents
from gateway.settings import Settings
from routers.base import Router
from routers.cost import DEFAULT_COST, CostParameters
from routers.kv_aware import Guard, KvAware
from routers.registry import make_policy

ORACLE: Final = "oracle"
_WEIGHTS: Final = (
    DEFAULT_COST.prefill_load_scale,
    DEFAULT_COST.recompute_weight,
    DEFAULT_COST.decode_active_request_weight,
)
_OBSERVED: Final = "+observed"
_RARE: Final = "+rare"
_VARIANT: Final = re.compile(
    rf"(?P<base>[a-z-]+)(?:/(?P<guard>{'|'.join(get_args(Guard))}))?(?P<weights>(?::[0-9.]+)*)"
    rf"(?:@(?P<wait>[0-9]+))?(?:x(?P<ratio>[0-9.]+))?(?:{re.escape(_OBSERVED)})?(?P<rare>{re.escape(_RARE)})?"
    rf"(?:~(?P<coalesce>[0-9]+))?"
)
_PROFILE: Final = "/tuned"
# The order of the report; what it is all about first.
_ORDER: Final = (
    ORACLE,
    "kv-aware",
    "kv-aware/tuned",
    "kv-aware/shared",
    "kv-aware:1:0",
    "prefix-approximate",
    "prefix-approximate/tuned",
    "consistent-hash",
    "least-loaded",
    "power-of-two",
    "round-robin",
)


class _Raise(logging.Handler):
    """What the gateway survives with a line in its log would spoil a measurement."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage()) from (record.exc_info[1] if record.exc_info else None)


def policy_of(name: str, seed: int, grain: int = 1) -> Router:
    """Make a policy by its name here.

    Args:
        name: As in the module's docstring.
        seed: Of its random choices.
        grain: Tokens that a simulated one stands for.

    Raises:
        ValueError: There is no such policy.
    """
    found = _VARIANT.fullmatch(_written_out(name))
    weights = found["weights"].split(":")[1:] if found else []
    if found is None or len(weights) > len(_WEIGHTS):
        raise ValueError(f"unknown policy {name!r}")
    scale, recompute, per_request = [*map(float, weights), *_WEIGHTS[len(weights) :]]
    return make_policy(
        KvAware.name if found["base"] == ORACLE else found["base"],
        seed,
        CostParameters(prefill_load_scale=scale, recompute_weight=recompute, decode_active_request_weight=per_request),
        guard=cast(Guard, found["guard"] or "all"),
        max_wait_tokens=int(found["wait"] or 0) // grain,
        max_wait_ratio=float(found["ratio"] or 0),
        recompute="rare" if found["rare"] else "all",
    )


def run(name: str, traffic: Traffic, setup: Setup, seed: int) -> Figures:
    """Send the traffic under one policy.

    Raises:
        RuntimeError: The gateway's part had something to log.
    """
    policy = policy_of(name, seed, setup.grain)
    found = _VARIANT.fullmatch(_written_out(name))
    assert found is not None
    return Run(
        policy,
        setup,
        is_oracle=_base(name) == ORACLE,
        observes=_OBSERVED in found[0],
        coalesce_tokens=-(-int(found["coalesce"] or 0) // setup.grain),
    ).go(traffic)


def _written_out(name: str) -> str:
    """A name with the options of ``--kv-profile tuned`` in place of its name."""
    options = Settings(kv_profile="tuned")
    weights = (options.kv_prefill_load_scale, options.kv_recompute_weight, options.kv_request_weight)
    written = "".join(f":{weight:g}" for weight in weights)
    waits = f"@{options.kv_max_wait_tokens}x{options.kv_max_wait_ratio:g}"
    models = f"+{options.kv_prefill_load_model}+{options.kv_recompute}~{options.kv_coalesce_tokens}"
    return name.replace(_PROFILE, f"/{options.kv_guard}{written}{waits}{models}")


def _base(name: str) -> str:
    """The policy that a name is a variant of."""
    return re.split("[:/@+~]", name)[0]


def heading() -> str:
    """The head of a table of ``row``; times are those to the first token."""
    return (
        "| policy | tokens hit | of prompts | expected | p50 s | p99 s | mean s | max/mean load | group on |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    )


def row(name: str, figures: Figures) -> str:
    """One policy's figures as a line of a table.

    ``expected`` is the share that it took to be cached, ``group on`` the mean number of engines of equal prompts.
    """
    looks = _base(name) in (ORACLE, "kv-aware", "prefix-approximate")
    expected = f"{figures.foreseen_tokens / max(1, figures.prompt_tokens):.1%}" if looks else "–"
    engines = figures.engines_per_group
    group = "–" if engines is None else f"{engines:.1f}"
    p50, p99 = figures.ttft_quantile_s(0.5), figures.ttft_quantile_s(0.99)
    mean = sum(figures.ttft_s) / len(figures.ttft_s)
    return (
        f"| {name} | {figures.hit_tokens:,} | {figures.hit_share:.1%} | {expected} "
        f"| {p50:.2f} | {p99:.2f} | {mean:.2f} | {figures.imbalance:.2f} | {group} |"
    )


def _traffics(options: argparse.Namespace) -> Iterator[Traffic]:
    rng = random.Random(options.seed)
    if options.trace is not None and "conversations" in options.traffic:
        yield recorded(options.trace, first=options.first, requests=options.requests, speedup=options.speedup)
    if "agents" in options.traffic:
        yield tool_agents(rng, sessions=options.sessions)
    if "groups" in options.traffic:
        yield sample_groups(rng, groups=options.groups)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add(
        "--trace", type=Path, help="recorded requests, JSON lines, perhaps compressed; without it that part is left out"
    )
    add("--first", type=int, default=0, help="request of the trace that is the first one sent")
    add("--requests", type=int, default=2000, help="of the trace, from there")
    add("--speedup", type=float, default=1.2, help="how much faster than recorded the trace is sent")
    add("--sessions", type=int, default=300, help="of agents")
    add("--groups", type=int, default=300, help="of samples")
    add("--traffic", nargs="+", default=["conversations", "agents", "groups"], help="which of the three")
    add(
        "--policies",
        nargs="+",
        default=list(_ORDER),
        help="names, or oracle, each perhaps with /tuned, or with /GUARD, :SCALE, :SCALE:RECOMPUTE or "
        ":SCALE:RECOMPUTE:REQUEST, @MAX_WAIT_TOKENS, xMAX_WAIT_RATIO, +observed, +rare and ~COALESCE_TOKENS, in order",
    )
    add("--engines", type=int, default=8)
    add(
        "--cache-tokens",
        type=int,
        help="of one engine; 1,000,000 for the trace and 250,000 for the others if not given",
    )
    add("--page-tokens", type=int, default=64)
    add("--prefill-tokens-per-s", type=float, default=10_000.0)
    add("--decode-step-ms", type=float, default=25.0)
    add("--context-ns", type=float, default=0.0, help="that each token of a running request adds to a step")
    add("--event-delay-ms", type=float, default=10.0, help="from the end of a step until its events are applied")
    add("--grain", type=int, default=4, help="tokens that a simulated one stands for")
    add("--seed", type=int, default=1)
    add("--http", action="store_true", help="compare a small traffic with real processes instead")
    options = parser.parse_args()
    for name in options.policies:
        try:
            policy_of(name, options.seed)
        except ValueError as exc:
            parser.error(str(exc))
    return options


def main() -> None:
    """Run every policy on every traffic, and print a table for each."""
    options = _options()
    logging.getLogger("forebay").addHandler(_Raise())
    if options.http:
        asyncio.run(measure_over_http(options.seed, run))
        return
    for traffic in _traffics(options):
        setup = Setup(
            engines=options.engines,
            page_tokens=options.page_tokens,
            cache_tokens=options.cache_tokens or (1_000_000 if traffic.name == "conversations" else 250_000),
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            decode_step_s=options.decode_step_ms / 1000,
            context_ns=options.context_ns,
            event_delay_s=options.event_delay_ms / 1000,
            grain=options.grain,
        )
        print(f"\n{traffic.name}: {traffic.requests} requests; {traffic.about}; {setup}\n\n{heading()}", flush=True)
        for name in options.policies:
            print(row(name, run(name, traffic, setup, options.seed)), flush=True)


if __name__ == "__main__":
    main()

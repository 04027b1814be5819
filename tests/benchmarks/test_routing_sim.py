"""The virtual fleet: its figures follow from its arguments, and the router's view is what the engines hold."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.routing_engine import Clock, Setup
from benchmarks.routing_quality import policy_of, run
from benchmarks.routing_sim import Run
from benchmarks.routing_traffic import Piece, Traffic, Turn, recorded, sample_groups, token_ids, tool_agents

SETUP = Setup(engines=3, cache_tokens=24_000, prefill_tokens_per_s=4000.0, chunk_tokens=1024)


def agents() -> Traffic:
    """Few of them, whose caches overflow."""
    return tool_agents(random.Random(3), sessions=12, sessions_per_s=0.6, system_tokens=1000, mean_turns=4.0)


def test_things_happen_in_the_order_of_their_times() -> None:
    clock = Clock()
    happened: list[tuple[float, str]] = []
    clock.after(2.0, lambda: happened.append((clock.now, "late")))
    clock.after(1.0, lambda: clock.after(1.0, lambda: happened.append((clock.now, "asked for later"))))
    clock.after(0.5, lambda: happened.append((clock.now, "early")))
    clock.run()
    assert happened == [(0.5, "early"), (2.0, "late"), (2.0, "asked for later")]


@pytest.mark.parametrize("name", ["oracle", "kv-aware", "prefix-approximate"])
def test_equal_arguments_give_equal_figures(name: str) -> None:
    one, other = (run(name, agents(), SETUP, 1) for _ in range(2))
    assert one.ttft_s == other.ttft_s
    assert (one.hit_tokens, one.foreseen_tokens, one.busy) == (other.hit_tokens, other.foreseen_tokens, other.busy)
    assert len(one.ttft_s) == agents().requests
    assert 0 < one.hit_tokens < one.prompt_tokens


def test_events_tell_the_router_what_the_caches_hold() -> None:
    seen = Run(policy_of("kv-aware", 1), SETUP)
    seen.go(agents())
    assert seen.caches.report.removed > 0
    assert not seen.caches.report.dropped
    for number, engine in enumerate(seen.engines):
        assert seen.caches.index.rank_blocks((f"engine-{number}", 0)) == engine.cache.stored_blocks


def test_nothing_stays_booked() -> None:
    done = Run(policy_of("kv-aware", 1), SETUP)
    done.go(sample_groups(random.Random(2), groups=5, problem_tokens=500, answer_tokens=40))
    assert all(candidate.load.is_idle for candidate in done.candidates)


def test_variants_of_a_policy_have_names() -> None:
    plain, shared = run("kv-aware", agents(), SETUP, 1), run("kv-aware/shared", agents(), SETUP, 1)
    assert run("kv-aware/all:1:16:0", agents(), SETUP, 1).ttft_s == plain.ttft_s
    assert run("kv-aware:1:0:64", agents(), SETUP, 1).ttft_s != plain.ttft_s
    assert len(shared.ttft_s) == len(plain.ttft_s)
    groups = sample_groups(random.Random(2), groups=30, groups_per_s=2.0)
    for base, variant in (("kv-aware", "@1000"), ("kv-aware:64", "+observed"), ("kv-aware", "+rare")):
        assert run(base + variant, groups, SETUP, 1).ttft_s != run(base, groups, SETUP, 1).ttft_s
    assert policy_of("round-robin", 1).name == "round-robin"


@pytest.mark.parametrize(
    "name", ["kv-unaware", "kv-aware/none", "kv-aware:1:2:3:4", "kv-aware:x", "kv-aware:-1", "kv-aware@", "kv-aware+"]
)
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown policy|could not convert|must be in"):
        policy_of(name, 1)


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    prompt = (Piece(7, 4096),)
    alone = Traffic("two", [Turn(0.0, prompt, 8, "a"), Turn(30.0, prompt, 8, "b")], "")
    figures = run("kv-aware", alone, SETUP, 1)
    # All but the block that holds the last token.
    assert figures.hit_tokens == 4096 - SETUP.page_tokens
    assert figures.ttft_s[0] == pytest.approx(4096 / SETUP.prefill_tokens_per_s)
    assert figures.ttft_s[1] == pytest.approx(SETUP.page_tokens / SETUP.prefill_tokens_per_s)


def test_pieces_with_equal_seeds_begin_alike() -> None:
    assert token_ids([Piece(5, 40)]) == token_ids([Piece(5, 90)])[:40]
    assert token_ids([Piece(5, 40)]) != token_ids([Piece(6, 40)])


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 700, [1, 2]), (0, 512, [1]), (3000, 1024, [1, 2])]
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "output_length": 9, "hash_ids": ids})
        for at, length, ids in rows
    ]
    path.write_text("\n".join(lines), "utf-8")
    later = recorded(path, requests=1, speedup=2.0, first=1)
    assert [(turn.after_s, sum(piece.tokens for piece in turn.pieces)) for turn in later.turns] == [(0.0, 512)]
    traffic = recorded(path, requests=10, speedup=2.0)
    assert [turn.after_s for turn in traffic.turns] == [0.0, 0.75, 1.5]
    assert [sum(piece.tokens for piece in turn.pieces) for turn in traffic.turns] == [700, 512, 1024]
    assert traffic.turns[0].session == traffic.turns[2].session != traffic.turns[1].session
    path.write_text(json.dumps({"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [1]}), "utf-8")
    with pytest.raises(ValueError, match="do not cover"):
        recorded(path, requests=10, speedup=1.0)

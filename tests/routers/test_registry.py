"""Policies by name."""

import pytest

from backends.types import EngineKind
from routers.kv_aware import KvAware
from routers.load import RankLoad
from routers.registry import BLOCK_POLICIES, DEFAULT_POLICY, POLICIES, make_policy
from routers.types import BlockGroup, Candidate, PromptBlocks, RankKey, RouteRequest


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_are_called_by_their_own_name(name: str) -> None:
    assert make_policy(name, 1).name == name


def test_the_default() -> None:
    assert isinstance(make_policy(None, None), KvAware)  # which falls back to least-loaded
    assert DEFAULT_POLICY in POLICIES


def test_policies_that_look_at_blocks_are_those_that_place_by_them() -> None:
    group = BlockGroup(EngineKind.SGLANG, 16)
    asked = RouteRequest(32, None, {group: PromptBlocks(16, 32, [1, 2])})
    one = [Candidate(RankKey("w", 0), RankLoad(), group)]
    looking = {name for name in POLICIES if make_policy(name, 1).select(asked, one).prompt is not None}
    assert looking == BLOCK_POLICIES


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'x', known: .*least-loaded"):
        make_policy("x", 1)

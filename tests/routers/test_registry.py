"""Policies by name."""

import pytest

from routers.least_loaded import LeastLoaded
from routers.registry import DEFAULT_POLICY, POLICIES, make_policy


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_are_called_by_their_own_name(name: str) -> None:
    assert make_policy(name, 1).name == name


def test_the_default() -> None:
    assert isinstance(make_policy(None, None), LeastLoaded)
    assert DEFAULT_POLICY in POLICIES


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'x', known: .*least-loaded"):
        make_policy("x", 1)

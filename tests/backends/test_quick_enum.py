"""Enums with plain members are enums in every other way."""

import enum

import pytest

from backends.quick_enum import quick


@quick
class Colour(enum.Enum):
    RED = 1
    GREEN = 2


@quick
class Word(enum.StrEnum):
    YES = "yes"
    NO = "no"


@pytest.mark.parametrize("kind", [Colour, Word])
def test_members_are_found_in_every_way(kind: type[enum.Enum]) -> None:
    assert len(list(kind)) == 2
    for member in kind:
        assert getattr(kind, member.name) is kind[member.name] is kind(member.value) is member
        assert isinstance(member, kind)
        assert {member: 1}[kind(member.value)] == 1


def test_a_word_is_found_under_its_text() -> None:
    assert {"yes": 1}[Word.YES] == 1


def test_members_stay_what_they_are() -> None:
    with pytest.raises(AttributeError):
        Colour.RED = Colour.GREEN  # type: ignore[misc, assignment]

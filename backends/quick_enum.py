"""Enums whose members cost no more to read than any attribute."""

import enum
from typing import TypeVar

_E = TypeVar("_E", bound=type[enum.Enum])


def quick(kind: _E) -> _E:
    """Make the members of ``kind`` plain attributes of the class, and hash them by identity (class decorator).

    Before Python 3.12 each of the two runs a function in Python, and a request reads members some dozens of times. Even
    so a member costs as much as twenty steps of a function, since the class of enums has a hook for names that are
    missing: what runs for every request reads it from a name of its module.
    Enums that are strings keep the hash of the string.
    """
    for name, member in kind.__members__.items():
        type.__setattr__(kind, name, member)
    if kind.__hash__ is enum.Enum.__hash__:
        type.__setattr__(kind, "__hash__", object.__hash__)
    return kind

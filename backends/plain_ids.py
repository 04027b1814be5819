"""Finds a long list of token ids in a JSON text without reading it digit by digit. Pure.

A JSON decoder walks through every digit to learn where the list ends, which for a long prompt is most of what the
gateway does. Here the list is checked as a whole, with a few operations on bit masks that have one bit a byte: what
passes is exactly a JSON list of numbers of one to nine digits, so that the decoder need not see it.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Keys under which engines take ids.
_KEYS: Final = ("input_ids", "prompt")
# Looked at in one go. Larger masks come from fresh pages each time, which cost more than the work itself.
_PIECE_BYTES: Final = 64 * 1024
_ZERO, _COMMA, _SPACE = (np.uint8(ord(char)) for char in "0, ")

_Bits = NDArray[np.uint64]


class PlainIds(NamedTuple):
    """A list of ids in a text.

    Attributes:
        key: The key before it.
        begin: Position of its opening bracket.
        end: Position behind its closing bracket.
        length: Number of ids, ``>= 1``.
    """

    key: str
    begin: int
    end: int
    length: int


def find_plain_ids(raw: bytes) -> PlainIds | None:
    """The list behind the first key for ids, ``None`` if there is anything in it but ids of up to nine digits.

    Items are separated by a comma, or by a comma and a space. Whether the key is one at the top level is
    for the caller to find out.
    """
    for key in _KEYS:
        quoted = b'"%b":' % key.encode()
        begin = raw.find(quoted) + len(quoted)
        if begin < len(quoted):
            continue
        begin += raw[begin : begin + 1] == b" "
        end = raw.find(b"]", begin) + 1
        if raw[begin : begin + 1] != b"[" or not end:
            return None
        length = _length(raw, begin + 1, end - 1)
        return PlainIds(key, begin, end, length) if length else None
    return None


def _length(raw: bytes, begin: int, end: int) -> int:
    """Number of ids in the inside of a list, 0 if it is anything else than that; taken apart at some of its commas."""
    length = 0
    while True:
        cut = end if end - begin <= _PIECE_BYTES else raw.rfind(b",", begin, begin + _PIECE_BYTES)
        found = _count(np.frombuffer(raw, np.uint8, cut - begin, begin)) if cut > begin else 0
        if not found:
            return 0
        length += found
        if cut == end:
            return length
        begin = cut + 1 + (raw[cut + 1 : cut + 2] == b" ")


def _count(text: NDArray[np.uint8]) -> int:
    """The same for one piece."""
    values = text - _ZERO
    is_digit, is_comma = values < 10, text == _COMMA
    commas = int(np.count_nonzero(is_comma))
    spaces = len(text) - int(np.count_nonzero(is_digit)) - commas  # anything else is found below
    if not (is_digit[0] and is_digit[-1]):
        return 0
    if len(text) > 1 and values[0] == 0 and is_digit[1]:
        return 0
    digits, separators, zeros = _bits(is_digit), _bits(is_comma), _bits(values == 0)
    if spaces:
        is_space = text == _SPACE
        if np.count_nonzero(is_space) != spaces:
            return 0
        behind = _bits(is_space)
        if (_next(behind, 1) != separators).any():
            return 0
        separators = behind
    has_no_digit_behind = separators & ~_next(digits, 1)
    has_leading_zero = separators & _next(zeros, 1) & _next(digits, 2)
    runs = digits
    for step in (1, 2, 4, 2):  # where 2, 4, 8 and 10 digits begin
        runs = runs & _next(runs, step)
    return 0 if (has_no_digit_behind | has_leading_zero | runs).any() else commas + 1


def _bits(mask: NDArray[np.bool_]) -> _Bits:
    """One bit for each item, the first one highest."""
    packed = np.packbits(mask)
    padded = np.zeros(-(-len(packed) // 8) * 8, np.uint8)
    padded[: len(packed)] = packed
    return padded.view(">u8").astype(np.uint64)


def _next(bits: _Bits, steps: int) -> _Bits:
    """For each item what ``bits`` say of the one that many steps behind it."""
    moved = bits << np.uint64(steps)
    moved[:-1] |= bits[1:] >> np.uint64(64 - steps)
    return moved

"""As much of protocol buffers as one answer needs. Pure."""

from typing import Final

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5


def first_text(message: bytes) -> bytes:
    """Give the text in field 1; the last one if there are several, empty if there is none.

    Raises:
        ValueError: It is no message.
    """
    found = b""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        field, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError("the answer is no protocol buffer")
        if at + size > len(message):
            raise ValueError("the answer ends too early")
        if field == 1 and kind == _BYTES:
            found = message[at : at + size]
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("the answer ends too early")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("the answer has a number that is too long")

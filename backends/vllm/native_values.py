"""Values of native requests and answers as JSON text: reading and writing. Pure."""

from collections.abc import Mapping

import msgspec
import orjson

from backends.json_body import JsonBody
from backends.vllm.native_fields import NativeRefused

_int = msgspec.json.Decoder(int)
_ids = msgspec.json.Decoder(list[int])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_string = msgspec.json.Decoder(str)
_strings = msgspec.json.Decoder(str | list[str])
_SWITCHES = {b"": False, b"false": False, b"true": True}


def as_int(text: bytes, param: str) -> int | None:
    """An integer, ``None`` if it is absent.

    Args:
        text: JSON text, empty for an absent value.
        param: The field, for the error.

    Raises:
        NativeRefused: It is none, or has more than 64 bits.
    """
    if not text:
        return None
    try:
        value = _int.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise NativeRefused(f"{param!r} is not an integer", param) from exc
    if not -(1 << 63) <= value < 1 << 63:
        raise NativeRefused(f"{param!r} has more than 64 bits", param)
    return value


def as_ids(text: bytes, param: str) -> list[int]:
    """A list of token ids; see ``as_int``."""
    try:
        ids = _ids.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NativeRefused(f"{param!r} is not a list of token ids", param) from exc
    if ids and min(ids) < 0:
        raise NativeRefused(f"{param!r} holds a negative id", param)
    return ids


def as_switch(text: bytes, param: str) -> bool:
    """True or false, false if it is absent; see ``as_int``."""
    value = _SWITCHES.get(text)
    if value is None:
        raise NativeRefused(f"{param!r} is neither true nor false", param)
    return value


def as_items(text: bytes, param: str) -> list[bytes]:
    """The items of a list, as JSON; see ``as_int``."""
    try:
        return [bytes(item) for item in _items.decode(text)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NativeRefused(f"{param!r} is not a list", param) from exc


def as_text(text: bytes, param: str) -> str:
    """A string; see ``as_int``."""
    try:
        return _string.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise NativeRefused(f"{param!r} is not a string", param) from exc


def as_texts(text: bytes, param: str) -> str | list[str]:
    """A string or a list of them; see ``as_int``."""
    try:
        return _strings.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise NativeRefused(f"{param!r} must be a string, or a list of them for a batch", param) from exc


def pick(body: JsonBody, name: str, index: int) -> bytes:
    """A field's value for one prompt, as JSON, empty if it is absent or null; of a list its item.

    Raises:
        NativeRefused: The list is shorter than the batch.
    """
    text = body.text(name)
    if not text.startswith(b"["):
        return text
    items = as_items(text, name)
    if index >= len(items):
        raise NativeRefused(f"{name!r} has fewer items than the batch", name)
    return b"" if items[index] == b"null" else items[index]


def render(members: Mapping[str, bytes]) -> bytes:
    """A JSON object of members in JSON."""
    return b"{%b}" % b",".join(b"%b:%b" % (orjson.dumps(name), value) for name, value in members.items())

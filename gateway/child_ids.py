"""The ids that an engine made by itself, as its events reveal them. Pure.

Samples of ``n > 1`` that stay one request run under such ids; to abort them is only possible once they are known.
"""

# A quote inside a JSON string is escaped, and so is a line break, so neither of these stands in a generated text.
_NATIVE = b'"meta_info":{"id":"'
_CHUNK = b'data: {"id":"'
_ID_BYTES = 32
_HEX = b"0123456789abcdef"


def revealed(block: bytes) -> tuple[str, ...]:
    """The engine ids in a block of whole events, as the engine sent it, in their order and each of them once.

    Args:
        block: Events of ``/generate``, or chunks of chat or completions.
    """
    places = _behind(block, _NATIVE)
    if not places:
        places = [len(_CHUNK)] if block.startswith(_CHUNK) else []
        places += _behind(block, b"\n" + _CHUNK)
    found = (block[at : at + _ID_BYTES + 1] for at in places)
    return tuple(dict.fromkeys(one[:-1].decode() for one in found if _is_id(one)))


def _behind(block: bytes, key: bytes) -> list[int]:
    """Where ``key`` ends; searched with ``find``, which on a long event takes a fraction of what a pattern does."""
    places = []
    at = block.find(key)
    while at >= 0:
        places.append(at + len(key))
        at = block.find(key, places[-1])
    return places


def _is_id(text: bytes) -> bool:
    """Whether ``text`` is an id and the quote behind it."""
    return len(text) == _ID_BYTES + 1 and text.endswith(b'"') and not text[:-1].strip(_HEX)

"""Token counts in answers, as engines give them. Pure."""

import re
from collections.abc import Iterable

import msgspec

from backends.sse import events

# With the names that /v1/responses and /v1/messages use, too.
_USAGE = re.compile(rb'"(prompt|completion|cached|input|output)_tokens":(\d{1,18})')
_COUNT = b'_tokens":'
# The longest name before that, its quote included.
_COUNT_NAME_BYTES = len(b'"completion')
# The last event of one item of a native stream; a word is found sooner than a pattern.
_ITEM_END = b'"finish_reason":{'
_ITEM_INDEX = re.compile(rb'"index":(\d{1,7})')
_INDEX_BYTES = 64


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts as the engine gave them, ``None`` where it gave none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


def usage_of(texts: Iterable[bytes]) -> Usage:
    """Sum the token counts in the given pieces of JSON: one object, or the items of a batch."""
    found: dict[bytes, int] = {}
    for text in texts:
        at = text.find(_COUNT)  # a word is found sooner than a pattern, and what comes before is mostly generated text
        if at >= 0:
            for name, count in _USAGE.findall(text, max(at - _COUNT_NAME_BYTES, 0)):
                found[name] = found.get(name, 0) + int(count)
    prompt, completion = found.get(b"prompt", found.get(b"input")), found.get(b"completion", found.get(b"output"))
    return Usage(prompt, completion, found.get(b"cached"))


def last_usage(texts: Iterable[bytes]) -> Usage:
    """The last of each token count; details inside of a usage object come with it."""
    found: dict[bytes, int] = {}
    for text in texts:
        found.update((name, int(count)) for name, count in reversed(_USAGE.findall(text)))
    return Usage(found.get(b"input"), found.get(b"output"), found.get(b"cached"))


class ItemEnds:
    """The last events of a native stream's items, each of which tells the counts of its own item only.

    Args:
        look_at_bytes: The end of an event in which the counts are looked for.
    """

    __slots__ = ("_look_at_bytes", "_usages")

    def __init__(self, look_at_bytes: int) -> None:
        self._look_at_bytes = look_at_bytes
        self._usages: dict[bytes, Usage] = {}

    def see(self, block: bytes) -> None:
        """Look at a block of whole events."""
        if block.find(_ITEM_END) < 0:
            return
        for event in events(block):
            if event.find(_ITEM_END) >= 0:
                index = _ITEM_INDEX.findall(event[-_INDEX_BYTES:])[-1:]
                self._usages[index[0] if index else b""] = usage_of([event[-self._look_at_bytes :]])

    @property
    def usage(self) -> Usage | None:
        """The sums over the items that have ended, ``None`` if none has been seen to."""
        if not self._usages:
            return None
        usages = self._usages.values()
        return Usage(*(_sum(getattr(one, name) for one in usages) for name in Usage.__struct_fields__))


def _sum(counts: Iterable[int | None]) -> int | None:
    told = [count for count in counts if count is not None]
    return sum(told) if told else None

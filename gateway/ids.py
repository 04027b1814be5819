"""Engine ids out, public ids in: rewriting of answers as bytes. Pure.

Engine ids are fresh random hex, so that replacing their bytes cannot hit anything else. Samples of ``n > 1`` run
under ids that the engine makes by itself; those are found at the one place where an answer can hold an id.
"""

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import orjson

from backends.sse import events
from backends.types import EngineIds

# Where the engines' answers hold a request's id: first in meta_info, or first in an OpenAI object.
_META_ID = re.compile(rb'("meta_info":\{"id":")([0-9a-f]{32})"')
_EVENT_ID = re.compile(rb'("meta_info":\{"id":"|\A[\r\n]*data: \{"id":")([0-9a-f]{32})"')
_FIRST_ID = re.compile(rb'("meta_info":\{"id":"|\A\{"id":")([0-9a-f]{32})"')
_CHILD_ID_BYTES = 64
_STREAM_BEGINNINGS = (b"data:", b"event:", b":")
_INDEX = re.compile(rb'"index":(\d+)')
_ID_BYTES = 32
_ID_BATCH = 128
_IDS = re.compile("." * _ID_BYTES)
# In a piece of this size without a quote, ids are not looked for but at its ends.
_GATE_BYTES = 4096
_EDGE_BYTES = 256
# What may follow the common part of a batch's ids.
_ITEM_SUFFIX_BYTES = 16


def fresh_ids() -> Callable[[], str]:
    """Make a source of ids, 32 random hex digits each. The system is asked for the randomness of many at once."""
    ready: list[str] = []

    def fresh_id() -> str:
        if not ready:
            digits = os.urandom(_ID_BATCH * _ID_BYTES // 2).hex()
            ready.extend(_IDS.findall(digits))
        return ready.pop()

    return fresh_id


def json_inner(text: str) -> bytes:
    """``text`` as it stands between the quotes of a JSON string."""
    return orjson.dumps(text)[1:-1]


class IdMap(Protocol):
    """Replaces engine ids by public ones."""

    @property
    def has_items(self) -> bool:
        """The answer may be that of several items or samples."""

    @property
    def keeps_length(self) -> bool:
        """Replacing never changes the number of bytes."""

    def apply(self, block: bytes) -> bytes:
        """Rewrite a block of whole events, or a whole body."""

    def apply_without_quotes(self, block: bytes) -> bytes:
        """Rewrite a long piece of a body in which there is no quote, so that ids can only stand at its ends."""

    def held(self, data: bytes) -> int:
        """How many bytes at the end of ``data`` may be the beginning of an id and must wait for what follows."""


def _held_suffix(data: bytes, pattern: bytes) -> int:
    """Length of the longest end of ``data`` that ``pattern`` begins with, the whole pattern excluded."""
    tail = data[1 - len(pattern) :]
    at = tail.find(pattern[:1])
    while at >= 0:
        if pattern.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(pattern[:1], at + 1)
    return 0


class SingleId:
    """One request, one id; what the engine appends to it (``_0``) stays."""

    __slots__ = ("_engine", "_public", "keeps_length")

    has_items = False

    def __init__(self, engine_id: str, public_id: str) -> None:
        self._engine = engine_id.encode()
        self._public = json_inner(public_id)
        self.keeps_length = len(self._engine) == len(self._public)

    def apply(self, block: bytes) -> bytes:
        """Rewrite a block; see ``IdMap``."""
        if len(block) >= _GATE_BYTES and block.find(b'"') < 0:  # one byte is found many times sooner than an id
            return self.apply_without_quotes(block)
        return block.replace(self._engine, self._public)

    def apply_without_quotes(self, block: bytes) -> bytes:
        """Rewrite a run of numbers or of Base64; see ``IdMap``.

        An id stands in a string of its own, of which a piece of a body may hold the end or the beginning.
        """
        engine = self._engine
        if block.find(engine, 0, _EDGE_BYTES) < 0 and block.find(engine, max(len(block) - _EDGE_BYTES, 0)) < 0:
            return block
        return block.replace(engine, self._public)

    def held(self, data: bytes) -> int:
        """Bytes that must wait; see ``IdMap``."""
        # An id may end with what it begins with, so a whole one at the end must not be taken for a beginning.
        last = data.rfind(self._engine, max(len(data) - 2 * _ID_BYTES, 0))
        return _held_suffix(data[last + _ID_BYTES :] if last >= 0 else data, self._engine)


class BatchIds:
    """A batch: ids with a common beginning, one public id for each.

    Args:
        engine_ids: Ids of the items.
        public_ids: Their public ids.
        public_id: What the part before the items' suffixes is called, should it come alone.
    """

    __slots__ = ("_base", "_common", "_pattern", "_public", "keeps_length")

    has_items = True

    def __init__(self, engine_ids: Sequence[str], public_ids: Sequence[str], public_id: str) -> None:
        engine = [one.encode() for one in engine_ids]
        self._public = dict(zip(engine, map(json_inner, public_ids), strict=True))
        self._base = {engine[0][:_ID_BYTES]: json_inner(public_id)}
        self._common = engine[0][:24]
        self._pattern = re.compile(re.escape(self._common) + rb"[0-9a-f]{8}(?:_\d{1,7})?")
        self.keeps_length = all(len(key) == len(value) for key, value in self._public.items())

    def apply(self, block: bytes) -> bytes:
        """Rewrite a block; see ``IdMap``."""
        if block.find(self._common) < 0:
            return block
        return self._pattern.sub(self._replaced, block)

    apply_without_quotes = apply

    def _replaced(self, match: re.Match[bytes]) -> bytes:
        found = match[0]
        whole = self._public.get(found)
        if whole is not None:
            return whole
        item, suffix = found[:_ID_BYTES], found[_ID_BYTES:]
        known = self._public.get(item, self._base.get(item))
        return found if known is None else known + suffix

    def held(self, data: bytes) -> int:
        """Bytes that must wait; see ``IdMap``."""
        at = data.rfind(self._common, max(len(data) - len(self._common) - _ITEM_SUFFIX_BYTES, 0))
        return len(data) - at if at >= 0 else _held_suffix(data, self._common)


class ChildIds:
    """Samples under ids of the engine's own: the public id with the sample's index.

    Args:
        public_id: Base of the children's public ids.
        has_one_id: The answer as a whole has one id, which becomes the base itself: a unary OpenAI answer.
    """

    __slots__ = ("_has_begun", "_has_one_id", "_is_stream", "_known", "_public")

    has_items = True
    keeps_length = False

    def __init__(self, public_id: str, *, has_one_id: bool) -> None:
        self._public = json_inner(public_id)
        self._has_one_id = has_one_id
        self._has_begun = False
        self._is_stream = False
        self._known: dict[bytes, bytes] = {}

    def apply(self, block: bytes) -> bytes:
        """Rewrite a block; see ``IdMap``. What the first one begins with says whether the answer is a stream."""
        pattern = _META_ID
        if not self._has_begun and block:
            self._has_begun = True
            self._is_stream = block.startswith(_STREAM_BEGINNINGS)
            pattern = _FIRST_ID
        if not self._is_stream:
            return pattern.sub(functools.partial(self._replaced, index=b""), block)
        rewritten = []
        for event in events(block):
            # A native event ends with its index; an OpenAI chunk holds it in its first choice.
            indices = _INDEX.findall(event)
            index = indices[-1 if b'"meta_info"' in event else 0] if indices else b""
            rewritten.append(_EVENT_ID.sub(functools.partial(self._replaced, index=index), event))
        return b"".join(rewritten)

    apply_without_quotes = apply

    def _replaced(self, match: re.Match[bytes], index: bytes) -> bytes:
        child = match[2]
        if child not in self._known:
            number = index or b"%d" % len(self._known)
            self._known[child] = self._public if self._has_one_id else self._public + b"_" + number
        return match[1] + self._known[child] + b'"'

    def held(self, data: bytes) -> int:
        """Bytes that must wait; see ``IdMap``."""
        if not self._has_begun and len(data) < _CHILD_ID_BYTES:
            return len(data)
        at = data.rfind(b'"meta_info"', max(len(data) - _CHILD_ID_BYTES, 0))
        return len(data) - at if at >= 0 else _held_suffix(data, b'"meta_info"')


def id_map(ids: EngineIds, public_id: str, item_ids: Sequence[str], *, has_one_id: bool) -> IdMap:
    """The map for one leg.

    Args:
        ids: Ids given to the engine.
        public_id: The request's public id.
        item_ids: Public ids of a batch's items.
        has_one_id: The answer is one OpenAI object with one id.
    """
    if ids.has_children:
        return ChildIds(public_id, has_one_id=has_one_id)
    if not ids.names_items:
        return SingleId(ids.sent[0], public_id)
    if len(ids.sent) == 1 and len(ids.sent[0]) == _ID_BYTES:
        return SingleId(ids.sent[0], item_ids[0])
    return BatchIds(ids.sent, item_ids, public_id)

"""What folds are made of: JSON values that grow piece by piece, and the walk over a stream's events. Pure.

Nothing is decoded beyond what has to be told apart. Two JSON strings are joined by joining what stands between their
quotes, lists likewise, so that escapes, lone surrogates and the spelling of numbers stay the engine's own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
import orjson

from backends.errors import AnswerMalformed, AnswerTooLarge
from backends.sse import DONE_DATA, data_of, events, name_of
from gateway.engine_errors import refusal_in
from gateway.errors import EngineRefused, ErrorReport, GatewayError, engine_failure
from gateway.outcome import Outcome

Fields = dict[str, msgspec.Raw]
# Name and default, in the order of the engine's unary answer; a default of None leaves an absent field out.
Template = tuple[tuple[str, bytes | None], ...]

NULL = b"null"
_NAMED = (b"", b"message", b"error")
_decoder = msgspec.json.Decoder(Fields)
_list_decoder = msgspec.json.Decoder(list[Fields])


class FoldIncomplete(GatewayError):
    """The engine's stream ended before the answer was whole.

    Attributes:
        is_terminated: The stream's end marker was there, but an item of the answer never came: after an abort before
            the first token vLLM sends the marker alone.
    """

    def __init__(self, *, is_terminated: bool) -> None:
        what = "without a whole answer" if is_terminated else "without its end marker"
        super().__init__(ErrorReport(502, "engine_error", f"the engine's stream ended {what}", Outcome.TRUNCATED))
        self.is_terminated = is_terminated


def payloads(block: bytes) -> Iterator[bytes]:
    """The payloads of a block's events, but for events with names of their own."""
    start = 0
    # The one shape that engines send, found by its line ends: a search for one byte is ten times as fast as for two.
    while block.startswith(b"data: ", start):
        end = block.find(b"\n", start)
        if block[end + 1 : end + 2] != b"\n":
            break
        if end > start + 6:
            yield block[start + 6 : end]
        start = end + 2
    for event in events(block[start:]):
        data = data_of(event)
        if data and name_of(event) in _NAMED:
            yield data


def parse_object(text: bytes | msgspec.Raw) -> Fields:
    """The members of a JSON object as slices of ``text``.

    Raises:
        AnswerMalformed: It is none.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise AnswerMalformed("an event of the engine's stream is no JSON object") from exc


def parse_objects(text: bytes | msgspec.Raw) -> list[Fields]:
    """The same for a list of objects."""
    try:
        return _list_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise AnswerMalformed("a list in an event of the engine's stream is not one of objects") from exc


def parse_index(raw: bytes | msgspec.Raw, count: int) -> int:
    """A position below ``count``.

    Raises:
        AnswerMalformed: It is anything else.
    """
    text = bytes(raw)
    if not text.isdigit() or len(text) > 9 or int(text) >= count:
        raise AnswerMalformed("an event of the engine's stream has an index that was not asked for")
    return int(text)


def render(members: Iterable[tuple[str, bytes | msgspec.Raw]]) -> bytes:
    """A JSON object of raw values."""
    return b"{%b}" % b",".join(b"%b:%b" % (orjson.dumps(name), value) for name, value in members)


def template(text: str) -> Template:
    """A template from names with their defaults: ``name`` is null, ``name=...`` that JSON, ``name?`` left out."""
    parts = (name.partition("=") for name in text.split())
    return tuple(
        (name.removesuffix("?"), None if name.endswith("?") else default.encode() or NULL) for name, _, default in parts
    )


def render_ordered(values: Mapping[str, bytes], order: Template) -> bytes:
    """A JSON object in a template's order; what the template does not know comes last."""
    known = dict(order)
    members = [(name, values.get(name, default)) for name, default in order]
    return render(
        [(name, value) for name, value in members if value is not None]
        + [(name, value) for name, value in values.items() if name not in known]
    )


class Value(Protocol):
    """One JSON value that comes in pieces; ``null`` never replaces what was there before."""

    def add(self, piece: bytes) -> int:
        """Take one piece; by how many bytes the value grew."""

    def json(self) -> bytes:
        """The value so far."""


class Joined:
    """Strings are concatenated and lists extended; of anything else the last wins.

    Args:
        kinds: First bytes of what is joined.
    """

    __slots__ = ("_inner", "_kind", "_kinds")

    def __init__(self, kinds: bytes = b'"[') -> None:
        self._kinds = kinds
        self._kind = b""
        self._inner = bytearray()

    def add(self, piece: bytes) -> int:
        """Take one piece; see ``Value``."""
        kind = piece[:1]
        before = len(self._inner)
        if kind == b"n":
            return 0
        if kind not in self._kinds:
            self._kind, self._inner = b"", bytearray(piece)
            return len(self._inner) - before
        inner = piece[1:-1] if kind == b'"' else piece[1:-1].strip()
        if kind != self._kind:
            self._kind, self._inner = kind, bytearray(inner)
        else:
            if kind == b"[" and self._inner and inner:
                self._inner += b","
            self._inner += inner
        return len(self._inner) - before

    def json(self) -> bytes:
        """The value so far; see ``Value``."""
        if self._kind == b'"':
            return b"".join((b'"', self._inner, b'"'))
        if self._kind == b"[":
            return b"".join((b"[", self._inner, b"]"))
        return bytes(self._inner) or NULL


class Latest:
    """The last value wins, or the first.

    Args:
        keeps_first: A value that is there is not replaced.
    """

    __slots__ = ("_keeps_first", "_value")

    def __init__(self, *, keeps_first: bool = False) -> None:
        self._keeps_first = keeps_first
        self._value = b""

    def add(self, piece: bytes) -> int:
        """Take one piece; see ``Value``."""
        if piece == NULL or (self._keeps_first and self._value):
            return 0
        before = len(self._value)
        self._value = piece
        return len(piece) - before

    def json(self) -> bytes:
        """The value so far; see ``Value``."""
        return self._value or NULL


class Members:
    """An object whose members grow each in its own way.

    Args:
        make: A new value for a member's name.

    Attributes:
        values: Members by name, in the order of their first coming.
    """

    __slots__ = ("_make", "values")

    def __init__(self, make: Callable[[str], Value]) -> None:
        self._make = make
        self.values: dict[str, Value] = {}

    def add(self, piece: bytes) -> int:
        """Take one piece; see ``Value``."""
        return 0 if piece == NULL else self.update(parse_object(piece))

    def update(self, fields: Fields) -> int:
        """Take one piece that has been parsed."""
        growth = 0
        for name, raw in fields.items():
            value = self.values.get(name)
            if value is None:
                value = self.values[name] = self._make(name)
                growth += len(name)
            growth += value.add(bytes(raw))
        return growth

    def texts(self) -> dict[str, bytes]:
        """The members' JSON."""
        return {name: value.json() for name, value in self.values.items()}

    def json(self) -> bytes:
        """The value so far; see ``Value``."""
        return render(self.texts().items()) if self.values else NULL


class EventFold:
    """The part of a fold that all dialects share.

    Args:
        count: Items of the answer: prompts times samples.
        limit_bytes: Bound of what is held, which is about the size of the answer.
    """

    def __init__(self, count: int, limit_bytes: int) -> None:
        self._count = count
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._is_terminated = False
        self._refusal: EngineRefused | None = None

    def feed(self, block: bytes) -> None:
        """Take a block of whole events; see ``gateway.fold.Fold``."""
        for data in payloads(block):
            if self._is_terminated or self._refusal is not None:
                return
            if data == DONE_DATA:
                self._is_terminated = True
            else:
                self._take(data)

    def result(self) -> bytes | EngineRefused:
        """The answer; see ``gateway.fold.Fold``."""
        refusal = self._refusal or self._refused_late()
        if refusal is not None:
            return refusal
        if not self._is_terminated or not self._is_whole():
            raise FoldIncomplete(is_terminated=self._is_terminated)
        return self._answer()

    def _hold(self, growth: int) -> None:
        self._held_bytes += growth
        if self._held_bytes > self._limit_bytes:
            raise AnswerTooLarge(self._limit_bytes)

    def _refuse(self, data: bytes) -> None:
        """Remember the error that an event holds."""
        self._refusal = refusal_in(data) or EngineRefused(engine_failure(500, ""))

    def _refused_late(self) -> EngineRefused | None:
        """An error that was left to be found at the end."""
        return None

    def _take(self, data: bytes) -> None:
        """Take one event's payload."""
        raise NotImplementedError

    def _is_whole(self) -> bool:
        """Whether every item has come."""
        raise NotImplementedError

    def _answer(self) -> bytes:
        """The unary body."""
        raise NotImplementedError

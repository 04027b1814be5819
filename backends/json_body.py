"""A JSON object whose payload stays the client's own bytes.

The body is parsed once, its top-level values kept as raw slices. Fields can be added or replaced without touching
anything else: number spelling, key order and nested white space survive. Adding splices into the original bytes;
replacing writes the object again from its slices, each of which is copied as it is.
"""

import functools
import json
import re
from collections.abc import Collection, Mapping

import msgspec

from backends.plain_ids import find_plain_ids

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
# An escaped lower-case letter or underscore, which nobody needs but to spell a known key in another way.
_ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")
# From here on, searching a body costs more than writing it again, and copying a field more than remembering it.
_LARGE_BYTES = 16 * 1024
# How encoders separate: none of them adds a space in some places only.
_SEPARATORS = ((b":", b","), (b": ", b", "))


class JsonBodyError(ValueError):
    """The body is not a JSON object, or repeats a key that must be unique.

    Attributes:
        key: The repeated key, ``None`` for any other fault.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class JsonBody:
    """One JSON object: the original bytes, and its top-level fields as raw JSON.

    Attributes:
        raw: The original bytes.
        fields: Top-level values by name, in order. Of a repeated key the last one, as the engines' parsers take it.
        id_counts: Number of ids by name, for long fields that are nothing but a list of ids of up to nine digits.
    """

    __slots__ = ("_texts", "fields", "id_counts", "raw")

    def __init__(self, raw: bytes, fields: dict[str, msgspec.Raw]) -> None:
        self.raw = raw
        self.fields = fields
        self.id_counts: dict[str, int] = {}
        self._texts: dict[str, bytes] = {}

    @classmethod
    def parse(cls, raw: bytes, unique: frozenset[str] = frozenset()) -> "JsonBody":
        """Parse ``raw``.

        Args:
            raw: The whole body.
            unique: Keys that may not occur twice at the top level.

        Raises:
            JsonBodyError: Not valid JSON, not an object, nested too deeply, or a key of ``unique`` is repeated.
        """
        body = cls._parse_beside_ids(raw, unique) if len(raw) >= _LARGE_BYTES else None
        return cls._parse(raw, unique) if body is None else body

    @classmethod
    def _parse_beside_ids(cls, raw: bytes, unique: frozenset[str]) -> "JsonBody | None":
        """Parse ``raw`` with an empty list in the place of its list of ids; ``None`` if there is any doubt.

        One list is as good as another to a JSON parser, so what is valid with the one is valid with the other.
        """
        ids = find_plain_ids(raw)
        if ids is None:
            return None
        rest = raw[: ids.begin] + b"[]" + raw[ids.end :]
        if rest.count(b'"%b"' % ids.key.encode()) != 1 or _has_escaped_letters(rest):
            return None  # the key of the list may not be the one at the top level
        try:
            body = cls._parse(rest, unique)
        except JsonBodyError:
            return None  # and is told with positions in the whole
        if bytes(body.fields.get(ids.key, b"")) != b"[]":
            return None
        body.raw = raw
        body.fields[ids.key] = msgspec.Raw(memoryview(raw)[ids.begin : ids.end])
        body.id_counts[ids.key] = ids.length
        return body

    @classmethod
    def _parse(cls, raw: bytes, unique: frozenset[str]) -> "JsonBody":
        try:
            fields = _decoder.decode(raw)
        except msgspec.ValidationError as exc:
            raise JsonBodyError("the body must be a JSON object") from exc
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise JsonBodyError(f"the body is not valid JSON: {exc}" if raw.strip() else "the body is empty") from exc
        except RecursionError as exc:
            raise JsonBodyError("the body is nested too deeply") from exc
        body = cls(raw, fields)
        if _is_as_long_as_its_fields(raw, fields):
            return body
        suspects: Collection[str] = unique.intersection(fields)
        if len(raw) >= _LARGE_BYTES and suspects and _equals_its_fields(raw, fields):
            return body
        if suspects and not _has_escaped_letters(raw):
            suspects = [key for key in suspects if _is_repeated(_quoted(key), raw)]
        if suspects:
            body._refuse_repeated(suspects)
        return body

    def _refuse_repeated(self, keys: Collection[str]) -> None:
        """Look exactly, since a key's text also occurs elsewhere in the body."""
        top: list[tuple[str, object]] = []

        def remember(pairs: list[tuple[str, object]]) -> None:
            top[:] = pairs  # objects end inside out, so the last call is for the outermost

        try:
            json.loads(self.raw, object_pairs_hook=remember, parse_int=str, parse_float=str)
        except RecursionError as exc:
            raise JsonBodyError("the body is nested too deeply") from exc
        except ValueError as exc:  # strings that are no UTF-8, which the first parse skips unread
            raise JsonBodyError("the body is not valid JSON: invalid UTF-8") from exc
        names = [name for name, _ in top]
        for key in sorted(keys):
            if names.count(key) > 1:
                raise JsonBodyError(f"the field {key!r} is given more than once", key)

    def text(self, key: str) -> bytes:
        """The JSON text of a field, ``b""`` if it is absent or null."""
        value = self.fields.get(key)
        if value is None:
            return b""
        text = self._texts.get(key)
        if text is None:
            text = bytes(value)
            if text == b"null":
                text = b""
            self._texts[key] = text
        return text

    def with_fields(self, changes: Mapping[str, bytes]) -> list[bytes | memoryview]:
        """The body's bytes, in pieces, with ``changes`` applied.

        Args:
            changes: JSON text by field name; new fields go to the end.
        """
        if not changes:
            return [self.raw]
        if self.fields.keys().isdisjoint(changes):
            added = b",".join([b'"%b":%b' % (key.encode(), value) for key, value in changes.items()])
            start = memoryview(self.raw)[: self.raw.rindex(b"}")]
            return [start, b",%b}" % added if self.fields else b"%b}" % added]
        pieces: list[bytes | memoryview] = []
        separator = b"{"
        merged: dict[str, msgspec.Raw | bytes] = {**self.fields, **changes}
        for key, value in merged.items():
            pieces += [separator, json.dumps(key, ensure_ascii=False).encode(), b":", memoryview(value)]
            separator = b","
        return [*pieces, b"}"]


@functools.lru_cache(maxsize=256)
def _quoted(key: str) -> bytes:
    """A key as it stands in a body; asked for keys of the caller's, so that there are few."""
    return b'"%b"' % key.encode()


def _is_repeated(quoted: bytes, raw: bytes) -> bool:
    return raw.find(quoted, raw.find(quoted) + 1) >= 0


def _is_as_long_as_its_fields(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether there is no room in ``raw`` for another field, nor for a space or an escape; so it is without spaces.

    Characters beyond ASCII make a key look shorter than it is, which is never mistaken for room that there is not.
    """
    punctuation = 4 * len(fields) + 1
    return sum(map(len, fields)) + sum(map(len, fields.values())) + punctuation == len(raw)


def _equals_its_fields(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether the fields written out again are ``raw``: then there was no other one, and no key in another spelling."""
    for colon, comma in _SEPARATORS:
        pieces: list[bytes | msgspec.Raw] = []
        separator = b'{"'
        for key, value in fields.items():
            pieces += [separator, key.encode(), b'"', colon, value]
            separator = comma + b'"'
        if b"".join([*pieces, b"}"]) == raw:
            return True
    return False


def _has_escaped_letters(raw: bytes) -> bool:
    # A single byte is found an order of magnitude sooner than four.
    return raw.find(b"\\") >= 0 and b"\\u00" in raw and _ESCAPED_LETTER.search(raw) is not None

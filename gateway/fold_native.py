"""Folding SGLang's native stream into the unary ``/generate`` answer. Pure.

A cumulative stream repeats everything in every event, so the last event of each item is its answer, byte for byte.
An incremental one is put together: ``text``, ``output_ids`` and the output-side lists of ``meta_info`` are deltas, all
else stands whole in the last event.

One event breaks both rules. A request that is aborted while it waits in the queue, perhaps because it was retracted
after some output, ends with the message ``Abort in waiting queue``, the whole text, and the last id alone, in either
mode (0.5.23); what was there before is the answer, and only ``meta_info`` is new.

Known differences to the engine's own unary answer: ``response_sent_to_client_ts`` is the time of the first event and
stands before ``request_finished_ts``. In incremental mode, lists that a model adds under names of its own
(``customized_info``) are deltas which cannot be told from whole lists, so only the last piece is kept. Output that the
engine had not sent when it made the queue's abort event is lost (``completion_tokens`` tells).
"""

import re

from backends.errors import AnswerMalformed
from gateway.engine_errors import refusal_in
from gateway.errors import EngineRefused
from gateway.fold_values import EventFold, Fields, Joined, parse_index, parse_object, render

# ``_INCREMENTAL_STREAMING_META_INFO_KEYS`` of the engine, and the other spelling of the masks' probabilities.
DELTA_LISTS = frozenset(
    {
        "output_token_logprobs",
        "output_top_logprobs",
        "output_token_ids_logprobs",
        "output_token_sampling_mask",
        "output_token_sampling_logprobs",
        "output_token_sampling_mask_logprobs",
    }
)
_DELTAS = frozenset({"text", "output_ids"})
# Quotes inside a generated text are escaped, so this stands in no text.
_QUEUE_ABORT = b'"message":"Abort in waiting queue"'
_INDEX_AT_END = re.compile(rb',\s*"index":\s*(\d{1,9})\s*\}\s*\Z')
_TAIL_BYTES = 48
_ERROR = b'{"error"'


def _answer_of(items: list[bytes], *, is_list: bool) -> bytes:
    return b"[%b]" % b",".join(items) if is_list else items[0]


class CumulativeFold(EventFold):
    """Every event holds everything so far: keep the last of each item, and for a while the one before.

    Args:
        count: Items of the answer: prompts times samples.
        limit_bytes: Bound of the items' last events together.
        is_list: The unary answer is a list, perhaps of one.
    """

    def __init__(self, count: int, limit_bytes: int, *, is_list: bool) -> None:
        super().__init__(count, limit_bytes)
        self._is_list = is_list
        self._last: dict[int, bytes] = {}
        # The one before, should the last be an abort in the queue. Looking for that in every event costs more.
        self._before: dict[int, bytes] = {}

    def _take(self, data: bytes) -> None:
        if data.startswith(_ERROR):
            self._refuse(data)
            return
        index = self._index_of(data) if self._count > 1 else 0
        if index is None:
            return
        last = self._last.get(index, b"")
        self._hold(len(data) - len(last))
        self._before[index], self._last[index] = last, data

    def _index_of(self, data: bytes) -> int | None:
        """The event's item; ``None`` for an error, which belongs to none."""
        match = _INDEX_AT_END.search(data[-_TAIL_BYTES:])
        if match is not None:
            return parse_index(match[1], self._count)
        fields = parse_object(data)
        if "error" in fields:
            self._refuse(data)
            return None
        if "index" not in fields:
            raise AnswerMalformed("an event of the engine's stream does not say to which item it belongs")
        return parse_index(fields["index"], self._count)

    def _refused_late(self) -> EngineRefused | None:
        found = (refusal_in(data) for data in self._last.values())
        return next((refusal for refusal in found if refusal is not None), None)

    def _is_whole(self) -> bool:
        return len(self._last) == self._count

    def _answer(self) -> bytes:
        items = [self._before_abort(index) for index in range(self._count)]
        return _answer_of([_without_index(item) for item in items], is_list=self._is_list)

    def _before_abort(self, index: int) -> bytes:
        """The item's last event, with the output that an abort in the queue leaves out."""
        data, before = self._last[index], self._before[index]
        if not before or data.find(_QUEUE_ABORT) < 0:
            return data
        meta = parse_object(data).get("meta_info", b"null")
        return render((name, meta if name == "meta_info" else raw) for name, raw in parse_object(before).items())


def _without_index(data: bytes) -> bytes:
    """An item as it stands in a unary answer: its own bytes wherever ``index`` stands last, as it does."""
    fields = parse_object(data)
    if "index" not in fields:
        return data
    match = _INDEX_AT_END.search(data, max(len(data) - _TAIL_BYTES, 0))
    if match is not None:
        return data[: match.start()] + b"}"
    del fields["index"]
    return render(fields.items())


class _Item:
    """One item of an incremental stream."""

    __slots__ = ("_fields", "_grown", "_last_bytes", "_meta")

    def __init__(self) -> None:
        self._fields: Fields = {}
        self._meta: Fields = {}
        self._grown: dict[str, Joined] = {}
        self._last_bytes = 0

    def take(self, fields: Fields, meta: Fields, size: int, *, adds_nothing: bool) -> int:
        """Take one event; by how many bytes the item grew."""
        growth = size - self._last_bytes
        self._last_bytes = size
        # Slices of the event, which is kept whole by them: the last one, and any that had a field of its own.
        self._fields.update(fields)
        self._meta = meta
        for part, names in ((fields, _DELTAS), (meta, DELTA_LISTS)):
            for name in part.keys() & names:
                piece = bytes(part[name])
                if adds_nothing:
                    piece = piece[:1] + piece[-1:]
                growth += self._grown.setdefault(name, Joined()).add(piece)
        return growth

    def json(self) -> bytes:
        """The item as it stands in a unary answer."""
        grown = {name: value.json() for name, value in self._grown.items()}
        lists = {name: text for name, text in sorted(grown.items()) if name in DELTA_LISTS}
        meta = render({**self._meta, **lists}.items())
        texts = {name: meta if name == "meta_info" else grown.get(name, raw) for name, raw in self._fields.items()}
        return render(texts.items())


class IncrementalFold(EventFold):
    """Every event holds what is new: join the pieces, each event parsed once.

    Args:
        count: Items of the answer: prompts times samples.
        limit_bytes: Bound of the joined pieces and the last events together.
        is_list: The unary answer is a list, perhaps of one.
    """

    def __init__(self, count: int, limit_bytes: int, *, is_list: bool) -> None:
        super().__init__(count, limit_bytes)
        self._is_list = is_list
        self._items: dict[int, _Item] = {}

    def _take(self, data: bytes) -> None:
        fields = parse_object(data)
        if "error" in fields:
            self._refuse(data)
            return
        index = fields.pop("index", None)
        if index is None and self._count > 1:
            raise AnswerMalformed("an event of the engine's stream does not say to which item it belongs")
        item = self._items.setdefault(0 if index is None else parse_index(index, self._count), _Item())
        meta = parse_object(fields["meta_info"]) if "meta_info" in fields else {}
        finish = bytes(meta.get("finish_reason", b""))
        if b'"status_code"' in finish:
            self._refusal = refusal_in(data)
        self._hold(item.take(fields, meta, len(data), adds_nothing=_QUEUE_ABORT in finish))

    def _is_whole(self) -> bool:
        return len(self._items) == self._count

    def _answer(self) -> bytes:
        return _answer_of([self._items[index].json() for index in range(self._count)], is_list=self._is_list)

"""Streams of vLLM's token route as SGLang's native stream. Pure.

A request's legs stream at the same time into one stream of events, of which each tells its position if there are
several. What vLLM sends is new each time; SGLang's events hold everything so far, or what is new, as configured.

The last event of an item waits for the end of its leg, which follows at once unless the leg has other samples: only
there vLLM tells how many tokens were cached. ``cached_tokens`` is 0 until then.
"""

from collections.abc import Sequence

import msgspec
import orjson

from backends.sse import DONE_DATA, DONE_EVENT, data_of, events
from backends.vllm.native_answer import Usage, counts_of_prompt, entries, item, logprob_fields
from backends.vllm.native_choice import Choice, Rows, add_output, finish, malformed, text_inner, versions
from backends.vllm.native_request import NativePlan
from backends.vllm.native_wanted import Wanted


class _Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_event = msgspec.json.Decoder(_Event)


class NativeStream:
    """The stream for one client.

    Args:
        plan: What ``translate`` made of the request.
        public_ids: One for each item.
        is_incremental: Events hold what is new.
        weight_version: The worker's, told until an item's last event tells its own.
    """

    def __init__(
        self, plan: NativePlan, public_ids: Sequence[str], *, is_incremental: bool, weight_version: str = "default"
    ) -> None:
        self._legs = [
            _Leg(
                [
                    _Item(
                        leg.wanted,
                        public_ids[index],
                        orjson.dumps(weight_version),
                        index=index if plan.is_list else None,
                        is_incremental=is_incremental,
                    )
                    for index in range(leg.first, leg.first + leg.samples)
                ]
            )
            for leg in plan.legs
        ]

    @property
    def is_ended(self) -> bool:
        """``[DONE]`` has been told."""
        return all(leg.is_ended for leg in self._legs)

    def has_ended(self, leg: int) -> bool:
        """Whether a leg has told its end."""
        return self._legs[leg].is_ended

    def feed(self, leg: int, block: bytes) -> bytes:
        """Take whole events of a leg; the events for the client, which may be none.

        An error event goes through as it is, and nothing of its leg comes after it. A leg that ends before an item
        of it has, without an error, was aborted, which vLLM says on this route and not on others.

        Args:
            leg: Position of the leg in the plan.
            block: Whole events.

        Raises:
            AnswerMalformed: An event is not of the engine's shape.
        """
        was_ended = self.is_ended
        told = [event for one in events(block) for event in self._legs[leg].take(data_of(one))]
        if self.is_ended and not was_ended:
            told.append(DONE_EVENT)
        return b"".join(told)


class _Leg:
    """One of the engine's streams."""

    def __init__(self, items: list["_Item"]) -> None:
        self._items = items
        self._cached = 0
        self._has_failed = False
        self.is_ended = False

    def take(self, data: bytes) -> list[bytes]:
        """Take one event's payload; events for the client."""
        if not data or self.is_ended:
            return []
        if data == DONE_DATA:
            self.is_ended = True
            return [] if self._has_failed else [one.last(self._cached) for one in self._items]
        if self._has_failed:
            return []
        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise malformed("has an event of another shape") from exc
        if bytes(event.error) != b"null":
            self._has_failed = True
            return [b"data: %b\n\n" % data]
        if event.usage is not None:
            self._cached = event.usage.cached_tokens
        return [told for choice in event.choices if (told := self._of(choice).take(choice))]

    def _of(self, choice: Choice) -> "_Item":
        if not 0 <= choice.index < len(self._items):
            raise malformed("has an event of a choice that was not asked for")
        return self._items[choice.index]


class _Item:
    """One item of the answer."""

    def __init__(
        self, wanted: Wanted, public_id: str, version: bytes, *, index: int | None, is_incremental: bool
    ) -> None:
        self._wanted = wanted
        self._public_id = orjson.dumps(public_id)
        self._version = version
        self._index = index
        self._is_incremental = is_incremental
        self._text = b""
        self._ids: list[int] = []
        self._rows = Rows()
        self._produced = 0
        self._last_token: int | None = None
        self._ending: Choice | None = None

    def take(self, choice: Choice) -> bytes:
        """Take a choice; the event for it, empty for the last, which has to wait."""
        if self._ending is not None:
            raise malformed("goes on after the end of a choice")
        if self._wanted.has_output:
            self._grow(choice)
        if choice.finish_reason is not None:
            self._ending = choice
            return b""
        return self._event(choice, 0) if self._wanted.has_output else b""

    def last(self, cached: int) -> bytes:
        """The last event."""
        return self._event(self._ending or Choice(0, finish_reason="abort"), cached)

    def _grow(self, choice: Choice) -> None:
        tokens = choice.token_ids or []
        self._text += text_inner(choice)
        self._ids += tokens
        self._produced += len(tokens)
        self._last_token = tokens[-1] if tokens else self._last_token
        if self._wanted.has_logprobs:
            for token, entry in entries(choice):
                add_output(self._rows, self._wanted, token, entry)

    def _event(self, choice: Choice, cached: int) -> bytes:
        wanted = self._wanted
        meta = {"id": self._public_id, "finish_reason": finish(choice, wanted, self._produced, self._last_token)}
        meta |= counts_of_prompt(wanted)
        meta["weight_version"], spans = versions(choice, wanted, self._version)
        meta |= logprob_fields(wanted, Rows(), self._rows, self._produced)
        meta |= {"completion_tokens": b"%d" % self._produced, "cached_tokens": b"%d" % cached}
        if spans:
            meta["weight_versions"] = spans
        told = item(wanted, self._text, orjson.dumps(self._ids), meta)
        if self._index is not None:
            told = b'%b,"index":%d}' % (told[:-1], self._index)
        if self._is_incremental:
            self._text, self._ids, self._rows = b"", [], Rows()
        return b"data: %b\n\n" % told

"""Server-sent events as bytes: cut a stream into whole events, and look inside one.

Nothing is decoded on the way through: an event is forwarded as the bytes that the engine sent, invalid UTF-8
included. Lines may end with LF or CRLF, which is what HTTP engines send.
"""

from collections.abc import Iterator

from backends.errors import AnswerTooLarge

DONE_EVENT = b"data: [DONE]\n\n"
DONE_DATA = b"[DONE]"
# The longest event separator is CRLF CRLF, so one that is cut in two has at most this much on the left.
_OVERLAP_BYTES = 3


def _end_of_last_event(data: bytes) -> int:
    """Position behind the last blank line in ``data``, 0 if there is none."""
    lf = data.rfind(b"\n\n")
    crlf = data.rfind(b"\n\r\n", max(lf, 0))
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


class EventCutter:
    """Turns reads of any size into blocks of whole events.

    Args:
        max_event_bytes: Bound of one event; a longer one raises.
    """

    __slots__ = ("_held", "_held_bytes", "_max_event_bytes", "_tail")

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._tail = b""

    @property
    def held_bytes(self) -> int:
        """Bytes of the unfinished event."""
        return self._held_bytes

    def feed(self, data: bytes) -> bytes:
        """Take one read; return all events that are complete now, ``b""`` if none is.

        Raises:
            AnswerTooLarge: An event passes the bound.
        """
        end = len(data)
        if not data.endswith(b"\n\n"):
            end = _end_of_last_event(self._tail + data if self._tail else data) - len(self._tail)
        if end <= 0:
            self._hold(data)
            return b""
        whole = data if end == len(data) else data[:end]
        if self._held:
            whole = b"".join([*self._held, whole])
            self._held.clear()
            self._held_bytes = 0
            self._tail = b""
        if len(whole) > self._max_event_bytes and max(map(len, events(whole))) > self._max_event_bytes:
            raise AnswerTooLarge(self._max_event_bytes)
        if end < len(data):
            self._hold(data[end:])
        return whole

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        self._tail = (self._tail + data)[-_OVERLAP_BYTES:]
        if self._held_bytes > self._max_event_bytes:
            raise AnswerTooLarge(self._max_event_bytes)


def events(block: bytes) -> Iterator[bytes]:
    """The events of a block, each with its blank line."""
    start = 0
    while start < len(block):
        lf = block.find(b"\n\n", start)
        crlf = block.find(b"\n\r\n", start, lf + 2 if lf >= 0 else len(block))
        end = crlf + 3 if crlf >= 0 else lf + 2 if lf >= 0 else len(block)
        yield block[start:end]
        start = end


def data_of(event: bytes) -> bytes:
    """The payload of one event: its data lines joined by LF; ``b""`` for comments and empty events."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and not event.endswith(b"\r\n\n"):
        return event[6:-2]  # the one shape that engines send
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            value = line[5:].removesuffix(b"\r")
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines)


def name_of(event: bytes) -> bytes:
    """The event's ``event:`` field, ``b""`` if it has none."""
    if event.find(b"event:") < 0:
        return b""
    for line in event.split(b"\n"):
        if line.startswith(b"event:"):
            return line[6:].strip()
    return b""

"""What the engine saw: requests, aborts and disconnects, in order of arrival."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One HTTP request and what became of it.

    Times are seconds of the monotonic clock, ``None`` until they happen. ``ended`` is ``None``
    while the request is open, then ``complete``, ``client_closed``, ``fault``, ``restart`` or ``died``.
    ``connection_state`` is ``open``, ``closed`` (by either side) or ``reset`` (by the engine). ``faults`` are
    those that have struck it, but for the points ``connect`` and ``transfer``.
    """

    number: int
    connection: int
    method: str
    path: str
    query: str
    headers: list[tuple[str, str]]
    body_length: int
    received_s: float
    body: bytes | None = None
    body_digest: str | None = None
    rids: list[str] = field(default_factory=list)
    model: str | None = None
    stream: bool = False
    dp_rank: int | None = None
    status: int | None = None
    first_byte_s: float | None = None
    finished_s: float | None = None
    events: int = 0
    written_bytes: int = 0
    tokens: int = 0
    connection_state: str = "open"
    ended: str | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def body_sha256(self) -> str:
        """Digest of the body as received."""
        return self.body_digest or hashlib.sha256(self.body or b"").hexdigest()

    @staticmethod
    def digest_of(body: bytes) -> str:
        """Return the digest that the log shows for ``body``."""
        return hashlib.sha256(body).hexdigest()

    def header(self, name: str) -> str | None:
        """Return the first header called ``name``, in any case."""
        lowered = name.lower()
        return next((value for key, value in self.headers if key.lower() == lowered), None)

    def as_json(self) -> dict[str, Any]:
        """Return the entry as ``GET /_log`` shows it."""
        skipped = ("body", "body_digest")
        shown: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name not in skipped}
        shown["body_sha256"] = self.body_sha256
        return shown


@dataclass(frozen=True, slots=True)
class AbortEntry:
    """One abort and what it reached.

    ``source`` is ``request`` (the abort route), ``disconnect``, ``late`` (the repetition after a
    stream's end), ``pause`` or ``fault``. ``is_accepted`` tells whether the front end passed it on;
    ``hit`` lists the sequences that it ended or marked.
    """

    at_s: float
    source: str
    rid: str
    abort_all: bool
    is_accepted: bool
    hit: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the entry as ``GET /_log`` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class DisconnectEntry:
    """A client that left before its answer was complete."""

    at_s: float
    connection: int
    request: int
    path: str
    rids: tuple[str, ...]
    stream: bool

    def as_json(self) -> dict[str, Any]:
        """Return the entry as ``GET /_log`` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class KvBatchEntry:
    """One batch of KV events; ``is_sent`` is false if a fault, named by ``fault``, kept it from subscribers."""

    at_s: float
    dp_rank: int
    sequence: int
    events: int
    is_sent: bool
    fault: str | None

    def as_json(self) -> dict[str, Any]:
        """Return the entry as ``GET /_log`` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class TransferEntry:
    """One thing that happened between the engines of a prefill/decode pair.

    ``room`` is SGLang's room or the id that vLLM's prefill gave the request. ``event`` is, on SGLang,
    ``waiting``, ``joined``, ``computed``, ``sent``, ``received`` or ``failed``; on vLLM ``pinned``, ``asked``
    (decode is in touch), ``fetched``, ``expired``, ``late`` (fetched after that, or never known) or ``failed``.
    """

    at_s: float
    event: str
    rid: str
    room: int | str | None
    dp_rank: int | None
    tokens: int

    def as_json(self) -> dict[str, Any]:
        """Return the entry as ``GET /_log`` shows it."""
        return {name: getattr(self, name) for name in self.__slots__}


class EngineLog:
    """The five lists, each bounded to ``limit`` entries; ``on_change`` is called after every change."""

    def __init__(self, limit: int, on_change: Callable[[], None]) -> None:
        self.requests: deque[RequestEntry] = deque(maxlen=limit)
        self.aborts: deque[AbortEntry] = deque(maxlen=limit)
        self.disconnects: deque[DisconnectEntry] = deque(maxlen=limit)
        self.kv_batches: deque[KvBatchEntry] = deque(maxlen=limit)
        self.transfers: deque[TransferEntry] = deque(maxlen=limit)
        self.changed = on_change
        self._numbers = 0

    def next_number(self) -> int:
        """Return the number of the next request, from 1."""
        self._numbers += 1
        return self._numbers

    def add_request(self, entry: RequestEntry) -> None:
        """Append a request."""
        self.requests.append(entry)
        self.changed()

    def add_abort(self, entry: AbortEntry) -> None:
        """Append an abort."""
        self.aborts.append(entry)
        self.changed()

    def add_disconnect(self, entry: DisconnectEntry) -> None:
        """Append a disconnect."""
        self.disconnects.append(entry)
        self.changed()

    def add_kv_batch(self, entry: KvBatchEntry) -> None:
        """Append a batch of KV events."""
        self.kv_batches.append(entry)
        self.changed()

    def add_transfer(self, entry: TransferEntry) -> None:
        """Append something that happened to a transfer."""
        self.transfers.append(entry)
        self.changed()

    def clear(self) -> None:
        """Forget all entries; numbers go on."""
        self.requests.clear()
        self.aborts.clear()
        self.disconnects.clear()
        self.kv_batches.clear()
        self.transfers.clear()
        self.changed()

    def requests_to(self, path: str) -> list[RequestEntry]:
        """Return the requests to ``path``, oldest first."""
        return [entry for entry in self.requests if entry.path == path]

    def find(self, rid: str) -> RequestEntry | None:
        """Return the newest request with ``rid`` among its ids."""
        return next((entry for entry in reversed(self.requests) if rid in entry.rids), None)

    def as_json(self) -> dict[str, Any]:
        """Return everything as ``GET /_log`` shows it."""
        return {
            "requests": [entry.as_json() for entry in self.requests],
            "aborts": [entry.as_json() for entry in self.aborts],
            "disconnects": [entry.as_json() for entry in self.disconnects],
            "kv_batches": [entry.as_json() for entry in self.kv_batches],
            "transfers": [entry.as_json() for entry in self.transfers],
        }

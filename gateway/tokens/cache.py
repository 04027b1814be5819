"""Ids of texts that were encoded lately: samples of one prompt, and turns that are sent again."""

import threading
from collections import OrderedDict

import xxhash

ENTRY_BYTES = 200
MAX_BYTES = 16 * 1024 * 1024


class IdCache:
    """Ids by text, the least recently used thrown out first. Safe to use from several threads.

    Args:
        max_bytes: Bound of what is kept, 0 for nothing.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What the entries take, about."""
        return self._used_bytes

    def get(self, key: bytes) -> bytes | None:
        """The ids of ``key``, if they are still known."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: bytes, ids: bytes) -> None:
        """Keep ``ids``; what takes more than an eighth of the room is not kept."""
        size = len(ids) + ENTRY_BYTES
        if size > self._max_bytes // 8:
            return
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self._used_bytes += size
            while self._used_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self._used_bytes -= len(oldest) + ENTRY_BYTES


def cache_key(model: str, text: str, *, add_special_tokens: bool) -> bytes:
    """Sixteen bytes that name a text and how it is encoded."""
    digest = xxhash.xxh3_128(f"{model}\0{add_special_tokens:d}\0".encode())
    digest.update(text.encode())
    return digest.digest()

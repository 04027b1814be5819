"""The newest batches of one source, for every gateway that is behind. Pure."""

from collections import deque

MAX_BUFFERED_BYTES = 32 << 20
# What a batch takes besides its payload.
BATCH_COST_BYTES = 128


class BatchBuffer:
    """Batches with numbers that follow each other, up to a bound in bytes; the oldest go first.

    Attributes:
        size_bytes: What they take.
    """

    def __init__(self, max_bytes: int = MAX_BUFFERED_BYTES) -> None:
        """Hold nothing yet."""
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._next: int | None = None
        self.size_bytes = 0

    @property
    def next_seq(self) -> int | None:
        """Number that follows the newest batch; ``None`` before the first of all."""
        return self._next

    @property
    def first_seq(self) -> int | None:
        """Number of the oldest batch that is held, or ``next_seq`` if none is."""
        return None if self._next is None else self._next - len(self._payloads)

    def add(self, seq: int, payload: bytes) -> None:
        """Take the next batch; the oldest ones are dropped for it, and the batch itself if it is larger than all room.

        Raises:
            ValueError: ``seq`` does not follow.
        """
        if self._next is not None and seq != self._next:
            raise ValueError(f"batch {seq} where {self._next} was due")
        self._next = seq + 1
        self._payloads.append(payload)
        self.size_bytes += len(payload) + BATCH_COST_BYTES
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= len(self._payloads.popleft()) + BATCH_COST_BYTES

    def get(self, seq: int) -> bytes | None:
        """Give the payload of a batch; ``None`` if it is not held any more, or not yet."""
        first = self.first_seq
        if first is None or not 0 <= seq - first < len(self._payloads):
            return None
        return self._payloads[seq - first]

    def clear(self) -> None:
        """Drop everything; any number may come next."""
        self._payloads.clear()
        self._next = None
        self.size_bytes = 0

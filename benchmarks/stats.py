"""From single measurements to the figures of the table. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Above this share of a measurement spent waiting for a core, somebody else was on it.
DISTURBED_SHARE: Final = 0.10


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed window.

    Attributes:
        items: Requests, events or answers in it.
        wall_s: Its length.
        cpu_s: CPU time of the process under test, ``None`` when there was none in between.
        waited_s: Time in which that process waited for a core.
    """

    items: int
    wall_s: float
    cpu_s: float | None = None
    waited_s: float = 0.0

    @property
    def cpu_us(self) -> float:
        """CPU microseconds per item.

        Raises:
            ValueError: Nothing was measured.
        """
        if self.cpu_s is None or not self.items:
            raise ValueError("no CPU time was measured")
        return self.cpu_s * 1e6 / self.items

    @property
    def per_s(self) -> float:
        """Items per second."""
        return self.items / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def is_disturbed(self) -> bool:
        """The process under test had to wait for its core more than usual."""
        return self.waited_s > DISTURBED_SHARE * self.wall_s


def joined(samples: Sequence[Sample]) -> Sample:
    """Several windows as one."""
    cpu = [sample.cpu_s for sample in samples if sample.cpu_s is not None]
    return Sample(
        sum(sample.items for sample in samples),
        sum(sample.wall_s for sample in samples),
        sum(cpu) if cpu else None,
        sum(sample.waited_s for sample in samples),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gateway beside haproxy, in rounds that took turns.

    Attributes:
        gateway: One sample a round.
        haproxy: One sample a round, as many.
        direct: The engine without anything in between; for the throughput.
    """

    gateway: Sequence[Sample]
    haproxy: Sequence[Sample]
    direct: Sequence[Sample]

    @property
    def ratio(self) -> float:
        """Best against best: what is left when others disturb as little as possible.

        Not where the machine's speed changes: the best of both need not be of the same speed.
        """
        return best_us(self.gateway) / best_us(self.haproxy)

    @property
    def median_ratio(self) -> float:
        """Median of the rounds' own ratios, whose two sides are seconds apart."""
        pairs = zip(self.gateway, self.haproxy, strict=True)
        return statistics.median(ours.cpu_us / theirs.cpu_us for ours, theirs in pairs)

    @property
    def disturbed_rounds(self) -> int:
        """Samples in which a process under test waited for its core."""
        return sum(sample.is_disturbed for sample in (*self.gateway, *self.haproxy))


def best_us(samples: Sequence[Sample]) -> float:
    """Least CPU time per item."""
    return min(sample.cpu_us for sample in samples)


def median_us(samples: Sequence[Sample]) -> float:
    """Median CPU time per item."""
    return statistics.median(sample.cpu_us for sample in samples)


def best_per_s(samples: Sequence[Sample]) -> float:
    """Highest rate, 0 without samples."""
    return max((sample.per_s for sample in samples), default=0.0)


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory over many requests.

    Attributes:
        requests: Requests between the first and the last reading.
        rss_bytes: Readings at equal distances, the first after warming up.
    """

    requests: int
    rss_bytes: Sequence[int]

    @property
    def total_bytes(self) -> int:
        """Growth from the first to the last reading."""
        return self.rss_bytes[-1] - self.rss_bytes[0]

    @property
    def late_bytes(self) -> int:
        """Growth over the second half, in which nothing should grow any more."""
        return self.rss_bytes[-1] - self.rss_bytes[len(self.rss_bytes) // 2]

    @property
    def bytes_per_request(self) -> float:
        """Growth over the second half, per request of it."""
        steps = len(self.rss_bytes) - 1
        late_steps = steps - len(self.rss_bytes) // 2
        return self.late_bytes / (self.requests * late_steps / steps)


def is_flat(growth: Growth, *, allowed_bytes: int = 1024 * 1024) -> bool:
    """Whether the second half grew by no more than what an allocator's arenas do by themselves."""
    return growth.late_bytes <= allowed_bytes

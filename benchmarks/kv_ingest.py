"""``python -m benchmarks.kv_ingest``: what bringing a publisher's messages into the index takes, stage by stage.

Messages hold one store each, of few blocks as decoding makes them and of many as prompts do, in chains of 512 blocks
of 16 tokens. Stages are timed apart from each other, a hundred or so messages at a time, in CPU time of the thread;
each has an index of its own size, so that their caches are no warmer than in the whole. The *whole* is what
``DeliveryQueue`` does with a payload. What is left of it after the stages is the queue's own work, the freeing of what
was decoded, and what the stages take from each other's caches.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.kv_index import PAGE_TOKENS, chains
from kv_events.codec import decode_batch
from kv_events.delivery import DeliveryQueue
from kv_events.index import PrefixIndex
from kv_events.index_types import ApplyReport, chain_hashes
from kv_events.publisher import PublisherSpec
from kv_events.sequence import SourceState
from kv_events.sources import Source
from kv_events.types import BASE, BlockStored

CHAIN_BLOCKS: Final = 512
_FRAME_BLOCKS: Final = (1, 2, 4, 32, 512)
_GROUPS: Final = 50
_STAGES: Final = ("decode", "hash", "index", "whole")
_RANK: Final = ("w", 0)


class _Quiet:
    """Nobody listens."""

    def kv_event(self, worker: str, kind: str) -> None:
        pass

    def kv_dropped(self, reason: str, count: int) -> None:
        raise AssertionError(f"{count} dropped: {reason}")

    def kv_reset(self, worker: str, reason: str) -> None:
        pass

    def kv_state(self, worker: str, dp_rank: int, state: SourceState) -> None:
        pass


class _Stages:
    """The stages beside each other, each over the same messages."""

    def __init__(self) -> None:
        self._chains: Iterator[list[int]] = iter(())
        self._parent: int | None = None
        self._index = PrefixIndex(lambda event, namespace, parent: next(self._chains))
        self._index.add_rank(_RANK)
        spec = PublisherSpec("w", Source(0, "tcp://127.0.0.1:1", block_size=PAGE_TOKENS))
        self._queue = DeliveryQueue(spec, PrefixIndex(), _Quiet())

    def run(self, payloads: list[bytes]) -> list[float]:
        """Give the seconds of CPU that each of ``_STAGES`` takes."""
        events: list[BlockStored] = []
        hashed: list[list[int]] = []
        report = ApplyReport()

        def decode() -> None:
            for payload in payloads:
                decode_batch(payload)

        def hashes() -> None:
            for event in events:
                parent = None if event.parent_hash is None else self._parent
                hashed.append(chain_hashes(event, BASE, parent))
                self._parent = hashed[-1][-1]

        def index() -> None:
            for event in events:
                self._index.store(_RANK, event, report)

        def whole() -> None:
            for payload in payloads:
                self._queue.add(payload)
                while len(self._queue):
                    self._queue.step(0.0)

        took = [_cpu_s(decode)]
        events += [
            event for payload in payloads for event in decode_batch(payload).events if isinstance(event, BlockStored)
        ]
        took.append(_cpu_s(hashes))
        self._chains = iter(hashed)
        took += [_cpu_s(index), _cpu_s(whole)]
        assert report.stored == sum(len(event.block_hashes) for event in events)
        return took


def _cpu_s(call: Callable[[], None]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def measure(rng: random.Random, frame_blocks: int, blocks: int) -> tuple[list[float], float]:
    """Give the median microseconds a message of each of ``_STAGES``, and those of the whole in the best tenth."""
    payloads = chains(rng, blocks // frame_blocks, max(2, CHAIN_BLOCKS // frame_blocks), frame_blocks)
    size = max(1, len(payloads) // _GROUPS)
    stages = _Stages()
    times = [stages.run(payloads[start : start + size]) for start in range(0, len(payloads) - size + 1, size)]
    by_stage = [sorted(took / size * 1e6 for took in column) for column in zip(*times, strict=True)]
    return [column[len(column) // 2] for column in by_stage], by_stage[-1][len(times) // 10]


def main() -> None:
    """Measure, and print a line for each size of message."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=200_000, help="that each index grows to")
    blocks = parser.parse_args().blocks
    print(
        f"{'blocks':>6} {'decode':>8} {'hash':>8} {'index':>8} {'rest':>8} {'whole':>8}   blocks/s: median, best tenth"
    )
    for frame_blocks in _FRAME_BLOCKS:
        # Small messages are dear, and the index need not be large to show it.
        medians, best_us = measure(random.Random(1), frame_blocks, min(blocks, 20_000 * frame_blocks))
        decode, hashes, index, whole = medians
        cells = " ".join(f"{value:8.1f}" for value in (decode, hashes, index, whole - decode - hashes - index, whole))
        print(f"{frame_blocks:6} {cells}   {frame_blocks / whole * 1e6:,.0f}, {frame_blocks / best_us * 1e6:,.0f}")


if __name__ == "__main__":
    main()

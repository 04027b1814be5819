"""``python -m benchmarks.kv_index``: what the prefix index costs, in one process, on this machine.

Four figures, each with its aim: lookups while events arrive, ingest on one core with decoding and hashing, memory by
block, and how long removing a large worker holds the loop. Times are CPU time of the thread, so that what else runs on
the machine counts only by the caches that it takes away.
"""

import argparse
import random
import time
import tracemalloc

import msgspec

from kv_events.codec import decode_batch
from kv_events.index import PrefixIndex, RankId
from kv_events.index_intake import RankIntake
from kv_events.index_sweep import STEP_BLOCKS
from kv_events.index_types import ApplyReport
from kv_events.types import BlockStored, Tier

PAGE_TOKENS = 16
BLOCKS_A_BATCH = 32
LOOKUP_BLOCKS = 512
RANKS = 16
ARRIVING_BLOCKS_PER_S = 100_000


def batch(rng: random.Random, parent: int | None, blocks: int = BLOCKS_A_BATCH) -> tuple[bytes, int]:
    """A message with one store, as SGLang 0.5.23 encodes it; and the name of its last block."""
    names = [rng.randrange(-(2**63), 2**63) for _ in range(blocks)]
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": [rng.randrange(150_000) for _ in range(blocks * PAGE_TOKENS)],
        "block_size": PAGE_TOKENS,
        "lora_id": None,
        "medium": "GPU",
    }
    return msgspec.msgpack.encode([time.time(), [event], 0]), names[-1]


def chains(rng: random.Random, batches: int, batches_a_chain: int = 16, blocks: int = BLOCKS_A_BATCH) -> list[bytes]:
    """Messages that store chains of blocks."""
    made, parent = [], None
    for number in range(batches):
        payload, last = batch(rng, parent if number % batches_a_chain else None, blocks)
        made.append(payload)
        parent = last
    return made


def ingest(index: PrefixIndex, rank: RankId, payloads: list[bytes]) -> float:
    """Decode and apply messages as the subscriber does; returns seconds of CPU."""
    intake, report = RankIntake(index, rank), ApplyReport()
    begin = time.thread_time()
    for payload in payloads:
        for event in decode_batch(payload).events:
            for _ in intake.apply(event, 0.0, report):
                pass
    took_s = time.thread_time() - begin
    assert report.stored == len(payloads) * BLOCKS_A_BATCH
    return took_s


def ingest_rates(rng: random.Random, blocks: int) -> list[list[float]]:
    """Blocks per second of CPU, for each hundred messages, while an index grows to ``blocks``, sorted.

    First of a rank that is alone, then of a second one that has the same blocks.
    """
    payloads = chains(rng, blocks // BLOCKS_A_BATCH)
    index = PrefixIndex()
    rates = []
    for number in (0, 1):
        rank = ("w", number)
        index.add_rank(rank)
        parts = [payloads[start : start + 96] for start in range(0, len(payloads) - 95, 96)]
        rates.append(sorted(len(part) * BLOCKS_A_BATCH / ingest(index, rank, part) for part in parts))
    return rates


def lookups(rng: random.Random, seconds: float) -> list[float]:
    """Times of lookups that come while events do, in seconds, sorted; each may wait for the tick before it."""
    index = PrefixIndex()
    prompt = chains(rng, LOOKUP_BLOCKS // BLOCKS_A_BATCH)
    hashes: list[int] = []
    for number in range(RANKS):
        index.add_rank(("w", number))
        # Every rank holds another share of the prompt.
        ingest(index, ("w", number), prompt[: 1 + number * len(prompt) // RANKS] if number < RANKS - 1 else prompt)
    holder = index.holder_of(("w", RANKS - 1), Tier.DEVICE)
    assert holder is not None
    keys = {name: key for table in holder.names for name, key in table.items()}
    for payload in prompt:
        event = decode_batch(payload).events[0]
        assert isinstance(event, BlockStored)
        hashes += [keys[name] for name in event.block_hashes]
    times: list[float] = []
    per_lookup = ARRIVING_BLOCKS_PER_S // 200 // BLOCKS_A_BATCH + 1
    arriving = chains(rng, int(seconds * 200 * per_lookup))
    for number in range(int(seconds * 200)):
        # 200 lookups a second; in between what has arrived in 5 ms, which is one tick's work.
        ingest(index, ("w", number % RANKS), arriving[number * per_lookup : (number + 1) * per_lookup])
        begin = time.thread_time()
        found = index.overlap(hashes)
        times.append(time.thread_time() - begin)
        assert found.device[("w", RANKS - 1)] == LOOKUP_BLOCKS
    return sorted(times)


def memory(blocks: int) -> tuple[float, float]:
    """Bytes for a distinct block with its first holder, and for each further holder; the worst of several fillings."""
    worst_distinct, worst_pair = 0.0, 0.0
    for share in (0.7, 0.8, 0.9, 1.0):
        rng = random.Random(7)
        count = int(blocks * share)
        sequences = [rng.randrange(2**64) for _ in range(count)]
        index = PrefixIndex(lambda event, namespace, parent, values=sequences: [int(str(value)) for value in values])  # type: ignore[misc]
        used = []
        tracemalloc.start()
        for number in range(3):
            index.add_rank(("w", number))
            event = BlockStored(tuple(rng.randrange(2**64) for _ in range(count)), None, b"", PAGE_TOKENS)
            index.store(("w", number), event, ApplyReport())
            del event
            used.append(tracemalloc.get_traced_memory()[0] / count)
        tracemalloc.stop()
        pair = (used[2] - used[0]) / 2
        worst_pair = max(worst_pair, pair)
        worst_distinct = max(worst_distinct, used[0] - pair)
    return worst_distinct, worst_pair


def longest_removal_s(rng: random.Random, blocks: int) -> tuple[float, float, float]:
    """Longest hold and all of the time that removing a worker takes, and the longest hold of one batch before."""
    index = PrefixIndex()
    index.add_rank(("w", 0))
    hold_s = max(ingest(index, ("w", 0), [payload]) for payload in chains(rng, blocks // BLOCKS_A_BATCH))
    holds = []
    begin = time.thread_time()
    index.remove_rank(("w", 0))
    holds.append(time.thread_time() - begin)
    more = True
    while more:
        begin = time.thread_time()
        more = index.collect(STEP_BLOCKS)
        holds.append(time.thread_time() - begin)
    assert index.distinct_blocks() == 0
    return max(holds), sum(holds), hold_s


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="size of the large index")
    parser.add_argument("--seconds", type=float, default=5.0, help="of arriving events that lookups are timed in")
    options = parser.parse_args()
    rng = random.Random(1)
    for what, rates in zip(("new", "shared"), ingest_rates(rng, options.blocks // 5), strict=True):
        print(
            f"ingest of {what} blocks, decoding and hashing included: median {rates[len(rates) // 2]:,.0f} blocks/s, "
            f"best {rates[-1]:,.0f} (aim 500,000)"
        )
    times = lookups(rng, options.seconds)
    print(
        f"lookup of {LOOKUP_BLOCKS} blocks, {RANKS} ranks, {ARRIVING_BLOCKS_PER_S:,} blocks/s arriving: "
        f"p50 {times[len(times) // 2] * 1e6:.0f} µs, p99 {times[len(times) * 99 // 100] * 1e6:.0f} µs, "
        f"max {times[-1] * 1e6:.0f} µs (aim 1,000 µs)"
    )
    distinct, pair = memory(options.blocks // 5)
    print(f"memory: {distinct:.0f} B for a distinct block (aim 150), {pair:.0f} B for a (rank, block) (aim 120)")
    hold_s, total_s, batch_s = longest_removal_s(rng, options.blocks)
    print(
        f"removing a worker with {options.blocks:,} blocks: longest hold {hold_s * 1e3:.1f} ms (aim 5), "
        f"{total_s * 1e3:.0f} ms in all; longest hold of a batch while it grew {batch_s * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()

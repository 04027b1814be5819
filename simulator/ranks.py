"""Makes the scheduler and cache of each rank out of the engine's options."""

from __future__ import annotations

from simulator.cache import CacheListener, PrefixCache
from simulator.kv_publisher import KvPublisher
from simulator.options import EngineOptions
from simulator.scheduler import Limits, Scheduler


def make_schedulers(options: EngineOptions, publisher: KvPublisher | None) -> list[Scheduler]:
    """Return one scheduler a rank; ``publisher`` hears of their caches."""
    return [_make_scheduler(options, rank, publisher) for rank in range(options.dp_size)]


def _make_scheduler(options: EngineOptions, rank: int, publisher: KvPublisher | None) -> Scheduler:
    ours = None if publisher is None else publisher.ranks[rank]
    journal: CacheListener | None = None if ours is None else ours.journal
    is_vllm = options.engine == "vllm"
    cache = PrefixCache(
        options.num_blocks,
        options.page_size,
        journal,
        keeps_copies=is_vllm,
        stores=is_vllm or options.role != "decode",  # SGLang switches its prefix cache off for decode
    )
    limits = Limits(
        max_running=options.max_running,
        max_queued=options.max_queued,
        chunked_prefill_tokens=options.chunked_prefill_tokens,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        decode_step_s=options.inter_token_ms / 1000,
        stores_while_decoding=is_vllm,
    )
    return Scheduler(rank, cache, limits) if ours is None else Scheduler(rank, cache, limits, ours.flush)

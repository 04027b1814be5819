"""Events by hand: prompts are strings, a block is one letter."""

from collections.abc import Iterable
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from kv_events.hashing import block_hashes, pack_tokens
from kv_events.types import BASE, BlockRemoved, BlockStored, Namespace, Tier

BLOCK_SIZE = 4


@lru_cache(4096)
def tokens(letters: str) -> bytes:
    """Four tokens for each letter."""
    return pack_tokens([ord(letter) for letter in letters for _ in range(BLOCK_SIZE)])


@lru_cache(4096)
def names(prefix: str, engine: str = "") -> tuple[int, ...]:
    """What an engine may call the blocks of a prompt: hashes of the whole prefix, different from engine to engine."""
    return tuple(xxh3_64_intdigest(f"{engine}/{prefix[: n + 1]}".encode()) for n in range(len(prefix)))


def stored(
    prompt: str, after: int = 0, engine: str = "", namespace: Namespace | None = None, tier: Tier = Tier.DEVICE
) -> BlockStored:
    """The blocks of ``prompt`` from block ``after`` on, as a child of the one before."""
    all_names = names(prompt, engine)
    return BlockStored(
        all_names[after:],
        all_names[after - 1] if after else None,
        tokens(prompt[after:]),
        BLOCK_SIZE,
        namespace=namespace,
        tier=tier,
    )


def removed(prompt: str, blocks: Iterable[int], engine: str = "", tier: Tier = Tier.DEVICE) -> BlockRemoved:
    """Blocks of ``prompt`` by their numbers."""
    all_names = names(prompt, engine)
    return BlockRemoved(tuple(all_names[number] for number in blocks), tier)


@lru_cache(4096)
def query(prompt: str, namespace: Namespace = BASE) -> list[int]:
    """What a request with this prompt asks for."""
    return block_hashes(tokens(prompt), BLOCK_SIZE, namespace)

"""What a policy sees and what it answers. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from backends.types import EngineKind
from kv_events.index_types import Overlap
from routers.load import RankLoad


class RankKey(NamedTuple):
    """One KV cache: a data-parallel rank of a worker."""

    worker_id: str
    dp_rank: int


class BlockGroup(NamedTuple):
    """Workers for which a prompt has the same blocks: they make the same tokens of it, and cut them alike.

    Attributes:
        engine: Software; two kinds may render one chat differently.
        block_size: Tokens per block, ``>= 1``.
        is_eagle: Each block covers one token more, see ``kv_events.hashing``.
    """

    engine: EngineKind
    block_size: int
    is_eagle: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that may serve the request.

    Attributes:
        key: Worker and rank.
        load: What is booked there now; policies read it, only bookings change it.
        group: How it cuts prompts into blocks, ``None`` if that is not known.
    """

    key: RankKey
    load: RankLoad
    group: BlockGroup | None = None


class PromptBlocks(msgspec.Struct, frozen=True):
    """A prompt as the workers of one group see it.

    Attributes:
        block_size: Tokens per block, ``>= 1``.
        prompt_tokens: Length of the prompt; of a batch, of all its prompts.
        sequence_hashes: Of its full blocks; of a batch, those of its longest prompt. Empty if they are not known.
        overlap: Leading blocks of ``sequence_hashes`` that ranks hold.

    Raises:
        ValueError: A number is too low.
    """

    block_size: int
    prompt_tokens: int
    sequence_hashes: Sequence[int] = ()
    overlap: Overlap = msgspec.field(default_factory=Overlap)

    def __post_init__(self) -> None:
        """Refuse what cannot be computed with."""
        if self.block_size < 1 or self.prompt_tokens < 0:
            raise ValueError(f"no prompt has {self.prompt_tokens} tokens in blocks of {self.block_size}")

    @property
    def full_blocks(self) -> int:
        """Blocks that the prompt fills."""
        return self.prompt_tokens // self.block_size

    @property
    def capacity_blocks(self) -> int:
        """Blocks that the prompt takes up."""
        return -(-self.prompt_tokens // self.block_size)

    def uncached_tokens(self, overlap_blocks: int) -> int:
        """Tokens that must be computed where so many leading blocks are cached."""
        return max(0, self.prompt_tokens - overlap_blocks * self.block_size)


class RouteRequest(msgspec.Struct, frozen=True):
    """What a policy knows of a request.

    Attributes:
        prompt_tokens: Length of the prompt, 0 if it is not known without tokenizing.
        stickiness_key: Key that keeps a session together, ``None`` if the client gave none.
        prompts: The prompt's blocks by group of workers; empty if they are not known, or not asked for.
    """

    prompt_tokens: int = 0
    stickiness_key: str | None = None
    prompts: Mapping[BlockGroup, PromptBlocks] = msgspec.field(default_factory=dict)


class Placement(msgspec.Struct, frozen=True):
    """A policy's choice.

    Attributes:
        candidate: The rank chosen.
        overlap_blocks: Leading prompt blocks that it holds, ``None`` when the policy does not look.
        prompt: The prompt's blocks as this rank has them, ``None`` when they are not known.
    """

    candidate: Candidate
    overlap_blocks: int | None = None
    prompt: PromptBlocks | None = None

"""The policy ``prefix-approximate``, and prompts that are known as text only."""

import random

import pytest

from backends.types import EngineKind
from routers.assumed import APPROXIMATE_TTL_S, AssumedBlocks
from routers.load import RankLoad
from routers.prefix_approximate import PrefixApproximate, text_blocks
from routers.types import BlockGroup, Candidate, RankKey, RouteRequest

GROUP = BlockGroup(EngineKind.VLLM, 16)


def test_texts_become_blocks_of_their_beginnings() -> None:
    text = random.Random(1).randbytes(1_000)
    blocks = text_blocks(text)
    assert (blocks.block_size, blocks.prompt_tokens, len(blocks.sequence_hashes)) == (64, 250, 3)
    assert len(set(blocks.sequence_hashes)) == 3
    assert blocks.full_blocks == 3
    longer = text_blocks(text + b"and more" * 100).sequence_hashes
    assert longer[:3] == blocks.sequence_hashes
    other = text_blocks(text[:300] + b"!" + text[301:]).sequence_hashes
    assert [one == two for one, two in zip(other, blocks.sequence_hashes, strict=True)] == [True, False, False]
    # The same block elsewhere is another one.
    assert len(set(text_blocks(b"a" * 1024).sequence_hashes)) == 4
    assert text_blocks(b"").sequence_hashes == []


@pytest.mark.parametrize("chunk_bytes", [-4, 0, 3])
def test_chunks_that_are_too_short_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="chunk_bytes is"):
        text_blocks(b"text of some length", chunk_bytes)


def test_q_12_turns_of_a_session_stay_where_the_first_went_until_its_time_is_over() -> None:
    assumed, policy = AssumedBlocks(APPROXIMATE_TTL_S), PrefixApproximate(random.Random(1))
    candidates = [Candidate(RankKey(f"w{index}", 0), RankLoad(), GROUP) for index in range(8)]
    text, now = b"You are a helpful assistant. " * 40, 0.0

    def turn() -> tuple[str, int | None]:
        prompt = text_blocks(text)
        assumed.merge_into(prompt.overlap, prompt.sequence_hashes, now)
        placement = policy.select(RouteRequest(0, None, {GROUP: prompt}), candidates)
        assumed.add(placement.candidate.key, prompt.sequence_hashes, now)
        placement.candidate.load.book(
            requests=1, blocks=prompt.capacity_blocks, prefill_tokens=0, block_hashes=prompt.sequence_hashes
        ).release()
        return placement.candidate.key.worker_id, placement.overlap_blocks

    first, overlap_blocks = turn()
    assert overlap_blocks == 0
    held = len(text) // 256
    for number in range(6):
        now += 100.0
        text += b"%d: What else can you tell me about it? " % number * 10
        assert turn() == (first, held)
        held = len(text) // 256
    now += APPROXIMATE_TTL_S
    assert turn()[1] == 0

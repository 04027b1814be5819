"""Whose cache a batch is, by the rank that it names."""

import json

import pytest

from kv_events.delivery import DeliveryQueue
from kv_events.index import PrefixIndex
from kv_events.publisher import PublisherSpec
from kv_events.sources import Source, announced_by_vllm
from tests.fakes.kv_publisher import payload
from tests.kv_events.blocks import BLOCK_SIZE, query, stored
from tests.kv_events.test_subscriber import Observed


def delivered(source: Source, dp_size: int, named: int | None) -> tuple[dict[tuple[str, int], int], dict[str, int]]:
    """Blocks of each rank, and what was dropped, after a batch of two blocks that names a rank."""
    index, observed = PrefixIndex(), Observed()
    queue = DeliveryQueue(PublisherSpec("w", source, dp_size=dp_size), index, observed)
    queue.add(payload([stored("ab")], 1.0, named))
    while queue:
        queue.step(0.0)
    return dict(index.overlap(query("ab")).device), dict(observed.dropped)


@pytest.mark.parametrize(
    ("first", "named", "blocks", "dropped"),
    [
        pytest.param(0, 1, {("w", 1): 2}, {}, id="all ranks behind one server"),
        pytest.param(4, 5, {("w", 1): 2}, {}, id="the second node of hybrid load balancing"),
        pytest.param(4, None, {("w", 1): 2}, {}, id="no rank named"),
        pytest.param(4, 4, {}, {"other_rank": 1}, id="its neighbour's"),
        pytest.param(4, 1, {}, {"rank_out_of_range": 1}, id="a rank of the first node"),
    ],
)
def test_ranks_are_counted_from_the_workers_first(
    first: int, named: int | None, blocks: dict[tuple[str, int], int], dropped: dict[str, int]
) -> None:
    endpoints = {str(first + rank): {"endpoint": f"tcp://*:{5557 + first + rank}"} for rank in (0, 1)}
    sources = announced_by_vllm(json.dumps(endpoints).encode(), "10.0.0.5", BLOCK_SIZE) or []
    assert [source.endpoint for source in sources] == [f"tcp://10.0.0.5:{5557 + first + rank}" for rank in (0, 1)]
    assert delivered(sources[1], 2, named) == (blocks, dropped)

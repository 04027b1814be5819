"""A relay's process in front of a real engine, publishers and gateways' HTTP, with an event wire that is fake."""

import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import zmq

from kv_events.publisher import SubscriberLimits
from relay import follower, process
from relay.feed import GatewayState
from relay.machine import Limits, Phase
from relay.process import RelayConfig
from relay.threads import Lookup, system_lookup
from tests.conftest import TIME_SCALE
from tests.fakes.kv_publisher import KvPublisher, kv_publisher
from tests.fakes.running import until
from tests.kv_events.blocks import stored
from tests.relay.fakes import ACKNOWLEDGED, FakeServer, RunningRelay, fake_server, leader, leaders, running_relay
from tests.relay.nodes import ADDRESS, info, source

# Quick to ask again, slow to give up.
LIMITS = Limits(phase_s=60 * TIME_SCALE, failure_s=60 * TIME_SCALE, retry_s=0.05, poll_s=0.05)
SOURCES = SubscriberLimits(replay_idle_s=0.5 * TIME_SCALE)


@dataclass
class Node:
    """Engine node 1 of 2 with ranks 2 and 3, and one gateway."""

    engine: FakeServer
    gateway: FakeServer
    publishers: dict[int, KvPublisher]

    def tell(self, **changes: object) -> None:
        """Have the engine describe itself."""
        listed = [
            source(rank, endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
            for rank, publisher in self.publishers.items()
        ]
        self.engine.pages["GET /server_info"] = 200, info(**{"kv_event_sources": listed, **changes})

    def config(self, **changes: object) -> RelayConfig:
        """The relay's configuration, with changes."""
        made = RelayConfig((self.gateway.url,), None, self.engine.url, limits=LIMITS, source_limits=SOURCES)
        return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    """The node, whose leader the gateway knows."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with (
            fake_server() as engine,
            fake_server() as gateway,
            kv_publisher(context) as second,
            kv_publisher(context) as third,
        ):
            made = Node(engine, gateway, {2: second, 3: third})
            made.tell()
            gateway.pages["GET /internal/kv_events"] = leaders(leader("w0", ADDRESS), leader("w9", "10.0.0.9:1"))
            yield made
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def ready_relay(
    node: Node, config: RelayConfig | None = None, lookup: Lookup = system_lookup
) -> AsyncIterator[RunningRelay]:
    """A relay that is ready."""
    async with running_relay(config or node.config(), lookup) as relay:
        await until(lambda: bool(relay.feeds), "the sources are relayed")
        await until(lambda: len(relay.feed.connected) == len(node.publishers), "all sources are connected")
        relay.feed.states = dict.fromkeys(relay.feed.states, ACKNOWLEDGED)
        assert relay.process.not_ready() == ""
        yield relay


def is_in(relay: RunningRelay, phase: Phase) -> bool:
    """Whether the relay has come so far, and no further."""
    return relay.process.phase is phase


async def ends(relay: RunningRelay) -> str:
    """Wait for the relay's end by itself; returns the reason."""
    await until(lambda: relay.reason is not None, "the relay ends")
    assert relay.reason
    return relay.reason


async def test_a1_1_a_follower_relays_its_ranks_as_its_leaders(node: Node) -> None:
    async with ready_relay(node) as relay:
        assert relay.feed.spec.worker_url == "http://w0:30000"
        assert relay.feed.spec.node.ranks == (2, 3)
        assert relay.feed.spec.group is not None
        node.publishers[2].publish(stored("a"), dp_rank=2)
        node.publishers[3].publish(stored("a"), dp_rank=3)
        await until(lambda: len(relay.feed.frames) == 2, "both batches")
        assert {(rank, seq) for rank, seq, _ in relay.feed.frames} == {(2, 0), (3, 0)}
        assert {payload for _, _, payload in relay.feed.frames} == {p.sent[0] for p in node.publishers.values()}
    assert relay.reason == ""
    assert relay.feed.is_closed
    assert not relay.feed.is_running
    assert node.gateway.asked["POST /workers"] == 0


async def test_a1_2_the_rank_of_a_batch_is_that_of_its_source(node: Node) -> None:
    node.publishers = {4: node.publishers[2]}
    node.tell(dp_size=8)
    node.gateway.pages["GET /internal/kv_events"] = leaders(leader("w0", ADDRESS, dp_size=8))
    async with ready_relay(node) as relay:
        node.publishers[4].publish(stored("a"), dp_rank=4)
        await until(lambda: bool(relay.feed.frames), "the batch")
        assert relay.feed.frames[0][0] == 4
        assert relay.feed.spec.node.ranks == (4,)


async def test_a_leader_relays_under_its_own_address(node: Node) -> None:
    node.tell(node_rank=0)
    async with ready_relay(node) as relay:
        assert relay.feed.spec.worker_url == node.engine.url
        assert relay.feed.spec.node.is_leader
        assert node.gateway.asked["GET /internal/kv_events"] == 0
        assert node.gateway.asked["POST /workers"] == 0


async def test_a_leader_registers_its_worker_and_does_so_again(node: Node) -> None:
    node.tell(node_rank=0, disaggregation_mode="prefill", disaggregation_bootstrap_port=8998)
    node.gateway.pages["POST /workers"] = None
    config = node.config(registers=True, worker_url="http://10.0.0.1:30000", engine_key="secret")
    async with ready_relay(node, config) as relay:
        await until(lambda: node.gateway.asked["POST /workers"] > 1, "it tries again")
        node.gateway.pages["POST /workers"] = 202, b"{}"
        asked = node.gateway.asked["POST /workers"]
        await until(lambda: node.gateway.asked["POST /workers"] > asked, "it succeeds")
        relay.feed.states[node.gateway.url] = GatewayState()
        asked = node.gateway.asked["POST /workers"]
        await until(lambda: node.gateway.asked["POST /workers"] > asked, "a lost gateway is told again")
    body = node.gateway.bodies["POST /workers"][-1]
    assert body == (
        b'{"url":"http://10.0.0.1:30000","worker_type":"prefill","engine":"sglang","bootstrap_port":8998,'
        b'"api_key":"secret"}'
    )
    assert node.gateway.headers["authorization"] == "Bearer admin"
    assert node.engine.headers["authorization"] == "Bearer secret"


async def test_a_gateway_that_is_not_there_yet_is_told_of_once_and_so_is_its_coming(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay.relay")
    node.tell(node_rank=0)
    node.gateway.pages["POST /workers"] = None
    async with ready_relay(node, node.config(registers=True, worker_url="http://10.0.0.1:30000")):
        await until(lambda: node.gateway.asked["POST /workers"] > 2, "it tries again and again")
        node.gateway.pages["POST /workers"] = 202, b"{}"
        await until(lambda: "has added the worker" in caplog.text, "it succeeds")
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "the worker" in r.getMessage()]
    (missing_level, missing), (added_level, added) = told
    assert (missing_level, added_level) == ("WARNING", "INFO")
    assert missing.startswith(f"gateway {node.gateway.url} has not added the worker, next try in 0.05 s: /workers")
    assert added == f"gateway {node.gateway.url} has added the worker http://10.0.0.1:30000"


async def test_a_loopback_address_is_no_workers_for_other_machines(node: Node) -> None:
    node.tell(node_rank=0)
    async with running_relay(node.config(gateways=("http://192.0.2.1:8000",))) as relay:
        assert "--worker-url" in await ends(relay)


async def test_a_feed_that_cannot_be_made_ends_it(node: Node) -> None:
    async with running_relay(node.config(), refusal="--key-file: missing") as relay:
        assert await ends(relay) == "--key-file: missing"


async def test_the_older_name_of_the_metadata_serves_too(node: Node) -> None:
    node.engine.pages["GET /get_server_info"] = node.engine.pages.pop("GET /server_info")
    async with ready_relay(node):
        pass


async def test_an_engine_and_gateways_that_come_late_are_waited_for(node: Node) -> None:
    told = node.engine.pages["GET /server_info"]
    known = node.gateway.pages["GET /internal/kv_events"]
    node.engine.pages["GET /server_info"] = None
    node.gateway.pages["GET /internal/kv_events"] = None
    async with running_relay(node.config()) as relay:
        await until(lambda: node.engine.asked["GET /server_info"] > 1, "it asks again")
        assert is_in(relay, Phase.CONNECT)
        node.engine.pages["GET /server_info"] = told
        await until(lambda: node.gateway.asked["GET /internal/kv_events"] > 1, "it asks the gateway again")
        assert is_in(relay, Phase.LEADER)
        for page in (
            leaders(),
            (503, b""),
            (401, b""),
            (200, b"not JSON"),
            leaders(leader("w", "1.1.1.1:1", group=None)),
        ):
            node.gateway.pages["GET /internal/kv_events"] = page
            node.gateway.asked.clear()
            await until(lambda: node.gateway.asked["GET /internal/kv_events"] > 1, "asked again")
            assert is_in(relay, Phase.LEADER)
        node.gateway.pages["GET /internal/kv_events"] = known
        await until(lambda: is_in(relay, Phase.RELAY), "it goes on")


@pytest.mark.parametrize(
    ("page", "names"),
    [
        pytest.param((200, info(kv_event_sources=None)), "null", id="a1_5 null"),
        pytest.param((200, info(kv_event_sources=[])), "no KV events", id="a1_5 empty follower"),
        pytest.param((200, info(node_rank=...)), "node_rank is missing", id="no rank"),
        pytest.param((200, info(kv_event_sources=[source(2, endpoint="tcp://*:1")])), "wildcard", id="a1_14"),
        pytest.param((200, b"[]"), "cannot be read", id="no metadata"),
    ],
)
async def test_a1_5_metadata_that_cannot_be_served_end_it(node: Node, page: tuple[int, bytes], names: str) -> None:
    node.engine.pages["GET /server_info"] = page
    async with running_relay(node.config()) as relay:
        assert names in await ends(relay)
        assert not relay.feeds


@pytest.mark.parametrize(
    ("page", "names"), [(None, "/server_info"), ((401, b""), "--engine-api-key-file"), ((404, b""), "SGLang")]
)
async def test_an_engine_that_does_not_tell_is_given_up_at_the_deadline(
    node: Node, page: tuple[int, bytes] | None, names: str
) -> None:
    node.engine.pages["GET /server_info"] = page
    limits = replace(LIMITS, phase_s=0.5)
    async with running_relay(node.config(limits=limits)) as relay:
        reason = await ends(relay)
    assert "--startup-deadline-s" in reason
    assert names in reason


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        pytest.param([leader("w0", ADDRESS, local_dp_ranks=[0, 3])], "rank 3", id="a1_3 overlap"),
        pytest.param([leader("w0", ADDRESS), leader("w1", ADDRESS)], "two leaders", id="a1_6 two leaders"),
        pytest.param([leader("w0", ADDRESS, dp_size=8)], "dp_size", id="ranks"),
        pytest.param([leader("w0", ADDRESS, block_size=8)], "block_size", id="a1_15 blocks"),
    ],
)
async def test_a1_3_leaders_that_do_not_fit_end_it(node: Node, listed: list[dict[str, object]], names: str) -> None:
    node.gateway.pages["GET /internal/kv_events"] = leaders(*listed)
    async with running_relay(node.config()) as relay:
        assert names in await ends(relay)
        assert not relay.feeds


async def test_a1_7_a_stop_does_not_wait_for_the_resolver(node: Node) -> None:
    release = threading.Event()
    asked = threading.Event()

    def hanging(host: str, port: int) -> list[str]:
        asked.set()
        release.wait(60)
        return ["10.0.0.1"]

    node.tell(dist_init_addr="leader.example:5000")
    try:
        async with running_relay(node.config(), hanging) as relay:
            await until(asked.is_set, "the look-up has begun")
            assert is_in(relay, Phase.GROUP)
        assert relay.reason == ""
    finally:
        release.set()
    await until(lambda: not any(t.name == "forebay-lookup" for t in threading.enumerate()), "the end of the look-up")


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        pytest.param([leader("w0", ADDRESS, dp_size=8)], "dp_size of the leader", id="ranks"),
        pytest.param([leader("w0", ADDRESS, block_size=8)], "block_size of the leader", id="blocks"),
        pytest.param([leader("w0", ADDRESS, local_dp_ranks=[])], "local_dp_ranks of the leader", id="events off"),
        pytest.param([leader("w9", "10.0.0.9:1")], "has gone", id="gone"),
    ],
)
async def test_a1_9_a_leader_that_changes_ends_it(
    node: Node, listed: list[dict[str, object]], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "LEADER_GRACE_S", 0.2)
    async with ready_relay(node) as relay:
        node.gateway.pages["GET /internal/kv_events"] = leaders(*listed)
        assert names in await ends(relay)


async def test_a1_13_a_leader_under_another_address_is_followed_there(node: Node) -> None:
    async with ready_relay(node) as relay:
        node.gateway.pages["GET /internal/kv_events"] = leaders(leader("w1", ADDRESS))
        await until(lambda: relay.feed.worker_urls == ["http://w1:30000"], "it is mapped")
        assert relay.process.not_ready() == ""


async def test_a1_9_other_workers_may_do_what_they_like(node: Node) -> None:
    async with ready_relay(node) as relay:
        node.gateway.pages["GET /internal/kv_events"] = leaders(
            leader("w0", ADDRESS), leader("w9", "1.1.1.1:1", dp_size=1)
        )
        asked = node.gateway.asked["GET /internal/kv_events"]
        await until(lambda: node.gateway.asked["GET /internal/kv_events"] > asked + 3, "some polls")
        assert relay.process.not_ready() == ""


async def test_a_leader_that_publishes_nothing_is_told_of(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.tell(node_rank=0, kv_event_sources=[])
    async with running_relay(node.config()) as relay:
        await until(lambda: is_in(relay, Phase.RELAY), "it relays")
    assert "publishes no KV events (--kv-events-config)" in caplog.text


async def test_a1_10_an_engine_that_goes_ends_it(node: Node) -> None:
    async with ready_relay(node) as relay:
        node.engine.pages["GET /server_info"] = None
        assert "does not answer any more" in await ends(relay)


async def test_a1_10_an_engine_that_changes_ends_it_and_others_do_not(node: Node) -> None:
    async with ready_relay(node) as relay:
        node.tell(served_model_name="other")
        asked = node.engine.asked["GET /server_info"]
        await until(lambda: node.engine.asked["GET /server_info"] > asked + 3, "some polls")
        assert relay.process.not_ready() == ""
        node.tell(disaggregation_mode="decode")
        assert "role was regular and is now decode" in await ends(relay)


async def test_a1_11_a_publisher_that_dies_turns_readiness_off_until_it_is_back(node: Node) -> None:
    async with ready_relay(node) as relay:
        publisher = node.publishers[3]
        publisher.publish(stored("a"), dp_rank=3)
        await until(lambda: len(relay.feed.frames) == 1, "the batch")
        publisher.stop()
        await until(lambda: "rank 3" in relay.process.not_ready(), "not ready")
        assert relay.feed.connected == {2: True, 3: False}
        publisher.publish_payload(b"lost", is_lost=True)
        await publisher.listen()
        await until(lambda: relay.process.not_ready() == "", "ready again")
        await until(lambda: len(relay.feed.frames) == 2, "what was lost is asked for")
        assert relay.feed.frames[1] == (3, 1, b"lost")
        assert relay.feed.told == []


async def test_a1_11_a_publisher_that_stays_away_ends_it(node: Node) -> None:
    limits = replace(LIMITS, failure_s=0.3)
    async with ready_relay(node, node.config(limits=limits)) as relay:
        node.publishers[3].stop()
        assert "rank 3 is away" in await ends(relay)


async def test_a1_13_an_engine_that_restarts_begins_its_rank_anew(node: Node) -> None:
    async with ready_relay(node) as relay:
        publisher = node.publishers[3]
        for _ in range(3):
            publisher.publish(stored("a"), dp_rank=3)
        await until(lambda: len(relay.feed.frames) == 3, "the batches")
        publisher.stop()
        publisher.sent = []
        await publisher.listen()
        publisher.publish(stored("ab"), dp_rank=3)
        await until(lambda: len(relay.feed.frames) == 4, "the batch of the new one")
        assert relay.feed.told == [("restarted", 3)]
        assert relay.feed.frames[-1] == (3, 0, publisher.sent[0])
        assert relay.process.readers[3].resets["restart"] == 1


async def test_a1_13_another_boot_of_the_engine_begins_all_ranks_anew(node: Node) -> None:
    async with ready_relay(node) as relay:
        for rank, publisher in node.publishers.items():
            publisher.publish(stored("a"), dp_rank=rank)
        await until(lambda: len(relay.feed.frames) == 2, "the batches")
        asked = node.engine.asked["GET /server_info"]
        await until(lambda: node.engine.asked["GET /server_info"] > asked + 1, "the boot is known")
        node.tell(random_seed=8)
        await until(lambda: sorted(relay.feed.told) == [("restarted", 2), ("restarted", 3)], "both are forgotten")
        await until(lambda: len(relay.feed.frames) == 4, "and read again")


async def test_history_that_is_lost_is_a_gap(node: Node) -> None:
    async with ready_relay(node) as relay:
        publisher = node.publishers[2]
        publisher.publish(stored("a"), dp_rank=2)
        await until(lambda: len(relay.feed.frames) == 1, "the first batch")
        publisher.keeps = 1
        for _ in range(3):
            publisher.publish(stored("a"), dp_rank=2, is_lost=True)
        publisher.publish(stored("ab"), dp_rank=2)
        await until(lambda: len(relay.feed.frames) == 2, "the last batch")
        assert relay.feed.told == [("gap", 2)]
        assert relay.feed.frames[-1][:2] == (2, 4)


async def test_garbage_of_a_publisher_is_counted(node: Node) -> None:
    async with ready_relay(node) as relay:
        node.publishers[2].send([b"kv", b"short", b""])
        node.publishers[2].send([b"kv", b""])
        node.publishers[2].publish(stored("a"), dp_rank=2)
        await until(lambda: bool(relay.feed.frames), "the batch behind it")
        assert relay.process.readers[2].dropped == {"sequence": 1, "frames": 1}


async def test_a_publisher_without_replays_is_read_too(node: Node) -> None:
    publisher = node.publishers[3]
    node.publishers = {3: publisher}
    node.tell(kv_event_sources=[source(3, endpoint=publisher.endpoint)])
    async with ready_relay(node) as relay:
        publisher.publish(stored("a"), dp_rank=3)
        await until(lambda: len(relay.feed.frames) == 1, "the batch")
        await publisher.drop_connections()
        await until(lambda: relay.feed.told == [("restarted", 3)], "nobody knows what was lost")


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a1_12_a_gateway_that_is_lost_is_waited_for_and_one_that_refuses_is_not(
    node: Node, is_refused: bool
) -> None:
    async with ready_relay(node) as relay:
        relay.feed.states[node.gateway.url] = GatewayState(last_error="rank 2 is taken", is_refused=is_refused)
        if is_refused:
            assert "rank 2 is taken" in await ends(relay)
        else:
            assert "rank 2 is taken" in relay.process.not_ready()
            assert is_in(relay, Phase.RELAY)


async def test_a_wire_that_ends_by_itself_ends_it(node: Node) -> None:
    async with ready_relay(node) as relay:
        relay.feed.ending.set()
        assert "wire has ended" in await ends(relay)


async def test_what_nobody_expected_ends_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: object) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(process, "resolve_group", broken)
    async with running_relay(node.config()) as relay:
        assert "broken" in await ends(relay)


async def test_a_question_that_never_began_leaves_nothing(node: Node) -> None:
    """It is stopped with its first question asked and not begun; a coroutine that nobody awaits is a warning."""
    async with running_relay(node.config()) as relay:
        relay.process.stop()
        await until(lambda: relay.reason is not None, "the relay ends")
        gc.collect()
    assert relay.reason == ""

"""A gateway that takes KV events over relays, on real sockets: whatever happens to either, its index is the truth."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from gateway.kv_listen import ListenTimes
from kv_events.relay_keys import generate_keys, write_key_file
from kv_events.relay_wire import Beat, Events, Group, Hello, RankOffer, decode_from_gateway, encode
from kv_events.sequence import SourceState
from relay.publisher import RelayPublisher
from routers.types import RankKey
from tests.fakes.kv_fleet import announces
from tests.fakes.kv_publisher import kv_publisher
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, ScriptEngine, script_engine
from tests.relay.truth import BLOCK_SIZE, Cache, identity, running_relay

ANY = "tcp://127.0.0.1:0"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that end soon."""
    times = ListenTimes(beat_s=0.05 * TIME_SCALE, lease_s=0.5 * TIME_SCALE, grace_s=0.3 * TIME_SCALE)
    monkeypatch.setattr("gateway.kv_listen.ListenTimes", lambda: times)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@asynccontextmanager
async def engine_of(dp_size: int = 1, **info: Any) -> AsyncIterator[ScriptEngine]:
    """An engine that publishes nothing where a gateway could reach it."""
    async with script_engine() as engine:
        known = {**METADATA["/server_info"], "page_size": BLOCK_SIZE, "dp_size": dp_size, **info}
        engine.metadata["/server_info"] = known
        yield engine


@asynccontextmanager
async def listening(dp_size: int = 1, **options: Any) -> AsyncIterator[tuple[ScriptEngine, RunningGateway]]:
    """Such an engine, and a gateway in front of it that listens for relays."""
    async with engine_of(dp_size) as engine, running_gateway(engine.url, **{"kv_listen": ANY, **options}) as gateway:
        yield engine, gateway


def worker_of(engine: ScriptEngine) -> str:
    return engine.url.removeprefix("http://")


async def follows(gateway: RunningGateway, engine: ScriptEngine, *caches: Cache) -> None:
    """Wait until the index is the truth."""
    index = gateway.gateway.kv.index
    worker = worker_of(engine)
    await until(lambda: all(cache.is_known_to(index, worker) for cache in caches), "the index is the truth")


async def state_is(gateway: RunningGateway, engine: ScriptEngine, state: str, dp_rank: int = 0) -> None:
    kv = gateway.gateway.kv
    await until(lambda: kv.state(worker_of(engine), dp_rank) == state, f"the rank is {state}")


async def ranks_of(gateway: RunningGateway) -> list[dict[str, Any]]:
    """What ``GET /workers`` shows of the only worker's ranks."""
    (worker,) = (await gateway.client.get("/workers")).json()["workers"]
    return [rank["kv"] for rank in worker["ranks"]]


async def dropped(gateway: RunningGateway, reason: str) -> int:
    """How often something was left out for a reason."""
    line = f'forebay_kv_events_dropped_total{{reason="{reason}"}} '
    text = (await gateway.client.get("/metrics")).text
    return next((int(float(one.removeprefix(line))) for one in text.splitlines() if one.startswith(line)), 0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


# What is brought


async def test_what_a_relay_brings_is_known() -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.work(100)
        await follows(gateway, engine, cache)
        assert cache.held
        await state_is(gateway, engine, SourceState.LIVE)
        (rank,) = await ranks_of(gateway)
        assert (rank["source"], rank["relay"], rank["state"]) == ("relay", relay.publisher, "live")
        assert rank["last_seq"] == cache.seq - 1
        cache.work(100)
        await follows(gateway, engine, cache)
        assert relay.counts()[gateway.url].snapshots == 1
        assert relay.gateways()[gateway.url].is_acknowledged


async def test_a1_1_each_node_brings_its_own_rank_and_followers_serve_nothing() -> None:
    async with (
        listening(dp_size=2) as (engine, gateway),
        running_relay(identity(engine.url, [0], dp_size=2, role="leader"), gateway.url) as leader,
        running_relay(identity(engine.url, [1], dp_size=2), gateway.url) as follower,
    ):
        caches = [Cache(leader, 0, seed=1), Cache(follower, 1, seed=2)]
        for cache in caches:
            cache.work(50)
        await follows(gateway, engine, *caches)
        assert (await gateway.client.get("/list_workers")).json()["urls"] == [engine.url]
        assert [rank["relay"] for rank in await ranks_of(gateway)] == [leader.publisher, follower.publisher]


async def test_a1_2_a_rank_keeps_its_global_number() -> None:
    async with (
        listening(dp_size=6) as (engine, gateway),
        running_relay(identity(engine.url, [4], dp_size=6), gateway.url) as relay,
    ):
        cache = Cache(relay, 4)
        cache.work(50)
        await follows(gateway, engine, cache)
        index = gateway.gateway.kv.index
        assert [index.rank_blocks((worker_of(engine), rank)) > 0 for rank in range(6)] == [False] * 4 + [True, False]
        (shown,) = (await gateway.client.get("/internal/kv_events")).json()["relays"]
        assert [rank["dp_rank"] for rank in shown["ranks"]] == [4]


async def test_leaders_are_shown_to_their_followers() -> None:
    group = Group("tcp://node0:5000", ("tcp://10.0.0.1:5000",))
    async with (
        listening(dp_size=2) as (engine, gateway),
        running_relay(identity(engine.url, [0], dp_size=2, role="leader", group=group), gateway.url) as leader,
        running_relay(identity(engine.url, [1], dp_size=2, group=group), gateway.url) as follower,
    ):
        for one in (leader, follower):
            await until(lambda one=one: one.gateways()[gateway.url].is_acknowledged, "it is accepted")  # type: ignore[misc]
        assert (await gateway.client.get("/internal/kv_events")).json()["leaders"] == [
            {
                "worker_id": worker_of(engine),
                "worker_url": engine.url,
                "group": {"literal": "tcp://node0:5000", "addresses": ["tcp://10.0.0.1:5000"]},
                "dp_size": 2,
                "block_size": BLOCK_SIZE,
                "local_dp_ranks": [0],
            }
        ]


# Who comes, goes and comes back


async def test_a_gateway_that_comes_late_gets_all_that_the_rank_holds() -> None:
    port = free_port()
    late = f"http://127.0.0.1:{port}"
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url, late) as relay:
        cache = Cache(relay)
        cache.work(300)
        await follows(gateway, engine, cache)
        assert relay.gateways()[late].last_error
        for _ in range(2):
            # The second time it is a gateway that has restarted.
            async with running_gateway(engine.url, kv_listen=ANY, port=port) as other:
                await follows(other, engine, cache)
                await state_is(other, engine, SourceState.LIVE)
                cache.work(50)
                await follows(other, engine, cache)
        await follows(gateway, engine, cache)
        assert relay.counts()[gateway.url].sessions == 1


async def test_a1_13_a_relay_that_restarts_begins_anew() -> None:
    async with listening() as (engine, gateway):
        async with running_relay(identity(engine.url), gateway.url) as first:
            before = Cache(first)
            before.work(100)
            await follows(gateway, engine, before)
        async with running_relay(identity(engine.url), gateway.url) as second:
            after = Cache(second, seed=9)
            after.store("abab")
            await follows(gateway, engine, after)
            (rank,) = await ranks_of(gateway)
            assert rank["relay"] == second.publisher
            await state_is(gateway, engine, SourceState.LIVE)


async def test_a_publisher_that_restarts_leaves_nothing_behind() -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.work(100)
        await follows(gateway, engine, cache)
        cache.restart()
        cache.work(20)
        await follows(gateway, engine, cache)
        await state_is(gateway, engine, SourceState.LIVE)


async def test_after_a_gap_nothing_old_is_believed() -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.work(100)
        await follows(gateway, engine, cache)
        cache.lose()
        cache.store("abc")
        await follows(gateway, engine, cache)
        await state_is(gateway, engine, SourceState.COLD)
        cache.clear()
        await state_is(gateway, engine, SourceState.LIVE)


async def test_a1_11_a_publisher_that_is_away_is_not_trusted() -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.work(20)
        await state_is(gateway, engine, SourceState.LIVE)
        relay.source_state(0, False)
        await state_is(gateway, engine, SourceState.GAP)
        relay.source_state(0, True)
        await state_is(gateway, engine, SourceState.LIVE)
        await follows(gateway, engine, cache)


@pytest.mark.usefixtures("quick")
async def test_a_relay_that_is_killed_makes_room_for_the_next() -> None:
    async with listening() as (engine, gateway):
        async with running_relay(identity(engine.url), gateway.url, is_killed=True) as first:
            Cache(first).work(100)
            await state_is(gateway, engine, SourceState.LIVE)
        async with running_relay(identity(engine.url), gateway.url) as second:
            cache = Cache(second, seed=5)
            cache.work(30)
            assert not second.gateways()[gateway.url].is_refused
            await follows(gateway, engine, cache)


@pytest.mark.usefixtures("quick")
async def test_what_a_lost_relay_brought_is_not_trusted_and_then_forgotten() -> None:
    async with listening() as (engine, gateway):
        async with running_relay(identity(engine.url), gateway.url, is_killed=True) as relay:
            Cache(relay).work(50)
            await state_is(gateway, engine, SourceState.LIVE)
        await state_is(gateway, engine, SourceState.GAP)
        await state_is(gateway, engine, "off")
        assert gateway.gateway.kv.index.rank_blocks((worker_of(engine), 0)) == 0
        assert not gateway.gateway.kv.follows_any


@pytest.mark.usefixtures("quick")
async def test_a_connection_that_is_lost_goes_on_where_it_was() -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.work(100)
        await follows(gateway, engine, cache)
        (link,) = relay._links.values()
        assert link._session is not None
        link._session.end("cut by the test")
        cache.work(100)
        await follows(gateway, engine, cache)
        counts = relay.counts()[gateway.url]
        assert (counts.sessions, counts.snapshots) == (2, 1)
        await state_is(gateway, engine, SourceState.LIVE)


async def test_an_engine_that_restarts_is_read_anew() -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.work(100)
        await follows(gateway, engine, cache)
        source = gateway.gateway.kv._followed[worker_of(engine)].subscribers[0]
        source.on_boot("another process")
        assert gateway.gateway.kv.index.rank_blocks((worker_of(engine), 0)) == 0
        assert not gateway.gateway.kv.is_trusted(RankKey(worker_of(engine), 0))
        # The relay still has what the engine's old process held, until that process's publisher goes too.
        cache.restart()
        cache.work(10)
        await follows(gateway, engine, cache)
        await state_is(gateway, engine, SourceState.LIVE)


async def test_a_gateway_that_is_too_slow_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """More happens than the relay keeps while the gateway takes nothing."""
    monkeypatch.setattr("relay.lanes.WINDOW_BYTES", 4096)
    async with (
        listening() as (engine, gateway),
        running_relay(identity(engine.url), gateway.url, max_buffered_bytes=20_000) as relay,
    ):
        cache = Cache(relay)
        await follows(gateway, engine, cache)
        listener = gateway.gateway.kv_listener
        assert listener is not None
        tick = listener._tick
        monkeypatch.setattr(listener, "_tick", lambda: None)
        for _ in range(40):
            cache.work(20)
            await until(lambda: relay.held_blocks(0) == len(cache.held), "the mirror has it")
        monkeypatch.setattr(listener, "_tick", tick)
        listener._tick()
        await follows(gateway, engine, cache)
        assert relay.counts()[gateway.url].snapshots == 2


async def test_a_flush_through_one_gateway_is_no_secret_to_a_late_one() -> None:
    """The engine itself tells nothing of it."""
    port = free_port()
    late = f"http://127.0.0.1:{port}"
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url, late) as relay:
        cache = Cache(relay)
        cache.work(100)
        await follows(gateway, engine, cache)
        gateway.gateway.kv.clear(worker_of(engine))
        cache.held.clear()
        cache.store("ab")
        await follows(gateway, engine, cache)
        await until(lambda: relay.held_blocks(0) == 2, "the relay knows it")
        async with running_gateway(engine.url, kv_listen=ANY, port=port) as other:
            await follows(other, engine, cache)
            await state_is(other, engine, SourceState.LIVE)
        await state_is(gateway, engine, SourceState.LIVE)


async def test_a1_13_a_leader_under_another_address_takes_its_followers_along() -> None:
    async with engine_of() as other, listening() as (engine, gateway):
        assert (await gateway.client.post("/workers", json={"url": other.url})).status_code == 202
        async with running_relay(identity(engine.url), gateway.url) as relay:
            cache = Cache(relay)
            cache.work(50)
            await follows(gateway, engine, cache)
            relay.remap(other.url)
            await follows(gateway, other, cache)
            await state_is(gateway, other, SourceState.LIVE)
            await state_is(gateway, engine, "off")
            assert gateway.gateway.kv.blocks(worker_of(engine), 0) == 0


async def test_a_window_of_dropped_messages_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.lanes.WINDOW_BYTES", 4096)
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.store("c")
        await follows(gateway, engine, cache)
        listener = gateway.gateway.kv_listener
        (link,) = relay._links.values()
        assert listener is not None
        assert link._session is not None
        lanes = link._session.lanes
        assert lanes is not None
        tick = listener._tick
        monkeypatch.setattr(listener, "_tick", lambda: None)
        cache.work(100)
        rank = listener._ranks[worker_of(engine), 0]
        (holder,) = listener.relays()

        def is_stuck() -> bool:
            is_known = lanes.taken_bytes == holder.taken_bytes
            return not listener._receive() and holder.received_bytes == lanes.sent_bytes and is_known

        await until(lambda: is_stuck() and not lanes.has_room, "all of it has come, and nothing more can")
        gateway.gateway.kv.clear(worker_of(engine))
        assert not rank.has_work
        monkeypatch.setattr(listener, "_tick", tick)
        listener._tick()
        cache.clear()
        cache.store("ab")
        await follows(gateway, engine, cache)


# Who is refused


async def refusal(relay: RelayPublisher, gateway: RunningGateway) -> str:
    """Why a gateway refuses a relay for good."""
    await until(lambda: relay.gateways()[gateway.url].is_refused, "it is refused")
    return relay.gateways()[gateway.url].last_error


@pytest.mark.usefixtures("quick")
async def test_a1_12_a_second_relay_on_the_same_engine_is_refused() -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as first:
        cache = Cache(first)
        cache.work(50)
        await follows(gateway, engine, cache)
        async with running_relay(identity(engine.url), gateway.url) as second:
            Cache(second, seed=7).work(50)
            assert "has a relay already" in await refusal(second, gateway)
        assert await dropped(gateway, "relay_duplicate") >= 2
        await follows(gateway, engine, cache)
        assert (await ranks_of(gateway))[0]["relay"] == first.publisher


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        pytest.param({"ranks": (RankOffer(2, BLOCK_SIZE),), "dp_size": 2}, "rank_out_of_range", "rank 2", id="rank"),
        pytest.param({"ranks": (RankOffer(1, 16),), "dp_size": 2}, "relay_block_size", "16 tokens", id="block size"),
        pytest.param({"ranks": (RankOffer(1, BLOCK_SIZE),), "dp_size": 4}, "relay_dp_size", "engine 4", id="dp size"),
        pytest.param({"ranks": (RankOffer(1), RankOffer(1)), "dp_size": 2}, "relay_malformed", "twice", id="twice"),
    ],
)
async def test_a1_15_what_cannot_be_the_workers_is_refused(changes: dict[str, Any], reason: str, text: str) -> None:
    who_changes = {name: value for name, value in changes.items() if name != "ranks"}
    async with listening(dp_size=2) as (engine, gateway):
        who = identity(engine.url, **who_changes)
        async with running_relay(type(who)(**{**_fields(who), "ranks": changes["ranks"]}), gateway.url) as relay:
            assert text in await refusal(relay, gateway)
        assert await dropped(gateway, reason) >= 1
        assert (await gateway.client.get("/internal/kv_events")).json()["relays"] == []


def _fields(who: Any) -> dict[str, Any]:
    return {name: getattr(who, name) for name in who.__dataclass_fields__}


async def test_an_unknown_worker_is_refused_until_it_is_known() -> None:
    async with (
        engine_of() as engine,
        running_gateway(kv_listen=ANY) as gateway,
        running_relay(identity(engine.url), gateway.url) as relay,
    ):
        cache = Cache(relay)
        cache.work(20)
        await until(lambda: "no worker" in relay.gateways()[gateway.url].last_error, "it is refused")
        assert not relay.gateways()[gateway.url].is_refused
        assert await dropped(gateway, "relay_unknown_worker") >= 1
        assert (await gateway.client.post("/workers", json={"url": engine.url})).status_code == 202
        await follows(gateway, engine, cache)
        assert (await gateway.client.delete(f"/workers/{worker_of(engine)}")).status_code == 202
        await until(lambda: "no worker" in relay.gateways()[gateway.url].last_error, "it is refused again")
        assert not gateway.gateway.kv.follows_any
        assert (worker_of(engine), 0) not in gateway.gateway.kv.index.ranks()


@pytest.mark.parametrize("setting", ["off", "tcp://127.0.0.1:9"])
async def test_the_operators_word_stands(setting: str) -> None:
    async with (
        engine_of() as engine,
        running_gateway(f"{engine.url},kv_events={setting}", kv_listen=ANY) as gateway,
        running_relay(identity(engine.url), gateway.url) as relay,
    ):
        assert f"kv_events={setting}" in await refusal(relay, gateway)


# Keys


def keyed(tmp_path: Path, *relays: bytes) -> dict[str, Any]:
    """Options of a gateway that lets these keys in."""
    write_key_file(tmp_path / "gateway.key")
    (tmp_path / "relays").write_text("# relays\n" + "".join(f"{key.decode()} node\n" for key in relays))
    return {
        "kv_listen": "tcp://0.0.0.0:0",
        "kv_key_file": tmp_path / "gateway.key",
        "kv_authorized_keys": tmp_path / "relays",
    }


async def test_a_known_key_opens_the_listener(tmp_path: Path) -> None:
    keys = generate_keys()
    async with (
        listening(**keyed(tmp_path, keys.public_key)) as (engine, gateway),
        running_relay(identity(engine.url), gateway.url, keys=keys) as relay,
    ):
        cache = Cache(relay)
        cache.work(50)
        await follows(gateway, engine, cache)


async def test_a_wrong_key_is_refused_and_counted(tmp_path: Path) -> None:
    async with (
        listening(**keyed(tmp_path, generate_keys().public_key)) as (engine, gateway),
        running_relay(identity(engine.url), gateway.url, keys=generate_keys()) as relay,
    ):
        Cache(relay).work(20)
        await until(lambda: "--kv-authorized-keys" in relay.gateways()[gateway.url].last_error, "it is told")
        assert await dropped(gateway, "relay_key") >= 1
        assert (await ranks_of(gateway))[0]["source"] is None


async def test_no_key_and_another_gateways_key_do_not_connect(tmp_path: Path) -> None:
    keys = generate_keys()
    pinned = type(keys)(keys.public_key, keys.secret_key, frozenset({generate_keys().public_key}))
    async with listening(**keyed(tmp_path, keys.public_key)) as (engine, gateway):
        async with running_relay(identity(engine.url), gateway.url) as relay:
            await until(lambda: "--key-file" in relay.gateways()[gateway.url].last_error, "it is told")
        async with running_relay(identity(engine.url), gateway.url, keys=pinned) as relay:
            await until(lambda: "gateway-key" in relay.gateways()[gateway.url].last_error, "it is told")
        # Who goes past the lookup without a key gets no answer.
        assert gateway.gateway.kv_listener is not None
        assert gateway.gateway.kv_listener.relays() == []


# Besides


async def test_a_relay_takes_the_place_of_the_direct_source_and_gives_it_back(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async with engine_of() as engine, kv_publisher(context) as publisher:
        announces(engine, publisher)
        info = engine.metadata["/server_info"]
        info["kv_event_sources"][0]["block_size"] = info["page_size"] = BLOCK_SIZE
        async with running_gateway(engine.url, kv_listen=ANY) as gateway:
            await state_is(gateway, engine, SourceState.LIVE)
            assert (await ranks_of(gateway))[0]["source"] == "direct"
            async with running_relay(identity(engine.url), gateway.url) as relay:
                cache = Cache(relay)
                cache.work(30)
                await follows(gateway, engine, cache)
                assert (await ranks_of(gateway))[0]["source"] == "relay"
            await until(lambda: gateway.gateway.kv.relay_of(worker_of(engine), 0) is None, "the direct one is back")
            await state_is(gateway, engine, SourceState.LIVE)
            assert (await ranks_of(gateway))[0]["blocks"] == 0


async def test_a1_16_a_relay_that_goes_takes_only_its_own_rank_along() -> None:
    async with (
        listening(dp_size=2) as (engine, gateway),
        running_relay(identity(engine.url, [0], dp_size=2, role="leader"), gateway.url) as leader,
    ):
        kept = Cache(leader, 0)
        kept.work(30)
        async with running_relay(identity(engine.url, [1], dp_size=2), gateway.url) as follower:
            gone = Cache(follower, 1)
            gone.work(30)
            await follows(gateway, engine, kept, gone)
        await state_is(gateway, engine, "off", 1)
        await follows(gateway, engine, kept)
        assert [rank["source"] for rank in await ranks_of(gateway)] == ["relay", None]


async def test_nonsense_is_refused_and_hurts_nobody(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async with listening() as (engine, gateway), running_relay(identity(engine.url), gateway.url) as relay:
        cache = Cache(relay)
        cache.work(20)
        await follows(gateway, engine, cache)
        listener = gateway.gateway.kv_listener
        assert listener is not None
        hello = encode(Hello(1, "p", engine.url, "follower", (RankOffer(0, BLOCK_SIZE),), 1))
        sends = [[b"x"], [b"\xc1", b"y"], [b"a", b"b", b"c"], encode(Beat(())), encode(Events(0, 0, 0), b"z"), hello]
        with context.socket(zmq.DEALER) as socket:
            socket.connect(listener.endpoint)
            for frames in sends:
                socket.send_multipart(frames)
            answers = [decode_from_gateway(await _received(socket)) for _ in sends]
        assert [getattr(answer, "status", None) for answer in answers] == [400, 400, 400, 410, 410, 409]
        assert await dropped(gateway, "relay_malformed") == 3
        cache.work(20)
        await follows(gateway, engine, cache)


async def _received(socket: zmq.Socket[bytes]) -> list[bytes]:
    async with asyncio.timeout(PATIENCE_S):
        while not socket.poll(0):  # noqa: ASYNC110 -- a bare socket has no event
            await asyncio.sleep(0.005)
    return socket.recv_multipart()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_the_index_ends_as_the_truth(seed: int) -> None:
    """Restarts, gaps, lost connections, new relays and a gateway that comes and goes, by chance."""
    chance = random.Random(seed)
    port = free_port()
    other_url = f"http://127.0.0.1:{port}"
    async with listening() as (engine, gateway):
        for life in range(3):
            async with running_relay(
                identity(engine.url), gateway.url, other_url, is_killed=chance.random() < 0.5
            ) as relay, AsyncExitStack() as stack:  # fmt: skip
                cache = Cache(relay, seed=seed * 10 + life)
                if chance.random() < 0.5:
                    await stack.enter_async_context(running_gateway(engine.url, kv_listen=ANY, port=port))
                for _ in range(15):
                    cache.work(chance.randint(0, 40))
                    what = chance.choice(["nothing", "restart", "lose", "cut", "clear", "wait"])
                    if what in ("restart", "lose", "clear"):
                        getattr(cache, what)()
                    elif what == "cut":
                        for link in relay._links.values():
                            if link._session is not None:
                                link._session.end("cut by the test")
                    elif what == "wait":
                        await asyncio.sleep(0.02 * TIME_SCALE)
                await follows(gateway, engine, cache)

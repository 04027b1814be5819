"""Which nodes are one engine, whatever their name servers say, and resolvers that never answer."""

import asyncio
import itertools
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay import threads
from relay.errors import GroupUnresolved
from relay.identity import Match, identity_of, match, parse_address
from relay.threads import DaemonExecutor, resolve_group, system_lookup
from tests.conftest import TIME_SCALE
from tests.fakes.running import until


def _lookups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "forebay-lookup"]


RECORDS = ["10.0.0.9", "10.0.0.10", "fd00::1", "9.0.0.1"]


def test_a1_4_records_in_any_order_make_one_key() -> None:
    found = {identity_of("leader:5000", order) for order in itertools.permutations(RECORDS)}
    assert len(found) == 1
    (only,) = found
    assert only.addresses == (
        "tcp://9.0.0.1:5000",
        "tcp://10.0.0.9:5000",
        "tcp://10.0.0.10:5000",
        "tcp://[fd00::1]:5000",
    )
    assert only.key == "dist_init:tcp://9.0.0.1:5000"


def test_an_address_without_records_is_no_group() -> None:
    with pytest.raises(GroupUnresolved, match="no address"):
        identity_of("leader:5000", [])


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("leader:5000", "leader", 5000),
        ("tcp://Leader:5000", "leader", 5000),
        ("TCP://10.0.0.1:1", "10.0.0.1", 1),
        ("[fd00::1]:5000", "fd00::1", 5000),
        (" tcp://[FD00::1]:5000 ", "fd00::1", 5000),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["leader", "leader:0", "leader:65536", "http://leader:1", "tcp://leader", "", ":1", "a:1/x", "u@a:1", "::1:5"],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(GroupUnresolved):
        parse_address(text)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        pytest.param(("a:1", ["10.0.0.1"]), ("a:1", ["10.0.0.2"]), Match.FULL, id="equal as written"),
        pytest.param(("a:1", ["10.0.0.1"]), ("tcp://A:1", ["10.0.0.1"]), Match.FULL, id="written otherwise"),
        pytest.param(("a:1", ["10.0.0.1"]), ("b:1", ["10.0.0.1"]), Match.FULL, id="two names"),
        pytest.param(("a:1", ["10.0.0.1"]), ("10.0.0.1:1", ["10.0.0.1"]), Match.FULL, id="name and address"),
        pytest.param(("a:1", ["10.0.0.1", "fd00::1"]), ("b:1", ["10.0.0.1"]), Match.PARTIAL, id="a record is missing"),
        pytest.param(("a:1", ["10.0.0.1"]), ("b:2", ["10.0.0.1"]), Match.NONE, id="another port"),
        pytest.param(("a:1", ["10.0.0.1"]), ("b:1", ["10.0.0.2"]), Match.NONE, id="another machine"),
        pytest.param(("a:1", ["127.0.0.1"]), ("b:1", ["127.0.0.1"]), Match.NONE, id="both loopback"),
        pytest.param(("a:1", ["::1"]), ("b:1", ["::1"]), Match.NONE, id="both loopback, IPv6"),
        pytest.param(("a:1", ["0.0.0.0"]), ("b:1", ["0.0.0.0"]), Match.NONE, id="both wildcards"),
        pytest.param(
            ("a:1", ["::ffff:127.0.0.1"]), ("b:1", ["::ffff:127.0.0.1"]), Match.NONE, id="loopback in disguise"
        ),
        pytest.param(
            ("a:1", ["127.0.0.1", "10.0.0.1"]),
            ("b:1", ["127.0.0.1", "10.0.0.2"]),
            Match.NONE,
            id="only loopback in common",
        ),
    ],
)
def test_who_belongs_together(ours: tuple[str, list[str]], theirs: tuple[str, list[str]], expected: Match) -> None:
    one, two = identity_of(*ours), identity_of(*theirs)
    assert match(one, two) is expected
    assert match(two, one) is expected


@given(st.lists(st.ip_addresses().map(str), min_size=1), st.randoms())
def test_the_order_of_records_never_matters(records: list[str], random: object) -> None:
    mixed = list(records)
    getattr(random, "shuffle")(mixed)  # noqa: B009 - hypothesis gives no better type
    assert identity_of("a:1", records) == identity_of("a:1", mixed)


async def test_an_ip_address_is_not_looked_up() -> None:
    def forbidden(host: str, port: int) -> Sequence[str]:
        raise AssertionError(host)

    assert (await resolve_group("10.0.0.1:5000", 1.0, forbidden)).addresses == ("tcp://10.0.0.1:5000",)


async def test_a_name_is_looked_up() -> None:
    found = await resolve_group("localhost:5000", 10.0 * TIME_SCALE, system_lookup)
    assert found.literal == "tcp://localhost:5000"
    assert found.addresses[0] in ("tcp://127.0.0.1:5000", "tcp://[::1]:5000")


async def test_a_lookup_that_fails_is_told() -> None:
    def failing(host: str, port: int) -> Sequence[str]:
        raise OSError(2, "no such host")

    with pytest.raises(GroupUnresolved, match="no such host"):
        await resolve_group("leader:5000", 10.0 * TIME_SCALE, failing)


async def test_a1_7_a_resolver_that_hangs_is_left_alone() -> None:
    release = threading.Event()
    try:
        with pytest.raises(GroupUnresolved, match="no answer"):
            await resolve_group("leader:5000", 0.05, lambda host, port: ["10.0.0.1"] if release.wait(60) else [])
        assert _lookups()
        assert all(thread.daemon for thread in _lookups())
    finally:
        release.set()
    await until(lambda: not _lookups(), "the end of all look-ups")


async def test_a_resolver_that_hangs_gets_only_so_many_threads() -> None:
    release = threading.Event()
    loop = asyncio.get_running_loop()
    waiting = [loop.run_in_executor(DaemonExecutor(), release.wait, 60) for _ in range(threads.MAX_THREADS)]
    try:
        with pytest.raises(GroupUnresolved, match="too many"):
            await resolve_group("leader:5000", 10.0 * TIME_SCALE, lambda host, port: ["10.0.0.1"])
    finally:
        release.set()
    async with asyncio.timeout(10 * TIME_SCALE):
        for future in waiting:
            await future
    await until(lambda: not _lookups(), "the end of all look-ups")

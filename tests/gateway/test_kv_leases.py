"""Leases of ranks: one relay a rank, and who may take another's place."""

import pytest

from backends.types import EngineFacts, EngineKind
from gateway.kv_leases import LeaseTable, OfferRefused, check_hello, check_offer
from kv_events.relay_wire import PROTOCOL, Hello, RankOffer

FACTS = EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", "model", dp_size=4, page_size=16)


def hello(publisher: str = "a", *ranks: int, **changes: int) -> Hello:
    offers = tuple(RankOffer(rank, 16) for rank in ranks or (0,))
    return Hello(
        changes.get("protocol", PROTOCOL), publisher, "http://w:1", "follower", offers, changes.get("dp_size", 4)
    )


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(beat_s=1.0, lease_s=10.0)


def test_a_rank_has_one_relay(table: LeaseTable) -> None:
    first, _ = table.claim(b"1", hello("a", 0, 1), "w", 0.0)
    with pytest.raises(OfferRefused) as refused:
        table.claim(b"2", hello("b", 1, 2), "w", 1.0)
    assert (refused.value.refusal.status, refused.value.refusal.is_final) == (409, False)
    assert table.holder("w", 1) is first
    assert table.holder("w", 2) is None
    other, before = table.claim(b"2", hello("b", 2, 3), "w", 1.0)
    assert (table.holder("w", 2), before) == (other, [])
    table.claim(b"3", hello("c", 0), "another worker", 1.0)


def test_a_holder_that_is_alive_stays_for_good(table: LeaseTable) -> None:
    holder, _ = table.claim(b"1", hello("a"), "w", 0.0)
    for now_s, heard_s, is_final in [(1.0, 0.9, False), (1.5, 1.4, False), (2.0, 2.0, False), (2.6, 2.5, True)]:
        holder.heard_s = heard_s
        with pytest.raises(OfferRefused) as refused:
            table.claim(b"2", hello("b"), "w", now_s)
        assert refused.value.refusal.is_final is is_final


def test_a_silent_holder_makes_room(table: LeaseTable) -> None:
    holder, _ = table.claim(b"1", hello("a"), "w", 0.0)
    with pytest.raises(OfferRefused):
        table.claim(b"2", hello("b"), "w", 9.9)
    assert table.silent(10.0) == []
    assert table.silent(10.1) == [holder]
    assert table.silent(10.2) == []
    relay, before = table.claim(b"2", hello("b"), "w", 10.2)
    assert before == [holder]
    assert table.holder("w", 0) is relay
    table.drop(holder)
    assert table.holder("w", 0) is relay
    assert table.of_session(b"1") is None


def test_a_relay_that_comes_back_takes_its_own_place(table: LeaseTable) -> None:
    first, _ = table.claim(b"1", hello("a", 0, 1), "w", 0.0)
    again, before = table.claim(b"2", hello("a", 0), "w", 0.1)
    assert before == [first]
    assert (table.holder("w", 0), table.holder("w", 1)) == (again, None)
    assert table.relays() == [again]


@pytest.mark.parametrize(
    ("offer", "setting", "reason"),
    [
        pytest.param(hello(), "auto", None, id="right"),
        pytest.param(hello("a", 3), "auto", None, id="last rank"),
        pytest.param(hello("a", 4), "auto", "rank_out_of_range", id="beyond the last"),
        pytest.param(hello(dp_size=2), "auto", "relay_dp_size", id="ranks"),
        pytest.param(hello(), "off", "relay_not_wanted", id="switched off"),
        pytest.param(
            Hello(PROTOCOL, "a", "u", "follower", (RankOffer(0, 32),), 4), "auto", "relay_block_size", id="block size"
        ),
        pytest.param(Hello(PROTOCOL, "a", "u", "follower", (RankOffer(0),), 4), "auto", None, id="block size untold"),
        pytest.param(Hello(PROTOCOL, "a", "u", "leader", (), 4), "auto", None, id="a leader without ranks"),
    ],
)
def test_an_offer_must_fit_the_worker(offer: Hello, setting: str, reason: str | None) -> None:
    if reason is None:
        check_offer(offer, "w", FACTS, setting)
        return
    with pytest.raises(OfferRefused) as refused:
        check_offer(offer, "w", FACTS, setting)
    assert refused.value.refusal.reason == reason
    assert refused.value.refusal.is_final


def test_another_version_may_be_another_one_the_next_time() -> None:
    with pytest.raises(OfferRefused) as refused:
        check_hello(hello(protocol=PROTOCOL + 1))
    assert (refused.value.refusal.status, refused.value.refusal.is_final) == (426, False)
    with pytest.raises(OfferRefused, match="twice"):
        check_hello(hello("a", 1, 1))

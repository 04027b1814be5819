"""The wire between relays and gateways: whatever comes is a message, or refused."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.errors import RelayMessageRefused
from kv_events.relay_wire import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    Accept,
    Ack,
    Beat,
    Begin,
    Bye,
    Cursor,
    End,
    Events,
    Group,
    Hello,
    Part,
    RankHealth,
    RankOffer,
    Refuse,
    Reset,
    Resume,
    Resync,
    ToGateway,
    ToRelay,
    cost_bytes,
    decode_from_gateway,
    decode_from_relay,
    encode,
)
from kv_events.types import Tier

HELLO = Hello(
    1,
    "name",
    "http://leader:30000",
    "follower",
    (RankOffer(3, 64), RankOffer(4)),
    8,
    "0.1.0",
    Group("n0:5000", ("::1",)),
)
FROM_RELAY: list[tuple[ToGateway, bytes]] = [
    (HELLO, b""),
    (Events(3, 1, 2**40), b"payload"),
    (Events(0, 0, 0), b""),
    (Reset(3, 2, "restart"), b""),
    (Resume(3, 2), b""),
    (Begin(3, 2, None, 5, True, False, {0: "full_attention"}), b""),
    (Part(3, Tier.HOST, ("ad", None, "salt", None), 2, 1), bytes(40)),
    (End(3), b""),
    (Beat((RankHealth(3, True), RankHealth(4, False))), b""),
    (Bye(), b""),
]
FROM_GATEWAY: list[ToRelay] = [
    Accept("worker", 1.0, 10.0, (Cursor(3, 2, 7), Cursor(4, 0, None))),
    Refuse(409, "relay_duplicate", "there is another one", True),
    Ack(2**40),
    Resync(3, "sequence"),
]
RANDOM = st.lists(st.binary(max_size=200), max_size=4)


@pytest.mark.parametrize(("message", "body"), FROM_RELAY, ids=lambda value: type(value).__name__)
def test_what_a_relay_says_comes_back(message: ToGateway, body: bytes) -> None:
    frames = encode(message, body if isinstance(message, Events | Part) else None)
    assert decode_from_relay(frames) == (message, body)
    assert cost_bytes(frames) - cost_bytes(encode(End(0))) == len(body)
    with pytest.raises(RelayMessageRefused):
        decode_from_gateway(frames)


@pytest.mark.parametrize("message", FROM_GATEWAY, ids=lambda value: type(value).__name__)
def test_what_a_gateway_says_comes_back(message: ToRelay) -> None:
    assert decode_from_gateway(encode(message)) == message
    with pytest.raises(RelayMessageRefused):
        decode_from_relay(encode(message))


def raw(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([], id="nothing"),
        pytest.param([b""], id="empty"),
        pytest.param([raw("bye"), b"", b""], id="three frames"),
        pytest.param([raw("events", 0, 0, 0)], id="events without a body"),
        pytest.param([raw("bye"), b"body"], id="a body too many"),
        pytest.param([raw("other")], id="unknown kind"),
        pytest.param([raw("end", -1)], id="negative rank"),
        pytest.param([raw("end", 65_536)], id="rank too high"),
        pytest.param([raw("end", 1, 2)], id="a field too many"),
        pytest.param([raw("end", True)], id="no number"),
        pytest.param([raw("resume", 0, 2**63)], id="epoch too high"),
        pytest.param([raw("part", 0, "device", [None] * 4, 2, 0), bytes(31)], id="part too short"),
        pytest.param([raw("part", 0, "device", [None] * 4, 1025, 0), bytes(1025 * 16)], id="part too long"),
        pytest.param([raw("part", 0, "tape", [None] * 4, 1, 0), bytes(16)], id="unknown tier"),
        pytest.param([raw("beat", [[rank, True] for rank in range(1025)])], id="too many ranks"),
        pytest.param([raw("hello", 1, "", "u", "r", [], 1)], id="no name"),
        pytest.param([raw("hello", 1, "n", "u" * 2049, "r", [], 1)], id="url too long"),
        pytest.param([b"\x91" * 100_000], id="nested"),
        pytest.param([bytes(MAX_HEADER_BYTES + 1)], id="header too long"),
        pytest.param([raw("events", 0, 0, 0), bytes(MAX_BODY_BYTES + 1)], id="body too long"),
    ],
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(RelayMessageRefused):
        decode_from_relay(frames)


def test_a_later_hello_may_say_more() -> None:
    """So that another version can be told apart from nonsense."""
    fields = msgspec.msgpack.decode(encode(HELLO)[0])
    message, _ = decode_from_relay([raw(*fields, {"more": [1, 2]})])
    assert message == HELLO


@given(RANDOM)
def test_any_bytes_are_a_message_or_refused(frames: list[bytes]) -> None:
    for decode in (decode_from_relay, decode_from_gateway):
        try:
            decode(frames)
        except RelayMessageRefused:
            pass


@given(st.sampled_from(FROM_RELAY), st.data())
def test_a_message_that_was_hurt_is_a_message_or_refused(which: tuple[ToGateway, bytes], data: st.DataObject) -> None:
    message, body = which
    header = bytearray(encode(message)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(header)))
    try:
        decode_from_relay([bytes(header[:cut]), *([body] if isinstance(message, Events | Part) else [])])
    except RelayMessageRefused:
        pass

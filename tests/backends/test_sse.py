"""Events out of reads of any size."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.errors import AnswerTooLarge
from backends.sse import EventCutter, data_of, events, name_of

UNBOUNDED = 1 << 30
EVENTS = (
    b'data: {"text":"a\\n\\n"}\n\n',
    b": ping\n\n",
    b"event: x\r\ndata: \xff\r\ndata:b\r\n\r\n",
    b"data: [DONE]\n\n",
)
WIRE = b"".join(EVENTS)


def fed(pieces: list[bytes], bound: int = UNBOUNDED) -> tuple[list[bytes], int]:
    """All blocks that come out, and the bytes that are left."""
    cutter = EventCutter(bound)
    blocks = [cutter.feed(piece) for piece in pieces]
    return blocks, cutter.held_bytes


def payloads(blocks: list[bytes]) -> list[bytes]:
    """What the events say."""
    return [data for block in blocks for event in events(block) if (data := data_of(event))]


@pytest.mark.parametrize("cut", range(len(WIRE) + 1))
def test_a2_16_events_do_not_depend_on_where_reads_end(cut: int) -> None:
    blocks, left = fed([WIRE[:cut], WIRE[cut:]])
    assert [event for block in blocks for event in events(block)] == list(EVENTS)
    assert left == 0
    for block in filter(None, blocks):
        assert block.endswith((b"\n\n", b"\r\n\r\n"))


@pytest.mark.parametrize("second", range(0, len(WIRE), 7))
@pytest.mark.parametrize("first", range(0, len(WIRE), 5))
def test_a2_16_nor_on_two_cuts(first: int, second: int) -> None:
    blocks, left = fed([WIRE[:first], WIRE[first : max(first, second)], WIRE[max(first, second) :]])
    assert [event for block in blocks for event in events(block)] == list(EVENTS)
    assert left == 0


def test_a2_16_nor_on_single_bytes() -> None:
    blocks, left = fed([WIRE[index : index + 1] for index in range(len(WIRE))])
    assert list(filter(None, blocks)) == list(EVENTS)
    assert left == 0


PIECES = st.lists(
    st.sampled_from([b"data: a", b"data:b", b":", b"x", b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b""])
)


@given(PIECES)
@example([b"a", b"\n\n", b"\r\n", b"\r\n", b"b"])
@example([b"a\r\n", b"\n", b"\n", b"\n"])
@example([b"\n", b"\n\n", b"data: a", b"\r\n", b"\n\n"])
def test_a2_16_random_cuts_equal_the_whole(pieces: list[bytes]) -> None:
    wire = b"".join(pieces)
    blocks, left = fed(pieces)
    whole, _ = fed([wire])
    assert b"".join(blocks) == wire[: len(wire) - left]
    # Stray blank lines may lie on either side of a cut, the events' words never.
    assert payloads(blocks) == payloads(whole)
    for block in filter(None, blocks):
        assert block.endswith((b"\n\n", b"\n\r\n"))


@given(PIECES)
def test_events_of_a_block_are_the_block(pieces: list[bytes]) -> None:
    block = b"".join(pieces)
    found = list(events(block))
    assert b"".join(found) == block
    for event in found[:-1]:
        assert event.endswith((b"\n\n", b"\n\r\n"))
        assert event.count(b"\n\n") + event.count(b"\n\r\n") == 1


@pytest.mark.parametrize("pieces", [[b"data: 12\n\n"], [b"data", b": 12\n\n"], [b"data: 12\n", b"\n"]], ids=len)
@pytest.mark.parametrize("behind", [b"", b"data: 1"])
def test_the_bound_holds_however_an_event_arrives(pieces: list[bytes], behind: bytes) -> None:
    size = sum(map(len, pieces))
    blocks, left = fed([*pieces[:-1], pieces[-1] + behind], size)
    assert b"".join(blocks) == b"".join(pieces)
    assert left == len(behind)
    with pytest.raises(AnswerTooLarge) as caught:
        fed([*pieces[:-1], pieces[-1] + behind], size - 1)
    assert caught.value.limit_bytes == size - 1


def test_the_bound_is_one_events() -> None:
    small = b"data: 1\n\n"
    assert fed([small * 100, small * 3 + b"data"], len(small)) == ([small * 100, small * 3], 4)


def test_an_event_without_end_is_bounded() -> None:
    cutter = EventCutter(100)
    cutter.feed(b"x" * 60)
    cutter.feed(b"x" * 40)
    assert cutter.held_bytes == 100
    with pytest.raises(AnswerTooLarge):
        cutter.feed(b"x")


def test_an_event_that_dribbles_takes_linear_time() -> None:
    cutter = EventCutter(UNBOUNDED)
    for _ in range(100_000):  # gigabytes of copies, were what is held joined at each
        cutter.feed(b"x")
    assert len(cutter.feed(b"\n\n")) == 100_002
    assert cutter.held_bytes == 0


@pytest.mark.parametrize(
    ("event", "data"),
    [
        pytest.param(b"data: {}\n\n", b"{}", id="the usual"),
        pytest.param(b"data:{}\n\n", b"{}", id="no space"),
        pytest.param(b"data:  x\n\n", b" x", id="one space is taken off"),
        pytest.param(b"data: x\r\n\r\n", b"x", id="CRLF"),
        pytest.param(b"data: a\ndata: b\n\n", b"a\nb", id="two lines"),
        pytest.param(b"event: e\nid: 1\ndata: a\n\n", b"a", id="other fields"),
        pytest.param(b": comment\n\n", b"", id="comment"),
        pytest.param(b"\n\n", b"", id="nothing"),
        pytest.param(b"\ndata: a\n\n", b"a", id="stray blank line"),
        pytest.param(b"data: \xff\xfe\n\n", b"\xff\xfe", id="no UTF-8"),
        pytest.param(b"data: a", b"a", id="unfinished"),
        pytest.param(b"data: \n\n", b"", id="empty"),
        pytest.param(b"database: a\n\n", b"", id="another field"),
    ],
)
def test_payloads(event: bytes, data: bytes) -> None:
    assert data_of(event) == data


@pytest.mark.parametrize(
    ("event", "name"),
    [
        pytest.param(b"event: error\ndata: {}\n\n", b"error", id="first"),
        pytest.param(b"data: {}\nevent: error\n\n", b"error", id="after the data"),
        pytest.param(b"id: 1\r\nevent:error\r\n\r\n", b"error", id="CRLF, no space"),
        pytest.param(b"data: {}\n\n", b"", id="none"),
        pytest.param(b"data: event: x\n\n", b"", id="in the data"),
    ],
)
def test_names(event: bytes, name: bytes) -> None:
    assert name_of(event) == name

import pytest

from kv_events.errors import BatchUndecodable
from kv_events.replay_frames import Message, parse_message, parse_reply, replay_request
from tests.kv_events.captured import SGLANG_STREAMS, load, sglang_stream, unhex

SEVEN = (7).to_bytes(8, "big")
END = b"\xff" * 8


@pytest.mark.parametrize("name", SGLANG_STREAMS)
def test_live_messages_are_topic_sequence_payload(name: str) -> None:
    sequences = []
    for frames, _ in sglang_stream(name):
        message = parse_message(frames)
        assert message.topic == b"kv-events"
        assert message.payload == frames[2]
        sequences.append(message.sequence)
    assert sequences == sorted(sequences)
    assert len(sequences) >= 10


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param([], "frames", id="nothing"),
        pytest.param([SEVEN, b"p"], "frames", id="no topic"),
        pytest.param([b"", b"t", SEVEN, b"p"], "frames", id="four"),
        pytest.param([b"t", b"7", b"p"], "sequence", id="short number"),
        pytest.param([b"t", b"", b"p"], "sequence", id="empty number"),
        pytest.param([b"t", SEVEN + b"0", b"p"], "sequence", id="long number"),
    ],
)
def test_other_messages_are_dropped(frames: list[bytes], reason: str) -> None:
    with pytest.raises(BatchUndecodable, match=f"^{reason}$"):
        parse_message(frames)


def test_the_sequence_is_unsigned() -> None:
    assert parse_message([b"", b"\x80" + bytes(7), b""]) == Message(b"", 2**63, b"")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        pytest.param("kv_replay_dealer_0", [0, 1, 24], id="from the first"),
        pytest.param("kv_replay_dealer_38", [], id="nothing newer"),
        pytest.param("kv_replay_dealer_future", [], id="far beyond"),
        pytest.param("kv_replay_dp0", [0, 1, 48], id="rank 0"),
        pytest.param("kv_replay_dp1", [0, 1, 54], id="rank 1"),
    ],
)
def test_replays_of_sglang(name: str, kept: list[int]) -> None:
    capture = load(f"sglang/{name}.json")
    assert replay_request(capture["start"]) == unhex(capture["sent_hex"])
    *replies, end = [parse_reply(unhex(reply["frames_hex"])) for reply in capture["replies"]]
    assert [reply and reply.sequence for reply in replies] == kept
    assert {reply and reply.topic for reply in replies} <= {b"kv-events"}
    assert end is None


def test_a_replay_of_vllm() -> None:
    capture = load("vllm/kv-events/replay.json")
    assert replay_request(0x183) == unhex(capture["sent_frames_hex"])
    *replies, end = [parse_reply(unhex(frames)) for frames in capture["received_frames_hex"]]
    assert [reply and reply.sequence for reply in replies] == [0x183, 0x184, 0x185]
    assert end is None


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        pytest.param([b"", SEVEN, b"p"], Message(b"", 7, b"p"), id="older engines send no topic"),
        pytest.param([b"", b"t", SEVEN, b"p"], Message(b"t", 7, b"p"), id="newer engines do"),
        pytest.param([b"", b"", SEVEN, b"p"], Message(b"", 7, b"p"), id="empty topic"),
        pytest.param([b"", END, b""], None, id="older end"),
        pytest.param([b"", b"", END, b""], None, id="newer end"),
    ],
)
def test_both_framings_are_read(frames: list[bytes], expected: Message | None) -> None:
    assert parse_reply(frames) == expected


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param([], "frames", id="nothing"),
        pytest.param([b"", SEVEN], "frames", id="two"),
        pytest.param([b"", b"t", SEVEN, b"p", b""], "frames", id="five"),
        pytest.param([b"t", SEVEN, b"p"], "frames", id="a live message"),
        pytest.param([b"", b"7", b"p"], "sequence", id="short number"),
        pytest.param([b"", b"t", b"7", b"p"], "sequence", id="short number after a topic"),
    ],
)
def test_other_replies_are_refused(frames: list[bytes], reason: str) -> None:
    with pytest.raises(BatchUndecodable, match=f"^{reason}$"):
        parse_reply(frames)

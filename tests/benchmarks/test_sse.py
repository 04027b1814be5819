import pytest

from benchmarks.sse import EventCounter, StreamClient, Watch, request_bytes

EVENTS = b'data: {"a":1}\n\ndata: {"a":"}\\n\\n"}\n\ndata: {"a":3}\n\n'
WIRE = EVENTS + b"data: [DONE]\n\n"


@pytest.mark.parametrize("cut", range(len(WIRE) + 1))
def test_count_does_not_depend_on_where_reads_end(cut: int) -> None:
    counter = EventCounter()
    assert counter.feed(WIRE[:cut]) + counter.feed(WIRE[cut:]) == 3
    assert counter.verdict(3) is None


@pytest.mark.parametrize(
    ("wire", "expected", "fault"),
    [
        pytest.param(WIRE, 4, "3 events, not 4", id="one is missing"),
        pytest.param(EVENTS, 3, "no [DONE] after 3 events", id="no end"),
        pytest.param(b"data: [DONE]\n\n", None, "0 events, not any", id="nothing at all"),
        pytest.param(EVENTS + b'data: {"error":{}}\n\ndata: [DONE]\n\n', 4, "no event of a good", id="error event"),
        pytest.param(EVENTS + b": ping\n\ndata: [DONE]\n\n", 3, "no event of a good", id="not data"),
        pytest.param(EVENTS + b'data: {"a"\n\ndata: [DONE]\n\n', 4, "no event of a good", id="cut inside"),
        pytest.param(WIRE + b"data: {}\n\n", 3, "more after [DONE]", id="more after the end"),
        pytest.param(WIRE + b"data: {", 3, "unfinished", id="unfinished"),
    ],
)
def test_faults_are_found(wire: bytes, expected: int | None, fault: str) -> None:
    counter = EventCounter()
    counter.feed(wire)
    assert (counter.verdict(expected) or "").startswith(fault) or fault in (counter.verdict(expected) or "")


class Seen:
    def __init__(self) -> None:
        self.events = 0
        self.firsts = 0
        self.verdicts: list[str | None] = []

    def watch(self) -> Watch:
        return Watch(self._came, self._first, self.verdicts.append)

    def _came(self, events: int) -> None:
        self.events += events

    def _first(self) -> None:
        self.firsts += 1


def http(status: int, *chunks: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" % status
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


END = b"0\r\n\r\n"


def test_a_whole_stream() -> None:
    seen = Seen()
    client = StreamClient(b"", 3, seen.watch())
    client.data_received(http(200, WIRE[:20], WIRE[20:]) + END)
    client.connection_lost(None)
    assert (seen.events, seen.firsts, seen.verdicts) == (3, 1, [None])


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        pytest.param(http(503), "status 503", id="status"),
        pytest.param(http(200, EVENTS), "the connection ended after 3 events", id="cut off"),
        pytest.param(b"\x00\x01garbage\r\n\r\n", "no valid HTTP", id="garbage"),
        pytest.param(http(200, EVENTS) + END, "no [DONE]", id="no end marker"),
    ],
)
def test_a_broken_stream_has_one_fault(data: bytes, fault: str) -> None:
    seen = Seen()
    client = StreamClient(b"", 3, seen.watch())
    client.data_received(data)
    client.connection_lost(None)
    assert len(seen.verdicts) == 1
    assert (seen.verdicts[0] or "").startswith(fault)


def test_request_has_its_length() -> None:
    assert request_bytes("/p", b"{}").endswith(b"content-length: 2\r\n\r\n{}")

"""Access lines: what they say, that nobody can forge one, and that a bad reader costs lines and not time."""

import asyncio
import errno
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access_log import MAX_IDS_CHARS, MAX_VALUE_CHARS, AccessLog, AccessRecord, format_json, format_text

RECORD = AccessRecord(
    time=1_700_000_000.1239,
    method="POST",
    route="/generate",
    path="/generate",
    status=200,
    outcome="complete",
    request_id="req-1",
    engine_ids=("e1", "e2"),
    worker="127.0.0.1:30000",
    dp_rank=1,
    prefill_worker="127.0.0.1:30001",
    prefill_dp_rank=2,
    attempts=2,
    stream=True,
    model="org/m",
    prompt_tokens=10,
    completion_tokens=20,
    cached_tokens=0,
    tokens_seen=19,
    bytes_in=100,
    bytes_out=2000,
    duration_s=1.23456789,
    first_byte_s=0.1,
    queue_s=0.5,
    error="it broke",
)
BARE = AccessRecord(time=1_700_000_000.0, method="GET", route="/x", path="/x", status=404, outcome="rejected")
PAIR = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "]+)(?: |$)')


def parse(line: bytes) -> dict[str, str]:
    """Read a text line back, and fail on anything that is not a row of pairs."""
    text = line.decode("ascii")
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    pairs: dict[str, str] = {}
    position = 0
    while position < len(text) - 1:
        match = PAIR.match(text[:-1], position)
        assert match is not None, text[position:]
        pairs[match[1]] = json.loads(match[2]) if match[2].startswith('"') else match[2]
        position = match.end()
    return pairs


def test_a_text_line_says_everything() -> None:
    assert format_text(RECORD) == (
        b"time=2023-11-14T22:13:20.123Z method=POST route=/generate path=/generate status=200 outcome=complete "
        b"request_id=req-1 engine_ids=e1,e2 worker=127.0.0.1:30000 dp_rank=1 "
        b"prefill_worker=127.0.0.1:30001 prefill_dp_rank=2 attempts=2 stream=true model=org/m "
        b"prompt_tokens=10 completion_tokens=20 cached_tokens=0 tokens_seen_estimate=19 bytes_in=100 bytes_out=2000 "
        b'duration_s=1.234568 first_byte_s=0.100000 queue_s=0.500000 error="it broke"\n'
    )


def test_unknown_values_are_left_out_of_text() -> None:
    assert set(parse(format_text(BARE))) == {
        "time", "method", "route", "path", "status", "outcome", "attempts", "stream", "bytes_in", "bytes_out",
        "duration_s",
    }  # fmt: skip


def test_json_has_the_same_fields_and_nulls() -> None:
    full, bare = json.loads(format_json(RECORD)), json.loads(format_json(BARE))
    names = set(AccessRecord.__struct_fields__) - {"tokens_seen"} | {"tokens_seen_estimate"}
    assert set(full) == set(bare) == set(parse(format_text(RECORD))) == names
    assert (full["engine_ids"], full["tokens_seen_estimate"], full["duration_s"]) == (["e1", "e2"], 19, 1.234568)
    assert bare["model"] is bare["first_byte_s"] is bare["cached_tokens"] is None


@given(st.text() | st.text('\n\r "=\\\x00\x1b\x7f\x85\u2028\ud800a'))
def test_no_value_can_forge_a_line_or_a_field(value: str) -> None:
    hostile = msgspec.structs.replace(
        RECORD, request_id=value, path=value, model=value, error=value, engine_ids=(value,), method=value
    )
    pairs = parse(format_text(hostile))
    assert list(pairs) == list(parse(format_text(RECORD)))
    assert pairs["request_id"] == pairs["path"] == pairs["model"] == pairs["error"] == pairs["engine_ids"] == value
    line = format_json(hostile)
    assert line.count(b"\n") == 1
    assert json.loads(line)["request_id"] == value


def test_long_values_are_cut() -> None:
    long = msgspec.structs.replace(RECORD, request_id="x" * 100_000, engine_ids=("e" * 32,) * 5000)
    pairs = parse(format_text(long))
    assert len(pairs["request_id"]) == MAX_VALUE_CHARS
    assert len(pairs["engine_ids"]) == MAX_IDS_CHARS
    assert len(format_json(long)) < 2 * MAX_IDS_CHARS


def numbered(n: int) -> AccessRecord:
    record: AccessRecord = msgspec.structs.replace(BARE, request_id=f"r{n}")
    return record


def ids(data: bytes) -> list[str]:
    return [parse(line + b"\n").get("request_id", "-") for line in data.splitlines()]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)
    try:
        os.close(reader)
    except OSError:
        pass


def read_all(fd: int) -> bytes:
    """Read what is there now, without waiting."""
    os.set_blocking(fd, False)
    data = b""
    try:
        while piece := os.read(fd, 1 << 20):
            data += piece
    except BlockingIOError:
        pass
    return data


async def test_files_get_one_batch_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    writes: list[int] = []
    with path.open("wb") as file:
        log = AccessLog(file.fileno())
        real_write = os.write

        def counted(fd: int, data: bytes) -> int:
            writes.append(fd)
            return real_write(fd, data)

        monkeypatch.setattr(os, "write", counted)
        for n in range(5):
            log.write(numbered(n))
        assert path.read_bytes() == b""
        await asyncio.sleep(0)
        assert ids(path.read_bytes()) == ["r0", "r1", "r2", "r3", "r4"]
        log.write(numbered(5))
        await log.close()
        await log.close()
    assert ids(path.read_bytes())[-1] == "r5"
    assert len(writes) == 2
    assert log.dropped_total == 0


async def test_json_lines_in_a_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        log = AccessLog(file.fileno(), "json")
        log.write(RECORD)
        await log.close()
    assert json.loads((tmp_path / "log").read_bytes())["request_id"] == "req-1"


async def test_a_pipes_other_users_keep_their_blocking_writes(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = AccessLog(writer)
    log.write(numbered(0))
    await asyncio.sleep(0)
    assert os.get_blocking(writer)
    assert ids(read_all(reader)) == ["r0"]
    await log.close()


async def test_a_pipe_that_cannot_be_opened_anew(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        log = AccessLog(pipe[1])
    log.write(numbered(0))
    await log.close()
    assert ids(read_all(pipe[0])) == ["r0"]


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_a_slow_reader_costs_lines_that_are_counted_and_reported(pipe: tuple[int, int], log_format: str) -> None:
    reader, writer = pipe
    log = AccessLog(writer, log_format, max_queue_bytes=20_000)
    total = 2000
    for n in range(total):
        log.write(numbered(n))
        await asyncio.sleep(0)
    dropped = log.dropped_total
    assert 0 < dropped < total
    data = bytearray()
    async with asyncio.timeout(10):
        while b"access_log_dropped" not in data:
            data += read_all(reader)
            await asyncio.sleep(0)
    lines = bytes(data).splitlines()
    assert len(lines) == total - dropped + 1
    assert str(dropped).encode() in lines[-1]
    log.write(numbered(total))
    await log.close()
    assert read_all(reader).count(b"\n") == 1
    assert log.dropped_total == dropped


async def test_closing_waits_for_the_reader_within_its_bound(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = AccessLog(writer)
    for n in range(2000):
        log.write(numbered(n))
    await asyncio.sleep(0)
    data = bytearray()
    async with asyncio.TaskGroup() as group, asyncio.timeout(10):
        closing = group.create_task(log.close(timeout_s=10))
        while not closing.done():
            data += read_all(reader)
            await asyncio.sleep(0)
    data += read_all(reader)
    assert len(ids(bytes(data))) == 2000
    assert log.dropped_total == 0


async def test_closing_gives_up_on_a_reader_that_hangs(pipe: tuple[int, int]) -> None:
    log = AccessLog(pipe[1])
    for n in range(2000):
        log.write(numbered(n))
    await log.close(timeout_s=0.01)
    assert log.dropped_total > 0
    written = read_all(pipe[0]).count(b"\n")
    assert written + log.dropped_total == 2000


async def test_a_reader_that_is_gone_costs_lines_only(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = AccessLog(writer)
    os.close(reader)
    log.write(numbered(0))
    await asyncio.sleep(0)
    log.write(numbered(1))
    await asyncio.sleep(0)
    assert log.dropped_total == 2
    await log.close()
    log.write(numbered(2))
    assert log.dropped_total == 3


async def test_a_reader_that_goes_while_lines_wait(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = AccessLog(writer)
    for n in range(2000):
        log.write(numbered(n))
    await asyncio.sleep(0)
    os.close(reader)
    await log.close(timeout_s=5)
    assert log.dropped_total > 0


async def test_a_full_disk_loses_a_batch_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    path = tmp_path / "log"
    with path.open("wb") as file:
        log = AccessLog(file.fileno())
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            log.write(numbered(0))
            log.write(numbered(1))
            await asyncio.sleep(0)
            assert log.dropped_total == 2
            log.write(numbered(2))
            await asyncio.sleep(0)
            assert log.dropped_total == 3
        log.write(numbered(3))
        await log.close()
    assert ids(path.read_bytes()) == ["r3", "-"]
    assert b"access_log_dropped=3" in path.read_bytes()
    assert log.dropped_total == 3


async def test_sockets_are_written_without_blocking() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        log = AccessLog(ours.fileno(), max_queue_bytes=1000)
        while log.dropped_total == 0:
            log.write(numbered(0))
            await asyncio.sleep(0)
        assert ours.getblocking()
        await log.close(timeout_s=0.01)
        theirs.setblocking(False)
        assert theirs.recv(100).startswith(b"time=")

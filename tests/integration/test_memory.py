"""What an exchange holds does not grow with its answer. Bounds have wide margins; the answers are far above them."""

import asyncio
import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import Wire, request_bytes, wire

MB = 1_000_000
PIECE = b"-0.12345678," * 5_000
ANSWER_BYTES = 60 * MB
PIECES = ANSWER_BYTES // len(PIECE)
# Socket buffers of two hops, which the kernel grows to some megabytes each.
MAX_IN_FLIGHT_BYTES = 30 * MB
# Python objects of all three parties, which share this process.
MAX_PEAK_BYTES = 16 * MB


@contextmanager
def bounded_peak(limit_bytes: int) -> Iterator[None]:
    """Fail if more than that is allocated at any moment of the block."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak - before < limit_bytes, f"peak {(peak - before) / MB:.1f} MB"
    finally:
        tracemalloc.stop()


async def body_digest(connection: Wire) -> tuple[int, str]:
    """Length and digest of a chunked or sized body, which is not kept."""
    status, headers = await connection.head()
    assert status == 200
    digest, size = hashlib.sha256(), 0
    if headers.get("transfer-encoding") == "chunked":
        while chunk := await connection.chunk():
            digest.update(chunk)
            size += len(chunk)
    else:
        left = int(headers["content-length"])
        while left:
            async with asyncio.timeout(PATIENCE_S):
                part = await connection.reader.read(left)
            assert part
            digest.update(part)
            size += len(part)
            left -= len(part)
    return size, digest.hexdigest()


def parts(rid: bytes) -> Iterator[bytes]:
    """A unary answer with its id at both ends."""
    yield b'{"text":"","meta_info":{"id":"%b","output_top_logprobs_val_flat":[' % rid
    for _ in range(PIECES):
        yield PIECE
    yield b'0]},"again":"%b"}' % rid


def batch_parts(rids: list[bytes]) -> Iterator[bytes]:
    """A batch's answer; ids come at no particular place of a read."""
    yield b"["
    for number, rid in enumerate(rids):
        yield b"," if number else b""
        yield b'{"text":"","meta_info":{"id":"%b","output_top_logprobs_val_flat":[' % rid
        yield PIECE * (PIECES // len(rids)) + b"0]}}"
    yield b"]"


def digest_of(pieces: Iterator[bytes]) -> tuple[int, str]:
    """Length and digest of what the client is to get."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()


@pytest.mark.parametrize("public", ["mine", "some id of thirty-two characters"], ids=["shorter id", "as long an id"])
@pytest.mark.parametrize("is_sized", [True, False], ids=["sized", "chunked"])
async def test_flat_log_probabilities_pass_without_being_kept(
    front: RunningGateway, scripted: ScriptEngine, public: str, is_sized: bool
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        rid = request.rid.encode()
        if is_sized:
            await reply.head("Content-Type: application/json", f"Content-Length: {digest_of(parts(rid))[0]}")
        else:
            await reply.start_chunked(content_type="application/json")
        for piece in parts(rid):
            reply.writer.write(piece if is_sized else b"%x\r\n%b\r\n" % (len(piece), piece))
            await reply.writer.drain()
        if not is_sized:
            await reply.end_chunked()

    scripted.script = script
    ids = ",".join(str(100_000 + number % 900_000) for number in range(86_000))
    body = f'{{"input_ids":[{ids}],"rid":"{public}","return_logprob":true}}'.encode()
    assert len(body) > 600_000
    async with wire(front.address) as connection:
        with bounded_peak(MAX_PEAK_BYTES):
            await connection.send(request_bytes("/generate", body))
            found = await body_digest(connection)
    assert found == digest_of(parts(public.encode()))
    record = await front.record()
    assert (record.outcome, record.bytes_in, record.bytes_out) == ("complete", len(body), found[0])
    assert len(scripted.requests[0].body) > 600_000


async def test_ids_of_a_batch_are_replaced_on_the_way(front: RunningGateway, scripted: ScriptEngine) -> None:
    seen: list[list[bytes]] = []

    async def script(request: SeenRequest, reply: Reply) -> None:
        rids = [rid.encode() for rid in request.rids]
        seen.append(rids)
        await reply.start_chunked(content_type="application/json")
        for piece in batch_parts(rids):
            if piece:
                reply.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await reply.writer.drain()
        await reply.end_chunked()

    scripted.script = script
    texts = [f"t{number}" for number in range(64)]
    async with wire(front.address) as connection:
        with bounded_peak(MAX_PEAK_BYTES):
            await connection.send(request_bytes("/generate", {"text": texts, "rid": "mine"}))
            found = await body_digest(connection)
    assert len(set(seen[0])) == 64
    assert found == digest_of(batch_parts([f"mine_{number}".encode() for number in range(64)]))


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_slow_reader_slows_the_engine_down(
    front: RunningGateway, scripted: ScriptEngine, is_stream: bool
) -> None:
    stalled, written = asyncio.Event(), 0
    event = b'data: {"text":"' + PIECE + b'"}\n\n'

    async def script(request: SeenRequest, reply: Reply) -> None:
        nonlocal written
        await reply.start_chunked(content_type="text/event-stream" if is_stream else "application/json")
        for _ in range(PIECES):
            piece = event if is_stream else PIECE
            reply.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if not await reply.is_read(within_s=0.3 * TIME_SCALE):
                stalled.set()
                await reply.writer.drain()
            written += len(piece)
        if is_stream:
            await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    async with wire(front.address, receive_buffer_bytes=16_384) as connection:
        with bounded_peak(MAX_PEAK_BYTES):
            await connection.send(request_bytes("/generate", {"text": "a", "stream": is_stream}))
            async with asyncio.timeout(PATIENCE_S):
                await stalled.wait()
            assert written < MAX_IN_FLIGHT_BYTES
            found = await body_digest(connection)
    expected = [event] * PIECES + [b"data: [DONE]\n\n"] if is_stream else [PIECE] * PIECES
    assert found == digest_of(iter(expected))
    assert (await front.record()).outcome == "complete"

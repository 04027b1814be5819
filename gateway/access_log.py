"""One line per request on stdout, written without ever holding up the event loop or a request.

A reader that is slow or gone costs lines, never time: what does not fit into the queue is dropped,
counted, and reported in one later line. No thread, and no ``logging``, whose handlers block.
"""

import asyncio
import fcntl
import functools
import json
import os
import re
import socket
import stat
import time
from collections import deque
from typing import Final

import msgspec
import orjson

# A request id or a path may be as long as a header; a line need not.
MAX_VALUE_CHARS: Final = 512
# A batch is one request with an engine id for every item.
MAX_IDS_CHARS: Final = 8192
_BATCH_BYTES: Final = 64 * 1024
_PLAIN: Final = re.compile(r"[!#-<>-\[\]-~]+")


class AccessRecord(msgspec.Struct, frozen=True, gc=False):
    """What the access log says about one request. ``None`` is unknown or not applicable.

    Attributes:
        time: End of the request, seconds since the epoch.
        method: HTTP method.
        route: The route's pattern in the gateway's table.
        path: The path as sent, without the query.
        status: Status sent; 499 when the client left first.
        outcome: One of ``gateway.outcome.Outcome``.
        request_id: The public id.
        engine_ids: Ids that engines saw, one per attempt and leg.
        worker: Id of the worker that answered.
        dp_rank: Data-parallel rank chosen.
        prefill_worker: Id of the worker that has computed the prompt, where that was another one.
        prefill_dp_rank: Data-parallel rank chosen there.
        attempts: Attempts at workers.
        stream: Whether the client got a stream.
        model: Model asked for.
        prompt_tokens: As the engine reported.
        completion_tokens: As the engine reported.
        cached_tokens: As the engine reported.
        tokens_seen: Tokens that passed through before the end, counted from events; an estimate, and
            written as ``tokens_seen_estimate``.
        bytes_in: Length of the request's body.
        bytes_out: Bytes of the answer's body that were sent.
        duration_s: From the request's first byte to its end.
        first_byte_s: From the same moment to the answer's first byte.
        queue_s: Time spent waiting for a worker, if it had to.
        error: Message of the error sent to the client, or of what went wrong.
    """

    time: float
    method: str
    route: str
    path: str
    status: int
    outcome: str
    request_id: str | None = None
    engine_ids: tuple[str, ...] = ()
    worker: str | None = None
    dp_rank: int | None = None
    prefill_worker: str | None = None
    prefill_dp_rank: int | None = None
    attempts: int = 0
    stream: bool = False
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    tokens_seen: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    duration_s: float = 0.0
    first_byte_s: float | None = None
    queue_s: float | None = None
    error: str | None = None


def format_text(record: AccessRecord) -> bytes:
    """Return the record as ``key=value`` pairs and a newline; unknown values are left out.

    A value with anything but plain visible ASCII is a JSON string, so that no value can end the line,
    pass for another key, or steer a terminal.
    """
    # Written out: a loop over the fields takes four times as long, and this runs once a request.
    line = (
        f"time={_timestamp(record.time)} {_asked(record.method, record.route, record.path)}"
        f" status={record.status} outcome={record.outcome}"
    )
    if record.request_id is not None:
        line += f" request_id={_quoted(record.request_id)}"
    if record.engine_ids:
        line += f" engine_ids={_quoted(','.join(record.engine_ids), MAX_IDS_CHARS)}"
    if record.worker is not None:
        line += f" worker={_name(record.worker)}"
    if record.dp_rank is not None:
        line += f" dp_rank={record.dp_rank}"
    if record.prefill_worker is not None:
        rank = "" if record.prefill_dp_rank is None else f" prefill_dp_rank={record.prefill_dp_rank}"
        line += f" prefill_worker={_name(record.prefill_worker)}{rank}"
    line += f" attempts={record.attempts} stream={'true' if record.stream else 'false'}"
    if record.model is not None:
        line += f" model={_name(record.model)}"
    if record.prompt_tokens is not None:
        line += f" prompt_tokens={record.prompt_tokens}"
    if record.completion_tokens is not None:
        line += f" completion_tokens={record.completion_tokens}"
    if record.cached_tokens is not None:
        line += f" cached_tokens={record.cached_tokens}"
    if record.tokens_seen is not None:
        line += f" tokens_seen_estimate={record.tokens_seen}"
    line += f" bytes_in={record.bytes_in} bytes_out={record.bytes_out} duration_s={record.duration_s:.6f}"
    if record.first_byte_s is not None:
        line += f" first_byte_s={record.first_byte_s:.6f}"
    if record.queue_s is not None:
        line += f" queue_s={record.queue_s:.6f}"
    if record.error is not None:
        line += f" error={_quoted(record.error)}"
    return (line + "\n").encode()


def format_json(record: AccessRecord) -> bytes:
    """Return the record as one JSON object and a newline; unknown values are ``null``."""
    return _json_line(
        {
            "time": _timestamp(record.time),
            "method": _shortened(record.method),
            "route": record.route,
            "path": _shortened(record.path),
            "status": record.status,
            "outcome": record.outcome,
            "request_id": _shortened(record.request_id),
            "engine_ids": list(record.engine_ids[: MAX_IDS_CHARS // 32]),
            "worker": record.worker,
            "dp_rank": record.dp_rank,
            "prefill_worker": record.prefill_worker,
            "prefill_dp_rank": record.prefill_dp_rank,
            "attempts": record.attempts,
            "stream": record.stream,
            "model": _shortened(record.model),
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "tokens_seen_estimate": record.tokens_seen,
            "bytes_in": record.bytes_in,
            "bytes_out": record.bytes_out,
            "duration_s": round(record.duration_s, 6),
            "first_byte_s": None if record.first_byte_s is None else round(record.first_byte_s, 6),
            "queue_s": None if record.queue_s is None else round(record.queue_s, 6),
            "error": _shortened(record.error),
        }
    )


class AccessLog:
    """Writes access lines to a file descriptor from the event loop. Not thread-safe.

    Regular files and terminals are written directly, in one batch a loop turn. Pipes and sockets are
    written without blocking; while their reader is slow, lines wait in a queue of bounded size.

    Args:
        fd: Where lines go; duplicated, so that the caller's stays the caller's.
        log_format: ``text`` or ``json``.
        max_queue_bytes: Lines held for a slow reader; what exceeds it is dropped.
    """

    def __init__(self, fd: int = 1, log_format: str = "text", max_queue_bytes: int = 4 * 1024 * 1024) -> None:
        self.dropped_total = 0
        self._format = format_json if log_format == "json" else format_text
        self._is_json = log_format == "json"
        self._max_queue_bytes = max_queue_bytes
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._unsent = b""
        self._unreported = 0
        self._reporting = 0
        self._flush_handle: asyncio.Handle | None = None
        self._is_waiting = False
        self._is_dead = False
        self._drained: asyncio.Future[None] | None = None
        self._sink = _Sink(fd)

    def write(self, record: AccessRecord) -> None:
        """Queue one line; returns at once and never raises for what the sink does."""
        line = self._format(record)
        if self._is_dead or self._queued_bytes + len(line) > self._max_queue_bytes:
            self.dropped_total += 1
            self._unreported += 1
            return
        self._queue.append(line)
        self._queued_bytes += len(line)
        if self._flush_handle is None and not self._is_waiting:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    async def close(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, for at most ``timeout_s``, and let go of the sink. Idempotent.

        Lines that the sink did not take in time count as dropped.
        """
        if self._sink.is_closed:
            return
        try:
            if self._flush_handle is not None:
                self._flush_handle.cancel()
            self._flush()
            if self._is_waiting:
                self._drained = asyncio.get_running_loop().create_future()
                await asyncio.wait([self._drained], timeout=timeout_s)
        finally:
            self._stop_waiting()
            self._die()
            self._sink.close()

    def _flush(self) -> None:
        """Write until nothing is queued or the sink takes no more."""
        self._flush_handle = None
        while not self._is_dead:
            self._unsent = self._unsent or self._next_batch()
            if not self._unsent:
                self._stop_waiting()
                return
            try:
                written = self._sink.write(self._unsent)
            except BlockingIOError:
                self._start_waiting()
                return
            except ConnectionError:
                self._die()
            except OSError:
                # A full disk, say: what is held is lost, later lines may be written.
                self._drop_held()
                self._stop_waiting()
                return
            else:
                self._unsent = self._unsent[written:]
        self._stop_waiting()

    def _next_batch(self) -> bytes:
        lines: list[bytes] = []
        size = self._reporting = 0
        while self._queue and size < _BATCH_BYTES:
            line = self._queue.popleft()
            lines.append(line)
            size += len(line)
        self._queued_bytes -= size
        # After the lines that were queued before the drop.
        if self._unreported and not self._queue and not self._is_dead:
            lines.append(self._report())
            self._reporting, self._unreported = self._unreported, 0
        return b"".join(lines)

    def _report(self) -> bytes:
        if self._is_json:
            return _json_line({"time": _timestamp(time.time()), "access_log_dropped": self._unreported})
        return f"time={_timestamp(time.time())} access_log_dropped={self._unreported}\n".encode()

    def _start_waiting(self) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            asyncio.get_running_loop().add_writer(self._sink.fd, self._flush)

    def _stop_waiting(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            asyncio.get_running_loop().remove_writer(self._sink.fd)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _die(self) -> None:
        """Take no more lines; what is held counts as dropped."""
        self._is_dead = True
        self._drop_held()

    def _drop_held(self) -> None:
        # A report in the batch is no access line, and what it says is still to be said.
        lines = len(self._queue) + self._unsent.count(b"\n") - bool(self._unsent and self._reporting)
        self.dropped_total += lines
        self._unreported += lines + self._reporting
        self._queue.clear()
        self._queued_bytes = self._reporting = 0
        self._unsent = b""


class _Sink:
    """A duplicate of a descriptor whose writes do not block, where its kind has such a thing.

    The flag for non-blocking writes belongs to the open file, which stderr or a parent shell may
    share, so it is not set on what was handed in: a pipe is opened anew, a socket is told per call.
    """

    __slots__ = ("_socket", "fd", "is_closed")

    def __init__(self, fd: int) -> None:
        self.is_closed = False
        self._socket: socket.socket | None = None
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(fd))
            self.fd = self._socket.fileno()
        elif stat.S_ISFIFO(mode):
            self.fd = _reopen_pipe(fd)
        else:
            self.fd = os.dup(fd)

    def write(self, data: bytes) -> int:
        """Write some of ``data``; raises ``BlockingIOError`` when the sink takes nothing now."""
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        return os.write(self.fd, data)

    def close(self) -> None:
        self.is_closed = True
        if self._socket is not None:
            self._socket.close()
        else:
            os.close(self.fd)


def _reopen_pipe(fd: int) -> int:
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        # No /proc, or the pipe belongs to another user: the flag is set after all.
        copy = os.dup(fd)
        fcntl.fcntl(copy, fcntl.F_SETFL, fcntl.fcntl(copy, fcntl.F_GETFL) | os.O_NONBLOCK)
        return copy


def _shortened(value: str | None, limit: int = MAX_VALUE_CHARS) -> str | None:
    return value if value is None or len(value) <= limit else value[: limit - 1] + "…"


@functools.lru_cache(maxsize=1024)
def _name(text: str) -> str:
    """The same for what comes again and again: workers, models."""
    return _quoted(text)


@functools.lru_cache(maxsize=1024)
def _asked(method: str, route: str, path: str) -> str:
    return f"method={_quoted(method)} route={_quoted(route)} path={_quoted(path)}"


def _quoted(text: str, limit: int = MAX_VALUE_CHARS) -> str:
    if len(text) <= limit and ((text.isalnum() and text.isascii()) or _PLAIN.fullmatch(text)):
        return text
    return json.dumps(_shortened(text, limit)).replace("\x7f", "\\u007f")


def _json_line(values: dict[str, object]) -> bytes:
    try:
        return orjson.dumps(values) + b"\n"
    except TypeError:
        # A lone surrogate, which the standard encoder escapes.
        return json.dumps(values).encode() + b"\n"


@functools.lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


def _timestamp(seconds: float) -> str:
    millis = int(seconds * 1000)
    return f"{_second(millis // 1000)}.{millis % 1000:03d}Z"

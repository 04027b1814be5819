"""Load of event streams, as a process of its own: ``python -m benchmarks.sse_load``.

Connects all streams, then prints ``start 0`` and sends all requests; ``begin N`` when every stream has had its
first event, ``end N`` when the first one is complete, ``done N`` when all are; ``N`` is the number of events so
far. Between ``begin`` and ``end`` no stream is opened or closed, so that this window holds events and nothing else.
"""

import argparse
import asyncio
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from benchmarks.sse import StreamClient, Watch, request_bytes


class Wave:
    """Streams that start together.

    Args:
        streams: How many.
    """

    def __init__(self, streams: int) -> None:
        self._without_event = streams
        self._open = streams
        self._streams = streams
        self._events = 0
        self.over = asyncio.Event()

    def watch(self) -> Watch:
        """What the streams report to."""
        return Watch(self._came, self._first, self._done)

    def _came(self, events: int) -> None:
        self._events += events

    def _first(self) -> None:
        self._without_event -= 1
        if not self._without_event:
            _say(f"begin {self._events}")

    def _done(self, fault: str | None) -> None:
        if fault is not None:
            _say(f"wrong {fault}")
        if self._open == self._streams:
            _say(f"end {self._events}")
        self._open -= 1
        if not self._open:
            _say(f"done {self._events}")
            self.over.set()


def _say(line: str) -> None:
    print(line, flush=True)


def _same(client: StreamClient) -> StreamClient:
    return client


async def run_wave(port: int, request: bytes, streams: int, expected: int | None) -> None:
    """Run ``streams`` streams, each on a connection of its own, until all are over."""
    wave = Wave(streams)
    loop = asyncio.get_running_loop()
    clients = [StreamClient(request, expected, wave.watch()) for _ in range(streams)]
    for client in clients:
        await loop.create_connection(functools.partial(_same, client), "127.0.0.1", port)
    _say("start 0")
    for client in clients:
        client.begin()
    await wave.over.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one wave."""
    parser = argparse.ArgumentParser(prog="benchmarks.sse_load", description="Load of event streams.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--body", type=Path, required=True, help="file with the request's body")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--expected", type=int, default=0, help="events of each stream, 0 if not known")
    arguments = parser.parse_args(argv)
    request = request_bytes(arguments.path, arguments.body.read_bytes())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_wave(arguments.port, request, arguments.streams, arguments.expected or None))
    return 0


if __name__ == "__main__":
    sys.exit(main())

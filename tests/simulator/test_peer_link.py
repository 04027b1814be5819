"""The messages between engines: framing at every cut, failures, and what others send to the port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from simulator import peer_link
from simulator.peer_link import Link, Listener
from tests.simulator.wire import request_bytes, send

WIRE = b'{"a":1}\n{"b":"two"}\n'


class Ear:
    """Writes down what a link says."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.ends = 0
        self.links: list[Link] = []
        self._news = asyncio.Event()

    def take(self, link: Link) -> None:
        """Listen to ``link``."""
        self.links.append(link)
        link.on_message = self._hear
        link.on_closed = self._end
        self._news.set()

    async def until(self, *, messages: int = 0, ends: int = 0, links: int = 0) -> None:
        """Wait for so many of each."""
        async with asyncio.timeout(5):
            while len(self.messages) < messages or self.ends < ends or len(self.links) < links:
                self._news.clear()
                await self._news.wait()

    def _hear(self, message: Any) -> None:
        self.messages.append(message)
        self._news.set()

    def _end(self) -> None:
        self.ends += 1
        self._news.set()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    found = Listener(asyncio.get_running_loop(), "127.0.0.1", 0)
    yield found
    found.close()
    found.close()


def dial(port: int, host: str = "127.0.0.1") -> tuple[Link, Ear]:
    ear, link = Ear(), Link.dial(asyncio.get_running_loop(), host, port)
    ear.take(link)
    return link, ear


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "known-name", "unknown-name"])
async def test_dialling(listener: Listener, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, port: int) -> Any:
        return (socket.AF_INET, ("127.0.0.1", port)) if name == "known-name" else None

    monkeypatch.setattr(peer_link, "_resolve", resolve)
    theirs = Ear()
    listener.on_link = theirs.take
    link, ours = dial(listener.port, host)
    link.send({"hello": 1})
    if host == "unknown-name":
        await ours.until(ends=1)
        return
    await theirs.until(messages=1)
    theirs.links[0].send({"and": "you"})
    await ours.until(messages=1)
    assert (theirs.messages, ours.messages) == ([{"hello": 1}], [{"and": "you"}])
    link.close()
    link.close()
    await theirs.until(ends=1)
    assert (ours.ends, theirs.ends) == (0, 1)


@pytest.mark.parametrize("port", [1, 0, 65_536, -1])
async def test_nobody_listens(port: int) -> None:
    _, ear = dial(port)
    await ear.until(ends=1)
    assert not ear.links[0].is_connected


async def test_a_link_that_was_closed_while_connecting_says_nothing(listener: Listener) -> None:
    link, ear = dial(listener.port)
    link.close()
    link.send({"too": "late"})
    _, other = dial(1)
    await other.until(ends=1)
    assert (ear.ends, ear.messages) == (0, [])


@pytest.mark.parametrize("cut", range(len(WIRE) + 1))
async def test_messages_do_not_depend_on_packets(listener: Listener, cut: int) -> None:
    ear = Ear()
    listener.on_link = ear.take
    _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    writer.write(WIRE[:cut])
    await ear.until(messages=WIRE[:cut].count(b"\n"), links=1)
    writer.write(WIRE[cut:])
    await ear.until(messages=2)
    assert ear.messages == [{"a": 1}, {"b": "two"}]
    writer.close()
    await ear.until(ends=1)


@pytest.mark.parametrize("data", [b"nonsense\n", b"[1]\n", b"x" * (1 << 21)], ids=["text", "list", "endless"])
async def test_what_is_no_message_ends_the_link(listener: Listener, data: bytes) -> None:
    ear = Ear()
    listener.on_link = ear.take
    assert await send(listener.port, data) == b""
    await ear.until(ends=1)
    assert ear.messages == []


async def test_http_gets_one_answer(listener: Listener) -> None:
    def answer_http(link: Link) -> None:
        link.on_http = lambda line: b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(line) + line

    listener.on_link = answer_http
    answer = await send(listener.port, request_bytes("/health", method="GET"))
    assert answer.endswith(b"GET /health HTTP/1.1\r")


async def test_the_end_of_the_listener_is_the_end_of_its_links(listener: Listener) -> None:
    links = [dial(listener.port) for _ in range(3)]
    accepted = Ear()
    listener.on_link = accepted.take
    await accepted.until(links=3)
    listener.close()
    for _, ear in links:
        await ear.until(ends=1)
    assert accepted.ends == 0
    _, ear = dial(listener.port)
    await ear.until(ends=1)


async def test_a_taken_port(listener: Listener) -> None:
    with pytest.raises(OSError, match="in use"):
        Listener(asyncio.get_running_loop(), "127.0.0.1", listener.port)


async def test_more_than_the_socket_takes_at_once(listener: Listener) -> None:
    theirs = Ear()
    listener.on_link = theirs.take
    link, _ = dial(listener.port)
    await theirs.until(links=1)
    for number in range(20):
        link.send({"n": number, "x": "y" * 200_000})
    await theirs.until(messages=20)
    assert [message["n"] for message in theirs.messages] == list(range(20))
    link.close()

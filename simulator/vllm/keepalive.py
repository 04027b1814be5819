"""Comments that keep an idle stream alive (``--sse-keep-alive-interval``)."""

from __future__ import annotations

from simulator.exchange import Exchange
from simulator.faulting import EventWriter
from simulator.vllm.engine import VllmCore

COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """Writes a comment after every interval in which the stream had no event, until the exchange is over."""

    def __init__(self, core: VllmCore, exchange: Exchange, writer: EventWriter) -> None:
        self._core = core
        self._exchange = exchange
        self._writer = writer
        self._interval_s = core.options.sse_keepalive_interval_s
        self._events = exchange.entry.events
        core.timers.after(self._interval_s, self._look)

    def _look(self) -> None:
        exchange = self._exchange
        if exchange.is_over:
            return
        if exchange.entry.events == self._events and not self._writer.is_hanging and exchange.is_writable:
            exchange.send_comment(COMMENT)
        self._events = exchange.entry.events
        self._core.timers.after(self._interval_s, self._look)

"""Carries out scripted faults on real exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import orjson

from simulator.exchange import Exchange
from simulator.faults import Fault, FaultTable, RequestFacts
from simulator.timers import Timers

GARBAGE = b"\x00\xff\xfe{]garbage\r\n"
_PART = b"x" * 65536


def huge_text(size: int, prefix: bytes, suffix: bytes) -> Iterator[bytes]:
    """Yield ``size`` bytes, made of ``prefix``, filling and ``suffix``, without building them whole."""
    yield prefix
    rest = max(0, size - len(prefix) - len(suffix))
    while rest > 0:
        part = _PART[:rest]
        rest -= len(part)
        yield part
    yield suffix


def _noted(exchange: Exchange, fault: Fault | None) -> Fault | None:
    if fault is not None:
        exchange.entry.faults.append(fault.kind)
    return fault


class FaultRunner:
    """Applies the faults of ``table``; ``restart`` reboots the engine."""

    def __init__(self, table: FaultTable, timers: Timers, restart: Callable[[], None]) -> None:
        self.table = table
        self._timers = timers
        self._restart = restart

    def at_head(
        self,
        point: str,
        exchange: Exchange,
        facts: RequestFacts,
        proceed: Callable[[], None],
        on_ignore: Callable[[], None] | None = None,
    ) -> None:
        """Apply what is scripted before any answer byte, else ``proceed``."""
        fault = _noted(exchange, self.table.take(point, facts))
        if fault is None:
            proceed()
        elif fault.kind == "ignore" and on_ignore is not None:
            on_ignore()
        else:
            self._apply_at_head(fault, exchange, proceed)

    def _apply_at_head(self, fault: Fault, exchange: Exchange, proceed: Callable[[], None]) -> None:
        if fault.kind == "hang":
            return
        if fault.kind == "delay":
            self._timers.after(fault.number / 1000, lambda: None if exchange.is_over else proceed())
        elif fault.kind == "abort_finish":
            exchange.starts_aborted = True
            proceed()
        elif fault.kind == "status":
            body = fault.body
            if body is None:
                body = orjson.dumps({"error": {"message": f"scripted status {fault.number}"}})
            exchange.respond(fault.number, body)
        elif fault.kind == "garbage":
            exchange.write(GARBAGE)
            exchange.cut("fault", reset=False)
        elif fault.kind == "huge":
            head = f"content-length: {max(fault.number, 11)}\r\ncontent-type: application/json\r\n"
            exchange.head(200, head.encode())
            exchange.write_slowly(huge_text(fault.number, b'{"text":"', b'"}'))
            exchange.finish()
        else:
            self.break_connection(fault, exchange)

    def break_connection(self, fault: Fault, exchange: Exchange) -> None:
        """Apply ``reset``, ``close`` or ``restart``; the engine then treats the client as gone."""
        if fault.kind == "restart":
            self._restart()
            return
        client_left = exchange.on_disconnect
        exchange.cut("fault", reset=fault.kind == "reset")
        if client_left is not None:
            client_left()

    def answer_unary(self, exchange: Exchange, status: int, body: bytes, content_type: str | None) -> None:
        """Write a unary answer, broken where a fault says so."""
        facts = exchange.facts
        fault = None
        if facts is not None:
            fault = _noted(exchange, self.table.take("event", facts, 0) or self.table.take("end", facts))
        if fault is None:
            exchange.respond(status, body, content_type)
            return
        kept = len(body) // 2 if fault.point == "event" else len(body) - 1
        if fault.kind in ("status", "huge", "garbage", "abort_finish"):
            # Before the body there is no difference to the same fault at the head.
            self._apply_at_head(fault, exchange, lambda: exchange.respond(status, body, content_type))
            return
        head = f"content-length: {len(body)}\r\ncontent-type: {content_type}\r\nvary: Origin\r\n"
        exchange.head(status, head.encode() + exchange.tail)
        exchange.write(body[:kept])
        if fault.kind == "delay":

            def rest() -> None:
                if not exchange.is_over:
                    exchange.write(body[kept:])
                    exchange.finish()

            self._timers.after(fault.number / 1000, rest)
        elif fault.kind != "hang":
            self.break_connection(fault, exchange)


class EventWriter:
    """Writes the events of one stream; every event passes the scripted faults."""

    __slots__ = ("_exchange", "_faults", "_held", "_is_hanging", "_sent")

    def __init__(self, exchange: Exchange, faults: FaultRunner) -> None:
        self._exchange = exchange
        self._faults = faults if exchange.facts is not None else None
        self._held: list[tuple[bytes, bool]] | None = None
        self._is_hanging = False
        self._sent = 0

    @property
    def is_hanging(self) -> bool:
        """Whether a fault has silenced the stream for good."""
        return self._is_hanging

    def send(self, event: bytes) -> None:
        """Write one event."""
        if self._faults is None:
            self._exchange.send_event(event)
        elif self._held is not None:
            self._held.append((event, False))
        elif not self._is_stopped("event"):
            self._write(event)
        elif self._held is not None:
            self._held.append((event, False))

    def end(self, last: bytes | None) -> None:
        """Write the ``last`` event, usually ``[DONE]``, and end the stream."""
        if self._faults is not None:
            if self._held is not None:
                self._held.append((last or b"", True))
                return
            if self._is_stopped("event") or self._is_stopped("end"):
                if self._held is not None:
                    self._held.append((last or b"", True))
                return
        if last:
            self._exchange.send_event(last)
        self._exchange.finish_stream()

    def _write(self, event: bytes) -> None:
        self._sent += 1
        self._exchange.send_event(event)

    def _is_stopped(self, point: str) -> bool:
        """Apply the fault of this point; whether the event in hand must not be written (or was held)."""
        faults, exchange = self._faults, self._exchange
        if self._is_hanging or exchange.is_over:
            return True
        assert faults is not None
        assert exchange.facts is not None
        fault = _noted(exchange, faults.table.take(point, exchange.facts, self._sent if point == "event" else 0))
        if fault is None:
            return False
        if fault.kind == "hang":
            self._is_hanging = True
            return True
        if fault.kind == "delay":
            self._held = []
            faults._timers.after(fault.number / 1000, self._release)
            return True
        return self._is_stopped_by(fault)

    def _is_stopped_by(self, fault: Fault) -> bool:
        exchange = self._exchange
        if fault.kind == "abort_finish":
            if exchange.on_abort_finish is not None:
                exchange.on_abort_finish()
            return False
        if fault.kind == "garbage":
            exchange.send_event(b"data: " + GARBAGE + b"\n\n")
            return False
        if fault.kind == "huge":
            size = max(fault.number, 24)
            exchange.write(b"%x\r\n" % size)
            exchange.write_slowly(huge_text(size, b'data: {"text":"', b'"}\n\n'))
            exchange.write(b"\r\n")
            return False
        if fault.kind == "status":
            message = fault.body.decode() if fault.body is not None else f"scripted status {fault.number}"
            error = {"message": message, "type": "scripted", "code": fault.number}
            exchange.send_event(b"data: " + orjson.dumps({"error": error}) + b"\n\n")
            exchange.send_event(b"data: [DONE]\n\n")
            exchange.finish_stream()
            return True
        assert self._faults is not None
        self._faults.break_connection(fault, exchange)
        return True

    def _release(self) -> None:
        held, self._held = self._held, None
        for event, is_last in held or ():
            if self._exchange.is_over:
                return
            if is_last:
                self.end(event or None)
            else:
                self.send(event)

"""Blocks that a vLLM prefill engine keeps for decode: until they have been fetched, or their lease ends."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulator.core import Core
from simulator.faults import FaultTable
from simulator.handoff import take_transfer_fault
from simulator.log import TransferEntry
from simulator.peer_link import Link, Listener, Message
from simulator.sequence import Sequence
from simulator.vllm.transfer import kept_params

_WILDCARDS = ("0.0.0.0", "::", "")


@dataclass(slots=True, eq=False)
class _Pin:
    """One ended request whose blocks are kept."""

    sequence: Sequence
    block_ids: list[int]
    expires_s: float
    forget_lease: Callable[[], None]


class PinTable:
    """All kept blocks of one boot, and the port where decode engines ask for them."""

    def __init__(self, core: Core, listener: Listener, faults: FaultTable) -> None:
        self.expired_requests = 0
        self.late_notifications = 0
        self._core = core
        self._listener = listener
        self._faults = faults
        self._pins: dict[str, _Pin] = {}
        self._engine_id = str(uuid.uuid4())
        self._next_block = 0
        listener.on_link = self._take_link

    @property
    def blocks(self) -> int:
        """Blocks that are kept."""
        return sum(len(pin.block_ids) for pin in self._pins.values())

    def add(self, sequence: Sequence) -> None:
        """Keep the blocks of ``sequence`` and put into it what decode has to be sent."""
        lease, options, timers = sequence.lease, self._core.options, self._core.timers
        assert lease is not None
        ids = [self._fresh_block() for _ in range(len(lease.blocks) + lease.reserved_blocks)]
        lease_s = options.transfer_lease_s / options.speedup
        forget = timers.after(lease_s, lambda: self._expire(sequence.rid))
        self._pins[sequence.rid] = _Pin(sequence, ids, timers.now() + lease_s, forget)
        host = socket.gethostname() if options.host in _WILDCARDS else options.host
        engine_id = self._engine_id if options.dp_size == 1 else f"{self._engine_id}_dp{sequence.rank}"
        address, tokens = (host, self._listener.port), len(sequence.prompt)
        sequence.transfer_result = kept_params(sequence.rid, ids, engine_id, address, tokens, sequence.cached_tokens)
        self._note("pinned", sequence.rid, sequence)

    def release_all(self) -> None:
        """Give up everything."""
        for pin in self._pins.values():
            pin.forget_lease()
            self._core.release(pin.sequence)
        self._pins.clear()

    def describe(self) -> list[dict[str, Any]]:
        """Return what is kept, the oldest first."""
        now = self._core.timers.now()
        return [
            {
                "request_id": request_id,
                "dp_rank": pin.sequence.rank,
                "block_ids": pin.block_ids,
                "expires_in_s": pin.expires_s - now,
            }
            for request_id, pin in self._pins.items()
        ]

    def stop(self) -> None:
        """Close the port and forget everything."""
        self._listener.close()
        self._pins.clear()

    def _take_link(self, link: Link) -> None:
        link.on_message = lambda message: self._hear(link, message)

    def _hear(self, link: Link, message: Message) -> None:
        if "done" in message:
            if not self._release(str(message["done"]), "fetched"):
                self.late_notifications += 1
                self._note("late", str(message["done"]), None)
            return
        pin = self._pins.get(str(message.get("fetch")))
        fault = None if pin is None else take_transfer_fault(self._faults, pin.sequence)
        self._note("asked", str(message.get("fetch")), None if pin is None else pin.sequence)
        if fault is None:
            # The blocks' names are enough to read them: nobody looks whether they are still kept.
            link.send({"ready": True})
        elif fault.kind == "delay":
            self._core.timers.after(fault.number / 1000, lambda: link.send({"ready": True}))
        elif fault.kind == "fail":
            link.send({"failed": True})
        elif fault.kind == "drop":
            link.close()

    def _expire(self, request_id: str) -> None:
        if self._release(request_id, "expired"):
            self.expired_requests += 1

    def _release(self, request_id: str, event: str) -> bool:
        pin = self._pins.pop(request_id, None)
        if pin is None:
            return False
        pin.forget_lease()
        self._core.release(pin.sequence)
        self._note(event, request_id, pin.sequence)
        return True

    def _fresh_block(self) -> int:
        self._next_block = self._next_block % self._core.options.num_blocks + 1
        return self._next_block

    def _note(self, event: str, request_id: str, sequence: Sequence | None) -> None:
        rank, tokens = (None, 0) if sequence is None else (sequence.rank, len(sequence.prompt))
        core = self._core
        core.log.add_transfer(TransferEntry(core.timers.now(), event, request_id, request_id, rank, tokens))

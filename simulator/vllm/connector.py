"""The NIXL connector of a vLLM engine: fetches blocks from prefill, and keeps them for decode.

A fetch that has begun goes on when its request ends, so that prefill gets its blocks back; one that
has not is dropped, and prefill keeps them until the lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.core import Core
from simulator.faults import FaultTable
from simulator.handoff import take_transfer_fault
from simulator.log import TransferEntry
from simulator.peer_link import Link, Message
from simulator.sequence import ABORTED, Finish, FinishKind, Sequence
from simulator.vllm.pins import PinTable
from simulator.vllm.transfer import Fetch, Order, parse_transfer

_FAILED = Finish(FinishKind.ABORT, message="Internal server error", status_code=500)
_REFUSED = Finish(FinishKind.ABORT, message="kv_transfer_params is incomplete", status_code=400)
# Measured with 0.32.0: a request that names a dead prefill engine.
_LOST_PREFILL_S = 5.0


@dataclass(slots=True, eq=False)
class _Fetching:
    """One fetch; ``sequence`` is ``None`` once its request has ended, or when there never was one."""

    source: Fetch
    sequence: Sequence | None
    link: Link | None = None
    tells_prefill: bool = True


class Connector:
    """Transfers of one boot; ``pins`` only on prefill engines, ``die`` ends the engine."""

    def __init__(
        self,
        core: Core,
        faults: FaultTable,
        dial: Callable[[str, int], Link],
        pins: PinTable | None,
        die: Callable[[], None],
    ) -> None:
        self.pins = pins
        self._core = core
        self._faults = faults
        self._dial = dial
        self._die = die
        self._held: dict[int, Sequence] = {}
        self._fetches: set[_Fetching] = set()

    @property
    def pinned_blocks(self) -> int:
        """Blocks kept for decode."""
        return 0 if self.pins is None else self.pins.blocks

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for their blocks."""
        return bool(self._held)

    def rank_of(self, sequence: Sequence) -> int | None:
        """Leave the rank to the engine."""
        return None

    def holds(self, sequence: Sequence) -> bool:
        """Keep a request until its blocks are here."""
        transfer, core = sequence.transfer, self._core
        if transfer is None:
            return False
        if transfer is Order.KEEP:
            sequence.keeps_lease = self.pins is not None
            return False
        if not isinstance(transfer, Fetch) and not core.options.die_on_bad_input:
            core.end(sequence, _REFUSED)
            return True
        self._held[id(sequence)] = sequence
        if isinstance(transfer, Fetch):
            self._plan(_Fetching(transfer, sequence))
        elif transfer is Order.DIE:
            core.timers.after(0, self._die)
        return True

    def keeps(self, sequence: Sequence) -> bool:
        """Pin the blocks of a computed prompt; its caller hears of the end at once."""
        if sequence.keeps_lease and sequence.lease is not None and self.pins is not None:
            self.pins.add(sequence)
        return False

    def abort(self, matches: Callable[[Sequence], bool], finish: Finish | None = None) -> list[Sequence]:
        """End the waiting requests that match; their fetches go on if they have begun."""
        hit = [sequence for sequence in self._held.values() if matches(sequence)]
        for sequence in hit:
            del self._held[id(sequence)]
            for fetching in self._fetches:
                if fetching.sequence is sequence:
                    fetching.sequence = None
            self._core.end(sequence, finish or ABORTED)
            if sequence.transfer is Order.DIE_LATER and finish is ABORTED:
                self._core.timers.after(0, self._die)
        return hit

    def waiting(self, rank: int) -> int:
        """Return how many requests wait for their blocks."""
        return sum(sequence.rank == rank for sequence in self._held.values())

    def queues(self, rank: int) -> Mapping[str, int]:
        """Return nothing: these queues are SGLang's."""
        return {}

    def release_pins(self) -> None:
        """Give up all blocks kept for decode."""
        if self.pins is not None:
            self.pins.release_all()

    def release_remote(self, params: Any) -> None:
        """Tell prefill that a refused request will not fetch its blocks."""
        source = parse_transfer(params) if isinstance(params, dict) else None
        if isinstance(source, Fetch):
            self._begin(_Fetching(source, None))

    def describe(self) -> dict[str, Any]:
        """Return what is kept and what is being fetched."""
        fetches = [
            {
                "request_id": fetching.source.request_id,
                "rid": None if fetching.sequence is None else fetching.sequence.rid,
                "is_begun": fetching.link is not None,
            }
            for fetching in self._fetches
        ]
        pinned = [] if self.pins is None else self.pins.describe()
        role = self._core.options.role
        return {"role": role, "rooms": fetches, "pinned": pinned, "pinned_blocks": self.pinned_blocks}

    def stop(self) -> None:
        """Close all connections and forget everything."""
        for fetching in self._fetches:
            if fetching.link is not None:
                fetching.link.close()
        self._fetches.clear()
        self._held.clear()
        if self.pins is not None:
            self.pins.stop()

    # -- fetching --------------------------------------------------------------------------------

    def _plan(self, fetching: _Fetching) -> None:
        self._fetches.add(fetching)
        sequence, options = fetching.sequence, self._core.options
        assert sequence is not None
        delay_s = options.transfer_setup_ms / 1000 / options.speedup
        fault = take_transfer_fault(self._faults, sequence)
        if fault is not None and fault.kind == "hang":
            return
        if fault is not None and fault.kind == "fail":
            self._core.timers.after(0, lambda: self._fail(fetching))
            return
        if fault is not None and fault.kind == "delay":
            delay_s = fault.number / 1000
        fetching.tells_prefill = fault is None or fault.kind != "drop"
        self._core.timers.after(delay_s, lambda: self._begin(fetching))

    def _begin(self, fetching: _Fetching) -> None:
        if fetching.sequence is None and fetching in self._fetches:
            self._fetches.discard(fetching)  # its request ended before the first contact
            self._core.log.changed()
            return
        self._fetches.add(fetching)
        source = fetching.source
        link = fetching.link = self._dial(source.host, source.port)
        link.on_message = lambda message: self._hear(fetching, message)
        link.on_closed = lambda: self._lost(fetching)
        link.send({"fetch": source.request_id})

    def _hear(self, fetching: _Fetching, message: Message) -> None:
        if "failed" in message:
            self._fail(fetching)
            return
        sequence, options = fetching.sequence, self._core.options
        rate = options.transfer_tokens_per_s
        duration_s = len(sequence.prompt) / rate / options.speedup if sequence is not None and rate else 0.0
        self._core.timers.after(duration_s, lambda: self._arrived(fetching))

    def _arrived(self, fetching: _Fetching) -> None:
        link, sequence = fetching.link, fetching.sequence
        if fetching not in self._fetches or link is None:
            return
        if fetching.tells_prefill:
            link.send({"done": fetching.source.request_id})
        self._note("fetched", fetching)
        self._end(fetching)
        if sequence is not None:
            del self._held[id(sequence)]
            sequence.remote_cached_tokens = 0
            self._core.schedule(sequence)

    def _lost(self, fetching: _Fetching) -> None:
        fetching.link = None
        options = self._core.options
        limit_s = _LOST_PREFILL_S if options.lost_prefill_s is None else options.lost_prefill_s
        self._core.timers.after(limit_s / options.speedup, lambda: self._fail(fetching))

    def _fail(self, fetching: _Fetching) -> None:
        if fetching not in self._fetches:
            return
        self._note("failed", fetching)
        self._end(fetching)
        if fetching.sequence is not None:
            del self._held[id(fetching.sequence)]
            self._core.end(fetching.sequence, _FAILED)

    def _end(self, fetching: _Fetching) -> None:
        self._fetches.discard(fetching)
        if fetching.link is not None:
            fetching.link.close()

    def _note(self, event: str, fetching: _Fetching) -> None:
        core, sequence = self._core, fetching.sequence
        rid, rank, tokens = ("", None, 0) if sequence is None else (sequence.rid, sequence.rank, len(sequence.prompt))
        core.log.add_transfer(TransferEntry(core.timers.now(), event, rid, fetching.source.request_id, rank, tokens))

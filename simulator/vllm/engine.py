"""vLLM's engine: ids, aborts, disconnects, sleep and death, on top of the common core."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from simulator.core import Core, Generation
from simulator.kv_publisher import KvPublisher
from simulator.log import AbortEntry, EngineLog
from simulator.options import EngineOptions
from simulator.sequence import ABORTED, Finish, FinishKind, Sequence, SequenceState
from simulator.vllm.connector import Connector
from simulator.vllm.errors import ENGINE_DEAD

DEAD = Finish(FinishKind.ABORT, message=ENGINE_DEAD, status_code=500)


def fresh_id() -> str:
    """Return the 16 characters of an id that no client gave."""
    return os.urandom(8).hex()


class VllmCore(Core):
    """One boot of a vLLM engine.

    A sequence's ``rid`` is the engine's internal id, unique by its random end; its ``name`` is the
    id that aborts go by, shared by all samples of a prompt and by requests with the same id.
    """

    def __init__(
        self,
        options: EngineOptions,
        loop: asyncio.AbstractEventLoop,
        log: EngineLog,
        publisher: KvPublisher | None = None,
    ) -> None:
        super().__init__(options, loop, log, publisher)
        self.started_s = time.time()
        self.is_sleeping = False
        self.is_dying = False
        self.connector: Connector | None = None

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len({id(entry.generation) for entry in self._live.values()})

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return min(self.options.context_length, self.options.pool_tokens)

    def client_left(self, generation: Generation) -> None:
        """Stop the request at once, streamed or not."""
        own = set(map(id, generation.sequences))
        hit = self._abort_in_schedulers(lambda s: id(s) in own)
        for name in dict.fromkeys(sequence.name for sequence in generation.sequences):
            self._note_abort(name, "disconnect", [other for other in hit if other == name])
        self.log.changed()

    def stream_over(self, generation: Generation) -> None:
        """Do nothing: an id is forgotten with its request."""

    def abort(self, rid: str, *, abort_all: bool = False, source: str = "request") -> None:
        """Abort by name, exactly; ``hit`` in the log lists the names of what has ended."""
        hit = self._abort_in_schedulers(lambda s: abort_all or s.name == rid)
        self._note_abort(rid, source, hit, abort_all=abort_all)

    def release_remote(self, params: object) -> None:
        """Tell the prefill engine that ``params`` name to give up its blocks: the request was refused."""
        if self.connector is not None:
            self.connector.release_remote(params)

    def begin_death(self) -> float:
        """End everything with the error of a dead engine; returns how long the server lives on."""
        self.is_dying = True
        self._end(lambda s: True, DEAD)
        return self.options.death_grace_s

    def _note_abort(self, name: str, source: str, hit: list[str], *, abort_all: bool = False) -> None:
        self.aborts_accepted += bool(hit)
        self.log.add_abort(AbortEntry(self.timers.now(), source, name, abort_all, bool(hit), tuple(hit)))

    def _abort_in_schedulers(self, matches: Callable[[Sequence], bool]) -> list[str]:
        return self._end(matches, ABORTED)

    def _end(self, matches: Callable[[Sequence], bool], finish: Finish) -> list[str]:
        now = self.timers.now()
        ended: list[Sequence] = []
        for entry in [entry for entry in self._held if matches(entry.sequence)]:
            self._held.remove(entry)
            entry.sequence.end(finish)
            entry.sequence.state = SequenceState.FINISHED
            self._drivers[0].deliver_soon([entry.sequence])
            ended.append(entry.sequence)
        if self.handoff is not None:
            ended += self.handoff.abort(matches, finish)
        for driver in self._drivers:
            gone, _ = driver.scheduler.abort(matches, now, at_once=finish)
            driver.deliver_soon(gone)
            ended += gone
        return [sequence.name for sequence in ended]

"""From the runs of a request over a pair to its client: one stream, or one document."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from backends.errors import AnswerBroken, ConnectionDropped
from backends.pair_events import Fail, Finish
from backends.pair_types import Failure, Part
from backends.slices import run as run_slices
from backends.upstream.base import AnswerHead, Headers
from gateway.answer import Usage, Verdict, passed_headers, unary_verdict
from gateway.client_side import ClientSide
from gateway.flat_logprobs import flat_builder, wants_flat
from gateway.merge import merge
from gateway.merge_stream import StreamMerge
from gateway.outcome import Outcome
from gateway.pair_attempt import PairAttempt
from gateway.pair_failure import EndedByEngine, raised
from gateway.pair_run import PairRun
from gateway.prompt_logprobs import PromptLogprobs

_DONE = b"[DONE]"
# A stream that ends so, once it has begun, has been cut.
_BROKEN_OFF = (AnswerBroken, ConnectionDropped)


class _ClientSide(ClientSide, Protocol):
    """The same, where an engine names the rank that it ran on."""

    def with_rank(self, placed: PairAttempt, verdict: Verdict, data: bytes) -> Verdict:
        """The verdict with the rank that the engine says it ran on."""


async def forward_pair(client: _ClientSide, attempt: PairAttempt) -> Verdict:
    """Send the answer of an attempt to its client; see ``AnswerRelay.forward``.

    Raises:
        PairFailed: It failed; the client is still to be told, and has got nothing unless ``client.status`` is set.
        EngineRefused: The same, in the engine's own words.
        UpstreamError: The answers do not fit together.
        CallClosed: This side stopped it.
    """
    relay = _Relay(client, attempt)
    try:
        return await (relay.stream() if attempt.request.envelope.is_stream else relay.document())
    except BaseException:
        attempt.end()
        raise


class _Relay:
    """One answer on its way."""

    def __init__(self, client: _ClientSide, attempt: PairAttempt) -> None:
        self._client = client
        self._attempt = attempt
        self._route = attempt.request.route
        self._engine = attempt.prefill.facts.engine
        self._logprobs: dict[PairRun, PromptLogprobs] = {}

    def _told(self, run: PairRun) -> PromptLogprobs:
        """What puts the prompt's log-probabilities into this run's answer; prefill has ended when it is asked for."""
        if run not in self._logprobs:
            self._logprobs[run] = PromptLogprobs(self._route.dialect, self._engine, run.prompts)
        return self._logprobs[run]

    async def stream(self) -> Verdict:
        """Events as they come."""
        client, attempt = self._client, self._attempt
        envelope, runs = attempt.request.envelope, attempt.runs
        merged = None
        if len(runs) > 1:
            merged = StreamMerge(self._route.dialect, self._engine, batch_size=envelope.batch_size, count=len(runs))
        left = set(runs)
        while True:
            if client.status:
                client.silent_since = attempt.request.services.clock()
            turn = await attempt.turns.next(client.keepalive_s)
            if turn is None:
                await client.comment()
                continue
            run, output = turn
            if isinstance(output, Fail):
                return await self._failed_stream(run, output.failure)
            block = self._told(run).in_events(output.block) if run.keeps_logprobs else output.block
            if merged is not None:
                block = merged.feed(runs.index(run), block)
            client.events_seen += block.count(b"\n\n")
            assert run.head is not None
            if isinstance(output, Finish):
                left.discard(run)
            if not left and merged is not None:
                block += merged.end()
            if block or not left:
                await client.begin_stream(run.head)
            if not left:
                await client.finish(block)
                return self._verdict(block)
            if block:
                await client.write(block)

    def _verdict(self, last: bytes) -> Verdict:
        """How the stream ended; of several samples the first that did not end as it should counts."""
        verdicts = [run.verdict for run in self._attempt.runs if run.verdict is not None]
        verdict = next((one for one in verdicts if one.outcome is not Outcome.COMPLETE), verdicts[0])
        if len(verdicts) > 1:
            return msgspec.structs.replace(verdict, usage=_sum([one.usage for one in verdicts]))
        return self._client.with_rank(self._attempt, verdict, last)

    async def _failed_stream(self, run: PairRun, failure: Failure) -> Verdict:
        """An engine that ends its answer by itself has the last word, if no other sample goes on."""
        error = failure.error
        if not isinstance(error, EndedByEngine) or len(self._attempt.runs) > 1 or run.head is None:
            if self._client.status and failure.part is Part.DECODE and isinstance(error, _BROKEN_OFF):
                failure = replace(failure, outcome=str(Outcome.TRUNCATED))
            raise raised(failure)
        block = error.block
        if error.verdict.outcome is Outcome.ENGINE_ERROR and _DONE not in block:
            block += self._client.end_after_error
        await self._client.begin_stream(run.head)
        await self._client.finish(block)
        return error.verdict

    async def document(self) -> Verdict:
        """One document, once all samples have ended."""
        attempt, dialect = self._attempt, self._route.dialect
        bodies: dict[PairRun, bytes] = {}
        while len(bodies) < len(attempt.runs):
            turn = await attempt.turns.next(0.0)
            assert turn is not None
            run, output = turn
            if isinstance(output, Fail):
                return await self._failed_document(run, output.failure)
            if isinstance(output, Finish):
                bodies[run] = self._told(run).in_body(output.block) if run.keeps_logprobs else output.block
        first = attempt.runs[0]
        assert first.head is not None
        body = bodies[first]
        if len(bodies) > 1:
            in_order = [bodies[run] for run in attempt.runs]
            batch_size = attempt.request.envelope.batch_size
            body = merge(dialect, in_order, batch_size=batch_size, engine=self._engine)
        body = await self._built(body)
        await self._client.send_whole(200, _document_headers(first.head), body)
        return self._client.with_rank(attempt, unary_verdict(body, dialect), body)

    async def _failed_document(self, run: PairRun, failure: Failure) -> Verdict:
        error = failure.error
        if not isinstance(error, EndedByEngine) or len(self._attempt.runs) > 1 or run.head is None:
            raise raised(failure)
        is_whole = error.verdict.outcome is Outcome.ABORTED
        body = await self._built(error.block) if is_whole else error.block
        await self._client.send_whole(200, _document_headers(run.head), body)
        return error.verdict

    async def _built(self, body: bytes) -> bytes:
        """The answer with what the engine has not built itself."""
        asked = self._attempt.request.envelope.body
        if not wants_flat(self._route.dialect, asked):
            return body
        build = flat_builder(self._route.dialect, self._engine, asked)
        return body if build is None else await run_slices(build([body]))


def _sum(usages: Sequence[Usage]) -> Usage:
    """The usage of all samples: the prompt counts once."""
    told = [one.completion_tokens for one in usages if one.completion_tokens is not None]
    return msgspec.structs.replace(usages[0], completion_tokens=sum(told) if told else None)


def _document_headers(head: AnswerHead) -> Headers:
    headers = [one for one in passed_headers(head) if one[0] != b"content-type"]
    return [(b"content-type", b"application/json"), *headers]

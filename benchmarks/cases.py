"""The cases: what is sent, what is right, what is aimed at."""

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import streams, wrk
from benchmarks.processes import Children
from benchmarks.stage import MODEL, Stage, Target, open_stage
from benchmarks.stats import Comparison, Growth, Sample
from benchmarks.streams import StreamLoad
from benchmarks.wrk import Load

ROUNDS: Final = 8
STREAMS: Final = 64
LARGE_ANSWER_BYTES: Final = 20 * 1024 * 1024
TOKEN_IDS: Final = 100_000
# Answers of other sizes are wrong; they vary by a few digits of timestamps.
_SMALL_ANSWER: Final = (700, 1100)

Say = Callable[[str], None]
Measure = Callable[["Context"], Comparison | Growth]


@dataclass(frozen=True, slots=True)
class Context:
    """How a case is to be run.

    Attributes:
        is_quick: Shorter windows.
        say: Takes a line on how it gets on.
    """

    is_quick: bool
    say: Say

    def seconds(self, full: float) -> float:
        """Length of a window that takes ``full`` seconds when there is time."""
        return full / 3 if self.is_quick else full


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        name: Name for ``--only``.
        title: What the table calls it.
        item: What a figure is per: ``request``, ``event`` or ``answer``.
        aim: Highest ratio to haproxy that is aimed at; ``None`` if it is for information.
        run: Measures it.
    """

    name: str
    title: str
    item: str
    aim: float | None
    run: Measure


def _token_ids(count: int, seed: int = 7) -> list[int]:
    """Ids with five or six digits in JSON, comma included about six bytes each."""
    rng = random.Random(seed)
    return [rng.randrange(10_000, 150_000) for _ in range(count)]


def unary_body() -> bytes:
    """A native request of 1 KB whose answer has about the same length."""
    request = {"input_ids": _token_ids(100), "sampling_params": {"max_new_tokens": 1, "temperature": 0.7}}
    raw = json.dumps({**request, "session": ""}).encode()
    return json.dumps({**request, "session": "x" * (1024 - len(raw))}).encode()


def large_body() -> bytes:
    """A native request of about 600 KB of token ids."""
    ids = json.dumps(_token_ids(TOKEN_IDS), separators=(",", ":"))
    return f'{{"input_ids":{ids},"sampling_params":{{"max_new_tokens":1}}}}'.encode()


def stream_body(tokens: int) -> bytes:
    """A streamed chat request with ``tokens`` tokens to come."""
    messages = [{"role": "user", "content": "Tell me about mills and rivers."}]
    request = {"model": MODEL, "stream": True, "max_tokens": tokens, "ignore_eos": True, "messages": messages}
    return json.dumps(request).encode()


def take_turns(stage: Stage, measure: Callable[[Target], Sample], context: Context) -> Comparison:
    """Measure gateway, haproxy and engine in turn, several times."""
    samples: dict[str, list[Sample]] = {"gateway": [], "haproxy": [], "direct": []}
    for turn in range(ROUNDS):
        for target in (*stage.targets, stage.direct):
            sample = measure(target)
            samples[target.name].append(sample)
            cpu = "" if sample.cpu_s is None else f", {sample.cpu_us:.1f} us CPU each"
            context.say(f"  round {turn + 1} {target.name}: {sample.items} at {sample.per_s:.0f}/s{cpu}")
    return Comparison(samples["gateway"], samples["haproxy"], samples["direct"])


def _on_stage(
    run: Callable[[Stage, Context], Comparison | Growth], *engine_options: str, is_for_streams: bool = False
) -> Measure:
    """Run on a stage of its own, which is gone afterwards."""

    def staged(context: Context) -> Comparison | Growth:
        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as temp, Children(Path(temp)) as children:
            return run(open_stage(children, engine_options, is_for_streams=is_for_streams), context)

    return staged


def _unary(load: Load, seconds: float, fault: dict[str, object] | None = None) -> Measure:
    def run(stage: Stage, context: Context) -> Comparison:
        if fault is not None:
            stage.add_fault(fault)
        counts: dict[str, int] = {}

        def measure(target: Target) -> Sample:
            if target.name not in counts:
                trial = wrk.measure(stage.children, target, load, wrk.requests_for(0, 0, load))
                trial = wrk.measure(stage.children, target, load, wrk.requests_for(trial.per_s, 0.3, load))
                counts[target.name] = wrk.requests_for(trial.per_s, context.seconds(seconds), load)
            return wrk.measure(stage.children, target, load, counts[target.name])

        return take_turns(stage, measure, context)

    return _on_stage(run)


def _streamed(tokens: int, *engine_options: str, waves: int, is_whole_wave: bool) -> Measure:
    load = StreamLoad("/v1/chat/completions", stream_body(tokens), STREAMS, is_whole_wave)

    def run(stage: Stage, context: Context) -> Comparison:
        expected = streams.expected_events(stage.children, stage.direct, load)
        context.say(f"  {expected} events a stream")
        for target in stage.targets:
            streams.run_wave(stage.children, target, load, expected)

        def measure(target: Target) -> Sample:
            count = 1 if context.is_quick or target.pid is None else waves
            return streams.measure(stage.children, target, load, expected, count)

        return take_turns(stage, measure, context)

    return _on_stage(run, *engine_options, is_for_streams=True)


def _memory(stage: Stage, context: Context) -> Growth:
    requests = 20_000 if context.is_quick else 100_000
    load = Load("/generate", unary_body(), 32, *_SMALL_ANSWER)
    return wrk.measure_growth(stage.children, stage.gateway, load, requests, marks=8)


def _unary_case(connections: int) -> Case:
    load = Load("/generate", unary_body(), connections, *_SMALL_ANSWER)
    return Case(f"unary-{connections}", f"unary 1 KB, {connections} connections", "request", 6.0, _unary(load, 2.0))


def cases() -> Sequence[Case]:
    """All cases that compare with haproxy, and the one on memory, in the order in which they run."""
    large_in = Load("/generate", large_body(), 4, *_SMALL_ANSWER)
    large_out = Load("/generate", unary_body(), 2, LARGE_ANSWER_BYTES, LARGE_ANSWER_BYTES)
    huge: dict[str, object] = {"at": "headers", "do": f"huge:{LARGE_ANSWER_BYTES}", "times": None}
    # The engines would spend most of their core on parsing the ids; what they answer is not what is measured.
    short: dict[str, object] = {"at": "headers", "do": f"huge:{_SMALL_ANSWER[0]}", "times": None}
    paced = _streamed(102, "--inter-token-ms", "10", waves=3, is_whole_wave=False)
    flat_out = _streamed(1000, waves=1, is_whole_wave=True)
    return (
        *map(_unary_case, (1, 32, 256)),
        Case("sse-paced", f"SSE, {STREAMS} streams, 100 events at 10 ms", "event", 2.0, paced),
        Case("sse-flat", f"SSE, {STREAMS} streams, flat out", "event", None, flat_out),
        Case("large-in", "600 KB of token ids in", "request", 6.0, _unary(large_in, 2.0, short)),
        Case("large-out", "20 MB answer out", "answer", 1.5, _unary(large_out, 2.0, huge)),
        Case("memory", "memory over many requests", "request", None, _on_stage(_memory)),
    )

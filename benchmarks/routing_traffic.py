"""Traffic for ``benchmarks.routing_quality``: a recorded chat service, tool-using agents, groups of samples.

A prompt is made of pieces; equal pieces in equal order are an equal beginning. Nothing here depends on anything but its
arguments.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np

# Of the recorded traces: one id of a piece stands for so many tokens.
TRACE_PIECE_TOKENS: Final = 512
# Time in ms, tokens of prompt and answer, and the pieces of the prompt.
TraceRow = tuple[int, int, int, list[int]]
_VOCABULARY: Final = 50_000
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of tokens.

    Attributes:
        seed: Which; equal seeds begin with equal tokens.
        tokens: How many.
    """

    seed: int
    tokens: int


@dataclass(slots=True)
class Turn:
    """One request, and what its client sends next.

    Attributes:
        after_s: When it is sent: seconds after the turn before it was answered, or since the start.
        pieces: What it adds to the prompt and the answer of the turn before, if there is one.
        output_tokens: Length of its answer.
        session: Names the client's session, as a stickiness key does.
        then: The next turn, ``None`` for none.
    """

    after_s: float
    pieces: tuple[Piece, ...]
    output_tokens: int
    session: str
    then: "Turn | None" = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests for one run.

    Attributes:
        name: Short.
        turns: Those that wait for no other.
        about: The parameters, for the report.
    """

    name: str
    turns: Sequence[Turn]
    about: str

    @property
    def requests(self) -> int:
        """Number of requests, later turns included."""
        count = 0
        for turn in self.turns:
            last: Turn | None = turn
            while last is not None:
                count, last = count + 1, last.then
        return count


def token_ids(pieces: Sequence[Piece], grain: int = 1) -> list[int]:
    """Make the token ids of a prompt, each in [1000, 51000); one for each ``grain`` tokens of a piece."""
    parts = []
    for piece in pieces:
        numbers = np.arange(-(-piece.tokens // grain), dtype=np.uint64) + np.uint64(piece.seed % 2**40 << 20)
        mixed = numbers * _MIX
        mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
        parts.append((mixed >> np.uint64(33)) % np.uint64(_VOCABULARY) + np.uint64(1000))
    ids: list[int] = np.concatenate(parts).tolist() if parts else []
    return ids


def recorded(path: Path, *, requests: int, speedup: float, first: int = 0) -> Traffic:
    """Read a trace of a chat service: JSON lines, perhaps compressed.

    Each line has ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``, one for each 512 tokens of
    the prompt. Many requests share a timestamp, which the recording has rounded down: they are spread evenly until the
    next one. All prompts begin with one piece, the service's own; the second tells conversations apart. Answers of
    earlier turns are part of later prompts by the trace's ids, so they count as never seen before.

    Args:
        path: The file.
        requests: How many.
        speedup: Divides all distances in time.
        first: Number of the first one, which is sent at once.

    Raises:
        ValueError: A line is no such request.
    """
    rows = trace_rows(path, first, first + requests + 1)
    same: dict[int, list[TraceRow]] = {}
    for row in rows:
        same.setdefault(row[0], []).append(row)
    following = dict(pairwise(sorted(same)))
    begun = rows[0][0] if rows else 0
    turns = []
    for moment, group in sorted(same.items()):
        step = (following.get(moment, moment) - moment) / len(group)
        for number, (_, length, output, ids) in enumerate(group):
            full = [Piece(seed, TRACE_PIECE_TOKENS) for seed in ids[:-1]]
            last = Piece(ids[-1], length - TRACE_PIECE_TOKENS * len(full))
            session = f"conversation-{ids[1] if len(ids) > 1 else ids[0]}"
            turns.append(Turn((moment - begun + step * number) / 1000 / speedup, (*full, last), output, session))
    turns = turns[:requests]
    about = f"{len(turns)} recorded requests from number {first} on, {speedup:g} times as fast"
    return Traffic("conversations", turns, about)


def trace_rows(path: Path, first: int = 0, end: int | None = None) -> list[TraceRow]:
    """Read the requests of a trace from number ``first`` to before ``end``; see ``recorded``.

    Raises:
        ValueError: A line is no such request.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [_row(line) for line in islice(lines, first, end)]


def _row(line: str) -> TraceRow:
    try:
        row = json.loads(line)
        moment, length, ids = row["timestamp"], row["input_length"], row["hash_ids"]
        output = max(1, row["output_length"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"not a request of a trace: {line[:80]!r}") from exc
    if len(ids) != -(-length // TRACE_PIECE_TOKENS) or not ids:
        raise ValueError(f"{len(ids)} ids do not cover {length} tokens")
    return moment, length, output, ids


def tool_agents(
    rng: random.Random,
    *,
    sessions: int = 400,
    sessions_per_s: float = 1.6,
    kinds: int = 6,
    system_tokens: int = 4000,
    mean_turns: float = 8.0,
    tool_tokens: int = 900,
    answer_tokens: int = 120,
    tool_s: float = 3.0,
) -> Traffic:
    """Agents of a few kinds, each with its own long instructions, that call tools turn after turn.

    Args:
        rng: Draws everything.
        sessions: How many.
        sessions_per_s: Mean rate at which they begin, independently.
        kinds: Sets of instructions; the first is the most common.
        system_tokens: Length of the instructions.
        mean_turns: Of a session, at least 1, geometrically distributed.
        tool_tokens: Mean length of a task or of a tool's result, exponentially distributed.
        answer_tokens: Mean length of an answer, exponentially distributed.
        tool_s: Mean time of a tool, exponentially distributed.
    """
    seeds = _seeds(1 << 30)
    instructions = [Piece(next(seeds), system_tokens) for _ in range(kinds)]
    weights = [1 / (rank + 1) for rank in range(kinds)]
    begin_s = 0.0
    turns = []
    for number in range(sessions):
        begin_s += rng.expovariate(sessions_per_s)
        count = 1
        while rng.random() > 1 / mean_turns:
            count += 1
        following: Turn | None = None
        for index in reversed(range(count)):
            said = Piece(next(seeds), _length(rng, tool_tokens))
            pieces = (said,) if index else (*rng.choices(instructions, weights), said)
            after_s = rng.expovariate(1 / tool_s) if index else begin_s
            following = Turn(after_s, pieces, _length(rng, answer_tokens), f"agent-{number}", following)
        assert following is not None
        turns.append(following)
    about = (
        f"{sessions} sessions, {sessions_per_s:g}/s, {kinds} kinds with {system_tokens} tokens of instructions, "
        f"mean {mean_turns:g} turns, {tool_tokens} tokens and {tool_s:g} s a tool, answers of {answer_tokens}"
    )
    return Traffic("tool agents", turns, about)


def sample_groups(
    rng: random.Random,
    *,
    groups: int = 400,
    groups_per_s: float = 1.5,
    samples: int = 8,
    problem_tokens: int = 3000,
    system_tokens: int = 600,
    answer_tokens: int = 500,
    spread_s: float = 0.1,
) -> Traffic:
    """Problems for reinforcement learning: each is asked several times at once, as requests of their own.

    Args:
        rng: Draws everything.
        groups: Problems.
        groups_per_s: Mean rate at which they come, independently.
        samples: Requests of a group.
        problem_tokens: Mean length of a problem, exponentially distributed.
        system_tokens: What all prompts begin with.
        answer_tokens: Mean length of an answer, exponentially distributed.
        spread_s: Within which a group's requests come.
    """
    seeds = _seeds(1 << 31)
    system = Piece(next(seeds), system_tokens)
    begin_s = 0.0
    turns = []
    for number in range(groups):
        begin_s += rng.expovariate(groups_per_s)
        problem = Piece(next(seeds), _length(rng, problem_tokens))
        for sample in range(samples):
            after_s = begin_s + rng.random() * spread_s
            turns.append(Turn(after_s, (system, problem), _length(rng, answer_tokens), f"rollout-{number}-{sample}"))
    about = (
        f"{groups} groups of {samples}, {groups_per_s:g}/s, problems of {problem_tokens} tokens after {system_tokens}, "
        f"answers of {answer_tokens}, a group within {spread_s:g} s"
    )
    return Traffic("sample groups", turns, about)


def _length(rng: random.Random, mean: int) -> int:
    return 16 + int(rng.expovariate(1 / mean))


def _seeds(first: int) -> Iterator[int]:
    """Numbers that no trace uses."""
    while True:
        yield first
        first += 1

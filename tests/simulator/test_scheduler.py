"""Scheduler in simulated time: batching, prefill, queue, aborts, retraction."""

from __future__ import annotations

import pytest

from simulator.cache import PrefixCache
from simulator.scheduler import Limits, Scheduler
from simulator.sequence import FinishKind, Sequence, SequenceState, StopRule
from simulator.text import TokenSource, decode, encode


def make_scheduler(
    max_running: int = 4,
    max_queued: int = 0,
    rate: float = 0.0,
    step_s: float = 0.0,
    chunk: int = 1000,
    num_blocks: int = 64,
) -> Scheduler:
    return Scheduler(0, PrefixCache(num_blocks, 4), Limits(max_running, max_queued, chunk, rate, step_s))


def make_sequence(rid: str, prompt: int = 10, tokens: int = 3, *, stop: StopRule | None = None) -> Sequence:
    ids = encode(rid * prompt)[:prompt]
    sequence = Sequence(rid, ids, tokens, TokenSource(0, ids, None, 0), None, is_streamed=True)
    if stop is not None:
        sequence.stop = stop
    return sequence


def run(scheduler: Scheduler, now: float = 0.0) -> float:
    """Run until idle; returns the simulated time that passed."""
    while (duration := scheduler.begin(now)) is not None:
        now += duration
        scheduler.finish(now)
    return now


def test_time_is_prefill_plus_one_step_per_further_token() -> None:
    scheduler = make_scheduler(rate=100, step_s=0.5)
    sequence = make_sequence("a", prompt=10, tokens=3)
    scheduler.add(sequence, 0.0)
    assert run(scheduler) == pytest.approx(10 / 100 + 2 * 0.5)
    assert sequence.finish is not None
    assert sequence.finish.kind is FinishKind.LENGTH
    assert len(sequence.output) == 3


def test_cached_prefix_costs_nothing() -> None:
    scheduler = make_scheduler(rate=10)
    first, second = make_sequence("a", prompt=9, tokens=1), make_sequence("a", prompt=9, tokens=1)
    scheduler.add(first, 0.0)
    assert run(scheduler) == pytest.approx(0.9)
    scheduler.add(second, 1.0)
    assert run(scheduler, 1.0) == pytest.approx(1.1)
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_output_is_cached_but_for_its_last_token() -> None:
    scheduler = make_scheduler()
    first = make_sequence("a", prompt=4, tokens=5)
    scheduler.add(first, 0.0)
    run(scheduler)
    assert scheduler.cache.overlap_blocks(first.tokens) == 2
    assert scheduler.cache.busy_blocks == 0


def test_long_prompts_are_prefilled_in_chunks_beside_decoding() -> None:
    scheduler = make_scheduler(rate=10, chunk=5, step_s=0.1)
    short, long = make_sequence("a", prompt=5, tokens=10), make_sequence("b", prompt=12, tokens=1)
    scheduler.add(short, 0.0)
    assert scheduler.begin(0.0) == pytest.approx(0.5)
    scheduler.finish(0.5)
    scheduler.add(long, 0.5)
    lengths = []
    now = 0.5
    while long.finish is None:
        now += scheduler.begin(now) or 0.0
        scheduler.finish(now)
        lengths.append(len(short.output))
    assert lengths == [2, 3, 4]


def test_running_and_queue_limits() -> None:
    scheduler = make_scheduler(max_running=1, max_queued=1)
    sequences = [make_sequence(name) for name in "abc"]
    assert [scheduler.add(sequence, 0.0) for sequence in sequences] == [True, True, False]
    assert (scheduler.running, scheduler.waiting) == (1, 1)
    refused = sequences[2].finish
    assert refused is not None
    assert (refused.status_code, refused.is_short) == (503, True)
    run(scheduler)
    assert [s.state for s in sequences] == [SequenceState.FINISHED] * 3
    assert len(sequences[1].output) == 3


def test_no_room_in_the_pool_means_waiting() -> None:
    scheduler = make_scheduler(num_blocks=6)
    first, second = make_sequence("a", prompt=8, tokens=8), make_sequence("b", prompt=8, tokens=8)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    assert (scheduler.running, scheduler.waiting) == (1, 1)
    run(scheduler)
    assert len(second.output) == 8


def test_abort_of_waiting_is_at_once_and_of_running_takes_one_step() -> None:
    scheduler = make_scheduler(max_running=1)
    first, second = make_sequence("a", tokens=50), make_sequence("b")
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    scheduler.begin(0.0)
    scheduler.finish(0.0)
    ended, marked = scheduler.abort(lambda s: True, 1.0)
    assert (ended, marked) == ([second], [first])
    assert second.finish is not None
    assert second.finish.message == "Abort in waiting queue"
    assert first.finish is None
    scheduler.begin(1.0)
    assert scheduler.finish(1.0) == [first]
    assert first.finish is not None
    assert (first.finish.message, len(first.output)) == ("Aborted", 2)
    assert not scheduler.running
    assert not scheduler.cache.busy_blocks


def test_pause_and_retract() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", tokens=5)
    scheduler.add(sequence, 0.0)
    scheduler.begin(0.0)
    scheduler.is_paused = True
    scheduler.retract_all(0.0)
    assert scheduler.finish(0.0) == []
    assert scheduler.begin(0.0) is None
    assert (scheduler.running, scheduler.waiting, sequence.retractions) == (0, 1, 1)
    assert scheduler.cache.busy_blocks == 0
    scheduler.is_paused = False
    run(scheduler)
    assert len(sequence.output) == 5


def test_begin_twice_is_an_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a"), 0.0)
    scheduler.begin(0.0)
    with pytest.raises(RuntimeError):
        scheduler.begin(0.0)


def test_no_tokens_wanted() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", tokens=0)
    scheduler.add(sequence, 0.0)
    run(scheduler)
    assert (sequence.output, sequence.text) == ([], "")


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_stops(keeps: bool, by_token: bool) -> None:
    scheduler = make_scheduler()
    for name in "abcdefghij":
        plain = make_sequence(name, tokens=20)
        scheduler.add(plain, 0.0)
        run(scheduler)
        if plain.text.isascii():
            break
    # A character that has not come before.
    place = next(i for i in range(3, 20) if plain.output[i] not in plain.output[:i])
    token = plain.output[place]
    stop = StopRule(() if by_token else (decode((token,)),), frozenset((token,) if by_token else ()), 0, keeps)
    stopped = make_sequence(plain.rid, tokens=20, stop=stop)
    scheduler.add(stopped, 0.0)
    run(scheduler)
    assert stopped.finish is not None
    assert stopped.finish.kind is FinishKind.STOP
    assert stopped.output == plain.output[: place + 1]
    assert stopped.text == plain.text[: place + keeps]
    late = make_sequence(plain.rid, tokens=20, stop=StopRule(stop.strings, stop.token_ids, 20, keeps))
    scheduler.add(late, 0.0)
    run(scheduler)
    assert len(late.output) == 20


def test_answers_follow_from_their_inputs() -> None:
    def answer(*arguments: object) -> list[int]:
        seed, prompt, sampling_seed, sample = arguments
        source = TokenSource(seed, prompt, sampling_seed, sample)  # type: ignore[arg-type]
        return [source.token(position) for position in range(100)]

    base = answer(0, [1, 2], None, 0)
    assert answer(0, [1, 2], None, 0) == base
    for other in ((1, [1, 2], None, 0), (0, [1, 3], None, 0), (0, [1, 2], 7, 0), (0, [1, 2], None, 1)):
        assert answer(*other) != base


def test_text_round_trip() -> None:
    for text in ("", "abc", "héllo", "漢字 🙂"):
        assert decode(encode(text)) == text

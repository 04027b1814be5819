"""Token counts in answers, and their sums over the items of a native stream."""

import pytest

from gateway.answer import StreamAnswer
from gateway.ids import BatchIds, ChildIds, IdMap, SingleId
from gateway.usage import ItemEnds, Usage, usage_of

ENGINE = ["0" * 24 + f"{number:08x}" for number in range(3)]
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("texts", "usage"),
    [
        pytest.param([b'{"prompt_tokens":6,"completion_tokens":3,"cached_tokens":4}'], Usage(6, 3, 4), id="all"),
        pytest.param([b'{"completion_tokens":3}'], Usage(None, 3, None), id="some"),
        pytest.param([b"{}"], Usage(), id="none"),
        pytest.param([], Usage(), id="nothing"),
        pytest.param([b'{"prompt_tokens":1}', b'{"prompt_tokens":2},{"prompt_tokens":4}'], Usage(7), id="items"),
        pytest.param([b'{"image_tokens":9,"details":{"cached_tokens":2}}'], Usage(None, None, 2), id="other"),
        pytest.param([b'{"text":"\\"prompt_tokens\\":9"}'], Usage(), id="in a text"),
        pytest.param([b'{"prompt_tokens":null,"cached_tokens":"x"}'], Usage(), id="no numbers"),
        pytest.param([b'{"prompt_tokens":' + b"9" * 5000], Usage(10**18 - 1), id="absurd"),
    ],
)  # fmt: skip
def test_usage(texts: list[bytes], usage: Usage) -> None:
    assert usage_of(texts) == usage


def event(item: int, counts: str, reason: str = "null", engine_id: str = "") -> bytes:
    """An event of a native batch; generated text may look like anything."""
    text = r"{\"finish_reason\":{\"prompt_tokens\":9,\"index\":7"
    meta = f'{{"id":"{engine_id or ENGINE[item]}","finish_reason":{reason},{counts}}}'
    return f'data: {{"text":"{text}","output_ids":[1],"meta_info":{meta},"index":{item}}}\n\n'.encode()


LENGTH = '{"type":"length","length":2}'
SOME = '"prompt_tokens":5,"completion_tokens":1,"cached_tokens":0'
FIRST = '"prompt_tokens":5,"completion_tokens":2,"cached_tokens":4'
SECOND = '"prompt_tokens":7,"completion_tokens":30'


@pytest.mark.parametrize(
    ("wire", "usage"),
    [
        pytest.param([event(0, FIRST, LENGTH), event(1, SECOND, LENGTH)], Usage(12, 32, 4), id="one after the other"),
        pytest.param([event(1, SECOND, LENGTH), event(0, SOME), event(0, FIRST, LENGTH)], Usage(12, 32, 4), id="mixed"),
        pytest.param([event(0, FIRST, LENGTH), event(1, SOME)], Usage(5, 2, 4), id="one has not ended"),
        pytest.param([event(0, SOME), event(1, SOME)], Usage(5, 1, 0), id="none has: the last event's"),
        pytest.param([event(0, FIRST, LENGTH), event(0, FIRST, LENGTH)], Usage(5, 2, 4), id="an end told twice"),
        pytest.param([event(0, '"e2e":1', LENGTH), event(1, SECOND, LENGTH)], Usage(7, 30, None), id="an end without"),
    ],
)
@pytest.mark.parametrize("ids", [BatchIds(ENGINE, ["a", "b", "c"], "r"), None], ids=["batch", "samples"])
def test_a_native_stream_of_several_items_has_their_sums(wire: list[bytes], usage: Usage, ids: IdMap | None) -> None:
    whole = b"".join(wire) + DONE
    for step in (1, 7, 64, len(whole)):
        answer = StreamAnswer(ids or ChildIds("r", has_one_id=False), 1 << 20)
        for at in range(0, len(whole), step):
            answer.feed(whole[at : at + step])
        assert answer.verdict(was_aborted=False).usage == usage, step


def test_sums_of_an_openai_stream_are_the_engines() -> None:
    end = b'data: {"id":"x","choices":[{"index":%d,"text":"","finish_reason":"length"}],"usage":null}\n\n'
    usage = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":8}}\n\n'
    answer = StreamAnswer(BatchIds(ENGINE, ["a", "b", "c"], "r"), 1 << 20)
    answer.feed(end % 0 + end % 1 + usage + DONE)
    assert answer.verdict(was_aborted=False).usage == Usage(5, 8)


def test_a_single_stream_has_its_last_events() -> None:
    answer = StreamAnswer(SingleId(ENGINE[0], "r"), 1 << 20)
    answer.feed(event(0, SOME) + event(0, FIRST, LENGTH) + DONE)
    assert answer.verdict(was_aborted=False).usage == Usage(5, 2, 4)


def test_only_the_end_of_a_long_event_is_looked_at() -> None:
    ends = ItemEnds(200)
    assert ends.usage is None
    ends.see(event(0, '"prompt_tokens":9,"x":"' + "y" * 300 + '","completion_tokens":3', LENGTH))
    assert ends.usage == Usage(None, 3)

"""Engine ids out, public ids in: at any cut, in captured answers and in made-up ones."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.sse import EventCutter
from backends.types import EngineIds
from gateway.answer import BodyAnswer
from gateway.ids import BatchIds, ChildIds, IdMap, SingleId, id_map, json_inner
from tests.fakes.replay_engine import captured_answer
from tests.simulator.wire import load_capture

# Ends with what it begins with, as one in 16 does.
ENGINE = "0a1b2c3d4e5f60718293a4b5c6d7e8f0"
OTHER = "fedcba9876543210" * 2
ITEMS = [f"{ENGINE[:24]}{index:08x}" for index in range(12)]
NAMED = [f"{ENGINE}_{index}" for index in range(12)]


def body_of(name: str) -> bytes:
    """The body of a captured answer."""
    answer = captured_answer(load_capture(name))
    assert answer is not None
    return answer.body


def through_body(ids: IdMap, pieces: list[bytes]) -> bytes:
    """A body's way through the gateway in these pieces."""
    answer = BodyAnswer(ids)
    out = [answer.feed(piece) for piece in pieces]
    return b"".join([*out, answer.end()])


def through_stream(ids: IdMap, pieces: list[bytes]) -> bytes:
    """A stream's way through the gateway in these pieces."""
    cutter = EventCutter(1 << 30)
    return b"".join(ids.apply(block) for piece in pieces if (block := cutter.feed(piece)))


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """``data`` in pieces."""
    bounds = [0, *sorted(min(one, len(data)) for one in at), len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds)]


@pytest.mark.parametrize(
    ("text", "inner"),
    [("a", b"a"), ('"', b'\\"'), ("\\", b"\\\\"), ("é", "é".encode()), ("\n", b"\\n"), ("", b"")],
)
def test_json_inner(text: str, inner: bytes) -> None:
    assert json_inner(text) == inner
    assert json.loads(b'"%b"' % inner) == text


@pytest.mark.parametrize(
    ("ids", "before", "after"),
    [
        pytest.param(SingleId(ENGINE, "mine"), f'{{"id":"{ENGINE}"}}', '{"id":"mine"}', id="single"),
        pytest.param(SingleId(ENGINE, 'a"é'), f'{{"id":"{ENGINE}"}}', '{"id":"a\\"é"}', id="single, odd id"),
        pytest.param(SingleId(ENGINE, "mine"), f'["{ENGINE}_0","{OTHER}"]', f'["mine_0","{OTHER}"]', id="suffix stays"),
        pytest.param(BatchIds(ITEMS, [f"p{n}" for n in range(12)], "p"), f'["{ITEMS[1]}","{ITEMS[11]}"]',
                     '["p1","p11"]', id="batch"),
        pytest.param(BatchIds(ITEMS[:2], ["a", "b"], "p"), f'["{ITEMS[1]}_0","{ITEMS[5]}"]', f'["b_0","{ITEMS[5]}"]',
                     id="batch, suffix and stranger"),
        pytest.param(BatchIds(NAMED, [f"p_{n}" for n in range(12)], "p"), f'["{NAMED[1]}","{NAMED[11]}","{ENGINE}"]',
                     '["p_1","p_11","p"]', id="named items and their base"),
        pytest.param(BatchIds(NAMED[:2], ["x", "y"], "p"), f'["{NAMED[1]}","{NAMED[7]}"]', '["y","p_7"]',
                     id="an item that was not asked for"),
        pytest.param(BatchIds(ITEMS[:1], ["only"], "p"), f'"{ITEMS[0]}"', '"only"', id="batch of one"),
        pytest.param(BatchIds(ITEMS, [str(n) for n in range(12)], "p"), f'"{OTHER}"', f'"{OTHER}"', id="nothing to do"),
    ],
)  # fmt: skip
def test_rewriting(ids: IdMap, before: str, after: str) -> None:
    assert ids.apply(before.encode()) == after.encode()
    assert ids.apply(b"") == b""


@pytest.mark.parametrize(
    ("ids", "keeps"),
    [
        (SingleId(ENGINE, OTHER), True),
        (SingleId(ENGINE, "é" * 16), True),
        (SingleId(ENGINE, "short"), False),
        (BatchIds(ITEMS[:2], [OTHER, ENGINE], "p"), True),
        (BatchIds(ITEMS[:2], [OTHER, "b"], "p"), False),
        (ChildIds(OTHER, has_one_id=True), False),
    ],
)
def test_whether_the_length_stays(ids: IdMap, keeps: bool) -> None:
    assert ids.keeps_length is keeps


@pytest.mark.parametrize(
    ("ids", "items", "kind"),
    [
        (EngineIds((ENGINE,), ()), ["p"], SingleId),
        (EngineIds((ENGINE,), ()), ["p_0", "p_1"], SingleId),
        (EngineIds((ENGINE,), (), has_children=True), ["p"], ChildIds),
        (EngineIds(tuple(ITEMS), (), names_items=True), ITEMS, BatchIds),
        (EngineIds(tuple(ITEMS[:1]), (), names_items=True), ["p_0"], SingleId),
        (EngineIds(tuple(NAMED[:1]), (), names_items=True), ["p_0"], BatchIds),
    ],
)
def test_the_map_for_a_leg(ids: EngineIds, items: list[str], kind: type) -> None:
    assert type(id_map(ids, "p", items, has_one_id=False)) is kind


def test_as_many_public_ids_as_engine_ids() -> None:
    with pytest.raises(ValueError, match="zip"):
        BatchIds(ITEMS, ["a"], "p")


# Samples under ids of the engine's own.


def ids_in(body: bytes) -> list[str]:
    """Ids where a native answer holds them, in order."""
    return [item["meta_info"]["id"] for item in json.loads(body)]


def test_samples_of_a_unary_native_answer_are_numbered_in_order() -> None:
    rewritten = ChildIds("p", has_one_id=False).apply(body_of("http/gen_n2"))
    assert ids_in(rewritten) == ["p_0", "p_1"]
    assert ids_in(ChildIds("p", has_one_id=False).apply(body_of("http/gen_batch2_n2"))) == ["p_0", "p_1", "p_2", "p_3"]


@pytest.mark.parametrize("name", ["http/comp_n2", "http/chat_n2"])
def test_a_unary_openai_answer_has_one_id(name: str) -> None:
    assert json.loads(ChildIds("p", has_one_id=True).apply(body_of(name)))["id"] == "p"


@pytest.mark.parametrize("name", ["http/gen_stream_n2", "http_dp2/incr_stream_n2"])
def test_samples_of_a_native_stream_follow_their_index(name: str) -> None:
    out = through_stream(ChildIds("p", has_one_id=False), [body_of(name)])
    events = [json.loads(line[6:]) for line in out.split(b"\n\n") if line.startswith(b"data: {")]
    assert {(event["index"], event["meta_info"]["id"]) for event in events} == {(0, "p_0"), (1, "p_1")}


def test_samples_of_a_chat_stream_keep_the_id_of_their_first_chunk() -> None:
    out = through_stream(ChildIds("p", has_one_id=False), [body_of("http/chat_n2_stream")])
    events = [json.loads(line[6:]) for line in out.split(b"\n\n") if line.startswith(b"data: {")]
    begun = {event["choices"][0]["index"]: event["id"] for event in events[:2]}
    assert begun == {0: "p_0", 1: "p_1"}
    assert {event["id"] for event in events} == {"p_0", "p_1"}


def test_children_leave_no_engine_id() -> None:
    for name in ("http/gen_n2", "http/gen_stream_n2", "http/chat_n2_stream"):
        body = body_of(name)
        out = ChildIds("p", has_one_id=False).apply(body)
        for event in [*json.loads(body)] if body.startswith(b"[") else []:
            assert event["meta_info"]["id"].encode() not in out
        assert b'"id":"p_' in out


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(b'{"object":1,"x":{"id":"%b"}}' % OTHER.encode(), id="an id elsewhere"),
        pytest.param(b'{"id":"short"}', id="an id of another form"),
        pytest.param(
            b'{"text":"\\"meta_info\\":{\\"id\\":\\"%b\\"}"}' % OTHER.encode(), id="a text that looks like it"
        ),
        pytest.param(b": ping\n\ndata: [DONE]\n\n", id="events without ids"),
    ],
)
def test_what_is_no_childs_id_stays(before: bytes) -> None:
    assert ChildIds("p", has_one_id=False).apply(before) == before


def test_a_stream_of_events_without_an_index_counts() -> None:
    ids = ChildIds("p", has_one_id=False)
    block = b'data: {"id":"%b","x":1}\n\ndata: {"id":"%b"}\n\n' % (OTHER.encode(), ENGINE.encode())
    assert ids.apply(block) == b'data: {"id":"p_0","x":1}\n\ndata: {"id":"p_1"}\n\n'
    assert ids.apply(b'event: e\ndata: {"id":"%b"}\n\n' % OTHER.encode()).endswith(OTHER.encode() + b'"}\n\n')


# At any cut.

Make = Callable[[], IdMap]
SINGLE_BODY = f'{{"id":"{ENGINE}","t":"{ENGINE[:20]} {ENGINE}","u":"{ENGINE}{ENGINE[:31]}"}}'.encode()
BATCH_BODY = json.dumps([{"id": one, "t": ENGINE[:23]} for one in (*ITEMS, OTHER)]).encode()
NAMED_BODY = json.dumps({"id": NAMED[0], "c": [NAMED[11], NAMED[1] + "_0", ENGINE, ENGINE[:24]]}).encode()
Case = tuple[Make, bytes]
BODIES: dict[str, Case] = {
    "single": (lambda: SingleId(ENGINE, "mine"), SINGLE_BODY),
    "batch": (lambda: BatchIds(ITEMS, [f"p{n}" for n in range(12)], "p"), BATCH_BODY),
    "named items": (lambda: BatchIds(NAMED, [f"p_{n}" for n in range(12)], "p"), NAMED_BODY),
    "native samples": (lambda: ChildIds("p", has_one_id=False), body_of("http/gen_n2")),
    "completion samples": (lambda: ChildIds("p", has_one_id=True), body_of("http/comp_n2")),
    "a short body": (lambda: ChildIds("p", has_one_id=True), b'{"id":"%b"}' % OTHER.encode()),
    "a shorter one": (lambda: ChildIds("p", has_one_id=True), b"{}"),
    "an object's id that is not the answer's": (
        lambda: ChildIds("p", has_one_id=False),
        b'[0,{"id":"%b"},' % OTHER.encode() + b'{"x":1}' * 20 + b"]",
    ),
}


@pytest.mark.parametrize(("make", "body"), BODIES.values(), ids=BODIES)
def test_rewriting_a_body_does_not_depend_on_cuts(make: Make, body: bytes) -> None:
    whole = make().apply(body)
    for at in range(len(body) + 1):
        assert through_body(make(), [body[:at], body[at:]]) == whole, at
    assert through_body(make(), [body[at : at + 1] for at in range(len(body))]) == whole


@given(st.sampled_from(sorted(BODIES)), st.lists(st.integers(0, 2000), max_size=12))
@example("native samples", [0, 0, 1, 65, 66, 200])
def test_rewriting_over_arbitrary_cuts_equals_rewriting_the_whole(name: str, at: list[int]) -> None:
    make, body = BODIES[name]
    assert through_body(make(), cut(body, at)) == make().apply(body)


STREAMS = [
    pytest.param(
        lambda: SingleId(ENGINE, "mine"), b'data: {"id":"%b"}\n\ndata: [DONE]\n\n' % ENGINE.encode(), id="single"
    ),
    pytest.param(lambda: ChildIds("p", has_one_id=False), body_of("http/gen_stream_n2"), id="native samples"),
    pytest.param(lambda: ChildIds("p", has_one_id=False), body_of("http/chat_n2_stream"), id="chat samples"),
    pytest.param(
        lambda: ChildIds("p", has_one_id=False), b": ping\n\n" + body_of("http/gen_stream_n2"), id="comment first"
    ),
]


@pytest.mark.parametrize(("make", "body"), STREAMS)
def test_a2_16_rewriting_a_stream_does_not_depend_on_cuts(make: Make, body: bytes) -> None:
    whole = through_stream(make(), [body])
    assert whole != body
    for at in range(0, len(body) + 1, 1 if len(body) < 200 else 3):
        assert through_stream(make(), [body[:at], body[at:]]) == whole, at


@given(st.text('abc"\\é\n0123456789abcdef_', min_size=1, max_size=40))
def test_any_public_id_comes_out_as_json(public: str) -> None:
    whole = SingleId(ENGINE, public).apply(b'{"meta_info":{"id":"%b"}}' % ENGINE.encode())
    assert json.loads(whole) == {"meta_info": {"id": public}}
    assert through_body(SingleId(ENGINE, public), cut(b'"%b"' % ENGINE.encode(), [7, 20])) == b'"%b"' % json_inner(
        public
    )


def test_a_blank_line_too_many_hides_no_child() -> None:
    ids = ChildIds("p", has_one_id=False)
    first, second = b"a" * 32, b"b" * 32
    assert ids.apply(b'data: {"id":"%b","choices":[{"index":0}]}\n\n' % first).startswith(b'data: {"id":"p_0"')
    later = ids.apply(b'\ndata: {"id":"%b","choices":[{"index":1}]}\n\n' % second)
    assert later.startswith(b'\ndata: {"id":"p_1"')

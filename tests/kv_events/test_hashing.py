import json
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_events.hashing import (
    block_hashes,
    chained_hashes,
    local_hashes,
    namespace_seed,
    pack_tokens,
    parse_ids,
    parse_plain_ids,
    sequence_hashes,
)
from kv_events.types import BASE, Namespace

TWELVE = pack_tokens(range(1, 13))
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
NAMESPACES = st.builds(
    Namespace, lora_name=st.none() | st.text(min_size=1), salt=st.none() | st.text(min_size=1), lora_id=st.none()
)


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("namespace", "seed", "local", "sequence"),
    [
        pytest.param(
            Namespace(),
            1337,
            "cb38e4d7fb2dca5c e8d3ec39b907b74c 06b748f1777d599c",
            "cb38e4d7fb2dca5c 44a2b2379d6d3c3d aea1e67a6c80cf84",
            id="plain",
        ),
        pytest.param(
            Namespace(lora_name="adapter-a"),
            8842669519798868182,
            "9df1b8814fdc3b69 4f13c12805361fe9 9799522907da1e6b",
            "9df1b8814fdc3b69 f31e7562c1c2b4e5 b270b48a1e4b8a59",
            id="lora",
        ),
        pytest.param(
            Namespace(salt="tenant-a"),
            1948188790972764086,
            "4fa3e8097233e995 9b7651d1fc728ccb 81509804cf942908",
            "4fa3e8097233e995 0eef8d1bc8240aff c5c73138b80a0d4c",
            id="salt",
        ),
        pytest.param(
            Namespace(lora_name="adapter-a", salt="tenant-a"),
            10790858310771630931,
            "8a5492a027cc43fa edf15862ddcdc19b 15d7328febccb4b5",
            "8a5492a027cc43fa 728b57f2da5783d3 587ee83dae90ac5a",
            id="both",
        ),
    ],
)
def test_a8_1_hashes_equal_those_of_other_routers(namespace: Namespace, seed: int, local: str, sequence: str) -> None:
    assert namespace_seed(namespace) == seed
    assert local_hashes(TWELVE, 4, seed) == numbers(local)
    assert sequence_hashes(numbers(local)) == numbers(sequence)
    assert block_hashes(TWELVE, 4, namespace) == numbers(sequence)


def test_blocks_of_pairs_cover_one_token_more() -> None:
    two = numbers("1a92ffa9004c0851 1ac55a72d61806e3")
    assert local_hashes(TWELVE, 4, 1337, is_eagle=True) == two
    assert local_hashes(pack_tokens(range(1, 14)), 4, 1337, is_eagle=True) == [*two, 0x7173BC24EAF6C994]


def test_media_are_sorted_behind_the_tokens() -> None:
    with_media = numbers("a00558c71cd26273 e8d3ec39b907b74c 06b748f1777d599c")
    assert local_hashes(TWELVE, 4, 1337, mm_hashes=[[5, 3]]) == with_media
    assert local_hashes(memoryview(TWELVE), 4, 1337, mm_hashes=[[3, 5], [], [], [9], [9]]) == with_media


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(BASE, Namespace(lora_id=0), id="the number 0 is an adapter"),
        pytest.param(Namespace(lora_id=7), Namespace(lora_id=8), id="two numbers"),
        pytest.param(Namespace(lora_id=7), Namespace(lora_name="7"), id="number and name"),
        pytest.param(Namespace(lora_id=7), Namespace(lora_name="lora_id:7"), id="number and a name that looks like it"),
        pytest.param(Namespace(lora_name="x"), Namespace(salt="x"), id="name and salt"),
    ],
)
def test_namespaces_are_apart(left: Namespace, right: Namespace) -> None:
    assert namespace_seed(left) != namespace_seed(right)
    assert not {*block_hashes(TWELVE, 4, left)} & {*block_hashes(TWELVE, 4, right)}


def test_a_name_stands_before_a_number_and_nothing_is_nothing() -> None:
    assert namespace_seed(Namespace(lora_name="a", lora_id=7)) == namespace_seed(Namespace(lora_name="a"))
    assert namespace_seed(Namespace(lora_name="", salt="")) == namespace_seed(BASE) == 1337


def test_an_opaque_namespace_is_never_matched() -> None:
    assert namespace_seed(Namespace(salt="s", opaque="?")) is None
    assert block_hashes(TWELVE, 4, Namespace(opaque="?")) == []


@settings(deadline=None)
@given(tokens=IDS, block_size=st.integers(1, 9), is_eagle=st.booleans(), namespace=NAMESPACES)
def test_hashes_follow_their_definition(
    tokens: list[int], block_size: int, is_eagle: bool, namespace: Namespace
) -> None:
    seed = namespace_seed(namespace)
    assert seed is not None
    count = max(len(tokens) - is_eagle, 0) // block_size
    expected: list[int] = []
    for index in range(count):
        block = tokens[index * block_size : (index + 1) * block_size + is_eagle]
        local = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(block)}I", *block), seed)
        chained = struct.pack("<QQ", expected[-1], local) if expected else b""
        expected.append(xxhash.xxh3_64_intdigest(chained, 1337) if expected else local)
    assert block_hashes(tokens, block_size, namespace, is_eagle=is_eagle) == expected
    cut = count // 2
    local_all = local_hashes(pack_tokens(tokens), block_size, seed, is_eagle)
    head = sequence_hashes(local_all[:cut])
    assert head + sequence_hashes(local_all[cut:], head[-1] if head else None) == expected


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_tokens(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        local_hashes(TWELVE, block_size, 1337)


def test_bytes_are_whole_tokens() -> None:
    with pytest.raises(ValueError, match="whole number"):
        local_hashes(TWELVE[:-1], 4, 1337)


@settings(deadline=None)
@given(tokens=IDS)
def test_ids_pack_the_same_from_everything(tokens: list[int]) -> None:
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    forms: list[Callable[[], bytes]] = [
        lambda: pack_tokens(tokens),
        lambda: pack_tokens(np.array(tokens, dtype=np.int64)),
        lambda: pack_tokens(np.array(tokens, dtype=np.uint32)),
        lambda: parse_ids(json.dumps(tokens).encode()),
        lambda: parse_ids(json.dumps(tokens, separators=(",", ":")).encode()),
        lambda: parse_ids(json.dumps(tokens, indent=1).encode()),
    ]
    assert [form() for form in forms] == [packed] * len(forms)


def test_ids_pack_little_endian_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_events.hashing._IS_LITTLE_ENDIAN", False)
    assert pack_tokens([1]) == b"\x00\x00\x00\x01"


BAD_TOKENS: list[Sequence[int]] = [[-1], [2**32], [1.5], ["1"], [None], [(1, 2)]]  # type: ignore[list-item]


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=repr)
def test_other_values_are_no_ids(tokens: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be"):
        pack_tokens(tokens)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(np.array([-1]), id="negative"),
        pytest.param(np.array([2**32]), id="too large"),
        pytest.param(np.array([1.0]), id="floats"),
        pytest.param(np.array([[1, 2]]), id="not flat"),
        pytest.param(np.array([True]), id="booleans"),
    ],
)
def test_other_arrays_are_no_ids(tokens: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
    with pytest.raises(ValueError, match="flat array"):
        pack_tokens(tokens)


@pytest.mark.parametrize(
    ("raw", "ids"),
    [
        pytest.param(b"[]", [], id="empty"),
        pytest.param(b"[ ]", [], id="empty with a space"),
        pytest.param(b"[0]", [0], id="zero"),
        pytest.param(b"[0, 0,0]", [0, 0, 0], id="zeros"),
        pytest.param(b"[ 1 , 20 ,4294967295 ]", [1, 20, 2**32 - 1], id="spaces"),
        pytest.param(b"\n[1,\t2\r\n]\n", [1, 2], id="other whitespace"),
    ],
)
def test_lists_of_ids_are_read(raw: bytes, ids: list[int]) -> None:
    assert parse_ids(raw) == pack_tokens(ids)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"1", b"[", b"]", b"[1", b"1]", b"[ ,]", b"[,]", b"[-1]", b"[1, -1]", b"[1.0]", b"[1, 1.0]", b"[1e3]",
        b"[1, 2e0]", b"[4294967296]", b"[1, 4294967296]", b"[18446744073709551617]", b"[99999999999999999999999]",
        b"[null]", b"[1, null]", b"[true]", b'["1"]', b'[1, "2"]', b"[[1]]", b"[[1],[2]]", b"[1, [2]]", b"{}", b"null",
    ],
)  # fmt: skip
def test_everything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_ids(raw)


@pytest.mark.parametrize("separator", [",", ", ", " ,"])
def test_long_lists_are_read(separator: str) -> None:
    words = [str(index * 40_009 % 128_000) for index in range(40_000)]
    raw = f"[{separator.join(words)}]".encode()
    assert parse_ids(raw) == pack_tokens([int(word) for word in words])
    for wrong in ("4294967296", "-1", "1.5", "null"):
        with pytest.raises(ValueError, match=r"."):
            parse_ids(f"[{separator.join([*words[:-1], wrong])}]".encode())


@given(ids=st.lists(st.integers(0, 999_999_999), min_size=1), separator=st.sampled_from([",", ", "]))
def test_plain_lists_are_read_the_same_way(ids: list[int], separator: str) -> None:
    raw = f"[{separator.join(map(str, ids))}]".encode()
    assert parse_plain_ids(raw) == parse_ids(raw)


@settings(deadline=None)
@given(raw=st.text(alphabet="[]0123456789,-. \n", max_size=12).map(str.encode))
def test_of_what_is_json_exactly_lists_of_ids_are_read(raw: bytes) -> None:
    try:
        value = json.loads(raw)
    except ValueError:
        return
    try:
        expected = struct.pack(f"<{len(value)}I", *value)
    except (TypeError, struct.error):
        with pytest.raises(ValueError, match=r"."):
            parse_ids(raw)
    else:
        assert parse_ids(raw) == expected


def outcome(call: Callable[[], list[int]]) -> list[int] | str:
    try:
        return call()
    except ValueError as error:
        return str(error)


@given(
    token_bytes=st.binary(max_size=200) | IDS.map(pack_tokens),
    block_size=st.integers(-2, 20) | st.sampled_from([2**31, 2**62, 2**64]),
    seed=st.integers(0, 2**64 - 1),
    parent=st.none() | st.integers(0, 2**64 - 1),
    is_eagle=st.booleans(),
    mm_hashes=st.none() | st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=2), max_size=4),
)
def test_hashing_in_one_pass_is_hashing_in_two(
    token_bytes: bytes,
    block_size: int,
    seed: int,
    parent: int | None,
    is_eagle: bool,
    mm_hashes: list[list[int]] | None,
) -> None:
    def in_two() -> list[int]:
        return sequence_hashes(local_hashes(token_bytes, block_size, seed, is_eagle, mm_hashes), parent)

    expected = outcome(in_two)
    assert outcome(lambda: chained_hashes(token_bytes, block_size, seed, parent, is_eagle, mm_hashes)) == expected
    view = memoryview(token_bytes)
    assert outcome(lambda: chained_hashes(view, block_size, seed, parent, is_eagle, mm_hashes)) == expected

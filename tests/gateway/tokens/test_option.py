"""The value of ``--tokenizer``."""

from pathlib import Path

import pytest

from gateway.tokens.option import parse_tokenizer_option, parse_tokenizer_options


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("m=dir", ("m", Path("dir")), id="plain"),
        pytest.param("org/m:a=/x/y=z", ("org/m:a", Path("/x/y=z")), id="equals sign in the directory"),
        pytest.param(" m = d ", ("m", Path("d")), id="spaces"),
    ],
)
def test_model_and_directory(value: str, expected: tuple[str, Path]) -> None:
    assert parse_tokenizer_option(value) == expected


@pytest.mark.parametrize("value", ["", "m", "m=", "=d", " = ", "m= "])
def test_what_is_missing_is_told(value: str) -> None:
    with pytest.raises(ValueError, match=r"is not MODEL=DIR: .*tokenizer\.json"):
        parse_tokenizer_option(value)


def test_all_values() -> None:
    assert parse_tokenizer_options(["a=x", "b=x"]) == {"a": Path("x"), "b": Path("x")}
    with pytest.raises(ValueError, match="'a' has two tokenizers, x and y: leave one out"):
        parse_tokenizer_options(["a=x", "a=y"])

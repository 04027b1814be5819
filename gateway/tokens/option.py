"""The value of ``--tokenizer``. Pure."""

from collections.abc import Iterable
from pathlib import Path


def parse_tokenizer_option(value: str) -> tuple[str, Path]:
    """Take ``MODEL=DIR`` apart; what stands after the first ``=`` is the directory.

    Raises:
        ValueError: One side is missing; the message says how it is written.
    """
    model, separator, directory = (part.strip() for part in value.partition("="))
    if not separator or not model or not directory:
        raise ValueError(
            f"{value!r} is not MODEL=DIR: the name under which the model is served, '=', "
            "and the directory that holds its tokenizer.json"
        )
    return model, Path(directory)


def parse_tokenizer_options(values: Iterable[str]) -> dict[str, Path]:
    """Directory by model, for all values of the option.

    Raises:
        ValueError: One cannot be read, or a model is named twice.
    """
    found: dict[str, Path] = {}
    for value in values:
        model, directory = parse_tokenizer_option(value)
        if model in found:
            raise ValueError(f"the model {model!r} has two tokenizers, {found[model]} and {directory}: leave one out")
        found[model] = directory
    return found

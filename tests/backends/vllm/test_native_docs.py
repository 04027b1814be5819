"""What the document says of the native route on vLLM is what the code does."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from backends.vllm.native_fields import SAMPLING_FIELDS, TOP_FIELDS, Fate, NativeField
from backends.vllm.native_wanted import MAX_TOKEN_IDS
from tests.backends.vllm.native_table import rows

TEXT = (Path(__file__).parents[3] / "docs" / "rl.md").read_text("utf-8")
TABLES = pytest.mark.parametrize("fields", [TOP_FIELDS, SAMPLING_FIELDS], ids=["top level", "sampling"])


@TABLES
def test_the_table_is_the_codes(fields: Mapping[str, NativeField]) -> None:
    assert "\n".join(["", *rows(fields), ""]) in TEXT


@TABLES
def test_every_line_is_whole(fields: Mapping[str, NativeField]) -> None:
    for name, field in fields.items():
        assert name == field.name
        assert bool(field.target) is (field.fate is Fate.SENT)
        assert field.note or field.fate is Fate.SENT
        assert "|" not in field.note


def test_the_bound_of_chosen_ids_is_the_codes() -> None:
    assert f"{MAX_TOKEN_IDS} at most" in TOP_FIELDS["token_ids_logprob"].note

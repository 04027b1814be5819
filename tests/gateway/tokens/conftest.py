"""Fixtures of the tests of token ids."""

from collections.abc import Iterator

import pytest

from gateway.tokens.service import PromptTokenizers
from tests.conftest import TIME_SCALE
from tests.gateway.tokens.tiny import DIRECTORIES


@pytest.fixture
def tokenizers() -> Iterator[PromptTokenizers]:
    """The tokenizers of both recorded engines, without a time limit that a slow machine would notice."""
    found = PromptTokenizers.load(DIRECTORIES)
    patient = PromptTokenizers(found.tokenizers.values(), time_limit_s=20 * TIME_SCALE)
    yield patient
    patient.close()

"""Byte-level tokenizer, deterministic output tokens and log-probabilities of the simulated model.

Pure: everything follows from the arguments.
"""

from __future__ import annotations

import codecs
import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

EOS_TOKEN = 2
BYTE_OFFSET = 3
_FIRST_UNNAMED = BYTE_OFFSET + 256

# Letters are repeated so that answers look a little like words; only bytes below 128 are here,
# two-byte characters are put in on purpose so that text lags tokens as with a real tokenizer.
_ALPHABET = b"etaoinshrdlu etaoin shrdlu cmfwyp vbgkqjxz, etaoin. shrdlu 0123\nETAOIN"
_TWO_BYTE_CHARACTERS = ["é", "ü", "ñ", "ß", "ø", "å", "λ", "ж"]
_BLOCK_TOKENS = 32


def encode(text: str) -> list[int]:
    """Return the token ids of ``text``, one per UTF-8 byte."""
    return [byte + BYTE_OFFSET for byte in text.encode("utf-8", "replace")]


def token_bytes(token: int) -> bytes:
    """Return the bytes that ``token`` stands for; special tokens stand for none."""
    if BYTE_OFFSET <= token < _FIRST_UNNAMED:
        return bytes((token - BYTE_OFFSET,))
    if token < BYTE_OFFSET:
        return b""
    return f"<{token}>".encode()


def decode(tokens: Iterable[int]) -> str:
    """Return the text of ``tokens``; broken UTF-8 becomes U+FFFD."""
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


def _tokens_of_byte(value: int) -> tuple[int, ...]:
    if value < 12:
        return tuple(encode(_TWO_BYTE_CHARACTERS[value % len(_TWO_BYTE_CHARACTERS)]))
    return (_ALPHABET[value % len(_ALPHABET)] + BYTE_OFFSET,)


_TOKENS_OF_BYTE = tuple(_tokens_of_byte(value) for value in range(256))
_LEAD_TOKENS = frozenset(tokens[0] for tokens in _TOKENS_OF_BYTE if len(tokens) == 2)


class TextDecoder:
    """Incremental decoder of one sequence: text appears once its bytes are complete."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes, often one character, perhaps none."""
        return self._decoder.decode(token_bytes(token))

    def flush(self) -> str:
        """Return what an unfinished character becomes at the end."""
        return self._decoder.decode(b"", True)


class TokenSource:
    """The endless answer to one prompt: the same arguments give the same tokens.

    Args:
        seed: The engine's ``--seed``.
        prompt: Prompt token ids.
        sampling_seed: The request's own seed; ``None`` means none was given.
        sample: Index of the sample of the same prompt (``n`` > 1).
    """

    __slots__ = ("_block", "_block_index", "_key")

    def __init__(self, seed: int, prompt: Sequence[int], sampling_seed: int | None, sample: int) -> None:
        digest = hashlib.blake2b(repr((seed, sampling_seed, sample)).encode(), digest_size=32)
        digest.update(array("Q", prompt).tobytes())
        self._key = digest.digest()
        self._block: list[int] = []
        self._block_index = -1

    def token(self, position: int) -> int:
        """Return output token number ``position``, counted from 0."""
        index, offset = divmod(position, _BLOCK_TOKENS)
        if index != self._block_index:
            self._block = self._make_block(index)
            self._block_index = index
        return self._block[offset]

    def _make_block(self, index: int) -> list[int]:
        raw = hashlib.blake2b(self._key + struct.pack("<Q", index), digest_size=_BLOCK_TOKENS).digest()
        tokens = [token for value in raw for token in _TOKENS_OF_BYTE[value]]
        del tokens[_BLOCK_TOKENS:]
        if tokens[-1] in _LEAD_TOKENS:
            tokens[-1] = _ALPHABET[0] + BYTE_OFFSET  # half a character at the block's end
        return tokens


def logprob(token: int, position: int) -> float:
    """Return the log-probability of ``token`` at ``position``, a value float32 holds exactly."""
    return -0.0625 - ((token * 2654435761 + position * 40503) & 1023) / 256


def top_logprobs(token: int, position: int, count: int, vocab_size: int) -> list[tuple[float, int]]:
    """Return the ``count`` likeliest tokens at ``position``, ``token`` first."""
    first = logprob(token, position)
    return [(first - rank / 256, (token + rank) % vocab_size) for rank in range(count)]


def flat_top_logprobs(
    tokens: Sequence[int], first_position: int, count: int, vocab_size: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return what ``top_logprobs`` gives for every token, as two arrays of shape ``[len(tokens), count]``."""
    ids = np.asarray(tokens, dtype=np.int64)[:, None]
    positions = np.arange(first_position, first_position + len(tokens), dtype=np.int64)[:, None]
    ranks = np.arange(count, dtype=np.int64)[None, :]
    first = -0.0625 - ((ids * 2654435761 + positions * 40503) & 1023) / 256
    values = (first - ranks / 256).astype(np.float32)
    return values, ((ids + ranks) % vocab_size).astype(np.int32)

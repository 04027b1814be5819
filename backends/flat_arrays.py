"""Top log-probabilities as flat arrays, in SGLang's form. Pure.

Rows of equal length follow each other; positions without a row come before all others and are only counted. As JSON
the numbers keep the spelling in which they came; in Base64 they are float32 and int32, little-endian.
"""

import base64
from array import array
from collections.abc import Sequence
from typing import Literal

import numpy as np

Side = Literal["input", "output"]


class FlatRows:
    """Grows row by row and is told once.

    Args:
        width: Entries of a row, should there be none to tell it.
        is_base64: The arrays are wanted in Base64.
    """

    __slots__ = ("_ids", "_is_base64", "_numbers", "_texts", "_width", "null_prefix", "rows")

    def __init__(self, width: int, *, is_base64: bool) -> None:
        self._width = width
        self._is_base64 = is_base64
        self._texts: list[tuple[bytes, bytes]] = []  # a row's values and ids, joined at once so that the end is quick
        self._numbers = array("d")
        self._ids = array("q")
        self.rows = 0
        self.null_prefix = 0

    def add_null(self) -> None:
        """Count a position without a row.

        Raises:
            ValueError: It does not come before all rows.
        """
        if self.rows:
            raise ValueError("flat arrays have no place for a missing row among others")
        self.null_prefix += 1

    def add(self, values: Sequence[bytes], ids: Sequence[int]) -> None:
        """Take the row of the next position.

        Args:
            values: JSON numbers.
            ids: Token ids, as many.

        Raises:
            ValueError: It is not as long as the rows before, or holds what is no number.
        """
        if self.rows and len(values) != self._width:
            raise ValueError(f"a row of {len(values)} entries among rows of {self._width}")
        if self._is_base64:
            self._numbers.extend(map(float, values))
            self._ids.extend(ids)
        else:
            self._texts.append((b",".join(values), ",".join(map(str, ids)).encode()))
        self._width = len(values)
        self.rows += 1

    def fields(self, side: Side) -> dict[str, bytes]:
        """JSON of the members of ``meta_info``, in SGLang's order, for the prompt's side or the output's."""
        name = f"{side}_top_logprobs"
        told: dict[str, bytes]
        if self._is_base64:
            told = {
                f"{name}_val_flat_b64": _base64(np.frombuffer(self._numbers, np.float64).astype("<f4")),
                f"{name}_idx_flat_b64": _base64(np.frombuffer(self._ids, np.int64).astype("<i4")),
                f"{name}_val_flat_b64_dtype": b'"float32"',
                f"{name}_idx_flat_b64_dtype": b'"int32"',
            }
        else:
            told = {
                f"{name}_val_flat": b"[%b]" % b",".join(values for values, _ in self._texts),
                f"{name}_idx_flat": b"[%b]" % b",".join(ids for _, ids in self._texts),
            }
        return {
            **told,
            f"{name}_shape": b"[%d,%d]" % (self.rows, self._width),
            f"{name}_null_prefix": b"%d" % self.null_prefix,
        }


def _base64(values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> bytes:
    return b'"%b"' % base64.b64encode(values.tobytes())

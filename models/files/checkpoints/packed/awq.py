"""Decodes AWQ checkpoints in the layout "gemm": 4-bit integers in groups, with zero points.

Source: `WQLinear_GEMM` and `dequantize_gemm` of AutoAWQ (awq/modules/linear/gemm.py,
awq/utils/packing_utils.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from ....support.json_fields import JSONFields
from ..safetensors import DTYPES, Weights
from .base import FLOATS, PackedTensor, modules, pieces
from .integers import affine, consecutive, fields

_BITS, _OF_WORD = 4, 8
#: Position in a word, from the lowest bits on, of each of its eight columns.
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclasses.dataclass(frozen=True)
class AWQ(PackedTensor):
    """A weight as `qweight` int32 (k, n / 8), `qzeros` (groups, n / 8) and `scales` (groups, n)."""

    module: str = ""

    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.floats`."""
        quants, zeros, scales = (
            weights.raw(f"{self.module}.{part}") for part in ("qweight", "qzeros", "scales")
        )
        n, k = self.shape
        first, last, _ = rows.indices(n)
        groups = np.arange(k) // (k // len(scales))
        out = np.empty((last - first, k), DTYPES[self.dtype])
        for piece in pieces(first // _OF_WORD * _OF_WORD, last, k, _OF_WORD):
            words = slice(piece.start // _OF_WORD, -(-piece.stop // _OF_WORD))
            columns = slice(words.start * _OF_WORD, words.stop * _OF_WORD)
            values = affine(
                _ordered(quants[:, words]), _ordered(zeros[:, words]), scales[:, columns].T, groups
            )
            begin = max(first - columns.start, 0)
            at = columns.start + begin - first
            out[at : piece.stop - first] = values[begin : piece.stop - columns.start]
        return out


def find(weights: Weights, settings: JSONFields) -> Iterator[PackedTensor]:
    """Yields the quantized weights."""
    version = settings.string("version", "gemm").lower()
    if version not in ("gemm", "exllama", "ipex", "marlin"):  # one layout in files
        settings.fail("version", f"is {version!r:.100}, which is not supported; supported: gemm")
    if (backend := settings.string("backend", "autoawq")) != "autoawq":
        settings.fail("backend", f"is {backend!r:.100}, which is not supported; supported: autoawq")
    bits = settings.integer("bits", settings.integer("w_bit", _BITS))
    if bits != _BITS:
        settings.fail("bits", f"is {bits}, which is not supported; supported: {_BITS}")
    for module in modules(weights, "qweight"):
        quants, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        shape = weights.expect(quants, ("I32",)).shape
        if len(shape) != 2:
            weights.fail(quants, f"has shape {shape}, expected a matrix")
        k, n = shape[0], shape[1] * _OF_WORD
        found = weights.expect(scales, FLOATS)
        if len(found.shape) != 2 or found.shape[1] != n:
            weights.fail(scales, f"has shape {found.shape}, expected (groups, {n})")
        consecutive(weights, scales, k, found.shape[0])
        weights.expect(zeros, ("I32",), (found.shape[0], shape[1]))
        parts = quants, zeros, scales
        yield AWQ(f"{module}.weight", (n, k), found.dtype, parts, "AWQ", None, module)


def _ordered(words: np.ndarray) -> np.ndarray:
    """Extracts the columns of words: int32 (rows, m) to uint8 (8 * m, rows)."""
    values = fields(np.ascontiguousarray(words), _BITS).reshape(*words.shape, _OF_WORD)
    return values[..., _POSITIONS].reshape(len(words), -1).T

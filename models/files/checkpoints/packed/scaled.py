"""Weights in FP8 or int8 with scales: per tensor, per row, per group of columns, or per block.

Sources: `Fp8Dequantize` of transformers' integrations/finegrained_fp8.py; `dequantize` of
compressed-tensors' quantization/lifecycle/forward.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..safetensors import DTYPES, Weights
from .base import FLOATS, PackedTensor, pieces

#: Types of scales that are powers of two: exponents plus 127.
_EXPONENTS = ("F8_E8M0", "U8")


@dataclasses.dataclass(frozen=True)
class Scaled(PackedTensor):
    """A weight in FP8 or int8; its value is (stored - zero) * scale.

    Attributes:
      weight, scale, zero: names of the stored tensors; None: no zeros.
      grid: (rows, columns) of scales of a matrix.
      block: (rows, columns) of weights with one scale.
    """

    weight: str = ""
    scale: str = ""
    zero: str | None = None
    grid: tuple[int, int] = (1, 1)
    block: tuple[int, int] = (1, 1)

    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """See `PackedTensor.floats`."""
        stored = weights.raw(self.weight, rows)
        grids = [_exact(weights.raw(self.scale))]
        if self.zero is not None:
            grids.append(weights.raw(self.zero).astype(np.float32))
        grids = [grid.reshape(-1, *self.grid) for grid in grids]  # one, or one for each expert
        first, last, _ = rows.indices(self.shape[0])
        out = np.empty(stored.shape, DTYPES[self.dtype])
        if stored.ndim == 2:
            self._decode(stored, [grid[0] for grid in grids], first, out)
        else:
            for at in range(last - first):
                of_one = [grid[first + at if len(grid) > 1 else 0] for grid in grids]
                self._decode(stored[at], of_one, 0, out[at])
        return out

    def _decode(
        self, stored: np.ndarray, grids: list[np.ndarray], first: int, out: np.ndarray
    ) -> None:
        """Decodes the rows of a matrix from `first` on; `grids` are its scales and zeros."""
        k, width = stored.shape[1], self.block[1]
        columns = np.arange(k) // width if k % width else None  # None: broadcast along blocks
        for piece in pieces(0, len(stored), k):
            at = np.arange(first + piece.start, first + piece.stop) // self.block[0]
            scale, *zero = (
                grid[at][..., None] if columns is None else grid[at][:, columns] for grid in grids
            )
            values = stored[piece].astype(np.float32)
            values = values if columns is not None else values.reshape(len(at), -1, width)
            with np.errstate(over="ignore", invalid="ignore"):
                if zero:
                    values -= zero[0]
                values *= scale
                out[piece] = values.reshape(len(at), k).astype(out.dtype)


def scaled(
    weights: Weights,
    name: str,
    scale: str,
    *,
    zero: str | None = None,
    block: tuple[int, int] | None = None,
    label: str | None = None,
    further: tuple[str, ...] = (),
) -> Scaled:
    """Describes a weight, after checking that its scales fit.

    Args:
      name: the stored tensor, (n, k) or (experts, n, k), which keeps its name.
      scale: name of its scales: one, or (n,), (n, 1), (n, groups) or (row blocks, column blocks);
        for experts all of them with a leading axis, or one.
      zero: name of its zero points, shaped like the scales.
      block: (rows, columns) with one scale; None derives them from the shapes.
      further: names of tensors that are skipped with it.
    """
    shape = weights.stored[name].shape
    if len(shape) not in (2, 3):
        weights.fail(name, f"has shape {shape}, expected a matrix or a stack of matrices")
    found = weights.expect(scale, (*FLOATS, *_EXPONENTS))
    grid, of_one = _grid(shape, found.shape, block)
    if grid is None:
        weights.fail(scale, f"has shape {found.shape}, which does not fit weights {shape}")
    if zero is not None:
        weights.expect(zero, ("I8", "U8", *FLOATS), found.shape)
    dtype = "BF16" if found.dtype in _EXPONENTS else found.dtype
    parts = name, scale, *(() if zero is None else (zero,)), *further
    return Scaled(name, shape, dtype, parts, label, None, name, scale, zero, grid, of_one)


def _grid(
    shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[Any, tuple[int, int]]:
    """Returns the numbers of scales along rows and columns, None if they do not fit, and block."""
    *leading, n, k = shape
    if 0 in scales:
        return None, (n, k)
    if leading and scales[:1] == shape[:1]:
        scales = scales[1:]
    elif leading and math.prod(scales) != 1:
        return None, (n, k)
    if math.prod(scales) == 1:
        return (1, 1), (n, k)
    if scales in ((n,), (n, 1)):
        return (n, 1), (1, k)
    if block is not None and scales == (-(-n // block[0]), -(-k // block[1])):
        return scales, block
    fits = len(scales) == 2 and n % scales[0] == 0 and k % scales[1] == 0
    if fits and (block is None or scales[0] == n):  # groups of columns
        return scales, (n // scales[0], k // scales[1])
    return None, (n, k)


def _exact(scales: np.ndarray) -> np.ndarray:
    """Converts scales to float32; bytes are exponents, and 255 is NaN."""
    if scales.dtype.itemsize > 1:
        return scales.astype(np.float32)
    exponents = scales.view(np.uint8)
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers)

"""ggml's codebooks: tables of four or eight magnitudes that IQ formats index.

The tables come from the `gguf` package, which is imported on first use.
"""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def entries(format: str) -> np.ndarray:
    """Returns the codebook of a format, int8 (entries, 4 or 8)."""
    from gguf import quants

    book = getattr(quants, format)
    book.init_grid()
    return np.asarray(book.grid[0, 0]).astype(np.int8)


@functools.cache
def words(format: str, factor: int = 1, offset: int = 0) -> tuple[int, ...]:
    """Returns a codebook's bytes, times `factor` plus `offset`, packed into little-endian u32."""
    bytes_ = entries(format).astype(np.int32) * factor + offset
    return tuple(bytes_.astype(np.uint8).view("<u4").reshape(-1).tolist())

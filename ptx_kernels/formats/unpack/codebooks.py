"""ggml's code books: tables of four or eight magnitudes that IQ formats number.

They are the `gguf` package's, which is imported when one is first used.
"""

from __future__ import annotations

import functools

import numpy as np


@functools.cache
def entries(format: str) -> np.ndarray:
    """int8 (entries, 4 or 8): what the numbers of a format's code book stand for."""
    from gguf import quants

    book = getattr(quants, format)
    book.init_grid()
    return np.asarray(book.grid[0, 0]).astype(np.int8)


@functools.cache
def words(format: str, factor: int = 1, offset: int = 0) -> tuple[int, ...]:
    """The entries' bytes, times `factor` and above `offset`, as little-endian u32, in order."""
    bytes_ = entries(format).astype(np.int32) * factor + offset
    return tuple(bytes_.astype(np.uint8).view("<u4").reshape(-1).tolist())

"""Splits tensors along their first axis, to process some rows at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from jax_q4k import QuantizedArray

#: Functions that return a tensor's rows, for several threads, with the first row of each.
Parts = Iterator[tuple[int, Callable[[], QuantizedArray | np.ndarray]]]


def in_rows(tensor: QuantizedArray | np.ndarray, rows: int) -> Parts:
    """Yields parts of at most `rows` rows of a tensor in memory; a vector is one part."""
    for start, stop in ranges(tensor.shape, rows):
        yield start, functools.partial(_part, tensor, start, stop)


def ranges(shape: tuple[int, ...], rows: int) -> Iterator[tuple[int, int]]:
    """Yields (first row, end) of the parts of a tensor; a vector is one part."""
    step = rows if len(shape) > 1 else shape[0]
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _part(
    tensor: QuantizedArray | np.ndarray, start: int, stop: int
) -> QuantizedArray | np.ndarray:
    return tensor if (start, stop) == (0, tensor.shape[0]) else tensor[start:stop]

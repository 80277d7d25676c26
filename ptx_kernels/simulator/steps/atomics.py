"""Simulates atomics: read, modify and write in one step. PTX ISA 9.1, 9.7.13.

Lanes that address one place are served in sequence, the lowest lane first. A GPU may use any order,
and so does a perturbed run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ptx.instructions.rounding import flush

Operation = Callable[..., np.ndarray]  # (old, operand, ...) -> new


def _compare_and_swap(old: np.ndarray, expected: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where(old == expected, new, old)


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, np.uint32(0), old + np.uint32(1))


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - np.uint32(1))


#: Operations of `redux.sync`, also used by atomics. Their order does not matter for integers.
REDUCTIONS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
OPERATIONS: dict[str, Operation] = {
    **REDUCTIONS,
    "exch": lambda old, new: new,
    "cas": _compare_and_swap,
    "inc": _increment,
    "dec": _decrement,
}


def add_in_global(old: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Adds as atom.add.f32 in global memory, which flushes subnormals; shared memory keeps them."""
    return flush(flush(old) + flush(x))


def serve(
    view: np.ndarray,
    index: np.ndarray,
    operation: Operation,
    values: list[np.ndarray],
    turns: np.ndarray,
) -> np.ndarray:
    """Sets view[index[i]] = operation(view[index[i]], values[0][i], ...), lane by lane.

    Returns the previous value for each lane.
    """
    # lanes of one place become adjacent, in their order
    lanes = turns[np.argsort(index[turns], kind="stable")]
    first = np.flatnonzero(np.diff(index[lanes], prepend=-1))
    turn = np.arange(index.size) - np.repeat(first, np.diff(first, append=index.size))
    lanes = lanes[np.argsort(turn, kind="stable")]
    found = np.empty(index.size, view.dtype)
    for group in np.split(lanes, np.cumsum(np.bincount(turn))[:-1]):  # all at different places
        at = index[group]
        found[group] = view[at]
        view[at] = operation(found[group], *(value[group] for value in values))
    return found

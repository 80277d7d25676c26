"""Integer weights in groups of columns, with zero points: (value - zero) * scale."""

from __future__ import annotations

import numpy as np

from ..safetensors import Weights


def affine(
    values: np.ndarray,
    zeros: np.ndarray | int,
    scales: np.ndarray,
    groups: np.ndarray,
) -> np.ndarray:
    """Computes (value - zero) * scale, rounded once to the scales' type.

    The differences and, with scales of 16 bits, the products are exact in float32.

    values: integers (n, k). zeros: integers (n, groups), or one for all. scales: (n, groups).
    groups: group of each column, (k,).
    """
    n, k = values.shape
    columns, factors = values.astype(np.float32), scales.astype(np.float32)
    differences = zeros.astype(np.float32) if isinstance(zeros, np.ndarray) else np.float32(zeros)
    if k % scales.shape[1] == 0 and np.array_equal(groups, np.arange(k) // (k // scales.shape[1])):
        columns, factors = columns.reshape(n, scales.shape[1], -1), factors[..., None]
        differences = differences[..., None]  # broadcast along the columns of a group
    else:
        factors = factors[:, groups]
        differences = differences[:, groups] if differences.ndim else differences
    with np.errstate(over="ignore", invalid="ignore"):  # the caller reports what is not finite
        columns -= differences
        columns *= factors
        return columns.astype(scales.dtype).reshape(n, k)


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Extracts the 32 // bits unsigned fields of each int32, the lowest first.

    words: (..., m). Returns uint8 (..., m * (32 // bits)).
    """
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    values = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return values.astype(np.uint8).reshape(*words.shape[:-1], -1)


def stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Extracts unsigned numbers that follow each other bit by bit, across int32s, the lowest first.

    words: (..., m). Returns uint8 (..., m * 32 // bits).
    """
    if 32 % bits == 0:
        return fields(words, bits)
    each = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    each = each.reshape(*words.shape[:-1], -1, bits)
    return (each << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def consecutive(weights: Weights, name: str, k: int, groups: int) -> int:
    """Returns the number of columns of each of `groups` equal groups.

    Raises CheckpointError about tensor `name` if k columns are no such groups.
    """
    if not groups or k % groups:
        weights.fail(name, f"has {groups} groups, which do not divide {k} columns")
    return k // groups

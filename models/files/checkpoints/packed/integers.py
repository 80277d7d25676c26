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
    (n, k), count = values.shape, scales.shape[1]
    columns, factors = values.astype(np.float32), scales.astype(np.float32)
    offsets = np.broadcast_to(np.asarray(zeros, np.float32), scales.shape)
    if k % count == 0 and np.array_equal(groups, np.arange(k) // (k // count)):
        columns = columns.reshape(n, count, -1)  # scales broadcast along the columns of a group
        factors, offsets = factors[..., None], offsets[..., None]
    else:
        factors, offsets = factors[:, groups], offsets[:, groups]
    with np.errstate(over="ignore", invalid="ignore"):  # the caller reports what is not finite
        columns -= offsets
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

    words: (..., m). Returns uint8 (..., m * 32 // bits); left-over bits are dropped.
    """
    if 32 % bits == 0:
        return fields(words, bits)
    each = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    each = each[..., : each.shape[-1] // bits * bits]
    each = each.reshape(*words.shape[:-1], -1, bits)
    return (each << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def consecutive(weights: Weights, name: str, k: int, groups: int) -> int:
    """Returns the number of columns of each of `groups` equal groups.

    Raises CheckpointError about tensor `name` if k columns are no such groups.
    """
    if not groups or k % groups:
        weights.fail(name, f"has {groups} groups, which do not divide {k} columns")
    return k // groups

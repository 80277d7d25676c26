"""Subjects for argmax and top-k."""

from __future__ import annotations

import numpy as np

from ptx_kernels.kernels.argmax import ArgmaxConfig, argmax
from ptx_kernels.kernels.top_k import TopKConfig, top_k

from .base import Subject, rng_of


def _searched(columns: int, places: tuple[int, ...] = ()) -> np.ndarray:
    """Rows to search, (5 + len(places), columns).

    Neighboring floats as the two largest, the smaller first; few distinct values, so many ties; the
    same below 0; NaN; zeros of both signs. Then rows whose maximum is at each of `places`.
    """
    rng = rng_of(7)
    shape = (1 + len(places), columns)
    ordinary = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 30, shape)
    few = rng.choice([-1.5, -0.0, 0.0, 2.0, -np.inf, np.inf], columns)
    zeros = np.where(rng.random(columns) < 0.3, 0.0, -0.0)
    first = ordinary[0]
    x = np.stack([first, few, -np.abs(first) - 2.0**-20, first, zeros, *ordinary[1:]]).astype(
        np.float32
    )
    x[0, -2:] = np.array([0x53800000, 0x53800001], np.uint32).view(np.float32)
    x[2, 5:9] = np.array([0xB0000001, 0xB0000000, 0xB0000001, 0xB0000000], np.uint32).view(
        np.float32
    )
    x[3, [columns // 2, columns - 2]] = np.nan
    x[np.arange(5, len(x)), list(places)] = 2.0**41
    return x


def _ordered(x: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` largest of each row, (rows, count).

    NaN comes first, then the order is by value, then by position.
    """
    key = np.where(np.isnan(x), -np.inf, -np.clip(x.astype(np.float64), -1e99, 1e99))
    return np.argsort(key, axis=1, kind="stable")[:, :count].astype(np.int32)


def argmax_subject() -> Subject:
    x = _searched(300, (0, 63, 64, 93, 128, 149, 150, 213, 214, 278, 299))
    want = np.concatenate([_ordered(x[:, :150], 1), 150 + _ordered(x[:, 150:], 1)], axis=1).astype(
        np.int32
    )
    kernel = argmax(rows=16, columns=300, splits=2, config=ArgmaxConfig(warps=2, unroll=1))
    return Subject(kernel, (x,), (np.take_along_axis(x, want, 1), want), 0)


def argmax_of_candidates_subject() -> Subject:
    x = _searched(80, (0, 5, 18, 31, 32, 41, 59, 63, 64, 73, 79))
    indices = rng_of(9).permutation(x.size).reshape(x.shape).astype(np.int32)
    place = np.concatenate([_ordered(x[:, :40], 1), 40 + _ordered(x[:, 40:], 1)], axis=1).astype(
        np.int32
    )
    kernel = argmax(
        rows=16, columns=80, splits=2, from_candidates=True, config=ArgmaxConfig(warps=1, unroll=1)
    )
    wants = np.take_along_axis(x, place, 1), np.take_along_axis(indices, place, 1)
    return Subject(kernel, (x, indices), wants, 0)


def top_k_subject() -> Subject:
    """Two parts of 71 and 70 values; the 71 largest of each are wanted.

    The result is all of them, in order, and one padding entry.
    """
    x = _searched(141)
    places = [_ordered(x[:, :71], 71), 71 + _ordered(x[:, 71:], 70), np.full((5, 1), 141, np.int32)]
    want = np.concatenate(places, axis=1).astype(np.int32)
    padded = np.concatenate([x, np.full((5, 1), -np.inf, np.float32)], axis=1)
    kernel = top_k(rows=5, columns=141, count=71, splits=2, config=TopKConfig(warps=1))
    return Subject(kernel, (x,), (np.take_along_axis(padded, want, 1), want), 0)


def top_k_of_candidates_subject() -> Subject:
    x, indices = _searched(40), rng_of(10).permutation(200).reshape(5, 40).astype(np.int32)
    places = _ordered(x, 9)
    kernel = top_k(rows=5, columns=40, count=9, from_candidates=True, config=TopKConfig(warps=2))
    wants = np.take_along_axis(x, places, 1), np.take_along_axis(indices, places, 1)
    return Subject(kernel, (x, indices), wants, 0)

"""argmax and top_k in the simulator, against NumPy: values, indices, ties, NaN, both launches."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_kernels import simulator
from ptx_kernels.kernels.argmax import ArgmaxConfig, argmax, argmax_splits_rule
from ptx_kernels.kernels.top_k import TopKConfig, top_k, top_k_splits_rule
from ptx_kernels.ptx import KernelError
from ptx_kernels.tuning import choose


def adversarial(rows: int, columns: int) -> np.ndarray:
    """Few distinct values, so that most tie; zeros of both signs, infinities, subnormals.

    The last row has NaNs.
    """
    rng = np.random.default_rng([rows, columns])
    x = rng.choice(np.float32([-np.inf, -2.5, -1e-41, -0.0, 0.0, 1e-41, 1.0, 2.5]), (rows, columns))
    x[0] = rng.standard_normal(columns)
    if rows > 2:
        x[1] = -np.inf
        x[-1, columns // 3 :: 7] = [np.nan, -np.nan][columns % 2]
    return x


def ranked(x: np.ndarray) -> np.ndarray:
    """Indices of each row by descending value: NaN first, ties by index."""
    keys = np.where(np.isnan(x), np.inf, x + np.float32(0)).astype(np.float64)
    return np.stack(
        [
            np.lexsort((np.arange(len(row)), -row, ~nan))
            for row, nan in zip(keys, np.isnan(x), strict=True)
        ]
    )


@pytest.mark.parametrize("columns, splits", [(1, 1), (37, 1), (257, 4), (1500, 7)])
def test_argmax(columns: int, splits: int) -> None:
    x = adversarial(4, columns)
    config = ArgmaxConfig(warps=2, unroll=2)
    found = simulator.run(argmax(rows=4, columns=columns, splits=splits, config=config), x)
    assert found[0].shape == (4, splits)
    if splits > 1:
        found = simulator.run(
            argmax(rows=4, columns=splits, from_candidates=True, config=ArgmaxConfig(1)), *found
        )
    want = ranked(x)[:, :1]
    np.testing.assert_array_equal(found[1], want)
    np.testing.assert_array_equal(found[0], np.take_along_axis(x, want, 1))
    assert (found[1][:, 0] == np.argmax(x + np.float32(0), axis=1)).all()  # like NumPy and JAX


@pytest.mark.parametrize(
    "columns, splits, count", [(1, 1, 1), (40, 1, 40), (500, 3, 17), (257, 4, 64), (129, 2, 5)]
)
def test_top_k(columns: int, splits: int, count: int) -> None:
    x = adversarial(3, columns)
    config = TopKConfig(warps=2)
    found = simulator.run(
        top_k(rows=3, columns=columns, count=count, splits=splits, config=config), x
    )
    assert found[0].shape == (3, splits * count)
    if splits > 1:
        merge = top_k(
            rows=3, columns=splits * count, count=count, from_candidates=True, config=config
        )
        found = simulator.run(merge, *found)
    want = ranked(x)[:, :count]
    np.testing.assert_array_equal(found[1], want)
    np.testing.assert_array_equal(found[0], np.take_along_axis(x, want, 1))


@pytest.mark.parametrize(
    "build, message",
    [
        (
            lambda: argmax(rows=1, columns=10, splits=11),
            "splits=11 must leave each part some of columns=10",
        ),
        (lambda: argmax(rows=1, columns=10, splits=0), "splits=0 must be an integer, at least 1"),
        (lambda: argmax(rows=1, columns=10, splits=6), "splits=6 must leave"),
        (
            lambda: top_k(rows=1, columns=4097, count=2),
            "count=2 must be 1 to 4097, the values of a part, and these at most 4096",
        ),
        (
            lambda: top_k(rows=1, columns=10, count=11),
            "count=11 must be 1 to 10, the values of a part",
        ),
        (lambda: top_k(rows=1, columns=10, count=0), "count=0 must be an integer, at least 1"),
    ],
)
def test_bad_arguments_are_refused(build, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        build()


@pytest.mark.parametrize("columns", [1, 1025, 4097, 32000, 50257, 128256, 151936, 262144])
def test_tuned_splits_leave_fewer_candidates_at_every_launch(columns: int) -> None:
    splits = choose(argmax_splits_rule, columns)
    assert argmax(rows=1, columns=columns, splits=splits).grid[0] <= 132
    for count, most in {1: 2, 40: 2, 64: 2, 1024: 5, 2048: 7}.items():
        if count > columns:
            continue
        left, launches, splits = columns, 0, 0
        while splits != 1:
            splits, launches = choose(top_k_splits_rule, left, count), launches + 1
            top_k(rows=1, columns=left, count=count, splits=splits, from_candidates=launches > 1)
            assert splits * count < left or splits == 1
            left = splits * count
        assert launches <= most


def test_a_count_that_leaves_too_many_candidates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"count=2049 of 262144 values: must be at most 2048"):
        choose(top_k_splits_rule, 262144, 2049)

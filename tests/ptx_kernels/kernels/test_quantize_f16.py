"""Conversion of activations to f16 in the simulator equals NumPy bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles import half_operands, loaded, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.quantize_f16 import quantize_f16


def assert_same_means(got: np.ndarray, want: np.ndarray) -> None:
    """Checks that high + low agree to half an ulp of a `low` below 2^3.

    A sum in f32 may be rounded before it becomes two f16.
    """
    np.testing.assert_allclose(
        got.astype(np.float64).sum(-1), want.astype(np.float64).sum(-1), rtol=0, atol=2.0**-7
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows, columns", [(1, 256), (3, 768), (5, 1024)])
def test_equals_numpy(rows: int, columns: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    x = stored(rng.standard_normal((rows, columns), np.float32) * 10, dtype)
    got = simulator.run(quantize_f16(rows=rows, columns=columns, dtype=dtype), x)
    want, exact = half_operands(loaded(x, dtype))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[2], want[2])
    assert_same_means(got[1], want[1])
    assert np.abs(exact - loaded(x, dtype)).max() <= 2.0**-11 * np.abs(exact).max()


def test_super_blocks_at_the_limits() -> None:
    """Zeros, one magnitude with both signs, powers of two, subnormals, almost the largest float.

    One super-block has a wide range.
    """
    x = np.zeros((7, 256), np.float32)
    x[1, ::2], x[1, 1::2] = 5.0, -5.0
    x[2] = np.exp2(np.arange(256) % 39 - 20.0)
    x[3] = np.linspace(-1e-40, 1e-40, 256)
    x[4] = np.linspace(-3.4e38, 3.4e38, 256)
    x[5, 7] = 1.4e-45
    x[6] = np.exp2(np.linspace(-126, 127, 256))
    values, means, scale = simulator.run(quantize_f16(rows=7, columns=256), x)
    want, exact = half_operands(x)
    np.testing.assert_array_equal(values, want[0])
    np.testing.assert_array_equal(scale, want[2])
    assert_same_means(means, want[1])
    assert np.isfinite(values).all() and np.isfinite(scale).all() and (scale > 0).all()
    np.testing.assert_array_equal(exact[[0, 1, 2, 5]], x[[0, 1, 2, 5]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_spoils_only_its_super_block(bad: float) -> None:
    x = np.ones((2, 512), np.float32)
    x[0, 300] = bad
    _, _, scale = simulator.run(quantize_f16(rows=2, columns=512), x)
    np.testing.assert_array_equal(np.isnan(scale), [[False, True], [False, False]])

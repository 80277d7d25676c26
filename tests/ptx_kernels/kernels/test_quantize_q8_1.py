"""Quantization of activations in the simulator equals NumPy bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from support.oracles import loaded, quantized, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.quantize_q8_1 import QuantizeConfig, quantize_q8_1


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows, columns", [(1, 32), (3, 96), (8, 1024)])
def test_equals_numpy(rows: int, columns: int, dtype: str) -> None:
    rng = np.random.default_rng(rows)
    x = stored(rng.standard_normal((rows, columns), np.float32) * 10, dtype)
    values, scale_sum = simulator.run(quantize_q8_1(rows=rows, columns=columns, dtype=dtype), x)
    want_values, want_scale_sum = quantized(loaded(x, dtype))
    np.testing.assert_array_equal(values, want_values)
    np.testing.assert_array_equal(scale_sum, want_scale_sum)


def test_groups_at_the_limits() -> None:
    """Zeros, one magnitude with both signs, halves that round to even, subnormals.

    Some values are near the largest float.
    """
    group = np.zeros((6, 32), np.float32)
    group[1, ::2], group[1, 1::2] = 5.0, -5.0
    group[2] = np.arange(32) + 0.5
    group[2, 0] = 127.0
    group[3] = np.linspace(-1e-40, 1e-40, 32)
    group[4] = np.linspace(-3e38, 3e38, 32)
    group[5, 7] = 1e-44
    values, scale_sum = simulator.run(
        quantize_q8_1(rows=6, columns=32, config=QuantizeConfig(warps=1)), group
    )
    want_values, want_scale_sum = quantized(group)
    np.testing.assert_array_equal(values, want_values)
    np.testing.assert_array_equal(scale_sum, want_scale_sum)
    assert values[2].tolist()[:4] == [127, 2, 2, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_spoils_only_its_group(bad: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 40] = bad
    values, scale_sum = simulator.run(quantize_q8_1(rows=2, columns=64), x)
    assert not np.isfinite(scale_sum[0, 1]).any()
    assert np.isnan(scale_sum[0, 1, 1])
    clean = np.ones((2, 2), bool)
    clean[0, 1] = False
    np.testing.assert_array_equal(
        scale_sum[clean], quantized(np.ones((3, 32), np.float32))[1][:, 0]
    )

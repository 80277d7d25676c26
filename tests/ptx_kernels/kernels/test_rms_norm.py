"""RMSNorm in the simulator, against float64; q8_1 output against its quantized f32 output."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import half_operands, quantized, rms_norm_oracle

from ptx_kernels import simulator
from ptx_kernels.kernels.rms_norm import RmsNormConfig, rms_norm, rms_norm_rule
from ptx_kernels.ptx import KernelError
from ptx_kernels.tuning import choose


@pytest.mark.parametrize(
    "rows, columns, warps", [(1, 32, 1), (3, 896, 8), (2, 1056, 4), (2, 4096, 2), (1, 100, 3)]
)
def test_equals_float64(rows: int, columns: int, warps: int) -> None:
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((rows, columns), np.float32) * np.float32(30) + 1
    weight = rng.standard_normal(columns, np.float32)
    kernel = rms_norm(rows=rows, columns=columns, eps=1e-5, config=RmsNormConfig(warps))
    (y,) = simulator.run(kernel, x, weight)
    assert nmse(y, rms_norm_oracle(x, weight, 1e-5)) <= 1e-13
    if columns % 32 == 0:
        kernel = rms_norm(
            rows=rows, columns=columns, eps=1e-5, output="q8_1", config=RmsNormConfig(warps)
        )
        for got, want in zip(simulator.run(kernel, x, weight), quantized(y), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("rows, columns, warps", [(1, 256, 1), (3, 1280, 2), (2, 4096, 8)])
def test_f16_output(rows: int, columns: int, warps: int) -> None:
    """Equals `quantize_f16` of the normalized rows, except for rounding in f32."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((rows, columns), np.float32) * np.float32(30) + 1
    weight = rng.standard_normal(columns, np.float32)
    config = RmsNormConfig(warps)
    kernel = rms_norm(rows=rows, columns=columns, eps=1e-5, output="f16", config=config)
    values, means, scale = simulator.run(kernel, x, weight)
    y = rms_norm_oracle(x, weight, 1e-5)
    want, exact = half_operands(y.astype(np.float32))
    assert nmse(exact, y) <= 1e-7
    np.testing.assert_array_equal(scale, want[2])
    # f32 values that differ by one rounding differ by at most one step in f16
    steps = np.abs(values.view(np.int16).astype(int) - want[0].view(np.int16).astype(int))
    assert steps.max() <= 1 and (steps > 0).mean() < 0.01
    groups = values.reshape(rows, -1, 32).astype(np.float64)
    np.testing.assert_allclose(means.astype(np.float64).sum(-1), groups.mean(-1), atol=2.0**-7)


def test_rows_at_the_limits() -> None:
    """eps keeps zeros and scales tiny rows; a NaN affects only its own row."""
    x = np.zeros((4, 64), np.float32)
    x[1] = 1e-6
    x[2] = 3.0
    x[2, 5] = np.nan
    x[3] = 2.0
    (y,) = simulator.run(
        rms_norm(rows=4, columns=64, eps=1e-6, config=RmsNormConfig(1)), x, np.ones(64, np.float32)
    )
    assert not y[0].any() and np.isnan(y[2]).all()
    assert nmse(y[[1, 3]], rms_norm_oracle(x[[1, 3]], np.ones(64, np.float32), 1e-6)) <= 1e-13


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(columns=66), "columns=66 must be a multiple of 4"),
        (dict(columns=4096, config=RmsNormConfig(1)), "of 1 warps at most 2048"),
        (dict(columns=100, output="q8_1"), "columns=100 must be a multiple of 32"),
        (dict(columns=128, output="f16"), "columns=128 must be a multiple of 256"),
        (dict(columns=256, output="bf16"), "output='bf16' must be f32, q8_1 or f16"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        rms_norm(rows=1, eps=0.0, **arguments)


def test_tuned_block_sizes() -> None:
    configs = {
        columns: choose(rms_norm_rule, columns)
        for columns in (32, 896, 2048, 4096, 5120, 16384, 65536)
    }
    assert [config.warps for config in configs.values()] == [1, 1, 4, 8, 16, 32, 32]
    for columns, config in configs.items():
        rms_norm(rows=1, columns=columns, eps=0.0, output="q8_1", config=config)

"""Conversion of activations to f16 rows in the simulator, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from support.helpers import nmse
from support.oracles import half_rows, loaded, rms_norm_oracle, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.activation import GATES
from ptx_kernels.kernels.f16_rows import F16RowsConfig, f16_rows, f16_rows_rule
from ptx_kernels.limits import MAX_F16_ROW
from ptx_kernels.ptx import KernelError
from ptx_kernels.tuning import choose

rng = np.random.default_rng(0)


@pytest.mark.grid
@pytest.mark.parametrize("below", [1, 1 << 15])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("rows, columns, warps", [(1, 64, 1), (3, 900, 2), (2, 4096, 8)])
def test_equals_numpy(rows: int, columns: int, warps: int, dtype: str, below: int) -> None:
    x = stored(rng.standard_normal((rows, columns), np.float32) * 10, dtype)
    config = F16RowsConfig(warps)
    kernel = f16_rows(rows=rows, columns=columns, dtype=dtype, below=below, config=config)
    for got, want in zip(simulator.run(kernel, x), half_rows(loaded(x, dtype), below), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("below", [1, 1 << 15])
def test_rows_at_the_limits(below: int) -> None:
    """Rows of zeros, powers of two, subnormals, values near the largest float, all magnitudes."""
    x = np.zeros((6, 256), np.float32)
    x[1] = np.exp2(np.arange(256) % 24 - 20.0)
    x[2] = np.linspace(-1e-40, 1e-40, 256)
    x[3] = np.linspace(-3.4e38, 3.4e38, 256)
    x[4, 7] = 1.4e-45
    x[5] = np.exp2(np.linspace(-126, 127, 256))
    values, scale = simulator.run(f16_rows(rows=6, columns=256, below=below), x)
    want = half_rows(x, below)
    np.testing.assert_array_equal(values, want[0])
    np.testing.assert_array_equal(scale, want[1])
    assert np.isfinite(values).all() and np.isfinite(scale).all() and (scale > 0).all()
    exact = values.astype(np.float64) * scale[:, None]
    np.testing.assert_array_equal(exact[[0, 1]], x[[0, 1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_spoils_only_its_row(bad: float) -> None:
    x = np.ones((3, 512), np.float32)
    x[1, 300] = bad
    _, scale = simulator.run(f16_rows(rows=3, columns=512), x)
    np.testing.assert_array_equal(np.isnan(scale), [False, True, False])


@pytest.mark.parametrize("rows, columns", [(1, 256), (3, 1280), (2, 4096)])
def test_normalizes(rows: int, columns: int) -> None:
    x = rng.standard_normal((rows, columns), np.float32) * np.float32(30) + 1
    weight = rng.standard_normal(columns, np.float32)
    config = choose(f16_rows_rule, columns)
    kernel = f16_rows(rows=rows, columns=columns, eps=1e-5, config=config)
    values, scale = simulator.run(kernel, x, weight)
    y = rms_norm_oracle(x, weight, 1e-5)
    np.testing.assert_array_equal(scale, half_rows(y.astype(np.float32))[1])
    assert nmse(values.astype(np.float64) * scale[:, None], y) <= 1e-7


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("rows, columns", [(1, 64), (2, 1288), (3, 4096)])
def test_gates_products_over_their_scales(rows: int, columns: int, activation: str) -> None:
    products = [rng.standard_normal((rows, columns)).astype(np.float16) for _ in range(2)]
    row_scale = np.exp2(rng.integers(-3, 4, rows)).astype(np.float32)
    scales = [np.exp2(rng.integers(-3, 3, columns)).astype(np.float32) for _ in range(2)]
    kernel = f16_rows(rows=rows, columns=columns, activation=activation)
    of_columns = [stored(scale, "bf16") for scale in scales]
    values, scale = simulator.run(kernel, *products, row_scale, *of_columns)
    gate, up = (
        p.astype(np.float64) * row_scale[:, None] * s for p, s in zip(products, scales, strict=True)
    )
    want = {"silu": _silu, "gelu": _gelu, "swiglu_oai": _swiglu_oai}[activation](gate, up)
    assert nmse(values.astype(np.float64) * scale[:, None], want) <= 1e-7
    assert (np.abs(values).max(-1) >= 1 << 14).all()


def _silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def _gelu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def _swiglu_oai(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(columns=66), "columns=66 must be a multiple of 4, and at most 32768"),
        (dict(columns=68, activation="silu"), "columns=68 must be a multiple of 8"),
        (dict(columns=MAX_F16_ROW + 4), "columns=32772 must be a multiple of 4, and at most 32768"),
        (dict(columns=MAX_F16_ROW, eps=1e-5), "and at most 16384"),
        (dict(columns=64, eps=1e-5, dtype="f16"), "dtype='f16' must be f32"),
        (dict(columns=64, below=5), "below=5 must be a power of two from 1 to 32768"),
    ],
)
def test_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        f16_rows(rows=1, **arguments)

"""Conversions among float types, by the library and by NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.implementations import needs_native

from jax_q4k import native, quantizers
from jax_q4k.float_types import GGML

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture(params=[pytest.param("best", marks=needs_native), "portable", "none"])
def kernels(request, monkeypatch):
    if request.param == "none":
        monkeypatch.setattr(native, "available", lambda: False)
        yield
        return
    before = native.kernels()
    if before is None:
        pytest.skip(native.problem())
    native.select("portable" if request.param == "portable" else before)
    yield
    native.select(before)


def values(dtype: np.dtype, largest: float) -> np.ndarray:
    """Returns all finite f16 up to `largest`, and numbers between them and far below."""
    halves = np.arange(1 << 16).astype(np.uint16).view(np.float16).astype(np.float64)
    halves = halves[np.abs(halves) < 65504]
    between = halves * (1 + np.random.default_rng(0).uniform(-(2.0**-10), 2.0**-10, halves.size))
    tiny = between * 2.0**-20
    x = np.concatenate([halves, between, tiny, [largest, -largest]])
    with np.errstate(over="ignore", under="ignore"):
        x = x.astype(dtype)
    x = x[np.isfinite(x) & (np.abs(x.astype(np.float64)) <= largest)]
    return x[: x.size // 3 * 3 - 3].reshape(3, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("type", GGML)
def test_values_are_those_of_numpy(type, dtype, kernels):
    x, to = values(dtype, float(ml_dtypes.finfo(GGML[type].dtype).max)), GGML[type].dtype
    got = quantizers.convert(x, type)
    want = x.astype(np.float32).astype(to)
    assert got.dtype == to and got.shape == x.shape
    np.testing.assert_array_equal(got.view(GGML[type].bits), want.view(GGML[type].bits))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type", GGML)
def test_values_that_are_not_finite(type, bad, kernels):
    x = np.ones((2, 70001), np.float32)
    x[1, 70000] = bad
    message = rf"w\[1, 70000\] is {bad}; {type} takes finite values of magnitude up to"
    with pytest.raises(ValueError, match=message):
        quantizers.convert(x, type)


def test_values_beyond_f16(kernels):
    x = np.array([1, 65504, -65600], np.float32)
    with pytest.raises(ValueError, match=r"w\[2\] is -65600.0; F16 takes .* up to 65504"):
        quantizers.convert(x, "F16")
    assert quantizers.convert(x[:2], "F16")[1] == 65504
    assert quantizers.convert(x[:0], "F16").shape == (0,)


def test_another_byte_order(kernels):
    x = np.array([1, 2.5], ">f2")
    np.testing.assert_array_equal(quantizers.convert(x, "F32"), np.array([1, 2.5], np.float32))

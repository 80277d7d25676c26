"""Searches of the library against those in JAX, with each kernel set that runs here."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from support.implementations import needs_native

from jax_q4k import native, quantizers
from ptx_kernels import formats

pytestmark = needs_native
FORMATS = [name for name, found in quantizers._found().items() if found.native]
RNG = np.random.default_rng(0)
#: Largest part of blocks that may differ from those of the search in JAX.
_DIFFERENT = {"Q8_0": 0.0, "Q4_1": 0.03, "Q5_1": 0.03, "Q4_K": 0.06, "Q5_K": 0.1}


@pytest.fixture(params=["best", "portable"])
def kernels(request):
    before = native.kernels()
    if request.param == "portable":
        native.select("portable")
    yield
    native.select(before)


def inputs(format: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns 600 blocks, of which some are zeros or tiny, and their importance."""
    size = formats.get(format).block_size
    x = RNG.standard_t(4, (600, size)).astype(np.float32)
    x[7], x[11], x[13, 1:] = 0, x[11] * np.float32(1e-30), 0
    return x, RNG.uniform(2.0**-20, 1, (3, size)).astype(np.float32)


def quantized(format: str, x: np.ndarray, importance: np.ndarray, first: int) -> np.ndarray:
    packed = np.empty((len(x), formats.get(format).block_bytes), np.uint8)
    largest = quantizers.largest(format)
    assert native.quantize(format, x, importance, first, largest, packed)
    return packed


def test_formats():
    assert [name for name in quantizers.names() if name not in FORMATS] == [
        name for name in quantizers.names() if name.startswith("IQ")
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_are_those_of_the_search_in_jax(format, kernels):
    """Rounding errors of sums decide between a few nearly equal candidates.

    A line through a block's values has two parameters, and several trials give nearly the same.
    """
    x, importance = inputs(format)
    got = quantized(format, x, importance, 2)
    rows = importance[(2 + np.arange(len(x))) % 3]
    want = quantizers._found()[format].blocks(x, rows)
    assert (got != want).any(-1).mean() <= _DIFFERENT.get(format, 0.02)

    def errors(packed: np.ndarray) -> np.ndarray:
        decoded = gguf.quants.dequantize(packed, GGMLQuantizationType[format])
        return (rows * (decoded.astype(np.float64) - x) ** 2).sum(-1)

    assert errors(got).sum() <= 1.001 * errors(want).sum()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -3e38], ids=["nan", "infinite", "too large"])
@pytest.mark.parametrize("format", FORMATS)
def test_values_that_blocks_cannot_hold(format, bad, kernels):
    x, importance = inputs(format)
    x[-1, 5] = bad
    packed = np.empty((len(x), formats.get(format).block_bytes), np.uint8)
    largest = quantizers.largest(format)
    assert not native.quantize(format, x, importance, 0, largest, packed)
    assert native.quantize(format, x[:-1], importance, 0, largest, packed[:-1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("format", FORMATS)
def test_halves_are_quantized_like_floats(format, dtype, kernels):
    """Blocks are converted some at a time, so the last values are of another part."""
    x, importance = inputs(format)
    halves = x.astype(dtype)
    got = quantized(format, halves, importance, 1)
    np.testing.assert_array_equal(got, quantized(format, halves.astype(np.float32), importance, 1))
    halves[-1, 5] = np.nan
    packed = np.empty_like(got)
    assert not native.quantize(format, halves, importance, 1, quantizers.largest(format), packed)


def test_a_format_without_a_search():
    x = np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="format='IQ4_NL' has no such quantizer"):
        native.quantize("IQ4_NL", x, x, 0, 1.0, np.zeros((1, 18), np.uint8))

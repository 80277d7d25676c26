"""Searches of the library against those in JAX, with each kernel set that runs here."""

from __future__ import annotations

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from support.implementations import needs_native

from jax_q4k import native, quantizers
from jax_q4k.quantizers import affine, fit
from ptx_kernels import formats

pytestmark = needs_native
FORMATS = [name for name, found in quantizers._found().items() if found.native]
#: Largest part of blocks that may differ from those of the search in JAX.
_DIFFERENT = {"Q8_0": 0.0, "Q4_K": 0.03, "Q5_K": 0.07}


@pytest.fixture(params=["best", "portable"])
def kernels(request):
    before = native.kernels()
    if request.param == "portable":
        native.select("portable")
    yield
    native.select(before)


def inputs(format: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns 600 blocks, of which some are zeros or tiny, and their importance."""
    size, rng = formats.get(format).block_size, np.random.default_rng([*format.encode()])
    x = rng.standard_t(4, (600, size)).astype(np.float32)
    x[7], x[11], x[13, 1:] = 0, x[11] * np.float32(1e-30), 0
    return x, rng.uniform(2.0**-20, 1, (3, size)).astype(np.float32)


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


@pytest.mark.slow("searches thousands of blocks in float64")
@pytest.mark.parametrize("format", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_the_library_is_as_near_to_float64_as_jax(format, monkeypatch):
    """Blocks differ from JAX's because float32 rounding chooses among nearly equal candidates.

    The same search in float64 chooses others in a few percent of blocks, whether the library or JAX
    searches in float32, and the errors are neither larger nor smaller on average.
    """

    def nearest_f16(x: jax.Array) -> jax.Array:
        return jnp.clip(x, -fit.LARGEST_F16, fit.LARGEST_F16).astype(jnp.float16).astype(x.dtype)

    quantizer, count = quantizers._found()[format], 1500
    block = formats.get(format)
    rng = np.random.default_rng(0)
    x = rng.standard_t(4, (count, block.block_size)).astype(np.float32)
    importance = rng.uniform(2.0**-20, 1, (3, block.block_size)).astype(np.float32)
    rows = importance[np.arange(count) % 3]
    library, in_jax = quantized(format, x, importance, 0), quantizer.blocks(x, rows)
    monkeypatch.setattr(affine, "nearest_f16", nearest_f16)
    with jax.enable_x64(True):
        doubles = x.astype(np.float64), rows.astype(np.float64)
        exact = np.asarray(jax.jit(quantizer.traced)(*doubles))
    weight = rows * np.sqrt(1 + x**2.0 / (2 * (x**2.0).mean(-1, keepdims=True)))

    def errors(packed: np.ndarray) -> np.ndarray:
        decoded = gguf.quants.dequantize(packed, GGMLQuantizationType[format])
        return (weight * (decoded.astype(np.float64) - x) ** 2).sum(-1)

    differ = [(packed != exact).any(-1).mean() for packed in (library, in_jax)]
    assert differ[0] <= 2 * differ[1] + 0.005, differ
    ratios = errors(library) / errors(exact)
    assert ratios.mean() <= 1.0015 and ratios.max() <= 1.5, (ratios.mean(), ratios.max())


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

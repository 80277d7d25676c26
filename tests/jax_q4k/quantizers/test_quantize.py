"""Quantizers: errors against ggml's, preserved grids, importance, dtypes, bad input."""

from __future__ import annotations

import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.helpers import nmse
from support.paths import DATA

import jax_q4k as jq
from jax_q4k import native, quantizers
from jax_q4k.quantizers import CHUNK
from ptx_kernels import formats

QUANTIZE = DATA / "quantize"
# (32, 1024) rows of seven kinds, `importance` (1024,), ggml's Q8_0 of eight rows
GGML = np.load(QUANTIZE / "ggml.npz")
# relative errors of ggml's quantizers on these rows; IQ1 to IQ3 without weights: with weights of 1
GGML_RMSE = json.loads((QUANTIZE / "ggml_rmse.json").read_text())
RMSE = json.loads(
    (QUANTIZE / "rmse.json").read_text()
)  # relative errors of these quantizers, as last recorded
KINDS = ["normal", "laplace", "heavy", "offset", "tiny", "sparse", "onesided"]
BOOKS = ["IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS"]  # made by C++ code
FORMATS = [name for name in quantizers.names() if native.available() or name not in BOOKS]
SEARCHED = [name for name in FORMATS if name != "Q8_0"]
K_FORMATS = ["Q4_K", "Q5_K"]
WITH_MINIMUM = ["Q4_1", "Q5_1", "Q2_K", *K_FORMATS]


def decoded(blocks: np.ndarray, format: str) -> np.ndarray:
    """Decodes uint8 (..., blocks, bytes) to float32 (..., k) with the gguf package."""
    return gguf.quants.dequantize(
        blocks.reshape(*blocks.shape[:-2], -1), GGMLQuantizationType[format]
    )


def round_trip(x, format: str, importance=None) -> np.ndarray:
    return decoded(quantizers.quantize(x, format, importance), format)


def relative_rmse(got: np.ndarray, want: np.ndarray, importance=1.0) -> float:
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.sqrt(np.sum(importance * (got - want) ** 2) / np.sum(importance * want**2)))


@pytest.mark.slow("searches the best codes of many blocks", quick=["Q4_0-*"])
@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", SEARCHED)
def test_errors_are_below_ggmls(format, kind):
    x, importance = GGML[kind], GGML["importance"]
    assert relative_rmse(round_trip(x, format), x) <= GGML_RMSE[f"{kind}/{format}"]
    weighted = relative_rmse(round_trip(x, format, importance), x, importance.astype(np.float64))
    assert weighted <= GGML_RMSE[f"{kind}/{format}/weighted"]


@pytest.mark.parametrize("format", SEARCHED)
def test_errors_do_not_rise(format):
    """Errors may rise by at most 0.05%; each step of a search saves more than that somewhere.

    Codebook searches round differently with other kernel sets, which changes up to 0.2%. Lower
    errors may be recorded.
    """
    for kind in KINDS:
        more = 1.003 if format in BOOKS else 1.0005
        if kind == "sparse" and format in WITH_MINIMUM:
            more = 1.006  # many scales and minimums fit a single value: rounding errors choose
        even = relative_rmse(round_trip(GGML[kind], format), GGML[kind])
        assert even <= more * RMSE[f"{kind}/{format}"]
        importance = GGML["importance"]
        weighted = relative_rmse(
            round_trip(GGML[kind], format, importance), GGML[kind], importance.astype(np.float64)
        )
        assert weighted <= more * RMSE[f"{kind}/{format}/weighted"]


@pytest.mark.parametrize("format", K_FORMATS)
def test_values_at_the_edge_of_f16(format):
    """A super-block's d is a few times the smallest subnormal f16.

    ggml's relative RMSE is 3 there.
    """
    assert relative_rmse(round_trip(GGML["tiny"], format), GGML["tiny"]) <= 0.08


@pytest.mark.parametrize("kind", KINDS)
def test_q8_0_is_ggmls_to_the_bit(kind):
    want = GGML[f"{kind}.Q8_0"]
    np.testing.assert_array_equal(
        quantizers.quantize(GGML[kind][:8], "Q8_0").reshape(want.shape), want
    )


def test_q8_0_multiplies_by_the_reciprocal_as_ggml_does():
    """This decides the rounding of values halfway between two quants."""
    rng = np.random.default_rng(0)
    largest = rng.uniform(1, 2, (256, 1)).astype(np.float32)
    x = (rng.integers(-127, 127, (256, 32)) + np.float32(0.5)) * (largest / np.float32(127))
    x[:, :1] = largest
    want = gguf.quants.quantize(x, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(quantizers.quantize(x, "Q8_0").reshape(want.shape), want)
    quotients = x / (largest / np.float32(127))
    halves_up = np.copysign(np.floor(np.abs(quotients) + np.float32(0.5)), x)
    assert (want[:, 2:].view(np.int8) != halves_up).any()  # the quotient would differ


@pytest.mark.filterwarnings("error")
def test_q8_0_of_values_whose_step_is_subnormal():
    assert not quantizers.quantize(np.full((1, 32), 1e-38, np.float32), "Q8_0").any()


def test_q8_0_rounds_halves_away_from_zero():
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = 127, 0.5, -0.5, 1.5, -2.5, np.nextafter(np.float32(0.5), 0), 126.5
    blocks = quantizers.quantize(x, "Q8_0")
    assert blocks[0, 0, 2:9].view(np.int8).tolist() == [127, 1, -1, 2, -3, 0, 127]


@pytest.mark.parametrize("format", FORMATS)
def test_fresh_rows_and_both_decoders(format):
    x = np.random.default_rng(7).laplace(size=(5, 1536)).astype(np.float32)
    w = jq.quantize(x, format)
    assert (w.format, w.shape) == (format, x.shape)
    blocks = quantizers.quantize(x, format)
    assert w.to_gguf_bytes() == blocks.tobytes()
    np.testing.assert_array_equal(
        np.asarray(w.dequantize()).view(np.uint32), decoded(blocks, format).view(np.uint32)
    )
    bound = {
        "IQ4_NL": 0.088,
        "IQ4_XS": 0.088,
        "Q2_K": 0.3,
        "Q3_K": 0.175,
        "MXFP4": 0.13,
        "Q4_0": 0.11,
        "Q4_1": 0.088,
        "Q5_0": 0.055,
        "Q5_1": 0.044,
        "Q8_0": 0.007,
        "Q4_K": 0.086,
        "Q5_K": 0.044,
        "Q6_K": 0.022,
        "IQ1_M": 0.46,
        "IQ1_S": 0.52,
        "IQ2_S": 0.295,
        "IQ2_XS": 0.32,
        "IQ2_XXS": 0.38,
        "IQ3_S": 0.154,
        "IQ3_XXS": 0.195,
        "NVFP4": 0.087,
        "TQ1_0": 0.55,
        "TQ2_0": 0.55,
    }[format]
    assert nmse(w.dequantize(), x) <= bound**2


@pytest.mark.grid
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["IQ4_NL", "MXFP4", "Q4_0", "Q5_0", "Q8_0"])
def test_decoded_blocks_are_kept(format, kind):
    for importance in (None, GGML["importance"]):
        once = round_trip(GGML[kind], format, importance)
        np.testing.assert_array_equal(round_trip(once, format, importance), once)


@pytest.mark.parametrize(
    "format, largest, others",
    [("Q4_0", -3, [-2, -1, 0, 1, 2]), ("Q5_0", -11, [-2, -1, 0, 1]), ("IQ4_NL", -83, [-10, 1, 13])],
)
def test_values_of_little_importance_stay_on_their_grid(format, largest, others):
    """Their errors count less than the rounding errors of a sum over all squares."""
    rng = np.random.default_rng(0)
    quants = rng.choice(others, (256, 32))
    quants[:, 5] = largest
    x = quants * rng.uniform(0.5, 2, (256, 1)).astype(np.float16).astype(np.float32)
    importance = np.full(32, 2.0**-19)
    importance[5] = 1
    np.testing.assert_array_equal(round_trip(x, format, importance), x)


@pytest.mark.parametrize("format", ["Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_decoded_blocks_that_tell_their_grid_are_kept(format):
    """Almost every run of 256 dense weights with both signs determines its grid."""
    kinds = ["normal", "laplace", "heavy"]
    changed = total = 0
    for importance in (None, GGML["importance"]):
        for kind in kinds:
            once = round_trip(GGML[kind], format, importance).reshape(-1, 256)
            twice = round_trip(once.reshape(32, 1024), format, importance).reshape(-1, 256)
            differ = (np.abs(twice - once) > 2.0**-23 * np.abs(once)).any(-1)
            changed, total = changed + differ.sum(), total + len(differ)
    assert total == 2 * len(kinds) * 128
    assert changed <= 0.01 * total


@pytest.mark.grid
@pytest.mark.parametrize("format", ["Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("kind", ["offset", "onesided", "sparse"])
def test_decoded_blocks_that_do_not_tell_their_grid_stay_close(format, kind):
    """Values of one sign leave the minimum undetermined, few distinct values the scale.

    The search may find another grid.
    """
    once = round_trip(GGML[kind], format)
    assert relative_rmse(round_trip(once, format), once) <= relative_rmse(once, GGML[kind])


@pytest.mark.parametrize("format", SEARCHED)
def test_importance_lowers_the_error_where_it_is(format):
    x = np.random.default_rng(3).standard_normal((8, 1024)).astype(np.float32)
    importance = np.ones(1024)
    importance[::8] = 100
    even, weighted = round_trip(x, format), round_trip(x, format, importance)
    # powers of two, and one ternary scale for 256 values, leave little choice
    most = 0.98 if format == "MXFP4" else 0.985 if format.startswith("TQ") else 0.95
    assert relative_rmse(weighted[:, ::8], x[:, ::8]) <= most * relative_rmse(
        even[:, ::8], x[:, ::8]
    )
    assert relative_rmse(weighted, x, importance) < relative_rmse(even, x, importance)


@pytest.mark.parametrize("format", SEARCHED)
def test_only_ratios_of_importance_within_a_block_count(format):
    x = np.random.default_rng(4).standard_normal((2, 512)).astype(np.float32)
    importance = np.random.default_rng(5).random(512)
    block = formats.get(format).block_size
    want = quantizers.quantize(x, format, importance)
    scaled = importance * np.repeat(2.0 ** np.arange(-400, -400 + 512 // block), block)
    np.testing.assert_array_equal(quantizers.quantize(x, format, scaled), want)


@pytest.mark.parametrize("format", FORMATS)
def test_a_block_without_importance_counts_as_even(format):
    x = np.random.default_rng(4).standard_normal((2, 768)).astype(np.float32)
    importance = np.ones(768)
    importance[256:512] = 0
    np.testing.assert_array_equal(
        quantizers.quantize(x, format, importance), quantizers.quantize(x, format)
    )


@pytest.mark.parametrize("format", SEARCHED)
def test_values_without_importance_are_still_rounded(format):
    x = np.random.default_rng(4).standard_normal((4, 512)).astype(np.float32)
    importance = np.ones(512)
    importance[:32] = 0  # one complete sub-block
    importance[100:256:3] = 0
    got = round_trip(x, format, importance)
    assert relative_rmse(got[:, :32], x[:, :32]) <= 2 * relative_rmse(got, x)


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_quantized_alike_wherever_it_stands(format):
    block = formats.get(format).block_size
    k = 1280  # chunks end within rows
    rows = CHUNK // k + 5
    x = np.random.default_rng(6).standard_t(4, (rows, k)).astype(np.float32)
    importance = np.random.default_rng(5).random(k)
    want = quantizers.quantize(x, format, importance)
    assert want.shape == (rows, k // block, formats.get(format).block_bytes)
    np.testing.assert_array_equal(quantizers.quantize(x[::-1], format, importance)[::-1], want)
    np.testing.assert_array_equal(quantizers.quantize(x[-1], format, importance), want[-1])
    np.testing.assert_array_equal(quantizers.quantize(x[1:], format, importance), want[1:])


@pytest.mark.parametrize("format", ["Q4_K", "Q8_0"])
def test_shapes_and_layouts(format):
    x = np.random.default_rng(8).standard_normal((2, 3, 512)).astype(np.float32)
    want = quantizers.quantize(x, format)
    assert want.shape[:2] == (2, 3)
    np.testing.assert_array_equal(quantizers.quantize(np.asfortranarray(x), format), want)
    np.testing.assert_array_equal(quantizers.quantize(x[1, 2], format), want[1, 2])
    np.testing.assert_array_equal(quantizers.quantize(jnp.asarray(x), format), want)
    assert jq.quantize(x, format).shape == x.shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", ">f4"])
def test_dtypes(dtype):
    x = (
        np.random.default_rng(9)
        .standard_normal((3, 256))
        .astype(jnp.bfloat16 if dtype == "bfloat16" else dtype)
    )
    np.testing.assert_array_equal(
        quantizers.quantize(x, "Q4_K"), quantizers.quantize(x.astype(np.float32), "Q4_K")
    )
    if dtype in ("float16", "bfloat16"):
        np.testing.assert_array_equal(
            quantizers.quantize(jnp.asarray(x), "Q4_K"), quantizers.quantize(x, "Q4_K")
        )


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float16, jnp.bfloat16])
def test_dtypes_of_importance(dtype):
    x = np.random.default_rng(9).standard_normal((3, 256)).astype(np.float32)
    importance = np.random.default_rng(5).integers(1, 100, 256)
    want = quantizers.quantize(x, "Q4_K", importance.astype(np.float64))
    for typed in (importance.astype(dtype), jnp.asarray(importance.astype(dtype))):
        np.testing.assert_array_equal(quantizers.quantize(x, "Q4_K", typed), want)


@pytest.mark.slow("searches the best codes of many blocks", quick=["*-strict"])
@pytest.mark.parametrize(
    "option, value", [("jax_enable_x64", True), ("jax_numpy_dtype_promotion", "strict")]
)
def test_settings_of_jax_do_not_matter(option, value):
    x = np.random.default_rng(9).standard_normal((3, 256)).astype(np.float32)
    formats_ = ["Q4_K", "Q6_K"]
    want = [quantizers.quantize(x, format) for format in formats_]
    before = getattr(jax.config, option)
    jax.config.update(option, value)  # for all threads, unlike a context manager
    try:
        for format, blocks in zip(formats_, want, strict=True):
            np.testing.assert_array_equal(quantizers.quantize(x, format), blocks)
    finally:
        jax.config.update(option, before)


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_are_kept(format):
    x = np.zeros((2, 512), np.float32)
    x[1, 256:] = np.random.default_rng(1).standard_normal(256)
    got = round_trip(x, format)
    assert not got[0].any() and not got[1, :256].any() and got[1, 256:].any()


@pytest.mark.grid
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [1e-45, 1e-30, -1e-12, 2.0**-26, -3e-8])
def test_values_below_every_step_become_small_ones(format, value):
    got = round_trip(np.full((1, 256), value, np.float32), format)
    assert np.abs(got).max() <= 2.0**-24


@pytest.mark.grid
@pytest.mark.parametrize("format", SEARCHED)
@pytest.mark.parametrize("value", [0.01, -1.0, 2500.0])
def test_constants(format, value):
    got = round_trip(np.full((1, 512), value, np.float32), format)
    # scales are powers of two, or fp8
    bound = {"MXFP4": 0.2, "NVFP4": 0.07}.get(format, 2e-3)
    assert relative_rmse(got, np.full((1, 512), value)) <= bound


# Largest magnitudes of both signs that blocks with the maximum d represent, relative to the largest
# f16
LARGEST = {"Q4_0": 7, "Q4_1": 1, "Q5_0": 15, "Q5_1": 1, "Q8_0": 127}
LARGEST |= {"IQ4_NL": 113, "MXFP4": 12 * 2.0**57 / 65504}
LARGEST |= {
    "IQ4_XS": 31 * 113,
    "Q2_K": 15,
    "Q3_K": 31 * 3,
    "Q4_K": 63,
    "Q5_K": 63,
    "Q6_K": 127 * 31,
    "IQ3_XXS": 31 * 62 / 4,
    "IQ3_S": 31 * 15,
    "NVFP4": 2688 / 65504,
}
LARGEST |= dict.fromkeys(["TQ1_0", "TQ2_0"], 1)
LARGEST |= dict.fromkeys(["IQ1_M", "IQ1_S"], 15 * 7 / 8)
LARGEST |= dict.fromkeys(["IQ2_S", "IQ2_XS", "IQ2_XXS"], 31 * 43 / 8)


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in BOOKS])
def test_the_largest_magnitudes_of_both_signs(format):
    limit = LARGEST[format] * 65504.0
    x = limit * np.random.default_rng(2).choice(np.array([1, -1], np.float32), (1, 512))
    # half a step where both signs meet; IQ4_NL's ends are not symmetric
    step = {"Q4_1": 0.067, "Q5_1": 0.033, "IQ4_NL": 0.08, "IQ4_XS": 0.08}.get(format, 0.01)
    assert np.abs(round_trip(x, format) - x).max() <= step * limit


@pytest.mark.grid
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_magnitudes(format, sign):
    limit = LARGEST[format] * 65504.0
    x = np.random.default_rng(2).standard_normal((1, 512)).astype(np.float32)
    x[0, 17] = 0
    x *= np.float32(limit / np.abs(x).max() * 0.999)
    x[0, 17] = sign * limit
    got = round_trip(x, format)
    few_bits = {"IQ1_S": 0.47, "IQ1_M": 0.44, "IQ2_XXS": 0.36, "IQ2_XS": 0.31, "IQ2_S": 0.27}
    few_bits |= {"IQ3_XXS": 0.2, "Q2_K": 0.3, "TQ1_0": 0.46, "TQ2_0": 0.46}
    assert relative_rmse(got, x) <= few_bits.get(format, 0.15)
    x[0, 17] = np.nextafter(np.float32(sign * limit), np.float32(sign * np.inf))
    with pytest.raises(
        ValueError,
        match=rf"w\[0, 17\] is -?[\d.e+]+; {format} takes finite values of magnitude up to",
    ):
        quantizers.quantize(x, format)


@pytest.mark.grid
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_value_that_is_not_finite_is_named(format, value):
    x = np.zeros((2, CHUNK // 1024, 1024), np.float32)
    x[1, 3, 5] = x[1, 3, 8] = x[1, 4, 2] = value
    with pytest.raises(ValueError, match=rf"w\[1, 3, 5\] is {value}; {format} takes finite values"):
        quantizers.quantize(x, format)


@pytest.mark.parametrize("name", ["w", "importance"])
def test_bytes_of_tracers_are_refused(name):
    given = {"w": jnp.ones((1, 32)), "importance": jnp.ones(32)}
    with pytest.raises(TypeError, match=f"^{name} is traced, .* or jax_q4k.quantize"):
        jax.jit(lambda x: quantizers.quantize(format="Q4_0", **given | {name: x}))(given[name])


def test_float64_beyond_float32_is_refused():
    with pytest.raises(ValueError, match=r"w\[0, 2\] is 1e\+300; Q4_K takes finite values"):
        quantizers.quantize(np.array([[0, 0, 1e300] + [0] * 253]), "Q4_K")


ONES = np.ones((2, 256), np.float32)


BAD_ARGUMENTS = [
    (
        ONES,
        "Q9_K",
        None,
        ValueError,
        f"format='Q9_K' must be one of {', '.join(quantizers.names())}$",
    ),
    (ONES, None, None, ValueError, "format=None must be one of"),
    (ONES, ["Q4_K"], None, ValueError, r"format=\['Q4_K'\] must be one of"),
    (
        ONES[:, :128],
        "Q4_K",
        None,
        ValueError,
        r"shape \(2, 128\): k=128 must be a multiple of 256, Q4_K's block",
    ),
    (
        ONES[:, :48],
        "Q8_0",
        None,
        ValueError,
        r"shape \(2, 48\): k=48 must be a multiple of 32, Q8_0's block",
    ),
    (np.float32(1), "Q4_K", None, ValueError, r"shape \(\); it must have at least one axis"),
    (
        ONES[:0],
        "Q4_K",
        None,
        ValueError,
        r"shape \(0, 256\); it must have at least one axis, and every axis",
    ),
    (ONES[:, :0], "Q4_K", None, ValueError, r"shape \(2, 0\)"),
    (
        ONES.astype(np.int32),
        "Q4_K",
        None,
        TypeError,
        "w has dtype int32; it must be one of float32, float16",
    ),
    (ONES.astype(np.complex64), "Q4_K", None, TypeError, "w has dtype complex64"),
    (ONES > 0, "Q4_K", None, TypeError, "w has dtype bool"),
    (ONES.astype(jnp.float8_e4m3fn), "Q4_K", None, TypeError, "w has dtype float8_e4m3fn"),
    (ONES, "Q4_K", np.ones(255), ValueError, r"importance has shape \(255,\); it must be \(256,\)"),
    (ONES, "Q4_K", ONES, ValueError, r"importance has shape \(2, 256\); it must be \(256,\)"),
    (ONES, "Q8_0", 1.0, ValueError, r"importance has shape \(\)"),
    (
        ONES,
        "Q4_K",
        np.r_[np.ones(9), -1.0, -np.ones(246)],
        ValueError,
        r"importance\[9\] is -1.0; it must be",
    ),
    (
        ONES,
        "Q8_0",
        np.r_[np.ones(255), np.nan],
        ValueError,
        r"importance\[255\] is nan; it must be finite",
    ),
    (
        ONES,
        "Q4_K",
        np.r_[np.inf, np.ones(255)],
        ValueError,
        r"importance\[0\] is inf; it must be finite",
    ),
    (
        ONES,
        "Q4_K",
        np.ones(256, bool),
        TypeError,
        "importance has dtype bool; it must be real numbers",
    ),
    (ONES, "Q4_K", ["a"] * 256, TypeError, "importance has dtype"),
]


@pytest.mark.parametrize(
    "w, format, importance, error, message", BAD_ARGUMENTS, ids=[c[-1] for c in BAD_ARGUMENTS]
)
def test_bad_arguments(w, format, importance, error, message):
    with pytest.raises(error, match=message):
        quantizers.quantize(w, format, importance)


def values(format: str) -> st.SearchStrategy[np.float32]:
    """Magnitudes from below every format's step to the largest that this one represents.

    They include zeros and both signs.
    """
    limit = quantizers.largest(format)
    magnitude = st.builds(
        lambda m, e: min(m * 2.0**e, limit), st.floats(1, 2), st.integers(-40, 28)
    )
    signed = st.builds(lambda m, s: np.float32(m * s), magnitude, st.sampled_from([1, -1]))
    return st.one_of(st.just(np.float32(0)), signed)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 3), st.integers(1, 3), st.data())
def test_any_values_decode_to_finite_ones_no_farther_than_zeros(format, n, blocks, data):
    shape = (n, blocks * formats.get(format).block_size)
    x = data.draw(
        hnp.arrays(np.float32, shape, elements=values(format), fill=st.just(np.float32(0)))
    )
    importance = data.draw(
        st.one_of(st.none(), hnp.arrays(np.float64, shape[1], elements=st.floats(0, 1e30)))
    )
    packed = quantizers.quantize(x, format, importance)
    assert packed.shape == (n, blocks, formats.get(format).block_bytes)
    got = decoded(packed, format).astype(np.float64)
    assert np.isfinite(got).all()
    if importance is None:
        assert np.linalg.norm(got - x) <= np.linalg.norm(x) * (1 + 1e-6) + 2.0**-24 * np.sqrt(
            x.size
        )

"""Decode attention on tensor cores in the simulator, against float64 and the kernel for lanes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.attention_runs import run, sectors, simulate
from support.helpers import nmse
from support.oracles import attention, int8_vectors, stored

from ptx_kernels.kernels.attention import (
    PagedAttentionConfig,
    paged_attention,
    paged_attention_rule,
)
from ptx_kernels.kernels.pages import HEAD_DIMS, PAGE_TYPES
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.ptx import KernelError
from ptx_kernels.simulator import run as simulated
from ptx_kernels.tuning import choose

DTYPES = ("bf16", "f16", "int8", "fp8")
#: Relative errors of 1e-5; f16 operands have two parts with 22 bits, which gives 1e-6.
TOLERANCE = {"bf16": 1e-10, "f16": 1e-12, "int8": 1e-12, "fp8": 1e-12}
NARROW = [head_dim for head_dim in HEAD_DIMS if head_dim <= 128]


def cores(queries: int = 4, warps: int = 2, **options: Any) -> PagedAttentionConfig:
    return PagedAttentionConfig(warps, queries, unroll=1, tensor_cores=True, **options)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", NARROW)
def test_head_dims(head_dim: int, dtype: str) -> None:
    got, want = run(
        [37, 3], head_dim=head_dim, dtype=dtype, kv_heads=2, group=4, config=cores(warps=1)
    )
    assert nmse(got, want) <= TOLERANCE[dtype]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "group, queries", [(1, 1), (2, 2), (7, 7), (8, 8), (9, 9), (16, 16), (20, 10), (5, 2), (17, 16)]
)
def test_query_heads_per_kv_head(group: int, queries: int, dtype: str) -> None:
    """Some blocks have fewer query heads than rows, and some repeat the last head."""
    got, want = run([18], group=group, head_dim=48, dtype=dtype, config=cores(queries))
    assert nmse(got, want) <= TOLERANCE[dtype]


LENGTHS = [0, 1, 15, 16, 17, 63, 113, 129]


@pytest.mark.grid
@pytest.mark.parametrize("warps, splits", [(1, 1), (4, 1), (8, 1), (2, 3), (1, 7), (3, 2)])
@pytest.mark.parametrize("contiguous", [False, True])
def test_lengths(warps: int, splits: int, contiguous: bool) -> None:
    options = dict(kv_heads=1, head_dim=32, contiguous=contiguous, dtype="f16")
    got, want = run(LENGTHS, config=cores(2, warps, splits=splits), **options)
    assert (got[0] == 0).all()
    assert nmse(got, want) <= TOLERANCE["f16"]


@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_page_sizes(page_size: int) -> None:
    options = dict(kv_heads=2, head_dim=64, dtype="int8", config=cores(2, 3))
    got, want = run([150, 64, 49], page_size=page_size, **options)
    assert nmse(got, want) <= TOLERANCE["int8"]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        dict(window=1),
        dict(window=16, splits=3),
        dict(window=50, splits=2),
        dict(window=1000, contiguous=True, splits=2),
        dict(soft_cap=0.5),
        dict(sinks=[0.3, -2.0, 5.0, -np.inf]),
        dict(sinks=[1e4, -1e4, 2.0], splits=3),
        dict(window=20, soft_cap=2.0, sinks=[1.0, -3.0], contiguous=True, splits=3, group=9),
    ],
    ids=lambda options: "-".join(options),
)
def test_windows_caps_and_sinks(options: dict[str, Any], dtype: str) -> None:
    group, splits = options.get("group", 3), options.get("splits", 1)
    options = {name: value for name, value in options.items() if name != "splits"}
    config = cores(group, splits=splits)
    shape = dict(group=group, head_dim=48, dtype=dtype) | options
    got, want = run([0, 1, 17, 63, 90], config=config, **shape)
    assert (got[0] == 0).all()
    assert nmse(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts(dtype: str) -> None:
    """The relative error is that of short contexts: it does not accumulate."""
    options = dict(kv_heads=1, head_dim=32, page_size=64, dtype=dtype)
    got, want = run([1023, 2048], config=cores(2, 4), **options)
    assert nmse(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_lanes(dtype: str) -> None:
    shape = dict(group=4, head_dim=128, dtype=dtype, window=40, sinks=[0.5, -1.0])
    got, _ = run([83, 0, 17], config=cores(4, splits=2), **shape)
    want, _ = run([83, 0, 17], config=PagedAttentionConfig(queries=4), **shape)
    assert nmse(got, want.astype(np.float64)) <= TOLERANCE[dtype]


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [4, 16])
def test_a_group_reads_its_keys_and_values_once(group: int, dtype: str) -> None:
    """The 32-byte sectors beyond those of an empty context are K's, V's and int8's scales."""
    tokens, head_dim = 64, 128
    read = sectors(tokens, group, head_dim, dtype, cores(group))
    once = 2 * tokens * head_dim * PAGE_TYPES[dtype].size // 32
    scales = 2 * tokens if dtype == "int8" else 0
    assert once <= read <= once + scales


SMALL = dict(
    batch=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_pages=3,
    page_size=16,
    pages_per_sequence=3,
    scale=1.0,
)
TABLE = np.array([[0, 1, 2]], np.int32)


def small(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int, dtype: str, **options: Any
) -> np.ndarray:
    """Attention of q (2, 32) over keys and values (48, 32), f32 that the dtype rounds."""
    shape = 3, 1, 16, 32
    arguments = SMALL | dict(dtype=dtype, config=cores(2, 1)) | options
    if dtype == "int8":
        (k_rows, k_scales), (v_rows, v_scales) = (int8_vectors(x.reshape(shape)) for x in (k, v))
        pages = [k_rows, v_rows, k_scales, v_scales]
    else:
        pages = [stored(x.reshape(shape), dtype) for x in (k, v)]
    (got,) = simulate(arguments, q[None], *pages, TABLE, np.array([length], np.int32))
    return got[0]


@pytest.mark.parametrize("descending", [False, True])
def test_scales_of_values_may_differ_by_any_factor(descending: bool) -> None:
    """Scales range from 2^-60 to 2^60, rising or falling over tokens."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 32), (48, 32), (48, 32)))
    factors = 2.0 ** np.linspace(-60, 60, 48)[:: -1 if descending else 1]
    v = (v * factors[:, None]).astype(np.float32)
    got = small(q, k, v, 48, "int8")
    quantized = [int8_vectors(x.reshape(3, 1, 16, 32)) for x in (k, v)]
    held = [rows * scales.astype(np.float64)[..., None] for rows, scales in quantized]
    want = attention(q[None], *held, TABLE, np.array([48]), 1.0)
    assert nmse(got, want[0]) <= TOLERANCE["int8"]


@pytest.mark.parametrize("dtype", ["f16", "int8", "fp8"])
@pytest.mark.parametrize("size", [1e-12, 1e8])
def test_queries_beyond_the_range_of_f16(size: float, dtype: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 32), (48, 32), (48, 32)))
    sized = (q * size).astype(np.float32)
    got = small(sized, k, v, 40, dtype, scale=1 / size)
    np.testing.assert_allclose(got, small(q, k, v, 40, dtype), rtol=1e-4, atol=1e-6)


def test_small_weights_keep_their_bits_in_f16() -> None:
    """43 tokens of weight 2^-20 and one of weight 1, whose value is zero."""
    q, k, v = np.zeros((2, 32), np.float32), np.zeros((48, 32), np.float32), np.ones((48, 32))
    v = v.astype(np.float32)
    q[:, 0], k[3, 0], v[3] = 1.0, np.float16(20 * np.log(2)), 0
    rest = 43 * np.exp(-k[3, 0].astype(np.float64))
    got = small(q, k, v, 44, "f16")
    np.testing.assert_allclose(got, rest / (1 + rest), rtol=5e-6)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(dtype: str, sign: int) -> None:
    q, pages = np.full((2, 32), 300.0 * sign, np.float32), np.full((48, 32), 300.0, np.float32)
    held = 288.0 if dtype == "fp8" else 300.0
    np.testing.assert_allclose(small(q, pages, pages, 40, dtype), held, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, dict(soft_cap=2.0)])
def test_nan_query_stays_in_its_head(options: dict[str, Any], dtype: str) -> None:
    q, ones = np.ones((2, 32), np.float32), np.ones((48, 32), np.float32)
    q[1, 5] = np.nan
    got = small(q, ones, ones, 17, dtype, **options)
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[0], 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "fp8"])
def test_nan_in_pages(dtype: str) -> None:
    """A NaN within the context affects its dimension; one after the context is not seen."""
    q, k, v = np.zeros((2, 32), np.float32), np.ones((48, 32), np.float32), np.ones((48, 32))
    v = v.astype(np.float32)
    v[17, 3] = np.nan
    got = small(q, k, v, 18, dtype)
    assert np.isnan(got[:, 3]).all() and np.isfinite(np.delete(got, 3, 1)).all()
    np.testing.assert_allclose(small(q, k, v, 17, dtype), 1.0, rtol=1e-6)


def test_lengths_and_pages_out_of_range() -> None:
    """A negative length is empty; a length beyond the table ends with it.

    Tokens in missing pages are skipped.
    """
    tables = np.array([[0, 1], [2, 3], [-1, 1], [5, 2**31 - 1], [0, -(2**31)], [1, 4]])
    lengths = [-5, 1000, 20, 20, 20, 20]
    for dtype in ("f16", "int8"):
        options = dict(tables=tables, num_pages=4, poison=False, dtype=dtype, config=cores(2))
        got, want = run(lengths, **options)
        assert (got[[0, 3]] == 0).all()
        assert nmse(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("splits", [1, 2])
def test_output_for_a_mat_vec(splits: int) -> None:
    """Equals quantize_q8_1 of the f32 output bit for bit."""
    arguments = SMALL | dict(dtype="f16", config=cores(2, splits=splits))
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 32), np.float32)
    pages = [stored(rng.standard_normal((3, 1, 16, 32), np.float32), "f16") for _ in range(2)]
    operands = (q, *pages, TABLE, np.array([41], np.int32))
    (out,) = simulate(arguments, *operands)
    want = simulated(quantize_q8_1(rows=1, columns=64), out.reshape(1, 64))
    for got, expected in zip(simulate(arguments, *operands, output="q8_1"), want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, capacity", [(3, 16), (4, 512), (8, 4096), (24, 300), (33, 64)])
def test_as_tuning_has_it(group: int, capacity: int, dtype: str) -> None:
    config = choose(paged_attention_rule, 1, group, 1, 64, capacity, dtype)
    assert config.tensor_cores and config.splits <= max(1, capacity // 64)
    few = replace(config, splits=min(config.splits, 3))
    got, want = run([min(capacity, 75)], kv_heads=1, group=group, dtype=dtype, config=few)
    assert nmse(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    "shape",
    [
        dict(dtype="f32"),
        dict(num_heads=8),  # one query head per KV head
        dict(num_heads=16, dtype="int8"),
        dict(num_heads=16, dtype="fp8"),
        dict(head_dim=256),
        dict(page_size=40),
        dict(head_dim=576, num_kv_heads=1, value_dim=512),
    ],
)
def test_shapes_that_stay_with_lanes(shape: dict[str, Any]) -> None:
    given = dict(batch=1, num_heads=32, num_kv_heads=8, head_dim=128, capacity=4096, dtype="bf16")
    assert choose(paged_attention_rule, **given).tensor_cores
    assert not choose(paged_attention_rule, **given | shape).tensor_cores


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype="f32"), "dtype='f32' must be one of bf16, f16, int8, fp8"),
        (dict(head_dim=144), "head_dim=144 at most 128"),
        (dict(page_size=24), "page_size=24 a multiple of 16"),
        (dict(head_dim=64, value_dim=32), "no pages latent"),
        (dict(config=cores(17)), "queries=17 must be at most 16"),
        (dict(config=cores(2, 4, teams=2)), "teams=2 1"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        paged_attention(**SMALL | dict(dtype="bf16", config=cores()) | change)

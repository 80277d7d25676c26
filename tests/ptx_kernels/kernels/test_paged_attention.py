"""Decode attention, in one pass or split and merged, in the simulator, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.attention_runs import run, sectors, simulate
from support.helpers import nmse
from support.oracles import attention, int8_vectors, stored

from ptx_kernels import simulator
from ptx_kernels.kernels.attention import (
    MergeConfig,
    PagedAttentionConfig,
    merge_attention,
    paged_attention,
    paged_attention_rule,
)
from ptx_kernels.kernels.pages import HEAD_DIMS, PAGE_TYPES
from ptx_kernels.kernels.quantize_f16 import quantize_f16
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.ptx import KernelError
from ptx_kernels.tuning import choose

DTYPES = ("f32", "f16", "bf16", "int8", "fp8")
TOLERANCE = 1e-11  # for every dtype, since the oracle gets the same rounded pages
#: Tolerance against unrounded float32 keys and values: bf16 has 8 bits of mantissa, fp8 has 4, and
#: int8 about 7 of the largest magnitude.
ROUNDING = {"f32": 1e-11, "f16": 1e-6, "bf16": 1e-5, "int8": 1e-4, "fp8": 2e-3}
DEFAULT = PagedAttentionConfig()


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim: int, dtype: str) -> None:
    got, want = run([21, 3], head_dim=head_dim, dtype=dtype, kv_heads=1)
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 112, 256, 512])
def test_loads_of_8_bytes(head_dim: int, dtype: str) -> None:
    config = PagedAttentionConfig(load_bytes=8, unroll=4, warps=1)
    got, want = run([21, 3], head_dim=head_dim, dtype=dtype, kv_heads=1, group=5, config=config)
    assert nmse(got, want) <= TOLERANCE


def chosen(
    group: int, head_dim: int, dtype: str, value_dim: int | None = None
) -> PagedAttentionConfig:
    """The tuned Config for a sequence of 64 tokens and one KV head."""
    return choose(paged_attention_rule, 1, group, 1, head_dim, 64, dtype, value_dim)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [5, 8])
def test_a_group_reads_its_keys_and_values_once(group: int, dtype: str) -> None:
    """The 32-byte sectors beyond those of an empty context are K's, V's and int8's scales.

    The Config is the tuned one.
    """
    tokens, head_dim = 64, 128
    read = sectors(tokens, group, head_dim, dtype, chosen(group, head_dim, dtype))
    once = 2 * tokens * head_dim * PAGE_TYPES[dtype].size // 32
    scales = 2 * tokens if dtype == "int8" else 0  # at most one sector per token
    assert once <= read <= once + scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_of_each_page_dtype(dtype: str) -> None:
    got, want = run(
        [300, 77], dtype=dtype, rounded=False, q_size=1.0, config=replace(DEFAULT, splits=2)
    )
    assert nmse(got, want) <= ROUNDING[dtype]
    if dtype != "f32":
        assert nmse(got, want) > ROUNDING[dtype] / 100  # the bound is tight


@pytest.mark.parametrize("group, queries", [(1, 8), (2, 8), (4, 4), (7, 8), (8, 8), (9, 8), (5, 2)])
def test_query_heads_per_kv_head(group: int, queries: int) -> None:
    got, want = run([18], group=group, config=PagedAttentionConfig(queries=queries, warps=2))
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [4, 8])
def test_wide_heads_as_tuning_has_them(group: int, dtype: str) -> None:
    config = chosen(group, 512, dtype)
    assert config.queries * config.teams == group
    got, want = run([37, 3], head_dim=512, dtype=dtype, kv_heads=1, group=group, config=config)
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "head_dim, value_dim, group",
    [(576, 512, 16), (288, 256, 20), (64, 64, 3), (96, 32, 1), (160, 96, 35)],
)
def test_latent_pages(head_dim: int, value_dim: int, group: int, dtype: str) -> None:
    config = chosen(group, head_dim, dtype, value_dim)
    sizes = dict(head_dim=head_dim, value_dim=value_dim, group=group)
    got, want = run([21, 3], dtype=dtype, kv_heads=1, config=config, **sizes)
    assert got.shape == (2, group, value_dim)
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "group, teams, warps, queries",
    [(4, 2, 2, 2), (4, 2, 6, 2), (5, 2, 4, 2), (7, 3, 3, 1), (3, 4, 4, 1)],
)
def test_teams_of_warps(group: int, teams: int, warps: int, queries: int, dtype: str) -> None:
    """Some blocks have fewer query heads than their teams could take."""
    config = PagedAttentionConfig(warps=warps, queries=queries, teams=teams, unroll=1)
    for splits in (1, 3):
        options = dict(dtype=dtype, config=replace(config, splits=splits), sinks=[0.5, -1.0, 2.0])
        got, want = run([50, 0, 17], group=group, head_dim=48, window=40, **options)
        assert nmse(got, want) <= TOLERANCE
        got, want = run([50, 0, 17], group=group, head_dim=96, value_dim=64, **options)
        assert nmse(got, want) <= TOLERANCE


@pytest.mark.slow("simulates or assembles large kernels", quick=["group=16-bf16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 128])
def test_a_team_reads_latent_rows_once(group: int, dtype: str) -> None:
    """Each team reads the sectors of rows and int8's scales once, beyond those of an empty context.

    All teams of 16 query heads are in one block, those of 128 in four.
    """
    tokens, head_dim = 64, 576
    config = replace(chosen(group, head_dim, dtype, 512), splits=1)
    assert group % (config.queries * config.teams) == 0
    assert group // (config.queries * config.teams) == (1 if group == 16 else 4)
    teams = group // config.queries
    once = sectors(tokens, group, head_dim, dtype, config, value_dim=512)
    least = tokens * head_dim * PAGE_TYPES[dtype].size // 32
    scales = tokens if dtype == "int8" else 0
    assert teams * least <= once <= teams * (least + scales)


LENGTHS = [0, 1, 15, 16, 17, 63, 113, 129]


@pytest.mark.grid
@pytest.mark.parametrize(
    "warps, unroll, splits", [(1, 1, 1), (2, 3, 1), (4, 2, 1), (8, 1, 1), (2, 1, 3), (1, 2, 7)]
)
@pytest.mark.parametrize("contiguous", [False, True])
def test_lengths(warps: int, unroll: int, splits: int, contiguous: bool) -> None:
    config = PagedAttentionConfig(warps=warps, unroll=unroll, splits=splits)
    got, want = run(LENGTHS, kv_heads=1, head_dim=32, contiguous=contiguous, config=config)
    assert (got[0] == 0).all()
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("splits", [1, 9])
def test_long_contexts(splits: int, dtype: str) -> None:
    config = PagedAttentionConfig(splits=splits, warps=2)
    got, want = run(
        [1023, 700, 2048], kv_heads=1, head_dim=32, page_size=64, dtype=dtype, config=config
    )
    assert nmse(got, want) <= TOLERANCE


SPLIT = PagedAttentionConfig(splits=3, warps=1, unroll=1)


@pytest.mark.parametrize(
    "options",
    [
        dict(window=1),
        dict(window=16),
        dict(window=50, config=SPLIT),
        dict(window=1000, contiguous=True, config=SPLIT),
        dict(soft_cap=0.5),
        dict(soft_cap=30.0, config=SPLIT),
        dict(sinks=[0.3, -2.0, 5.0, -np.inf]),
        dict(sinks=[1e4, -1e4, 2.0], config=SPLIT),
        dict(window=20, soft_cap=2.0, sinks=[1.0], dtype="bf16", contiguous=True, config=SPLIT),
        dict(
            window=20,
            soft_cap=2.0,
            sinks=[1.0],
            dtype="int8",
            group=3,
            config=replace(SPLIT, queries=2),
        ),
        dict(
            sinks=[0.3, -2.0, 5.0, -np.inf, 1.0, 7.0, 0.1],
            dtype="int8",
            group=7,
            kv_heads=1,
            config=SPLIT,
        ),
    ],
    ids=lambda options: "-".join(name for name in options if name != "config"),
)
def test_windows_caps_and_sinks(options: dict[str, Any]) -> None:
    got, want = run(LENGTHS[:-2] + [90], head_dim=48, **options)
    assert (got[0] == 0).all()
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.parametrize("splits, warps, unroll", [(2, 1, 1), (13, 4, 2), (64, 2, 2)])
def test_merge(splits: int, warps: int, unroll: int) -> None:
    """Empty splits have no effect, at the start, in between and everywhere."""
    rng = np.random.default_rng(splits)
    parts = rng.standard_normal((2, 3, splits, 80), np.float32)
    marks = np.stack(
        [rng.uniform(-200, 200, (2, 3, splits)), rng.uniform(1, 9, (2, 3, splits))], -1
    ).astype(np.float32)
    empty = rng.random((2, 3, splits)) < 0.4
    empty[1, 2] = True
    parts[empty], marks[empty] = 0, (-3.0e38, 0)
    arguments = dict(
        batch=2,
        num_heads=3,
        head_dim=80,
        splits=splits,
        config=MergeConfig(warps=warps, unroll=unroll),
    )
    (got,) = simulator.run(merge_attention(**arguments), parts, marks)
    weights = np.where(
        empty, 0, 2.0 ** (marks[..., 0].astype(np.float64) - marks[..., 0].max(-1, keepdims=True))
    )
    total = (weights * marks[..., 1]).sum(-1, keepdims=True)
    want = (weights[..., None] * parts).sum(-2) / np.where(total == 0, 1, total)
    assert nmse(got, want) <= TOLERANCE and not got[1, 2].any()


@pytest.mark.parametrize("splits", [1, 2])
def test_output_for_a_mat_vec(splits: int) -> None:
    """Equals quantize_q8_1 of the f32 output bit for bit."""
    arguments = dict(
        batch=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=96,
        num_pages=2,
        page_size=32,
        contiguous=True,
    )
    arguments |= dict(
        pages_per_sequence=1,
        scale=0.1,
        config=PagedAttentionConfig(splits=splits, warps=3, queries=1),
    )
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal(s, np.float32) for s in ((2, 4, 96), (2, 2, 32, 96), (2, 2, 32, 96))
    )
    operands = (q, k, v, np.array([29, 0], np.int32))
    (out,) = simulate(arguments, *operands)
    want = simulator.run(quantize_q8_1(rows=2, columns=384), out.reshape(2, 384))
    for got, expected in zip(simulate(arguments, *operands, output="q8_1"), want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "dtype, heads, kv_heads, head_dim, config",
    [
        ("bf16", 16, 4, 128, PagedAttentionConfig(warps=2, tensor_cores=True)),
        ("bf16", 16, 2, 96, PagedAttentionConfig(warps=3, tensor_cores=True)),
        ("f32", 8, 2, 64, PagedAttentionConfig(warps=3)),
        ("f32", 2, 1, 128, PagedAttentionConfig(warps=3)),  # warps with no super-block
        ("f32", 3, 1, 256, PagedAttentionConfig(warps=2, queries=2)),  # a block with fewer heads
        ("f32", 8, 1, 128, PagedAttentionConfig(warps=4, queries=4, teams=2)),
        ("f32", 4, 1, 256, PagedAttentionConfig(splits=2)),  # a separate merge
        ("bf16", 8, 1, 64, PagedAttentionConfig(2, splits=3, tensor_cores=True, cluster=True)),
        ("f32", 4, 1, 192, PagedAttentionConfig(warps=1, splits=2, cluster=True)),
    ],
)
def test_output_for_products_of_f16(
    dtype: str, heads: int, kv_heads: int, head_dim: int, config: PagedAttentionConfig
) -> None:
    """Equals quantize_f16 of the f32 output bit for bit."""
    arguments = dict(
        batch=3,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=3,
        page_size=32,
        pages_per_sequence=1,
        scale=0.1,
        dtype=dtype,
        contiguous=not config.tensor_cores,
        config=config,
    )
    rng = np.random.default_rng(0)
    shape = (3, kv_heads, 32, head_dim)
    k, v = (stored(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))
    q = rng.standard_normal((3, heads, head_dim), np.float32)
    lengths = np.array([29, 0, 7], np.int32)
    tables = [np.arange(3, dtype=np.int32)[:, None]] * config.tensor_cores
    operands = (q, k, v, *tables, lengths)
    (out,) = simulate(arguments, *operands)
    columns = heads * head_dim
    want = simulator.run(quantize_f16(rows=3, columns=columns), out.reshape(3, columns))
    found = simulate(arguments, *operands, output="f16")
    for got, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert out[[0, 2]].any() and not out[1].any()


def test_sequences_may_share_pages() -> None:
    tables = np.array([[3, 1, 0], [3, 1, 2]])
    got, want = run([40, 48], tables=tables, num_pages=4)
    assert nmse(got, want) <= TOLERANCE


def test_lengths_and_pages_out_of_range() -> None:
    """A negative length is empty; a length beyond the table ends with it.

    Tokens in missing pages are skipped.
    """
    tables = np.array([[0, 1], [2, 3], [-1, 1], [5, 2**31 - 1], [0, -(2**31)], [1, 4]])
    got, want = run([-5, 1000, 20, 20, 20, 20], tables=tables, num_pages=4, poison=False)
    assert (got[[0, 3]] == 0).all()
    assert nmse(got, want) <= TOLERANCE


def test_pages_beyond_2_gib() -> None:
    """The last page of 4.3 GB each for keys and values; only written pages use memory."""
    num_pages, shape = (1 << 32) // (16 * 256) + 2, (16, 256)
    rng, last = np.random.default_rng(0), num_pages - 1
    pages = [np.zeros((num_pages, 1, *shape), np.int8) for _ in range(2)]
    scales = [np.zeros((num_pages, 1, 16), np.float32) for _ in range(2)]
    for page in (last, num_pages // 2):
        for p, s in zip(pages, scales, strict=True):
            p[page, 0], s[page, 0] = int8_vectors(rng.standard_normal(shape, np.float32))
    q = rng.standard_normal((1, 1, 256), np.float32)
    tables, lens = np.array([[last, num_pages // 2]], np.int32), np.array([25], np.int32)
    kernel = paged_attention(
        batch=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=256,
        num_pages=num_pages,
        page_size=16,
        pages_per_sequence=2,
        scale=0.1,
        dtype="int8",
    )
    (got,) = simulator.run(kernel, q, *pages, *scales, tables, lens)
    k, v = (
        p[tables[0]] * s[tables[0]].astype(np.float64)[..., None]
        for p, s in zip(pages, scales, strict=True)
    )
    assert nmse(got, attention(q, k, v, np.array([[0, 1]]), lens, 0.1)) <= TOLERANCE


SMALL = dict(
    batch=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_pages=1,
    page_size=16,
    pages_per_sequence=1,
)


def small(q: np.ndarray, pages: np.ndarray, length: int, **options: Any) -> np.ndarray:
    arguments = SMALL | dict(scale=1.0, config=DEFAULT) | options
    (got,) = simulate(
        arguments, q, pages, pages, np.zeros((1, 1), np.int32), np.array([length], np.int32)
    )
    return got


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_do_not_overflow(sign: int, splits: int) -> None:
    q, pages = (
        np.full((1, 2, 32), 300.0 * sign, np.float32),
        np.full((1, 1, 16, 32), 300.0, np.float32),
    )
    np.testing.assert_allclose(
        small(q, pages, 16, config=replace(DEFAULT, splits=splits)), 300.0, rtol=1e-5
    )


@pytest.mark.parametrize(
    "options", [{}, dict(soft_cap=2.0), dict(config=replace(DEFAULT, splits=2))]
)
def test_nan_query_stays_in_its_head(options: dict[str, Any]) -> None:
    q, pages = np.ones((1, 2, 32), np.float32), np.ones((1, 1, 16, 32), np.float32)
    q[0, 1, 5] = np.nan
    got = small(q, pages, 3, **options)
    assert np.isnan(got[0, 1]).all() and (got[0, 0] == 1).all()


def test_nan_in_fp8_pages_stays_nan() -> None:
    pages = stored(np.ones((1, 1, 16, 32), np.float32), "fp8")
    pages[0, 0, 1, 3] = 0xFF
    assert np.isnan(small(np.zeros((1, 2, 32), np.float32), pages, 2, dtype="fp8")).all()
    pages[0, 0, 1] = stored(np.ones(32, np.float32), "fp8")
    pages[0, 0, 2, 3] = 0x7F  # after the context
    assert (small(np.zeros((1, 2, 32), np.float32), pages, 2, dtype="fp8") == 1).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(head_dim=40), "head_dim=40 must be one of"),
        (dict(head_dim=520), "head_dim=520 must be one of"),
        (dict(head_dim=528), "head_dim=528 must be one of"),
        (dict(head_dim=48, value_dim=32), "head_dim=48 of latent pages must be one of"),
        (dict(head_dim=608, value_dim=32), "head_dim=608 of latent pages must be one of"),
        (dict(head_dim=64, value_dim=48), "value_dim=48 must be a multiple of 32, at most .*=64"),
        (dict(head_dim=64, value_dim=96), "value_dim=96 must be a multiple of 32, at most .*=64"),
        (
            dict(config=PagedAttentionConfig(warps=4, teams=3)),
            "warps=4 must be a multiple of teams=3",
        ),
        (dict(num_heads=3, num_kv_heads=2), "num_heads=3 must be a multiple of num_kv_heads=2"),
        (dict(dtype="f64"), "dtype='f64' must be one of f32, f16, bf16, int8, fp8"),
        (dict(contiguous=True, batch=2), "num_pages=1 must be batch=2"),
        (dict(window=0), "window=0 must be an integer, at least 1"),
        (dict(soft_cap=0.0), "soft_cap=0.0 must be positive"),
        (dict(config=PagedAttentionConfig(load_bytes=4)), "load_bytes=4 must be 8 or 16"),
        (
            dict(config=PagedAttentionConfig(splits=9, cluster=True)),
            "cluster: splits=9 must be 2 to 8",
        ),
        (dict(config=PagedAttentionConfig(cluster=True)), "cluster: splits=1 must be 2 to 8"),
        (dict(output="bf16"), "output='bf16' must be f32"),
        (dict(output="q8_1", head_dim=48), "head_dim=48 is a multiple of 32"),
        (
            dict(output="f16", num_heads=3, num_kv_heads=1, head_dim=64),
            "f16 where 3 of a block's heads also fill multiples of 256",
        ),
        (
            dict(
                output="f16",
                num_heads=6,
                num_kv_heads=1,
                head_dim=64,
                config=PagedAttentionConfig(queries=4),
            ),
            "f16 where 1 of a block's heads also fill multiples of 256",
        ),
        (
            dict(output="q8_1", config=PagedAttentionConfig(splits=2)),
            "output='q8_1' must be f32 of splits=2 that are no cluster",
        ),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        paged_attention(**SMALL | dict(scale=1.0) | change)

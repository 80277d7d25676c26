"""Decode attention with splits in a cluster, in the simulator, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.attention_runs import run, simulate
from support.helpers import nmse
from support.oracles import stored

from ptx_kernels import simulator
from ptx_kernels.kernels.attention import (
    PagedAttentionConfig,
    leaves_f16,
    paged_attention,
    paged_attention_rule,
)
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.kernels.pages import PAGE_TYPES
from ptx_kernels.kernels.quantize_f16 import quantize_f16
from ptx_kernels.kernels.quantize_q8_1 import quantize_q8_1
from ptx_kernels.ptx import Kernel
from ptx_kernels.simulator import Traffic
from ptx_kernels.simulator.traffic import total
from ptx_kernels.tuning import choose

LANES = PagedAttentionConfig(warps=2, queries=2, cluster=True)
CORES = PagedAttentionConfig(warps=2, queries=4, tensor_cores=True, cluster=True)
TOLERANCE = 1e-11
LENGTHS = [0, 1, 17, 63, 90]


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("config", [LANES, CORES], ids=["lanes", "tensor cores"])
def test_lengths(config: PagedAttentionConfig, splits: int) -> None:
    """Some splits of short contexts have no tokens; all splits of the first context are empty."""
    config = replace(config, splits=splits)
    got, want = run(LENGTHS, group=4, head_dim=64, dtype="f16", config=config)
    assert (got[0] == 0).all()
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("dtype", PAGE_TYPES)
@pytest.mark.parametrize(
    "head_dim, value_dim, group", [(320, 256, 11), (256, None, 5)], ids=["latent", "wide"]
)
def test_groups_divided_by_the_rule(
    head_dim: int, value_dim: int | None, group: int, dtype: str
) -> None:
    """A group of one KV head, over clusters of two query heads; the last has one."""
    # pages of eight tokens, which tensor cores do not take
    config = choose(paged_attention_rule, 1, group, 1, head_dim, 512, dtype, value_dim, 8)
    assert (config.cluster, config.queries, config.teams) == (True, 2, 1)
    sizes = dict(head_dim=head_dim, value_dim=value_dim, group=group, kv_heads=1)
    got, want = run([77], dtype=dtype, config=config, **sizes)
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("dtype", PAGE_TYPES)
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_pages(head_dim: int, dtype: str) -> None:
    options = dict(group=3, head_dim=head_dim, dtype=dtype, kv_heads=2)
    got, want = run([70, 5], config=replace(LANES, splits=3), **options)
    assert nmse(got, want) <= TOLERANCE
    if dtype != "f32":
        got, want = run([70, 5], config=replace(CORES, splits=3), **options)
        assert nmse(got, want) <= 2 * TOLERANCE


@pytest.mark.parametrize("config", [LANES, CORES], ids=["lanes", "tensor cores"])
@pytest.mark.parametrize(
    "options",
    [
        dict(window=16),
        dict(window=50, contiguous=True),
        dict(soft_cap=0.5),
        dict(sinks=[0.3, -2.0, 5.0, -np.inf]),
        dict(window=20, soft_cap=2.0, sinks=[1.0, -3.0], contiguous=True),
    ],
    ids=lambda options: "-".join(options),
)
def test_windows_caps_and_sinks(options: dict[str, Any], config: PagedAttentionConfig) -> None:
    shape = dict(group=4, head_dim=48, dtype="bf16") | options
    got, want = run(LENGTHS, config=replace(config, splits=3), **shape)
    assert (got[0] == 0).all()
    assert nmse(got, want) <= 2 * TOLERANCE


@pytest.mark.parametrize("group, queries, teams", [(5, 2, 2), (3, 2, 1), (6, 1, 4), (1, 1, 1)])
def test_blocks_whose_last_heads_repeat(group: int, queries: int, teams: int) -> None:
    config = replace(LANES, warps=2 * teams, queries=queries, teams=teams, splits=3, unroll=1)
    got, want = run([70, 0, 33], group=group, head_dim=96, dtype="f32", config=config)
    assert nmse(got, want) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_latent_pages(dtype: str) -> None:
    config = replace(LANES, warps=2, queries=3, teams=2, splits=4, unroll=1)
    options = dict(kv_heads=1, group=5, head_dim=160, value_dim=96)
    got, want = run([70, 0, 33], dtype=dtype, config=config, **options)
    assert nmse(got, want) <= TOLERANCE


SMALL: dict[str, Any] = dict(
    batch=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    num_pages=9,
    page_size=16,
    pages_per_sequence=4,
    scale=0.125,
    dtype="bf16",
)


def operands() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 8, 64), np.float32)
    pages = [stored(rng.standard_normal((9, 2, 16, 64), np.float32), "bf16") for _ in range(2)]
    return q, *pages, rng.permutation(8).reshape(2, 4).astype(np.int32), np.array([61, 9], np.int32)


#: A block of four heads is a super-block of f16.
WHOLE = replace(LANES, queries=4)


@pytest.mark.parametrize(
    "config, output, quantize",
    [
        (LANES, "q8_1", quantize_q8_1),
        (CORES, "q8_1", quantize_q8_1),
        (WHOLE, "f16", quantize_f16),
        (CORES, "f16", quantize_f16),
    ],
)
def test_output_for_a_product(
    config: PagedAttentionConfig, output: str, quantize: Callable[..., Kernel]
) -> None:
    """Equals quantize_q8_1 or quantize_f16 of the f32 output bit for bit."""
    arguments = SMALL | dict(config=replace(config, splits=3))
    (out,) = simulate(arguments, *operands())
    want = simulator.run(quantize(rows=2, columns=512), out.reshape(2, 512))
    for got, expected in zip(simulate(arguments, *operands(), output=output), want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "config, output", [(LANES, "f32"), (CORES, "f32"), (WHOLE, "f16"), (CORES, "f16")]
)
def test_blocks_and_warps_in_any_order(
    config: PagedAttentionConfig, output: str, seed: int
) -> None:
    arguments = SMALL | dict(config=replace(config, splits=4))
    want = simulate(arguments, *operands(), output=output)
    with simulator.perturbation(seed):
        got = simulate(arguments, *operands(), output=output)
    if output == "f32":
        assert nmse(got[0], want[0]) <= TOLERANCE
        return
    values, means, scale = (
        [np.asarray(each, np.float64) for each in pair] for pair in zip(got, want, strict=True)
    )
    np.testing.assert_array_equal(*scale)
    # the last bits may differ
    assert nmse(*values) <= 1e-8 and nmse(*(pair.sum(-1) for pair in means)) <= 1e-8


@pytest.mark.parametrize(
    "config, output", [(LANES, "f32"), (CORES, "f32"), (WHOLE, "f16"), (CORES, "f16")]
)
@pytest.mark.parametrize("which", [0, 1])
def test_both_barriers_are_needed(config: PagedAttentionConfig, output: str, which: int) -> None:
    kernel = paged_attention(**SMALL, output=output, config=replace(config, splits=3))
    barrier = "barrier.cluster.arrive.release.aligned;\n  barrier.cluster.wait.acquire.aligned;"
    parts = kernel.text.split(barrier)
    assert len(parts) == 3
    ends = [barrier, barrier]
    ends[which] = "bar.sync 0;"
    text = parts[0] + ends[0] + parts[1] + ends[1] + parts[2]
    with pytest.raises(simulator.AbsentBlock):
        simulator.run(replace(kernel, text=text, lines={}), *operands())


@pytest.mark.grid
@pytest.mark.parametrize("dtype", PAGE_TYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("cluster", [False, True])
def test_no_bank_conflicts(cluster: bool, head_dim: int, dtype: str) -> None:
    """Warps and blocks store their sums without bank conflicts."""
    splits = 2 if cluster else 1
    configs = [PagedAttentionConfig(warps=4, queries=4, splits=splits, cluster=cluster)]
    if dtype != "f32":
        configs.append(replace(configs[0], tensor_cores=True))
    for config in configs:
        for output in ("f32", "f16")[: 1 + leaves_f16(head_dim, 4)]:
            arguments = SMALL | dict(head_dim=head_dim, dtype=dtype, output=output, config=config)
            kernel, traffic = paged_attention(**arguments), Traffic()
            simulator.run(kernel, *random_operands(kernel), traffic=traffic)
            assert total(traffic.shared).excess <= 1.1

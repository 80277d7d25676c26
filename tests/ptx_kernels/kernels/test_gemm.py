"""The tensor-core product, simulated, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import nmse
from oracles import quantized, random_planes, weights

from ptx_kernels import formats, simulator, tuning
from ptx_kernels.assemble import assemble
from ptx_kernels.kernels.gemm import FORMATS, GemmConfig, gemm
from ptx_kernels.operands import random_operands
from ptx_kernels.ptx import KernelError
from ptx_kernels.sass import disassemble, hot_loop
from ptx_kernels.simulator.traffic import total

TOLERANCE = 1e-12


def run(format: str, m: int, n: int, columns: int, config: GemmConfig, kind: str = "random") -> float:
    """NMSE of the simulated kernel against the exact product of the same packed weights and activations."""
    rng = np.random.default_rng([n, columns, m])
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size, kind=kind)
    values, scale_sum = quantized(rng.standard_normal((m, columns), np.float32) * 3)
    kernel = gemm(format=format, n=n, columns=columns, m=m, config=config)
    (y,) = simulator.run(kernel, *planes, values, scale_sum)
    x = values.astype(np.float64).reshape(m, -1, 32) * scale_sum[..., :1]
    return nmse(y, x.reshape(m, -1) @ weights(format, planes).T)


K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
OTHERS = tuple(format for format in FORMATS if format not in K_QUANTS)


@pytest.mark.parametrize("format", K_QUANTS)
@pytest.mark.parametrize(
    ("m", "n", "columns"),
    [(9, 1, 256), (16, 37, 512), (17, 100, 768), (64, 100, 256), (128, 37, 512), (1, 16, 256), (70, 33, 256)],
)
def test_shapes(format: str, m: int, n: int, columns: int) -> None:
    assert run(format, m, n, columns, tuning.gemm(format, n, columns, m)) <= TOLERANCE


@pytest.mark.parametrize("format", OTHERS)
@pytest.mark.parametrize(("m", "n", "columns"), [(9, 1, 64), (16, 37, 896), (40, 20, 320), (17, 100, 256)])
def test_rows_that_are_no_whole_super_blocks(format: str, m: int, n: int, columns: int) -> None:
    assert run(format, m, n, columns, tuning.gemm(format, n, columns, m)) <= TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(row_warps=1, column_warps=1, tiles=2, m_tile=16, stages=2),
        GemmConfig(row_warps=2, column_warps=1, tiles=1, m_tile=32, stages=3),
        GemmConfig(row_warps=1, column_warps=2, tiles=1, m_tile=48, stages=4),
        GemmConfig(row_warps=1, column_warps=4, tiles=3, m_tile=16, stages=5),  # more stages than super-blocks
        GemmConfig(row_warps=8, column_warps=1, tiles=1, m_tile=16, stages=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "Q5_1"])
def test_configs(format: str, config: GemmConfig) -> None:
    assert run(format, 37, 101, 768, config) <= TOLERANCE


@pytest.mark.parametrize("kind", ["extreme", "zero", "full"])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_at_the_limits(format: str, kind: str) -> None:
    assert run(format, 16, 20, 512, GemmConfig(row_warps=2, tiles=1, m_tile=16), kind) <= 1e-11


def test_an_odd_number_of_halves() -> None:
    """Q6_K's scales end in the middle of the 4 bytes that are copied: the last read stops at the buffer's end."""
    assert run("Q6_K", 16, 3, 768, GemmConfig(row_warps=1, tiles=1, m_tile=16)) <= TOLERANCE
    assert run("Q6_K", 16, 17, 768, GemmConfig(row_warps=1, tiles=1, m_tile=16)) <= TOLERANCE


def test_largest_products_are_exact() -> None:
    """All quants and activations at their limits: integers stay below what the magic number holds."""
    for format in FORMATS:
        planes = random_planes(np.random.default_rng(0), format, 16, 256 // formats.get(format).block_size, kind="full")
        values, scale_sum = quantized(np.where(np.arange(16 * 256).reshape(16, 256) // 32 % 2, -1.0, 1.0).astype("f4"))
        kernel = gemm(format=format, n=16, columns=256, m=16, config=GemmConfig(1, 1, 1, 16))
        (y,) = simulator.run(kernel, *planes, values, scale_sum)
        x = values.reshape(16, 8, 32) * scale_sum[..., :1].astype(np.float64)
        scale = np.abs(weights(format, planes)).sum(1)  # the products cancel: against their size, not their sum
        assert np.abs(y - x.reshape(16, 256) @ weights(format, planes).T).max() <= 1e-6 * scale.max()


def test_nan_stays_in_its_row() -> None:
    planes = random_planes(np.random.default_rng(0), "Q4_K", 20, 1)
    values, scale_sum = quantized(np.random.default_rng(1).standard_normal((17, 256), np.float32))
    scale_sum[16, 3] = np.nan
    (y,) = simulator.run(gemm(format="Q4_K", n=20, columns=256, m=17), *planes, values, scale_sum)
    assert np.isnan(y[16]).all() and np.isfinite(y[:16]).all()


@pytest.mark.parametrize(
    ("format", "budget"),
    [("Q4_K", 20), ("Q6_K", 27), ("Q8_0", 14)],  # of which 12, 16 and 8 are FFMA
)
def test_instructions_per_4096_products(format: str, budget: float) -> None:
    """SASS of the hot loop per 16 x 8 x 32 products, prompts' config on sm_90."""
    kernel = gemm(format=format, n=14336, columns=4096, m=512, config=tuning.gemm(format, 14336, 4096, 512))
    loop = hot_loop(disassemble(assemble(kernel.text, "sm_90").cubin))
    assert loop is not None
    products = loop.count("mma") / (2 if format == "Q6_K" else 1)
    assert 0 < loop.issued() / products <= budget


@pytest.mark.parametrize("m", [9, 16, 32, 48, 64, 512])
@pytest.mark.parametrize("format", FORMATS)
def test_tuning_fits_every_target(format: str, m: int) -> None:
    for n in (1024, 4096, 14336, 128256):
        config = tuning.gemm(format, n, 4096, m)
        kernel = gemm(format=format, n=n, columns=4096, m=m, config=config)
        assert kernel.dynamic_shared_bytes <= 99 << 10
        assert kernel.grid[0] * kernel.grid[1] >= 198 or config.row_warps * config.tiles * config.m_tile == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(format="Q2_K"), "format='Q2_K' must be one of Q4_K"),
        (dict(columns=288), "columns=288 must be a multiple of 256 for Q4_K"),
        (dict(format="Q8_0", columns=96), "columns=96 must be a multiple of 64 for Q8_0"),
        (dict(columns=0), "columns=0 must be"),
        (dict(m=0), "m=0 must be an integer, at least 1"),
        (dict(config=GemmConfig(m_tile=24)), "m_tile=24 must be a multiple of 16"),
        (dict(config=GemmConfig(column_warps=3)), "column_warps=3 must be 1, 2 or 4"),
        (dict(config=GemmConfig(stages=1)), "stages=1 must be 2 to 16"),
        (dict(config=GemmConfig(row_warps=9, column_warps=4)), "row_warps=9 must be 1 to 8"),
        (dict(config=GemmConfig(tiles=9)), "tiles=9 must be 1 to 8"),
    ],
)
def test_what_it_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        gemm(**(dict(format="Q4_K", n=16, columns=256, m=16) | arguments))


@pytest.mark.parametrize("format", FORMATS)
def test_shared_memory_has_few_bank_conflicts(format: str, record_property) -> None:
    """Of all accesses, copies into the ring included."""
    kernel = gemm(format=format, n=64, columns=512, m=64, config=GemmConfig(tiles=1))
    traffic = simulator.Traffic()
    buffers = [*random_operands(kernel), np.zeros((64, 64), np.float32)]
    simulator.launch(kernel.text, buffers, kernel.grid, kernel.block, kernel.dynamic_shared_bytes, traffic=traffic)
    count = total(traffic.shared)
    record_property("figure", f"gemm {format}: {count.moved} wavefronts of shared memory, {count.least} at the least")
    assert count.moved <= 1.1 * count.least

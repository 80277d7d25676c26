"""The tensor-core product in the simulator, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse
from support.oracles import dequantized, half_operands, quantized, random_planes, weights

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.gemm import (
    F16_FORMATS,
    GemmConfig,
    fused_gemm_rule,
    gemm,
    gemm_rule,
)
from ptx_kernels.kernels.operands import random_operands
from ptx_kernels.kernels.quantize_f16 import quantize_f16
from ptx_kernels.machine_code.ptxas import assemble
from ptx_kernels.machine_code.report import figures
from ptx_kernels.machine_code.sass import disassemble, enclosing_loop, hot_loop
from ptx_kernels.ptx import KernelError
from ptx_kernels.simulator.traffic import total
from ptx_kernels.tuning import choose

TOLERANCE = 1e-12


def run(
    format: str, m: int, n: int, columns: int, config: GemmConfig, kind: str = "random"
) -> float:
    """NMSE of the simulated kernel against the exact product of its weights and activations."""
    rng = np.random.default_rng([n, columns, m])
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size, kind=kind)
    x = rng.standard_normal((m, columns), np.float32) * 3
    if config.products == "f16":
        operands, exact = half_operands(x)
    else:
        operands = quantized(x)
        exact = dequantized(*operands)
    kernel = gemm(format=format, n=n, columns=columns, m=m, config=config)
    (y,) = simulator.run(kernel, *planes, *operands)
    return nmse(y, exact @ weights(format, planes).T)


K_QUANTS = tuple(format for format in PRODUCTS if formats.get(format).block_size == 256)
OTHERS = tuple(format for format in PRODUCTS if format not in K_QUANTS)


@pytest.mark.grid
@pytest.mark.parametrize("format", K_QUANTS)
@pytest.mark.parametrize(
    ("m", "n", "columns"),
    [
        (9, 1, 256),
        (16, 37, 512),
        (17, 100, 768),
        (64, 100, 256),
        (128, 37, 512),
        (1, 16, 256),
        (3, 100, 512),
        (8, 33, 768),
        (70, 33, 256),
    ],
)
def test_shapes(format: str, m: int, n: int, columns: int) -> None:
    assert run(format, m, n, columns, choose(gemm_rule, format, n, columns, m)) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize("format", OTHERS)
@pytest.mark.parametrize(
    ("m", "n", "columns"), [(5, 1, 64), (16, 37, 896), (40, 20, 320), (17, 100, 256)]
)
def test_rows_that_are_no_whole_super_blocks(format: str, m: int, n: int, columns: int) -> None:
    assert run(format, m, n, columns, choose(gemm_rule, format, n, columns, m)) <= TOLERANCE


@pytest.mark.grid
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(row_warps=1, column_warps=1, tiles=2, m_tile=16, stages=2),
        GemmConfig(row_warps=2, column_warps=1, tiles=1, m_tile=32, stages=3),
        GemmConfig(row_warps=1, column_warps=2, tiles=1, m_tile=48, stages=4),
        # more stages than super-blocks
        GemmConfig(row_warps=1, column_warps=4, tiles=3, m_tile=16, stages=3),
        GemmConfig(row_warps=8, column_warps=1, tiles=1, m_tile=16, stages=2),
        GemmConfig(row_warps=2, column_warps=1, tiles=2, m_tile=8, stages=4),
        GemmConfig(row_warps=1, column_warps=4, tiles=1, m_tile=8, stages=3),
        GemmConfig(row_warps=1, column_warps=2, tiles=3, m_tile=16, stages=2),  # units in a loop
    ],
    ids=str,
)
@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "Q5_1"])
def test_configs(format: str, config: GemmConfig) -> None:
    assert run(format, 37, 101, 768, config) <= TOLERANCE


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("kind", ["extreme", "zero", "full"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_weights_at_the_limits(format: str, kind: str) -> None:
    assert run(format, 16, 20, 512, GemmConfig(row_warps=2, tiles=1, m_tile=16), kind) <= 1e-11


@pytest.mark.parametrize("exponent", [104, 120, 124])
def test_scales_that_the_magic_number_has_no_room_for(exponent: int) -> None:
    """MXFP4 has scales up to 2^126; from 2^104 on, 1.5 * 2^23 times the scale would be infinite."""
    codes, e = random_planes(np.random.default_rng(0), "MXFP4", 16, 8)
    e[...] = exponent + 128
    e[:, ::3] -= 2
    x = np.random.default_rng(1).standard_normal((16, 256), np.float32) * 2.0**-100
    values, scale_sum = quantized(x)
    kernel = gemm(format="MXFP4", n=16, columns=256, m=16, config=GemmConfig(1, 1, 1, 16, 2))
    (y,) = simulator.run(kernel, codes, e, values, scale_sum)
    exact = dequantized(values, scale_sum) @ weights("MXFP4", (codes, e)).T
    assert np.isfinite(exact).all() and nmse(y * 2.0**-20, exact * 2.0**-20) <= TOLERANCE


#: Q6_K's scale * quant has up to 12 bits: f16 rounds the last one.
HALF_TOLERANCES = {"Q4_K": 1e-13, "Q5_K": 1e-13, "Q6_K": 1e-7}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("m", "n", "columns", "config"),
    [
        (17, 33, 512, GemmConfig(1, 1, 2, 16, 2, "f16")),
        (37, 101, 768, GemmConfig(2, 1, 1, 32, 3, "f16")),
        # one short tile, more stages than super-blocks
        (
            3,
            5,
            256,
            GemmConfig(1, 1, 1, 16, 4, "f16"),
        ),
        (48, 64, 256, GemmConfig(4, 1, 1, 48, 2, "f16")),
        (7, 20, 512, GemmConfig(1, 2, 1, 8, 3, "f16")),
    ],
    ids=str,
)
@pytest.mark.parametrize("format", F16_FORMATS)
def test_products_of_halves(format: str, m: int, n: int, columns: int, config: GemmConfig) -> None:
    assert run(format, m, n, columns, config) <= HALF_TOLERANCES[format]


@pytest.mark.parametrize("kind", ["extreme", "zero", "full"])
@pytest.mark.parametrize("format", F16_FORMATS)
def test_products_of_halves_at_the_limits(format: str, kind: str) -> None:
    assert (
        run(format, 16, 20, 512, GemmConfig(2, 1, 1, 16, 2, "f16"), kind) <= HALF_TOLERANCES[format]
    )


@pytest.mark.parametrize("format", F16_FORMATS)
def test_activations_of_any_size(format: str) -> None:
    """Rows of 1e-30, of 1e30 and of both, from float32 to y with both kernels.

    The reference is the product with the unquantized x.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal((17, 512), np.float32)
    x[1], x[2], x[3, ::7] = x[1] * 1e-30, x[2] * 1e30, x[3, ::7] * 1e30
    planes = random_planes(rng, format, 20, 2)
    operands = simulator.run(quantize_f16(rows=17, columns=512), x)
    config = GemmConfig(1, 1, 2, 32, 2, "f16")
    (y,) = simulator.run(
        gemm(format=format, n=20, columns=512, m=17, config=config), *planes, *operands
    )
    want = x.astype(np.float64) @ weights(format, planes).T
    for row, exact in zip(y, want, strict=True):
        assert nmse(row, exact) <= 1e-6


def test_nan_stays_in_its_row_of_halves() -> None:
    x = np.random.default_rng(1).standard_normal((17, 256), np.float32)
    x[16, 3], x[2, 200] = np.nan, np.inf
    planes = random_planes(np.random.default_rng(0), "Q4_K", 20, 1)
    operands = simulator.run(quantize_f16(rows=17, columns=256), x)
    config = GemmConfig(1, 1, 2, 16, 2, "f16")
    (y,) = simulator.run(
        gemm(format="Q4_K", n=20, columns=256, m=17, config=config), *planes, *operands
    )
    finite = np.isfinite(y).all(1)
    assert np.isnan(y[[2, 16]]).all() and finite.sum() == 15


def test_an_odd_number_of_halves() -> None:
    """Q6_K's scales end in the middle of the 4 bytes that are copied.

    The last read stops at the buffer's end.
    """
    assert run("Q6_K", 16, 3, 768, GemmConfig(row_warps=1, tiles=1, m_tile=16)) <= TOLERANCE
    assert run("Q6_K", 16, 17, 768, GemmConfig(row_warps=1, tiles=1, m_tile=16)) <= TOLERANCE


@pytest.mark.slow("simulates or builds large kernels")
def test_largest_products_are_exact() -> None:
    """Integers stay below the magic number's limit if all quants and activations are maximal."""
    for format in PRODUCTS:
        planes = random_planes(
            np.random.default_rng(0), format, 16, 256 // formats.get(format).block_size, kind="full"
        )
        values, scale_sum = quantized(
            np.where(np.arange(16 * 256).reshape(16, 256) // 32 % 2, -1.0, 1.0).astype("f4")
        )
        kernel = gemm(format=format, n=16, columns=256, m=16, config=GemmConfig(1, 1, 1, 16))
        (y,) = simulator.run(kernel, *planes, values, scale_sum)
        x = values.reshape(16, 8, 32) * scale_sum[..., :1].astype(np.float64)
        # the products cancel, so errors are relative to their magnitude, not to their sum
        scale = np.abs(weights(format, planes)).sum(1)
        assert (
            np.abs(y - x.reshape(16, 256) @ weights(format, planes).T).max() <= 1e-6 * scale.max()
        )


def test_nan_stays_in_its_row() -> None:
    planes = random_planes(np.random.default_rng(0), "Q4_K", 20, 1)
    values, scale_sum = quantized(np.random.default_rng(1).standard_normal((17, 256), np.float32))
    scale_sum[16, 3] = np.nan
    (y,) = simulator.run(gemm(format="Q4_K", n=20, columns=256, m=17), *planes, values, scale_sum)
    assert np.isnan(y[16]).all() and np.isfinite(y[:16]).all()


@pytest.mark.parametrize(
    ("format", "budget"),
    [("Q4_K", 20), ("Q6_K", 27), ("Q8_0", 14)],  # 12, 16 and 8 of them are FFMA
)
def test_instructions_per_4096_products(format: str, budget: float) -> None:
    """SASS instructions of the hot loop per 16 x 8 x 32 products, with a prompt Config on sm_90."""
    kernel = gemm(
        format=format,
        n=14336,
        columns=4096,
        m=512,
        config=choose(gemm_rule, format, 14336, 4096, 512),
    )
    loop = hot_loop(disassemble(assemble(kernel.text, "sm_90").cubin))
    assert loop is not None
    products = loop.count("mma") / (2 if format == "Q6_K" else 1)
    assert 0 < loop.issued() / products <= budget


@pytest.mark.slow("simulates or assembles large kernels", quick=["Q4_K"])
@pytest.mark.parametrize("format", ["Q4_K", "Q6_K"])
def test_instructions_of_few_rows(format: str) -> None:
    """One step of 256 columns, with its copies, per byte of quants and lane."""
    config = choose(gemm_rule, format, 14336, 4096, 8)
    kernel = gemm(format=format, n=14336, columns=4096, m=8, config=config)
    found = figures(kernel, "sm_90", predict_time=False)
    assert found.instructions_per_quant_byte is not None
    assert found.instructions_per_quant_byte <= 6.5 and found.spill_bytes == 0


@pytest.mark.parametrize(("format", "budget"), [("Q4_K", 12), ("Q5_K", 16), ("Q6_K", 14)])
def test_instructions_of_products_of_halves(format: str, budget: float) -> None:
    """One step of a super-block stays within its budget per 16 x 8 x 32 products.

    mma alone takes 12.9 clocks of a scheduler on an H200.
    """
    config = choose(fused_gemm_rule, (format,), (14336,), 4096, 512, "f32", "f16")
    kernel = gemm(format=format, n=14336, columns=4096, m=512, config=config)
    code = disassemble(assemble(kernel.text, "sm_90").cubin)
    loop = hot_loop(code)
    step = loop and enclosing_loop(code, loop)
    assert loop is not None and step is not None
    products = 4 * loop.count("mma") / 2  # of four units
    assert products == 8 * config.tiles * config.m_tile // 8
    assert 0 < (step.issued() + 3 * loop.issued()) / products <= budget


@pytest.mark.parametrize("m", [33, 512])
@pytest.mark.parametrize("format", F16_FORMATS)
def test_tuning_of_halves_fits_an_sm_90(format: str, m: int) -> None:
    """No spills, and two stages fit the shared memory of a block, for every m_tile of the rule."""
    config = choose(fused_gemm_rule, (format,), (128256,), 4096, m, "f32", "f16")
    assert config.m_tile == (64 if m > 48 and format != "Q5_K" else 48)
    kernel = gemm(format=format, n=128256, columns=4096, m=m, config=config)
    found = assemble(kernel.text, "sm_90")
    assert (found.spill_store_bytes, found.stack_bytes) == (0, 0)
    assert kernel.dynamic_shared_bytes + found.shared_bytes <= 227 << 10


@pytest.mark.grid
@pytest.mark.parametrize("m", [4, 9, 16, 32, 48, 64, 512])
@pytest.mark.parametrize("format", PRODUCTS)
def test_tuning_fits_every_target(format: str, m: int) -> None:
    for n in (1024, 4096, 14336, 128256):
        config = choose(gemm_rule, format, n, 4096, m)
        kernel = gemm(format=format, n=n, columns=4096, m=m, config=config)
        alone = math.prod(kernel.grid) <= 132  # a block may use all of an H200's shared memory
        assert kernel.dynamic_shared_bytes <= (227 if m <= 64 and alone else 99) << 10
        if m > 64:
            blocks = kernel.grid[0] * kernel.grid[1]
            assert blocks >= 198 or config.rows * config.m_tile == 16 * 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(columns=288), "columns=288 must be a multiple of 256 for Q4_K"),
        (dict(format="Q8_0", columns=96), "columns=96 must be a multiple of 64 for Q8_0"),
        (dict(columns=0), "columns=0 must be"),
        (dict(m=0), "m=0 must be an integer, at least 1"),
        (dict(config=GemmConfig(m_tile=24)), "m_tile=24 must be 8 or a multiple of 16"),
        (dict(config=GemmConfig(column_warps=3)), "column_warps=3 must be 1, 2, 4 or 8"),
        (dict(config=GemmConfig(stages=1)), "stages=1 must be 2 to 16"),
        (dict(config=GemmConfig(row_warps=9, column_warps=4)), "row_warps=9 must be 1 to 8"),
        (dict(config=GemmConfig(tiles=9)), "tiles=9 must be 1 to 8"),
        (dict(config=GemmConfig(products="bf16")), "products='bf16' must be int8 or f16"),
        (
            dict(format="Q8_0", config=GemmConfig(products="f16")),
            "products='f16' is for Q4_K, Q5_K",
        ),
        (
            dict(config=GemmConfig(stages=8)),
            "take 321536 bytes of shared memory, of 232448 that a block can have",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        gemm(**(dict(format="Q4_K", n=16, columns=256, m=16) | arguments))


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="format='Q9_K' must be one of "):
        gemm(format="Q9_K", n=16, columns=256, m=16)


@pytest.mark.slow(
    "simulates a product for each format", quick=["Q4_K-*", "Q6_K-*", "Q8_0-*", "MXFP4-*"]
)
@pytest.mark.parametrize(
    ("format", "products"),
    [*((f, "int8") for f in PRODUCTS), *((f, "f16") for f in F16_FORMATS)],
)
def test_shared_memory_has_few_bank_conflicts(format: str, products: str, record_property) -> None:
    """Counts all accesses, including copies into the ring."""
    kernel = gemm(
        format=format, n=64, columns=512, m=64, config=GemmConfig(tiles=1, products=products)
    )
    traffic = simulator.Traffic()
    buffers = [*random_operands(kernel), np.zeros((64, 64), np.float32)]
    simulator.launch(
        kernel.text,
        buffers,
        kernel.grid,
        kernel.block,
        kernel.dynamic_shared_bytes,
        traffic=traffic,
    )
    count = total(traffic.shared)
    record_property(
        "figure",
        f"gemm {format} {products}: {count.moved} wavefronts of shared memory, "
        f"{count.least} at the least",
    )
    assert count.moved <= 1.1 * count.least

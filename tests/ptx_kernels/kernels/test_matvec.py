"""The mat-vec in the simulator, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse
from support.oracles import activation_operands, quantized, random_planes, weights

from ptx_kernels import formats, simulator
from ptx_kernels.kernels.matvec import PRESETS, MatvecConfig, matvec, matvec_rule
from ptx_kernels.kernels.matvec.config import ACTIVATIONS, LANES
from ptx_kernels.ptx import KernelError
from ptx_kernels.tuning import choose

TIGHT = 1e-12  # int8 activations: only a sum of a few hundred f32 is rounded
F32 = 1e-11  # f32 activations: as many roundings as weights


def run(
    format: str, n: int, columns: int, m: int, config: MatvecConfig, kind: str = "random"
) -> float:
    """NMSE of the simulated kernel against the exact product of its weights and activations."""
    rng = np.random.default_rng([n, columns, m])
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size, kind=kind)
    x = rng.standard_normal((m, columns), np.float32) * 3
    operands, x = activation_operands(config, x)
    (y,) = simulator.run(
        matvec(format=format, n=n, columns=columns, m=m, config=config), *planes, *operands
    )
    return nmse(y, x @ weights(format, planes).T)


@pytest.mark.grid
@pytest.mark.parametrize("n", [1, 3, 37])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("format", PRODUCTS)
def test_rows_and_activations(format: str, m: int, n: int) -> None:
    assert run(format, n, 512, m, choose(matvec_rule, format, n, 512, m)) <= TIGHT


#: (n, columns, m): all tails of rows and blocks. Formats with blocks of 32 weights use other
#: columns than those with 256.
PRESET_SHAPES = [(1, 256, 96, 4), (37, 768, 864, 2), (4, 2304, 928, 8), (3, 27648, 18912, 1)]
PRESETS_OF_FORMATS = [
    (name, format)
    for name, config in PRESETS.items()
    for format in PRODUCTS
    if not config.broadcast_header
    or format in ("Q4_K", "Q5_K")  # the others have no header to broadcast
]


def bound(config: MatvecConfig) -> float:
    return F32 if config.activations == "f32" else TIGHT


@pytest.mark.slow("simulates every preset on every format", quick=["*-Q4_K", "*-IQ4_XS"])
@pytest.mark.parametrize("name, format", PRESETS_OF_FORMATS)
def test_presets(name: str, format: str) -> None:
    for n, super_blocks, small_blocks, m in PRESET_SHAPES:
        columns = small_blocks if formats.get(format).block_size == 32 else super_blocks
        if name == "tiled":
            columns = min(columns, 18944)  # limited by shared memory
        config = replace(PRESETS[name], rows_per_warp=min(PRESETS[name].rows_per_warp, n))
        assert run(format, n, columns, m, config) <= bound(config), (n, columns, m)


@pytest.mark.parametrize("name", PRESETS)
def test_a_persistent_grid(name: str) -> None:
    """Three blocks loop over all rows with each strategy; the last block has one iteration less."""
    config = replace(
        PRESETS[name], persistent=3, warps=PRESETS[name].warps_per_row, rows_per_warp=2
    )
    assert run("Q4_K", 15, 512, 2, config) <= bound(config)


@pytest.mark.parametrize("name", PRESETS)
def test_many_rows(name: str) -> None:
    assert run("Q4_K", 4099, 256, 1, PRESETS[name]) <= bound(PRESETS[name])


def test_many_rows_of_small_blocks() -> None:
    assert run("Q5_0", 4099, 32, 1, choose(matvec_rule, "Q5_0", 4099, 32, 1)) <= TIGHT


# with all kinds of tails after the unrolled loop
@pytest.mark.grid
@pytest.mark.parametrize("blocks", [1, 4, 9, 35])
@pytest.mark.parametrize(
    "config",
    [
        MatvecConfig(lanes=8, rows_per_warp=1, unroll=1),
        MatvecConfig(lanes=8, rows_per_warp=2, unroll=2),
        MatvecConfig(lanes=8, rows_per_warp=3, unroll=4, warps=1),
        MatvecConfig(lanes=4, rows_per_warp=1, unroll=2, warps=8),
        MatvecConfig(lanes=4, rows_per_warp=4, unroll=1),
        MatvecConfig(lanes=16, warps_per_row=2, rows_per_warp=2),
    ],
    ids=str,
)
def test_configs(config: MatvecConfig, blocks: int) -> None:
    for format in ("Q4_K", "Q6_K", "Q5_1"):  # all formats share the loop
        assert run(format, 10, 256 * blocks, 2, config) <= TIGHT


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("kind", ["extreme", "zero", "full"])
@pytest.mark.parametrize("format", PRODUCTS)
def test_weights_at_the_limits(format: str, kind: str) -> None:
    for lanes in LANES:
        for activations in ACTIVATIONS:
            config = MatvecConfig(activations=activations, lanes=lanes)
            assert run(format, 4, 768, 1, config, kind) <= 1e-11, config


@pytest.mark.parametrize("name", ["quarter_warp_dp4a", "fused_f32"])
@pytest.mark.parametrize("format, zero", [("Q4_0", 0x88), ("Q8_0", 0)])
def test_weights_of_zero_give_exactly_zero(format: str, zero: int, name: str) -> None:
    """Pruned models have such weights.

    No offset is multiplied and subtracted again, which would leave noise.
    """
    x = np.random.default_rng(0).standard_normal((1, 96), np.float32) + 100
    quants, d = random_planes(np.random.default_rng(1), format, 4, 3)
    quants[...] = zero
    operands, _ = activation_operands(PRESETS[name], x)
    (y,) = simulator.run(
        matvec(format=format, n=4, columns=96, m=1, config=PRESETS[name]), quants, d, *operands
    )
    np.testing.assert_array_equal(y, 0)


def test_nan_stays_in_its_row() -> None:
    rng = np.random.default_rng(0)
    planes = random_planes(rng, "Q4_K", 8, 1)
    values, scale_sum = quantized(rng.standard_normal((3, 256), np.float32))
    scale_sum[1, 3] = np.nan
    kernel = matvec(format="Q4_K", n=8, columns=256, m=3, config=MatvecConfig())
    (y,) = simulator.run(kernel, *planes, values, scale_sum)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize(
    "changes, config, message",
    [
        (dict(format="Q6_K"), dict(lanes=2), r"lanes=2 must be one of \(4, 8, 16, 32\)"),
        (dict(m=9), {}, "m=9 must be 1 to 8"),
        (dict(dtype="nonsense"), {}, "'nonsense' must be one of f32, f16, bf16"),
        (dict(dtype="bf16"), {}, "dtype='bf16' is for activations that come as floats"),
        (dict(m=0), {}, "m=0 must be an integer, at least 1"),
        (dict(columns=300), {}, "columns=300 must be a positive multiple of 256 for Q4_K"),
        ({}, dict(rows_per_warp=17), "rows_per_warp=17 must be 1 to 16"),
        ({}, dict(rows_per_warp=0), "rows_per_warp=0 must be an integer, at least 1"),
        (dict(n=3), dict(rows_per_warp=4), "rows_per_warp=4 must be 1 to 3"),
        ({}, dict(warps=33), "warps=33 must be 1 to 32"),
        (
            {},
            dict(warps=16, resident_blocks=5),
            "= 80 warps: a multiprocessor holds 64, with 32 registers a thread",
        ),
        ({}, dict(unroll=0), "unroll=0 must be an integer, at least 1"),
        ({}, dict(persistent=-1), "persistent=-1 must be an integer, at least 0"),
        ({}, dict(activations="f16"), "activations='f16' must be one of q8_1, inline_q8, f32"),
        (
            {},
            dict(stage="whole"),
            "stage='whole' must be one of none, whole, chunks, the latter two for f32 activations",
        ),
        ({}, dict(warps=4, warps_per_row=3), "warps=4 must be a multiple of warps_per_row=3"),
        (
            {},
            dict(lanes=8, broadcast_header=True),
            "broadcast_header needs lanes=32, or columns=256 to be a multiple of 1024",
        ),
        (
            dict(columns=1024),
            dict(activations="f32", stage="chunks", lanes=8, broadcast_header=True),
            "whole in a block, not stage='chunks'",
        ),
    ],
)
def test_bad_arguments_are_refused(changes: dict, config: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        matvec(
            **{**dict(format="Q4_K", n=16, columns=256, m=1), **changes},
            config=MatvecConfig(**config),
        )


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="format='Q9_K' must be one of "):
        matvec(format="Q9_K", n=16, columns=256, m=1, config=MatvecConfig())

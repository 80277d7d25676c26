"""The mat-vec, simulated, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import nmse
from oracles import activation_operands, quantized, random_planes, weights

from ptx_kernels import formats, simulator, tuning
from ptx_kernels.kernels.matvec import FORMATS, PRESETS, MatvecConfig, matvec
from ptx_kernels.kernels.matvec.config import ACTIVATIONS, PACKED_ROWS
from ptx_kernels.ptx import KernelError

TIGHT = 1e-12  # int8 activations: all that is rounded is a sum of a few hundred f32
F32 = 1e-11  # f32 activations: as many roundings as weights


def run(format: str, n: int, columns: int, m: int, config: MatvecConfig, kind: str = "random") -> float:
    """NMSE of the simulated kernel against the exact product of the same packed weights and activations."""
    rng = np.random.default_rng([n, columns, m])
    planes = random_planes(rng, format, n, columns // formats.get(format).block_size, kind=kind)
    x = rng.standard_normal((m, columns), np.float32) * 3
    operands, x = activation_operands(config, x)
    (y,) = simulator.run(matvec(format=format, n=n, columns=columns, m=m, config=config), *planes, *operands)
    return nmse(y, x @ weights(format, planes).T)


@pytest.mark.parametrize("n", [1, 3, 8, 37])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_activations(format: str, m: int, n: int) -> None:
    assert run(format, n, 512, m, tuning.matvec(format, n, 512, m)) <= TIGHT


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("format", FORMATS)
def test_presets(format: str, name: str) -> None:
    config = PRESETS[name]
    if config.broadcast_header and format not in ("Q4_K", "Q5_K"):
        pytest.skip("no header to broadcast")
    assert run(format, 5, 2304, 2, config) <= (F32 if config.activations == "f32" else TIGHT)


@pytest.mark.parametrize("blocks", [1, 3, 4, 9, 17, 35])  # with tails of every kind behind the unrolled loop
@pytest.mark.parametrize(
    "config",
    [
        MatvecConfig(lanes=8, rows_per_warp=1, unroll=1),
        MatvecConfig(lanes=8, rows_per_warp=2, unroll=2),
        MatvecConfig(lanes=8, rows_per_warp=3, unroll=4, warps=1),
        MatvecConfig(lanes=4, rows_per_warp=1, unroll=2, warps=8),
        MatvecConfig(lanes=4, rows_per_warp=4, unroll=1),
    ],
    ids=str,
)
def test_configs(config: MatvecConfig, blocks: int) -> None:
    for format in FORMATS:
        if config.lanes in PACKED_ROWS[format].lanes:
            assert run(format, 10, 256 * blocks, 2, config) <= TIGHT


@pytest.mark.parametrize("kind", ["extreme", "zero", "full"])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_at_the_limits(format: str, kind: str) -> None:
    for lanes in PACKED_ROWS[format].lanes:
        for activations in ACTIVATIONS:
            config = MatvecConfig(activations=activations, lanes=lanes)
            assert run(format, 4, 768, 1, config, kind) <= 1e-11, config


def test_a_wide_matrix() -> None:
    """Rows beyond 4096 and k = 14336, as an 8B model's down projection has it, on few rows."""
    assert run("Q4_K", 6, 14336, 1, tuning.matvec("Q4_K", 4096, 14336, 1)) <= TIGHT


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
        (dict(format="Q6_K"), dict(lanes=2), r"lanes=2 must be one of \(4, 8, 16, 32\) for Q6_K"),
        (dict(format="Q4_1"), {}, "format='Q4_1' must be one of Q4_K"),
        (dict(m=9), {}, "m=9 must be 1 to 8"),
        (dict(m=0), {}, "m=0 must be 1 to 8"),
        (dict(columns=300), {}, "columns=300 must be a positive multiple of 256 for Q4_K"),
        ({}, dict(rows_per_warp=17), "rows_per_warp=17 1 to n=16"),
        ({}, dict(rows_per_warp=0), "rows_per_warp=0 1 to n=16"),
        ({}, dict(activations="f16"), "activations='f16' must be one of q8_1, inline_q8, f32"),
        (
            {},
            dict(stage="whole"),
            "stage='whole' must be one of none, whole, chunks, the latter two for f32 activations",
        ),
        ({}, dict(warps=4, warps_per_row=3), "warps=4 must be a multiple of warps_per_row=3"),
        ({}, dict(lanes=8, broadcast_header=True), "broadcast_header needs lanes=32"),
    ],
)
def test_what_it_refuses(changes: dict, config: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        matvec(**{**dict(format="Q4_K", n=16, columns=256, m=1), **changes}, config=MatvecConfig(**config))

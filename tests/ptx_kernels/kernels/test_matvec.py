"""The mat-vec, simulated, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import nmse
from oracles import quantized, random_planes, weights

from ptx_kernels import simulator, tuning
from ptx_kernels.kernels.matvec import FORMATS, MatvecConfig, matvec
from ptx_kernels.ptx import KernelError


def run(format: str, n: int, blocks: int, m: int, config: MatvecConfig, kind: str = "random") -> float:
    """NMSE of the simulated kernel against the exact product of the same packed weights and activations."""
    rng = np.random.default_rng([n, blocks, m])
    planes = random_planes(rng, format, n, blocks, kind=kind)
    values, scale_sum = quantized(rng.standard_normal((m, 256 * blocks), np.float32) * 3)
    (y,) = simulator.run(matvec(format=format, n=n, blocks=blocks, m=m, config=config), *planes, values, scale_sum)
    x = values.astype(np.float64).reshape(m, -1, 32) * scale_sum[..., :1]
    return nmse(y, x.reshape(m, -1) @ weights(format, planes).T)


@pytest.mark.parametrize("n", [1, 3, 8, 37])
@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_activations(format: str, m: int, n: int) -> None:
    assert run(format, n, 2, m, tuning.matvec(format, n, 2, m)) <= 1e-12


@pytest.mark.parametrize(
    "config",
    [
        MatvecConfig(lanes_per_block=8, rows_per_warp=1, unroll=1),
        MatvecConfig(lanes_per_block=8, rows_per_warp=2, unroll=2),
        MatvecConfig(lanes_per_block=8, rows_per_warp=3, unroll=4, warps=1),
        MatvecConfig(lanes_per_block=4, rows_per_warp=1, unroll=2, warps=8),
        MatvecConfig(lanes_per_block=4, rows_per_warp=4, unroll=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("blocks", [1, 3, 4, 9, 17, 35])  # with tails of every kind behind the unrolled loop
def test_configs(config: MatvecConfig, blocks: int) -> None:
    for format in FORMATS:
        if format == "Q6_K" and config.lanes_per_block == 8:
            continue  # Q6_K's lanes hold whole sectors with four lanes; eight are refused, tested below
        assert run(format, 10, blocks, 2, config) <= 1e-12


@pytest.mark.parametrize("kind", ["extreme", "zero", "full"])
@pytest.mark.parametrize("lanes", [4, 8])
def test_weights_at_the_limits(kind: str, lanes: int) -> None:
    for format in FORMATS if lanes == 4 else ("Q4_K", "Q5_K"):
        assert run(format, 4, 3, 1, MatvecConfig(lanes_per_block=lanes), kind) <= 1e-11


def test_a_wide_matrix() -> None:
    """Rows beyond 4096 and k = 14336, as an 8B model's down projection has it, on few rows."""
    assert run("Q4_K", 6, 56, 1, tuning.matvec("Q4_K", 4096, 56, 1)) <= 1e-12


def test_nan_stays_in_its_row() -> None:
    rng = np.random.default_rng(0)
    planes = random_planes(rng, "Q4_K", 8, 1)
    values, scale_sum = quantized(rng.standard_normal((3, 256), np.float32))
    scale_sum[1, 3] = np.nan
    kernel = matvec(format="Q4_K", n=8, blocks=1, m=3, config=MatvecConfig())
    (y,) = simulator.run(kernel, *planes, values, scale_sum)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(format="Q6_K", m=1, config=MatvecConfig(lanes_per_block=8)), r"lanes_per_block=8 must be one of \(4,\)"),
        (dict(format="Q4_K", m=9, config=MatvecConfig()), "m=9 must be 1 to 8"),
        (dict(format="Q4_K", m=0, config=MatvecConfig()), "m=0 must be 1 to 8"),
        (dict(format="Q4_K", m=1, config=MatvecConfig(rows_per_warp=17)), "rows_per_warp=17 1 to n=16"),
        (dict(format="Q4_K", m=1, config=MatvecConfig(rows_per_warp=0)), "rows_per_warp=0 1 to n=16"),
    ],
)
def test_what_it_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        matvec(n=16, blocks=1, **arguments)

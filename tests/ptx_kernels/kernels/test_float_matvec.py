"""Mat-vecs with float activations and tuned Configs, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from support.format_lists import FEW_ARE_QUICK, PRODUCTS
from support.helpers import nmse
from support.oracles import random_planes, weights

from ptx_kernels import formats, simulator
from ptx_kernels.devices import target
from ptx_kernels.kernels.matvec import float_matvec_rule, matvec
from ptx_kernels.ptx.instructions import bf16_to_f32, f32_to_bf16

EXACT = 1e-11  # only a sum of a few hundred f32 is rounded


def activations(m: int, columns: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows as an operand of `dtype`, and as float64."""
    x = np.random.default_rng(m).standard_normal((m, columns), np.float32)
    if dtype == "bf16":
        return f32_to_bf16(x), bf16_to_f32(f32_to_bf16(x)).astype(np.float64)
    x = x.astype(np.float16 if dtype == "f16" else np.float32)
    return x, x.astype(np.float64)


@FEW_ARE_QUICK
@pytest.mark.grid
@pytest.mark.parametrize("multiprocessors", [132, 1])  # rows too few for a device, and enough
@pytest.mark.parametrize("m", [1, 2, 3, 8])
@pytest.mark.parametrize("format", PRODUCTS)
def test_exact_products_of_packed_weights(format: str, m: int, multiprocessors: int) -> None:
    n, columns = 19, 1280
    config = float_matvec_rule(target("unknown", multiprocessors), (format,), (n,), columns, m)
    assert config.activations == "f32"
    planes = random_planes(
        np.random.default_rng(0), format, n, columns // formats.get(format).block_size
    )
    for dtype in ("f32", "bf16", "f16") if m in (1, 3) else ("f32",):
        operand, x = activations(m, columns, dtype)
        kernel = matvec(format=format, n=n, columns=columns, m=m, dtype=dtype, config=config)
        (y,) = simulator.run(kernel, *planes, operand)
        assert nmse(y, x @ weights(format, planes).T) <= EXACT

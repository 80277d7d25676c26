"""One place chooses a product's kernel: alone and with a residual it is the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jax_q4k as jq
from ptx_kernels import formats

#: Kernels that multiply; then those of products by XLA with decoded weights, float16 and float32.
FAMILIES = ("matvec", "gemm", "f16_rows", "decode")


def family(call, *arguments, device: str) -> str:
    """Returns the first of FAMILIES that is launched."""
    explained = jq.explain(call, *arguments, platform="cuda", device=device)
    launched = {kernel.family for each in explained.calls for kernel in each.kernels}
    return next(name for name in FAMILIES if name in launched)


@pytest.mark.slow(
    "traces products of each format", quick=["Q4_K-*", "Q6_K-*", "MXFP4-*", "IQ4_NL-*", "Q3_K-*"]
)
@pytest.mark.grid()
@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA A100"])
@pytest.mark.parametrize("m", [1, 8, 9, 64, 65, 1024])
@pytest.mark.parametrize("format", formats.names())
def test_matmul_and_linear_agree(format, m, device):
    n, k = 512, 1024
    block = formats.get(format)
    shapes = [(n, k // block.block_size, plane.bytes_per_block) for plane in block.planes]
    planes = tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)
    w = jq.QuantizedArray(format, (n, k), planes)
    x, residual = (jax.ShapeDtypeStruct((m, size), jnp.float32) for size in (k, n))

    def with_residual(x, w, residual):
        return jq.linear(x, (w,), residual=residual)

    alone = family(jq.matmul, x, w, device=device)
    assert alone == family(with_residual, x, w, residual, device=device)
    assert (alone == "matvec") <= (m <= 8)

"""Scales and casts activations to f16, one scale per super-block, for the f16 tensor-core GEMM."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ..custom_call import ptx_name
from .op import KernelCall


def ptx(launch: KernelCall, x: jax.Array) -> Sequence[jax.Array]:
    """Casts a float x (m, k), k a multiple of 256, to f16 by a PTX kernel.

    Returns values, means and scales.
    """
    from ptx_kernels.kernels.quantize_f16 import quantize_f16

    rows, columns = x.shape
    return launch(quantize_f16(rows=rows, columns=columns, dtype=ptx_name(x.dtype)), x)

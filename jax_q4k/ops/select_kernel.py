"""Selects the GPU kernel of a matmul with packed weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.indexed import Packed
from . import decoded, gemm, gemv


def select_matmul_kernel(
    weights: Sequence[Packed], m: int, activations: str | None, *, gated: bool = False
) -> Callable[..., list[Any]] | None:
    """Returns the function that multiplies m rows by all weights, None if no function does.

    The first of these that applies: XLA with decoded weights for many rows (`decoded.products`),
    tensor cores (`gemm.gemm`), or a mat-vec (`gemv.gemv`). The caller must call it, as the decision
    is recorded with the launch.

    gated: the two weights are a gate and an up projection.
    """
    if decoded.takes(weights, m, activations, gated=gated, launched=True):
        return decoded.products
    if gemm.takes(weights, m, activations):
        return functools.partial(gemm.gemm, activations=activations)
    if gemv.takes(weights, m):
        return functools.partial(gemv.gemv, activations=activations)
    return None

"""Selects the kernel of a product with packed weights on a GPU; the only place that does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..arrays.indexed import Packed
from . import decoded, gemm, gemv


def select_matmul_kernel(
    weights: Sequence[Packed], m: int, activations: str | None, *, gated: bool = False
) -> Callable[..., list[Any]] | None:
    """Returns what launches the products of m rows with all weights, or None if nothing does.

    That is, in this order: XLA with decoded weights for many rows (`decoded.products`), tensor
    cores (`gemm.gemm`), or a mat-vec (`gemv.gemv`). The caller must launch the answer: it is
    recorded with the launch.

    gated: the product with the first of two weights gates that with the second.
    """
    if decoded.takes(weights, m, activations, gated=gated, launched=True):
        return decoded.products
    if gemm.takes(weights, m, activations):
        return functools.partial(gemm.gemm, activations=activations)
    if gemv.takes(weights, m):
        return functools.partial(gemv.gemv, activations=activations)
    return None

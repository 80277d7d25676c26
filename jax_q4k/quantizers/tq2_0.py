"""Quantizer of TQ2_0: 256 ternary quants of two bits and a scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import pack
from .fit import LARGEST_F16, Best, best_of, nearest_f16, reciprocal, rounded
from .quantizer import Fields, Quantizer, as_bytes, searched

#: Values above the largest magnitude divided by one of these are tried as the nonzero ones.
_PARTS = np.concatenate([[2.0], np.geomspace(2.4, 40, 9)])
_REFITS = 2


def ternary(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes x (256, blocks), errors weighted by w of that shape.

    Given which values are not zero, with sums p of their w * |x| and q of their w, the best d is
    p / q, and lowers the error by p^2 / q.

    Returns d, (blocks,) of f16 values, and quants of -1 to 1, (256, blocks); both float32.
    """
    magnitudes = jnp.abs(x)
    wx = w * magnitudes

    def trial(limit: jax.Array) -> Best:
        used = magnitudes > limit[None]
        p, q = (jnp.where(used, a, 0).sum(0) for a in (wx, w))
        d = p * reciprocal(q)
        return -d * p, d

    largest = magnitudes.max(0)
    start = jnp.zeros_like(largest), largest
    best = best_of(1 / _PARTS, lambda part: trial(part * largest), start)
    for _ in range(_REFITS):
        best = trial(best[1] / 2)
    d = nearest_f16(best[1])
    return d, rounded(x * reciprocal(d)[None], -1, 1)


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, q = ternary(x, w)
    return {
        "qs": pack.bits(as_bytes(q + 1).reshape(-1, 2, 4, 32), 2).reshape(-1, 64),
        "d": pack.f16_bytes(d),
    }


QUANTIZER = Quantizer("TQ2_0", LARGEST_F16, searched("TQ2_0", (256,), _fields), native=True)

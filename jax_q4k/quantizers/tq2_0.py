"""Quantizer of TQ2_0: 256 ternary quants of two bits and a scale."""

from __future__ import annotations

import jax
import numpy as np

from . import pack, symmetric
from .fit import LARGEST_F16, rounded
from .quantizer import Fields, Quantizer, as_bytes, searched

#: d is the largest magnitude divided by one of these, and then fitted.
_LEVELS = np.concatenate([[1.0], np.geomspace(1.2, 20, 9)])
GRID = symmetric.Grid(lambda x: rounded(x, -1, 1), _LEVELS)


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, q = symmetric.blocks(x, w, GRID)
    return {
        "qs": pack.bits(as_bytes(q + 1).reshape(-1, 2, 4, 32), 2).reshape(-1, 64),
        "d": pack.f16_bytes(d),
    }


QUANTIZER = Quantizer("TQ2_0", LARGEST_F16, searched("TQ2_0", (256,), _fields))

"""Quantizer of IQ4_NL: blocks of one scale and 32 4-bit indices into a codebook."""

from __future__ import annotations

import jax

from ptx_kernels.formats.iq4_nl import TABLE

from . import pack, symmetric
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, searched

_GRID = symmetric.table(TABLE, margin=9)


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, q = symmetric.blocks(x, w, _GRID)
    return {"d": pack.f16_bytes(d), "qs": pack.nibbles(pack.codes(q, TABLE))}


# the positive maximum serves for both signs, although the table is not symmetric
QUANTIZER = Quantizer("IQ4_NL", max(TABLE) * LARGEST_F16, searched("IQ4_NL", (32,), _fields))

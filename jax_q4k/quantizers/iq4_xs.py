"""Quantizer of IQ4_XS: eight sub-blocks of 32 4-bit codebook indices, with 6-bit scales."""

from __future__ import annotations

import jax

from ptx_kernels.formats.iq4_xs import TABLE

from . import pack, symmetric
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched

_GRID = symmetric.table(TABLE, margin=9)


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, scale, q = symmetric.super_blocks(x, w, _GRID, 32)
    scales = as_bytes(scale + 32)  # (blocks, 8)
    return {
        "d": pack.f16_bytes(d),
        "scales_h": pack.bits((scales >> 4).reshape(-1, 2, 4).swapaxes(-1, -2), 2),
        "scales_l": pack.bits(scales.reshape(-1, 4, 2).swapaxes(-1, -2), 4),
        "qs": pack.nibbles(pack.codes(q, TABLE)).reshape(-1, 128),
    }


QUANTIZER = Quantizer("IQ4_XS", 31 * max(TABLE) * LARGEST_F16, searched("IQ4_XS", (32, 8), _fields))

"""Quantizer of NVFP4: four sub-blocks of 16 4-bit floats, each with a scale of fp8 e4m3."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels.formats.mxfp4 import TABLE
from ptx_kernels.formats.nvfp4 import SCALES

from . import pack, symmetric
from .fit import Best, best_of, reciprocal
from .quantizer import Fields, Quantizer, searched

_GRID = symmetric.table(sorted(set(TABLE)), margin=0)
_TOP = 126  # code of the largest scale; 127 means 0
#: Scales to try, relative to the code that maps the largest magnitude to the largest value: a code
#: is about a tenth.
_STEPS = (0, *(step for i in range(1, 6) for step in (i, -i)), -6, -7, -8)


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    scale = jnp.abs(x).max(0) / (max(TABLE) / 2)  # (4, blocks)
    bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
    subnormal = jnp.floor(scale * 2.0**9).astype(jnp.int32)
    code = jnp.where(scale < 2.0**-6, subnormal, (bits >> 20) - (120 << 3))

    def quants(factor: jax.Array) -> jax.Array:
        return _GRID.nearest(x * reciprocal(factor))

    def trial(step: jax.Array) -> Best:
        c = jnp.clip(code + step.astype(jnp.int32), 0, _TOP)
        factor = _half_of_scale(c)
        return (w * (factor * quants(factor) - x) ** 2).sum(0), c

    start = (jnp.full(scale.shape, jnp.inf), jnp.zeros_like(code))
    _, code = best_of(np.array(_STEPS), trial, start)
    quants_ = pack.codes(quants(_half_of_scale(code)), TABLE)  # (blocks, 4, 16)
    return {"d": code.T.astype(jnp.uint8), "qs": pack.nibbles(quants_).reshape(-1, 32)}


def _half_of_scale(code: jax.Array) -> jax.Array:
    """Returns half the scale of a code, int32, computed: a table would be a constant array."""
    normal = jax.lax.bitcast_convert_type((code + (120 << 3)) << 20, jnp.float32)
    return 0.5 * jnp.where(code < 8, code.astype(jnp.float32) * 2.0**-9, normal)


QUANTIZER = Quantizer(
    "NVFP4",
    max(TABLE) * float(SCALES[_TOP]),
    searched("NVFP4", (16, 4), _fields),
    native=True,
)

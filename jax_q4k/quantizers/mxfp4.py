"""Quantizer of MXFP4: blocks of one power-of-two scale and 32 4-bit floats."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ptx_kernels.formats.mxfp4 import TABLE

from . import pack, symmetric
from .fit import Best, best_of
from .quantizer import Fields, Quantizer, searched

_GRID = symmetric.table(sorted(set(TABLE)), margin=0)
_LARGEST = max(TABLE) * 2.0**57  # squares of weights stay far from the largest f32


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    """Returns the blocks' fields as bytes, with the best of four power-of-two scales.

    They are the power that maps the largest magnitude to 8 to 16, and its neighbors.
    """
    largest = jax.lax.bitcast_convert_type(jnp.abs(x).max(0), jnp.int32)

    def quants(e: jax.Array) -> jax.Array:
        return _GRID.nearest(x * _power(128 - e))

    def trial(step: jax.Array) -> Best:
        e = jnp.maximum((largest >> 23) - 2 + step.astype(jnp.int32), 2)  # no subnormal scale
        return (w * (quants(e) * _power(e - 128) - x) ** 2).sum(0), e

    start = (jnp.full(largest.shape, jnp.inf), jnp.full_like(largest, 2))
    _, e = best_of([0, 1, -1, 2], trial, start)
    e = jnp.where(largest > 0, e, 0)
    return {
        "e": e.astype(jnp.uint8)[:, None],
        "qs": pack.nibbles(pack.codes(quants(jnp.maximum(e, 2)), TABLE)),
    }


def _power(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent, int32 -> float32, for exponents from -126."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


QUANTIZER = Quantizer("MXFP4", _LARGEST, searched("MXFP4", (32,), _fields), native=True)

"""The quantizer of each format: blocks of floats and their importance to the bytes that a file
holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels import formats

from . import affine, pack, symmetric
from .fit import LARGEST_HALF, error_weights

Fields = Mapping[str, jax.Array]


def _bytes(values: jax.Array) -> jax.Array:
    """float32 (values, ..., blocks) -> uint8 (blocks, ..., values)."""
    return values.T.astype(jnp.uint8)


def _q4_0(x: jax.Array, w: jax.Array) -> Fields:
    d, q = symmetric.blocks(x, w, 8)
    return {"d": pack.half_bytes(d), "qs": pack.nibbles(_bytes(q + 8))}


def _q5_0(x: jax.Array, w: jax.Array) -> Fields:
    d, q = symmetric.blocks(x, w, 16)
    quants = _bytes(q + 16)
    return {"d": pack.half_bytes(d), "qh": pack.fifth_bits(quants), "qs": pack.nibbles(quants)}


def _q5_1(x: jax.Array, w: jax.Array) -> Fields:
    d, m, q = affine.blocks(x, w, 31)
    quants = _bytes(q)
    return {
        "d": pack.half_bytes(d),
        "m": pack.half_bytes(m),
        "qh": pack.fifth_bits(quants),
        "qs": pack.nibbles(quants),
    }


def _k_fields(x: jax.Array, w: jax.Array, top: int) -> Fields:
    d, dmin, scale, minimum, q = affine.super_blocks(x, w, top)
    quants = _bytes(q)
    return {
        "d": pack.half_bytes(d),
        "dmin": pack.half_bytes(dmin),
        "scales": pack.k_scales(_bytes(scale), _bytes(minimum)),
        "qh": pack.bits(quants >> 4, 1),  # Q5_K alone has these
        "qs": pack.k_low_bits(quants),
    }


def _q6_k(x: jax.Array, w: jax.Array) -> Fields:
    d, scale, q = symmetric.super_blocks(x, w)
    quants = _bytes(q + 32)
    return {
        "ql": pack.bits(quants.reshape(-1, 2, 2, 64), 4).reshape(-1, 128),
        "qh": pack.bits(quants.reshape(-1, 2, 4, 32) >> 4, 2).reshape(-1, 64),
        "scales": jax.lax.bitcast_convert_type(scale.T.astype(jnp.int8), jnp.uint8),
        "d": pack.half_bytes(d),
    }


def _q8_0(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """float32 (blocks, 32) -> uint8 (blocks, 34): ggml's bytes, which know no importance.

    d = largest magnitude / 127 and q = x * (1 / d), halves away from zero, all in float32. In
    NumPy, since XLA may multiply by a reciprocal where a division is written.
    """
    d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    scaled = x * np.divide(1, d, out=np.zeros_like(d), where=d >= np.finfo(np.float32).tiny)
    quants = np.trunc(scaled)
    quants += np.copysign(np.abs(scaled - quants) >= 0.5, scaled)
    return np.concatenate(
        [d.astype("<f2").view(np.uint8), quants.astype(np.int8).view(np.uint8)], axis=-1
    )


@dataclass(frozen=True)
class _Search:
    """`fields`: x and its errors' weights, float32 (*shape, blocks) -> fields of the struct, uint8
    (blocks, bytes).
    """

    shape: tuple[int, ...]  # (values,), or (values, sub-blocks)
    fields: Callable[[jax.Array, jax.Array], Fields]


_SEARCHES = {
    "Q4_0": _Search((32,), _q4_0),
    "Q5_0": _Search((32,), _q5_0),
    "Q5_1": _Search((32,), _q5_1),
    "Q4_K": _Search((32, 8), functools.partial(_k_fields, top=15)),
    "Q5_K": _Search((32, 8), functools.partial(_k_fields, top=31)),
    "Q6_K": _Search((16, 16), _q6_k),
}

# The largest magnitude that a block represents whatever the signs of its values: beyond it d would
# overflow.
LIMITS = {
    "Q4_0": 7 * LARGEST_HALF,
    "Q5_0": 15 * LARGEST_HALF,
    "Q5_1": LARGEST_HALF,
    "Q8_0": 127 * LARGEST_HALF,
    "Q4_K": 63 * LARGEST_HALF,
    "Q5_K": 63 * LARGEST_HALF,
    "Q6_K": 127 * 31 * LARGEST_HALF,
}


@functools.cache
def program(format: str) -> Callable[[Any, Any], Any]:
    """float32 x and importance, both (blocks, block_size) -> uint8 (blocks, block_bytes)."""
    if format == "Q8_0":
        return _q8_0
    block, search = formats.get(format), _SEARCHES[format]

    @jax.jit
    def run(x: jax.Array, importance: jax.Array) -> jax.Array:
        x, importance = (a.reshape(-1, *search.shape[::-1]).T for a in (x, importance))
        fields = search.fields(x, error_weights(x, importance))
        return jnp.concatenate([fields[name] for name, _ in block.struct], axis=-1)

    return run

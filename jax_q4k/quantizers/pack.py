"""Packs integers into the bytes of quantization blocks.

The functions are inverses of the decoders in `ptx_kernels.formats`, which define the layouts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp


def f16_bytes(x: jax.Array) -> jax.Array:
    """Converts float32 (blocks,) with f16 values to uint8 (blocks, 2), little-endian."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint8)


def little_endian(words: jax.Array) -> jax.Array:
    """Converts uint16 or uint32 (..., n) to the bytes uint8 (..., n * bytes of a word)."""
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], -1)


def nibbles(values: jax.Array) -> jax.Array:
    """Packs the low four bits of uint8 (..., 2n) into uint8 (..., n).

    The first n become the low nibbles, the last n the high nibbles.
    """
    low, high = jnp.split(values & 0xF, 2, axis=-1)
    return low | (high << 4)


def codes(quants: jax.Array, table: Sequence[int]) -> jax.Array:
    """Converts codebook values to their indices in `table`; among equal entries, the first wins.

    float32 (values, ..., blocks) -> uint8 (blocks, ..., values).
    """
    found = jnp.zeros(quants.shape, jnp.uint8)
    for number in range(len(table) - 1, -1, -1):
        found = jnp.where(quants == table[number], jnp.uint8(number), found)
    return found.T


def bits(values: jax.Array, width: int) -> jax.Array:
    """Packs unsigned integers (..., count, n) into integers of the same type, (..., n).

    The low `width` bits of row i go to bit i * width.
    """
    rows = jnp.moveaxis(values & ((1 << width) - 1), -2, 0)
    return functools.reduce(operator.or_, [row << (i * width) for i, row in enumerate(rows)])


def fifth_bits(quants: jax.Array) -> jax.Array:
    """Packs the fifth bits of quants, uint8 (..., 32), into uint8 (..., 4).

    Bit i of the little-endian word is the fifth bit of quant i.
    """
    return bits((quants >> 4).reshape(*quants.shape[:-1], 4, 8).swapaxes(-1, -2), 1)


def k_scales(scale: jax.Array, minimum: jax.Array) -> jax.Array:
    """Packs scales and minimums, uint8 (..., 8) of 0 to 63, into the 12 bytes of Q4_K and Q5_K."""
    lower, upper = slice(0, 4), slice(4, 8)
    first = scale[..., lower] | ((scale[..., upper] >> 4) << 6)
    second = minimum[..., lower] | ((minimum[..., upper] >> 4) << 6)
    third = (scale[..., upper] & 0xF) | (minimum[..., upper] << 4)
    return jnp.concatenate([first, second, third], axis=-1)


def k_low_bits(quants: jax.Array) -> jax.Array:
    """Packs uint8 (..., 8, 32) into the 128 bytes of low nibbles of Q4_K and Q5_K."""
    leading = quants.shape[:-2]
    return nibbles(quants.reshape(*leading, 4, 64)).reshape(*leading, 128)

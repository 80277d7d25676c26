"""Quantizer of TQ1_0: 256 ternary quants, five in a byte, and a scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import pack
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, as_bytes, searched
from .tq2_0 import ternary


def _fields(x: jax.Array, w: jax.Array) -> Fields:
    d, q = ternary(x, w)
    digits = as_bytes(q + 1)
    first, second, third = digits[:, :160], digits[:, 160:240], digits[:, 240:]
    return {
        "qs": jnp.concatenate(
            [_fractions(first.reshape(-1, 5, 32)), _fractions(second.reshape(-1, 5, 16))], axis=-1
        ),
        "qh": _fractions(third.reshape(-1, 4, 4)),
        "d": pack.f16_bytes(d),
    }


def _fractions(digits: jax.Array) -> jax.Array:
    """Packs base-3 digits, uint8 (blocks, 4 or 5, n), into fractions of 256, uint8 (blocks, n).

    Rounds up, so that the decoder, which rounds down, finds the same digits.
    """
    count = digits.shape[1]
    numbers = jnp.zeros_like(digits[:, 0], jnp.uint32)
    for i in range(count):
        numbers = 3 * numbers + digits[:, i]
    numbers *= 3 ** (5 - count)
    return ((numbers * 256 + 242) // 243).astype(jnp.uint8)


QUANTIZER = Quantizer("TQ1_0", LARGEST_F16, searched("TQ1_0", (256,), _fields), native=True)

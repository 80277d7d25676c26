"""Rotary position embedding: pairs of a head's dimensions, rotated by position times frequency."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CAPACITY_UNIT = 256  # tokens: llama.cpp rounds a context up to it before it chooses factors

#: Tensors of divisors of frequencies: of every context, and of long and short ones (LongRoPE).
DIVISORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class Yarn(NamedTuple):
    """YaRN's constants (https://arxiv.org/abs/2309.00071).

    Pairs that rotate more than `beta_fast` times within the original context keep their frequency,
    those that rotate less than `beta_slow` times are stretched by the factor; linearly between.
    """

    original_context: int  # tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0  # the magnitude is divided by 1 + 0.1 * it * log(factor)


class Rope(NamedTuple):
    """A rotation: frequencies theta ** (-2i / dim) / factor, or YaRN's; an infinite factor: none.

    magnitude: cosines and sines are multiplied by it, and by YaRN's own. divided: a file's divisors
    apply to it.
    """

    theta: float
    dim: int
    factor: float = 1.0
    yarn: Yarn | None = None
    magnitude: float = 1.0
    divided: bool = True


class Rotation(NamedTuple):
    """Angles of tokens, and how a head's dimensions pair up.

    cos, sin: float32 (..., rope_dim / 2). interleaved: pairs are dimensions (2i, 2i + 1) instead of
    (i, i + rope_dim / 2).
    """

    cos: jax.Array
    sin: jax.Array
    interleaved: bool


def frequencies(rope: Rope, divisors: Any = None) -> np.ndarray:
    """Radians per token of every pair, float32 (dim / 2,).

    divisors: (dim / 2,), a file's, which divide them: how Llama 3 stretches its low frequencies.
    """
    radians = exact_frequencies(rope, None if rope.yarn is None else _stretched(rope, rope.yarn))
    if divisors is not None:
        radians = radians / np.asarray(divisors, np.float64)
    return radians.astype(np.float32)


def exact_frequencies(rope: Rope, stretched: np.ndarray | None) -> np.ndarray:
    """Radians per token of every pair before any divisors, float64 (dim / 2,).

    stretched: (dim / 2,), the part of each pair's frequency that the factor divides; None: all.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    part = 1.0 if stretched is None else stretched
    return rope.theta**-exponents * (part / rope.factor + (1 - part))


def pair_of(rope: Rope, original_context: int, rotations: float) -> float:
    """The pair that rotates so many times within the original context, a fraction."""
    wavelength = original_context / (rotations * 2 * math.pi)
    return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _stretched(rope: Rope, yarn: Yarn) -> np.ndarray:
    """The part of each pair's frequency that llama.cpp's YaRN stretches, (dim / 2,)."""
    first = max(0, math.floor(pair_of(rope, yarn.original_context, yarn.beta_fast)))
    last = min(rope.dim - 1, math.ceil(pair_of(rope, yarn.original_context, yarn.beta_slow)))
    return np.clip((np.arange(rope.dim // 2) - first) / max(0.001, last - first), 0.0, 1.0)


def magnitude(rope: Rope) -> float:
    """Factor of cosines and sines."""
    if rope.yarn is None or rope.factor <= 1:
        return rope.magnitude
    growth = 0.1 * math.log(rope.factor)
    return rope.magnitude * (1 + growth) / (1 + rope.yarn.log_multiplier * growth)


def tables(ropes: tuple[Rope, ...], tensors: Mapping[str, Any]) -> list[np.ndarray]:
    """The `frequencies` of each rope, and behind them those of long contexts, where they differ.

    tensors: GGUF's names -> a file's.
    """
    every, long, short = (tensors.get(name) for name in DIVISORS)
    divisors = short if every is None else every
    of_each = [frequencies(rope, divisors if rope.divided else None) for rope in ropes]
    return of_each if every is not None or long is None else [*of_each, frequencies(ropes[0], long)]


def is_long(capacity: int, original_context: int) -> bool:
    """True where a cache of `capacity` tokens takes the frequencies of long contexts."""
    return -(-capacity // CAPACITY_UNIT) * CAPACITY_UNIT > original_context


def angles(
    positions: jax.Array, frequencies: jax.Array, magnitude: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """cos and sin times a magnitude, both float32 (..., rope_dim / 2), of positions (...)."""
    every = frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    radians = positions.astype(jnp.float32)[..., None] * every
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)

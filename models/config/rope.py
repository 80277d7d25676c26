"""Computes frequencies and angles of rotary position embeddings, with YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CAPACITY_UNIT = 256  # tokens; llama.cpp rounds the context up to it before it chooses factors

#: Tensors of frequency divisors: for every context, for long ones and for short ones (LongRoPE).
DIVISORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class Yarn(NamedTuple):
    """YaRN's constants (https://arxiv.org/abs/2309.00071).

    Pairs that rotate more than `beta_fast` times within the original context keep their frequency.
    Pairs that rotate less than `beta_slow` times are stretched by the factor. In between, YaRN
    interpolates linearly.
    """

    original_context: int  # tokens
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0  # divides the magnitude by 1 + 0.1 * log_multiplier * log(factor)


class Rope(NamedTuple):
    """Parameters of a rotary embedding, with frequencies theta ** (-2i / dim) / factor or YaRN's.

    An infinite factor means no rotation. magnitude: multiplies cosines and sines, as does YaRN's
    own. divided: whether the file's frequency divisors apply.
    """

    theta: float
    dim: int
    factor: float = 1.0
    yarn: Yarn | None = None
    magnitude: float = 1.0
    divided: bool = True


class Rotation(NamedTuple):
    """Cosines and sines of the tokens' rotary angles, and how dimensions of a head are paired.

    cos, sin: float32 (..., rope_dim / 2). interleaved: pairs are dimensions (2i, 2i + 1) instead of
    (i, i + rope_dim / 2).
    """

    cos: jax.Array
    sin: jax.Array
    interleaved: bool


def frequencies(rope: Rope, divisors: Any = None) -> np.ndarray:
    """Returns each dimension pair's frequency in radians per token, float32 (dim / 2,).

    divisors: (dim / 2,), divide the frequencies. Llama 3 stretches its low frequencies with them.
    """
    radians = exact_frequencies(rope, None if rope.yarn is None else _stretched(rope, rope.yarn))
    if divisors is not None:
        radians = radians / np.asarray(divisors, np.float64)
    return radians.astype(np.float32)


def exact_frequencies(rope: Rope, stretched: np.ndarray | None) -> np.ndarray:
    """Like `frequencies`, but without divisors and float64.

    stretched: (dim / 2,), fraction of each frequency that the factor divides; None means 1.
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    part = 1.0 if stretched is None else stretched
    return rope.theta**-exponents * (part / rope.factor + (1 - part))


def pair_of(rope: Rope, original_context: int, rotations: float) -> float:
    """Returns the fractional index of the dimension pair that rotates `rotations` times.

    Rotations are counted over the original context.
    """
    wavelength = original_context / (rotations * 2 * math.pi)
    return rope.dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _stretched(rope: Rope, yarn: Yarn) -> np.ndarray:
    """Returns the fraction of each frequency that llama.cpp's YaRN stretches, (dim / 2,)."""
    first = max(0, math.floor(pair_of(rope, yarn.original_context, yarn.beta_fast)))
    last = min(rope.dim - 1, math.ceil(pair_of(rope, yarn.original_context, yarn.beta_slow)))
    return np.clip((np.arange(rope.dim // 2) - first) / max(0.001, last - first), 0.0, 1.0)


def magnitude(rope: Rope) -> float:
    """Returns the factor of cosines and sines, YaRN's included."""
    if rope.yarn is None or rope.factor <= 1:
        return rope.magnitude
    growth = 0.1 * math.log(rope.factor)
    return rope.magnitude * (1 + growth) / (1 + rope.yarn.log_multiplier * growth)


def tables(ropes: tuple[Rope, ...], tensors: Mapping[str, Any]) -> list[np.ndarray]:
    """Returns the `frequencies` of each rope, then those for long contexts if they differ.

    tensors: a file's tensors by GGUF name.
    """
    every, long, short = (tensors.get(name) for name in DIVISORS)
    divisors = short if every is None else every
    of_each = [frequencies(rope, divisors if rope.divided else None) for rope in ropes]
    return of_each if every is not None or long is None else [*of_each, frequencies(ropes[0], long)]


def is_long(capacity: int, original_context: int) -> bool:
    """Returns whether a cache of `capacity` tokens uses the frequencies for long contexts."""
    return -(-capacity // CAPACITY_UNIT) * CAPACITY_UNIT > original_context


def angles(
    positions: jax.Array, frequencies: jax.Array, magnitude: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns magnitude * (cos, sin) at positions (...), both float32 (..., rope_dim / 2)."""
    every = frequencies.reshape((1,) * positions.ndim + frequencies.shape)
    radians = positions.astype(jnp.float32)[..., None] * every
    cos, sin = jnp.cos(radians), jnp.sin(radians)
    return (cos, sin) if magnitude == 1 else (cos * magnitude, sin * magnitude)

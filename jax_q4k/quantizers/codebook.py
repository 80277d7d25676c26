"""Quantizes to formats whose values are entries of ggml's codebooks: IQ1, IQ2 and IQ3.

weight = d * unit * (2 * scale + 1) * signed value of an entry. `native/src/codebook_search.h` has
the search; there is no other implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels.formats.unpack import codebooks

from .. import native
from ..errors import UnavailableError
from ..native import calls
from . import pack
from .fit import LARGEST_F16
from .quantizer import Fields, Quantizer, searched

_MOST_PAIRS = 96  # with these, the search's tables of errors about fill an L1 cache


class Codes(NamedTuple):
    """Result of a search for blocks of 256 values.

    Attributes:
      d: f16 values, float32 (blocks,).
      scales: uint8 (blocks, sub-blocks).
      entries: codebook indices, uint16 (blocks, 256 / values of an entry).
      signs: uint8 (blocks, 32), bit i for value i of eight: 1 if it is negative. In formats whose
        entries have signs, 1 if an eighth is subtracted from the eight values, 0 if it is added.
    """

    d: jax.Array
    scales: jax.Array
    entries: jax.Array
    signs: jax.Array


class _Book(NamedTuple):
    digits: np.ndarray  # uint8 (entries, 4 or 8): indices of levels
    levels: np.ndarray  # float32 (3 or 8,), ascending
    pairs: np.ndarray  # see `shared_pairs`


@functools.cache
def _book(format: str) -> _Book:
    levels, digits = np.unique(codebooks.entries(format), return_inverse=True)
    digits = digits.reshape(codebooks.entries(format).shape).astype(np.uint8)
    return _Book(digits, levels.astype(np.float32), shared_pairs(digits, len(levels)))


def shared_pairs(digits: np.ndarray, levels: int) -> np.ndarray:
    """Returns pairs of second halves of entries that have many first halves in common.

    The search takes the smaller error of each pair once instead of once per first half. Greedy:
    each pair is the most frequent one, and replaces its members where both occur.

    Args:
      digits: uint8 (entries, 4 or 8).
      levels: number of levels; n = levels to the power of half an entry's values.

    Returns:
      uint8 (pairs, 2): numbers of second halves, 0 to n - 1, or n plus the number of an earlier
      pair.
    """
    half = digits.shape[1] // 2
    places = levels ** np.arange(half)[::-1]
    has = np.zeros((levels**half, levels**half + _MOST_PAIRS), np.float32)
    has[digits[:, :half] @ places, digits[:, half:] @ places] = 1
    common = has.T @ has * (1 - np.eye(has.shape[1], dtype=np.float32))
    pairs = []
    for new in range(levels**half, has.shape[1]):
        pair = list(divmod(int(common.argmax()), len(common)))
        if common[pair[0], pair[1]] < 2:  # saves nothing
            break
        both, changed = has[:, pair].all(1), [*pair, new]
        has[both, new] = 1
        for member in pair:
            has[both, member] = 0
        common[changed] = has[:, changed].T @ has
        common[:, changed] = common[changed].T
        common[changed, changed] = 0
        pairs.append(pair)
    return np.array(pairs, np.uint8).reshape(-1, 2)


def quantizer(
    format: str,
    fields: Callable[[Codes], Fields],
    *,
    unit: float,
    largest: float,
    subs: int,
    book: str | None = None,
) -> Quantizer:
    """Returns a format's quantizer.

    Its `blocks` raises UnavailableError if the C++ library is not available.

    Args:
      fields: packs the codes: {field of the struct: uint8 (blocks, its bytes)}.
      unit: factor of d in weights.
      largest: largest weight of both signs, in units of d.
      subs: sub-blocks with a scale.
      book: format that owns the codebook; None means this one.
    """

    def search(x: jax.Array, w: jax.Array) -> Fields:
        codes = calls.codebook_search(
            x.T, w.T, *map(jnp.asarray, _book(book or format)), format=format, unit=unit, subs=subs
        )
        return fields(Codes(*codes))

    run = searched(format, (256,), search)

    def blocks(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
        if not native.available():
            raise UnavailableError(f"{format} is quantized by C++ code: {native.problem()}")
        return run(x, importance)

    return Quantizer(format, largest * LARGEST_F16, blocks)


def nibble_scales(scales: jax.Array) -> jax.Array:
    """Packs scales of four bits, uint8 (blocks, 2n), into uint8 (blocks, n), low nibbles first."""
    return pack.bits(scales.reshape(*scales.shape[:-1], -1, 2).swapaxes(-1, -2), 4)


def signs_and_scales(codes: Codes) -> jax.Array:
    """Packs four times seven signs and a scale into words of 32 values, uint32 (blocks, 8)."""
    signs = codes.signs.astype(jnp.uint32).reshape(-1, 8, 4).swapaxes(-1, -2)
    return pack.bits(signs, 7) | (codes.scales.astype(jnp.uint32) << 28)


def low_bytes(entries: jax.Array) -> jax.Array:
    """Returns the low eight bits of codebook indices, uint16 -> uint8."""
    return (entries & 255).astype(jnp.uint8)


def high_bits(entries: jax.Array) -> jax.Array:
    """Returns the bits of codebook indices above the low eight, uint16 -> uint8."""
    return (entries >> 8).astype(jnp.uint8)

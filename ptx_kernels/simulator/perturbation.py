"""Perturbation: makes random choices where the hardware's behavior is not specified.

A kernel's results must not depend on these choices beyond its tolerance.

Inside `with perturbation(seed):` every launch, including one that JAX makes on its own thread,
  - runs blocks in a random order, and the warps of a block between two barriers in random groups;
  - lets a random lane win if lanes of a warp store to one place, and serves atomics in a random
    order;
  - moves the results of `.approx` instructions within their documented error, always the same way
    for one operand, because hardware is also a function;
  - contracts multiplications and additions that state no rounding, as ptxas may;
  - sums an mma in a random order.
The draws depend only on the seed and the kernel's text.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..ptx.instructions import Error

_seed: int | None = None


@dataclass(frozen=True)
class Freedom:
    """Choices in one launch that PTX leaves to the hardware, fixed or drawn by a generator.

    Attributes:
      salt: seed of the approximate results. It depends only on the seed, so that all launches share
        the same hardware.
    """

    generator: np.random.Generator | None = None
    salt: np.uint32 | None = None

    def scatter(self, target: np.ndarray, index: np.ndarray, items: np.ndarray) -> None:
        """Sets target[index] = items.

        On a collision the highest lane wins, or a random one if perturbed.
        """
        if self.generator is not None:
            order = self.generator.permutation(max(index.size, items.size))
            index, items = (x if x.size == 1 else x[order] for x in (index, items))
        target[index] = items if items.size <= index.size else items[-1:]  # all lanes at one place

    def turns(self, count: int) -> np.ndarray:
        """Returns the order in which lanes are served: lowest first, or random if perturbed."""
        return np.arange(count) if self.generator is None else self.generator.permutation(count)


@contextlib.contextmanager
def perturbation(seed: int) -> Iterator[None]:
    """Perturbs all launches of this process inside the context; the choices depend on `seed`."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


def current(text: str) -> Freedom:
    """Returns the `Freedom` for a launch of `text`: fixed choices outside of `perturbation`."""
    if _seed is None:
        return Freedom()
    salt = np.random.default_rng(_seed).integers(0, 1 << 32, dtype=np.uint32)
    return Freedom(np.random.default_rng([_seed, zlib.crc32(text.encode())]), np.uint32(salt))


def moved(
    result: np.ndarray, operands: list[np.ndarray], error: Error, salt: np.uint32
) -> np.ndarray:
    """Returns float32 results moved by up to the documented error; special values stay exact."""
    exact = result.astype(np.float64)
    bound = np.maximum(error.ulps * np.spacing(np.abs(result)), error.relative * np.abs(exact))
    nudged = exact + _direction(operands, salt) * np.maximum(bound, error.absolute)
    open_ = np.isfinite(result) & np.isfinite(operands[-1]) & (result != 0) & (operands[-1] != 0)
    return np.where(open_, nudged.astype(np.float32), result)


def _direction(operands: list[np.ndarray], salt: np.uint32) -> np.ndarray:
    """Returns a number from -1 to 1, a hash of the operands' bits (MurmurHash3's finalizer)."""
    mixed = np.array([salt])
    for operand in operands:
        mixed = (mixed ^ np.ascontiguousarray(operand).view(np.uint32)) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ mixed >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        mixed ^= mixed >> np.uint32(16)
    return mixed / 2.0**31 - 1.0

"""Defines Quantizer, which maps blocks of floats and their importance to a file's bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels import formats

from .fit import error_weights

Fields = Mapping[str, jax.Array]

#: Options that make a file's bytes independent of `XLA_FLAGS`: with less optimization, LLVM does
#: not fuse products and sums into one rounding, and a search ends elsewhere.
_COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}


@dataclass(frozen=True)
class Blocks:
    """A function for `Quantizer.blocks` that programs can also call while they are traced.

    Attributes:
      host: see `Quantizer.blocks`.
      traced: the same in plain JAX; an XLA that compiles other programs with it may round
        otherwise.
    """

    host: Callable[[np.ndarray, np.ndarray], np.ndarray]
    traced: Callable[[jax.Array, jax.Array], jax.Array]

    def __call__(self, x: np.ndarray, importance: np.ndarray) -> np.ndarray:
        return self.host(x, importance)


@dataclass(frozen=True)
class Quantizer:
    """The quantizer of a format, named `QUANTIZER` in the format's module.

    Attributes:
      format: ggml's name.
      largest: largest magnitude that a block represents whatever the signs of its values; beyond
        it, d would overflow.
      blocks: float32 values and importance, both (blocks, block_size) -> uint8 (blocks,
        block_bytes). Only `Blocks` can be traced.
      native: whether `native/src/quantizers.cpp` has the same search, which is several times as
        fast; `blocks` replaces it where the library is not available.
    """

    format: str
    largest: float
    blocks: Callable[[np.ndarray, np.ndarray], np.ndarray]
    native: bool = False

    @property
    def traced(self) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
        """`blocks` of traced arrays; None if it needs their values."""
        return self.blocks.traced if isinstance(self.blocks, Blocks) else None


def searched(
    format: str, shape: tuple[int, ...], fields: Callable[[jax.Array, jax.Array], Fields]
) -> Blocks:
    """Returns a function for `Quantizer.blocks` that searches for scales in JAX.

    Args:
      shape: shape of a block, (values,) or (values, sub-blocks).
      fields: x and its error weights, float32 (*shape, blocks) -> {field of the struct: uint8
        (blocks, its bytes)}; fields that the format lacks are ignored.
    """
    struct = formats.get(format).struct

    def traced(x: jax.Array, importance: jax.Array) -> jax.Array:
        x, importance = (a.reshape(-1, *shape[::-1]).T for a in (x, importance))
        found = fields(x, error_weights(x, importance))
        return jnp.concatenate([found[name] for name, _ in struct], axis=-1)

    run = jax.jit(traced, compiler_options=_COMPILER_OPTIONS)

    def host(x: np.ndarray, importance: np.ndarray) -> np.ndarray:
        cpu = jax.local_devices(backend="cpu")[0]
        with jax.default_device(cpu), jax.numpy_rank_promotion("allow"):
            return np.asarray(run(x, importance))

    return Blocks(host, traced)


def as_bytes(values: jax.Array) -> Any:
    """Converts float32 (values, ..., blocks) to uint8 (blocks, ..., values)."""
    return values.T.astype(jnp.uint8)

"""One matrix of a stack of packed ones, as products take it: where it lies."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .quantized_array import QuantizedArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class IndexedArray:
    """Matrix `index` (n, k) of a packed `stack` (layers, n, k).

    Kernels get the whole stack and the index, and read the matrix in place: a loop over layers that
    hands on slices would copy each of them.

    Attributes:
      index: int32 (). Below 0 it counts from the end, and beyond either end it is the nearest: as
        `jax.lax.dynamic_index_in_dim` has it.
    """

    stack: QuantizedArray
    index: Any

    @property
    def format(self) -> str:
        return self.stack.format

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, k)."""
        return self.stack.shape[1:]

    @property
    def planes(self) -> tuple[jax.Array, ...]:
        """The matrix's own planes, a copy: for what reads no stacks."""
        return tuple(
            jax.lax.dynamic_index_in_dim(plane, self.index, keepdims=False)
            for plane in self.stack.planes
        )


#: A packed matrix: its leaves are its planes, and an index where these are a stack's.
Packed = QuantizedArray | IndexedArray


def layers(w: Packed) -> int:
    """The number of matrices in the stack that a matrix is one of; 0: it lies by itself."""
    return w.stack.shape[0] if isinstance(w, IndexedArray) else 0


def axes(w: Any, names: str) -> str:
    """A Layout's names of the leaves of a matrix, whose own axes have `names`."""
    return f"_ {names}" if isinstance(w, IndexedArray) else names

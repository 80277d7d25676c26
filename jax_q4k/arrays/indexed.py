"""Defines IndexedArray: one matrix of a packed stack, which kernels read in place."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from .quantized_array import QuantizedArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class IndexedArray:
    """Matrix `index`, of shape (n, k), in a packed `stack` (layers, n, k).

    Kernels receive the stack and the index and read the matrix in place. A loop over layers that
    passed slices instead would copy each of them.

    Attributes:
      index: int32 scalar. Negative values count from the end; values out of range are clamped, as
        by `jax.lax.dynamic_index_in_dim`.
    """

    stack: QuantizedArray
    index: Any

    @property
    def format(self) -> str:
        return self.stack.format

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (n, k) of the selected matrix."""
        return self.stack.shape[1:]

    @property
    def planes(self) -> tuple[jax.Array, ...]:
        """Copies of the matrix's planes, sliced from the stack for code that cannot read stacks."""
        return tuple(
            jax.lax.dynamic_index_in_dim(plane, self.index, keepdims=False)
            for plane in self.stack.planes
        )


#: A packed matrix, alone or in a stack. The leaves are the planes, then the index into a stack.
Packed = QuantizedArray | IndexedArray


def layers(w: Packed) -> int:
    """Returns the number of matrices in the stack of `w`, or 0 if `w` is not in a stack."""
    return w.stack.shape[0] if isinstance(w, IndexedArray) else 0


def axes(w: Any, names: str) -> str:
    """Returns the axis names of the leaves of `w`, for a `Layout`.

    names: axis names of the matrix, such as "n k".
    """
    return f"_ {names}" if isinstance(w, IndexedArray) else names

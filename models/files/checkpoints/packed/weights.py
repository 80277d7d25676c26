"""Reads the tensors of a checkpoint as if its weights were not quantized."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from jax_q4k import CheckpointError

from ..safetensors import TYPES, Stored, Weights, first_not_finite
from .base import PackedTensor

_COMPARED = 1 << 24  # elements compared at a time


class DecodedWeights:
    """Reader of a checkpoint's tensors, with packed weights decoded.

    Attributes:
      stored: name -> description; those of packed weights have the decoded dtype and shape.
      packed: name -> packed weight.
    """

    def __init__(self, weights: Weights, packed: Mapping[str, PackedTensor]) -> None:
        self._weights, self.packed = weights, packed
        parts = {part for tensor in packed.values() for part in tensor.parts}
        self.stored = {
            name: s._replace(dtype="F32") if s.dtype == "F64" else s  # as `Weights.read` returns it
            for name, s in weights.stored.items()
            if name not in parts
        }
        for name, tensor in packed.items():
            file = weights.stored[tensor.parts[0]].file
            self.stored[name] = Stored(file, tensor.dtype, tensor.shape)

    def close(self) -> None:
        """Closes the last file."""
        self._weights.close()

    def nbytes(self, name: str) -> int:
        """Returns the bytes of a tensor in the files."""
        parts = self.packed[name].parts if name in self.packed else (name,)
        return sum(self._weights.stored[part].nbytes for part in parts)

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads a tensor, or the rows of a slice with step 1.

        Raises CheckpointError if a value is NaN or infinite.
        """
        if name not in self.packed:
            return self._weights.read(name, rows)
        tensor, rows = self.packed[name], rows or slice(None)
        values = tensor.floats(self._weights, rows)
        before = rows.indices(tensor.shape[0])[0] * math.prod(tensor.shape[1:])
        if (at := first_not_finite(values)) is not None:
            self.fail(name, f"element {before + at} is NaN or infinite")
        return values

    def blocks(self, name: str, rows: slice | None = None) -> np.ndarray:
        """Reads rows of a packed weight as blocks of its format, uint8 (..., bytes of a row)."""
        return self.packed[name].blocks(self._weights, rows or slice(None))

    def factor(self, name: str) -> np.float32:
        """Returns the factor of the values in a packed weight's blocks."""
        factor = self.packed[name].factor(self._weights)
        return np.float32(1) if factor is None else factor

    def equal(self, first: str, second: str) -> bool:
        """Returns whether two tensors have equal types, shapes and values.

        False for unsupported types. Compares in parts to save memory. Raises like `read`.
        """
        one, other = self.stored[first], self.stored[second]
        if one[1:] != other[1:] or one.dtype not in TYPES or not one.shape:
            return False
        count = max(1, _COMPARED // max(1, math.prod(one.shape[1:])))
        parts = [slice(at, at + count) for at in range(0, one.shape[0], count)]
        read = self.read
        return all(np.array_equal(read(first, part), read(second, part)) for part in parts)

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raises CheckpointError about a tensor."""
        raise CheckpointError(str(self.stored[name].file), f"tensor {name!r}", problem)

"""Importance matrices in memory, and the program that collects them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.tensors import expected_tensors
from ..network.observing import observed
from .programs import Program, Weights


@dataclasses.dataclass(frozen=True, eq=False)
class ImportanceMatrix:
    """Sums of squared activations for each column of a model's matrices, as llama.cpp counts them.

    Attributes:
      sums: GGUF name of a tensor -> float64 (k,), or (experts, k). A stack with a matrix per head
        has one row for all heads, (heads * k,).
      counts: GGUF name -> float64 (1,) or (experts,), rows of activations in each row of `sums`.
      datasets: names of the texts.
      chunks: number of chunks of text.
      chunk_size: tokens of a chunk.
    """

    sums: Mapping[str, np.ndarray]
    counts: Mapping[str, np.ndarray]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0

    def means(self) -> dict[str, np.ndarray]:
        """Returns GGUF name -> mean squared activation, float32 with the shape of `sums`.

        This is the argument `importance` of `quantize`. Columns without rows of activations, such
        as those of an expert that no token used, get 1.
        """
        found = {}
        for name, sums in self.sums.items():
            rows = self.counts[name][:, None]
            means = np.where(rows > 0, sums.reshape(len(rows), -1) / np.where(rows > 0, rows, 1), 1)
            found[name] = means.astype(np.float32).reshape(sums.shape)
        return found

    def added(self, other: ImportanceMatrix) -> ImportanceMatrix:
        """Returns the sums over the texts of both; `chunk_size` is that of `other`.

        Raises ValueError that names a tensor with different shapes.
        """
        sums, counts = dict(self.sums), dict(self.counts)
        for name, more in other.sums.items():
            if name not in sums:
                sums[name], counts[name] = more, other.counts[name]
                continue
            old = sums[name], counts[name]
            if (both := _same_rows(old, (more, other.counts[name]))) is None:
                shapes = f"{more.shape} and {sums[name].shape}"
                raise ValueError(f"importance matrices of {name!r} have shapes {shapes}")
            sums[name] = both[0][0] + both[1][0]
            counts[name] = both[0][1] + both[1][1]
        datasets = tuple(dict.fromkeys((*self.datasets, *other.datasets)))
        chunks = self.chunks + other.chunks
        return ImportanceMatrix(sums, counts, datasets, chunks, other.chunk_size)


def _same_rows(
    *entries: tuple[np.ndarray, np.ndarray],
) -> list[tuple[np.ndarray, np.ndarray]] | None:
    """Returns sums and counts of entries in one shape; None if they belong to different matrices.

    Files may have one count for all experts, and in the .dat format also one row of sums.
    """
    shape = max((sums.shape for sums, _ in entries), key=len)
    rows = max(len(counts) for _, counts in entries)
    found = []
    for sums, counts in entries:
        if sums.size != math.prod(shape) or len(counts) not in (1, rows):
            return None
        found.append((sums.reshape(shape), np.broadcast_to(counts, (rows,))))
    return found


#: Sums of squares float32 (k,) or (matrices, k), and rows of activations int32 () or (matrices,).
Sums = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareSums(Program):
    """Sums the squares of the inputs of matrices over the tokens of texts.

    (weights, tokens int32 (batch, time)) -> GGUF name of a matrix -> `Sums`.

    Attributes:
      names: GGUF names of the matrices.
    """

    names: tuple[str, ...]

    def __call__(self, weights: Weights, tokens: jax.Array) -> dict[str, Sums]:
        shapes = self._shapes
        found: dict[str, Sums] = {}

        def report(name: str, x: jax.Array, ids: jax.Array | None = None) -> None:
            new = _sums(x) if ids is None else _sums_of_each(x, ids, shapes[name][0])
            found[name] = new if name not in found else jax.tree.map(jnp.add, found[name], new)

        decoder = observed(self._decoder(weights), self.names, report)
        x = decoder.vectors(tokens)
        if "output.weight" in self.names:
            decoder.logits(x)  # XLA removes the product, whose result is not used
        return found

    def results(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Returns shapes and dtypes of the results."""

        def of(shape: tuple[int, ...]) -> Any:
            *stack, _, k = shape
            return tuple(
                jax.ShapeDtypeStruct(length, dtype)
                for length, dtype in (((*stack, k), jnp.float32), (tuple(stack), jnp.int32))
            )

        return {name: of(self._shapes[name]) for name in self.names}

    @property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """GGUF name -> shape of each tensor."""
        expected = expected_tensors(self.network.config)
        return {name: expected[name].shape for name in self.names}


def _sums(x: jax.Array) -> Sums:
    """Returns the `Sums` of the inputs x (..., k) of a matrix."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    return jnp.square(rows).sum(0), jnp.asarray(len(rows), jnp.int32)


def _sums_of_each(x: jax.Array, ids: jax.Array, matrices: int) -> Sums:
    """Returns the `Sums` of each matrix of a stack.

    x: (..., k), inputs of all matrices that a token uses, or (..., top, k), one for each. ids:
    (..., top), the matrices.
    """
    x = x if x.ndim > ids.ndim else x[..., None, :]
    squares = jnp.square(x.astype(jnp.float32))
    rows = jnp.broadcast_to(squares, (*ids.shape, x.shape[-1])).reshape(-1, x.shape[-1])
    chosen = ids.reshape(-1)
    sums = jax.ops.segment_sum(rows, chosen, num_segments=matrices)
    ones = jnp.ones(chosen.shape, jnp.int32)
    return sums, jax.ops.segment_sum(ones, chosen, num_segments=matrices)

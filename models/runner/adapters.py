"""LoRA adapters in memory, and the arrays that hold those of an engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..config.tensors import expected_tensors
from ..network.adapters import named_linears, present
from .model import Model

#: Largest factor of an adapter. Larger ones come from damaged files.
MAX_SCALE = 1e6

#: Largest change of an output for inputs up to 1. Trained adapters stay far below it; with larger
#: ones, products of a layer soon exceed float32 and logits become NaN.
MAX_REACH = 1e12

#: Name of a matrix -> its arrays; see `stacks_for`.
Stacks = dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Pair:
    """A LoRA adapter of one matrix: a (rank, k), b (n, rank), and the factor of b @ a.

    names: names of a's and b's tensors in the file.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    names: tuple[str, str]

    @functools.cached_property
    def reach(self) -> tuple[float, float]:
        """Largest |a @ x| and |scale * b @ a @ x| for |x| <= 1, in float64; may be infinite."""
        between = np.abs(self.a).astype(np.float64).sum(axis=1)
        added = np.abs(self.b).astype(np.float64) @ between
        return float(between.max()), abs(self.scale) * float(added.max())


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter, read from a file by `read_lora`.

    Attributes:
      pairs: GGUF name of each adapted matrix -> its arrays.
      path: the file.
    """

    pairs: Mapping[str, Pair]
    path: str

    @property
    def rank(self) -> int:
        """Largest rank of its matrices."""
        return max((len(pair.a) for pair in self.pairs.values()), default=0)

    def __repr__(self) -> str:
        return f"Adapter({self.path!r}, {len(self.pairs)} matrices, rank {self.rank})"


def check_scale(scale: Any, pairs: Mapping[str, Pair] | None = None) -> None:
    """Raises ValueError unless `scale` is a factor of an adapter, and suits that of `pairs`."""
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not abs(scale) <= MAX_SCALE:
        raise ValueError(f"scale={scale!r} must be a number from -{MAX_SCALE:g} to {MAX_SCALE:g}")
    for name, pair in (pairs or {}).items():
        if not abs(scale) * pair.reach[1] <= MAX_REACH:
            problem = f"makes the adapter of {name} so large that logits may be NaN"
            raise ValueError(f"scale={scale!r} {problem}")


def stacks_for(model: Model, count: int, rank: int) -> Stacks:
    """Returns room for `count` adapters of up to `rank` of every matrix but the output's.

    Each matrix (n, k) has a (count * rank, k), b (n, count * rank) and scale (count * rank,), zeros
    in float32.
    """
    named = named_linears(model.config)
    named.pop("output.weight", None)
    expected, wide = expected_tensors(model.config), count * rank
    found: Stacks = {}
    for name in sorted(present(model.decoder(), named)):
        n, k = expected[name].shape
        shapes = {"a": (wide, k), "b": (n, wide), "scale": (wide,)}
        found[name] = {part: jnp.zeros(shape, jnp.float32) for part, shape in shapes.items()}
    return found


def arrays_for(adapter: Adapter, stacks: Stacks, rank: int, scale: float) -> Stacks:
    """Returns an adapter as one entry of `stacks`: all matrices, padded to `rank` with zeros.

    Raises ValueError if it does not fit.
    """
    if adapter.rank > rank:
        raise ValueError(f"the adapter's rank is {adapter.rank}; max_adapter_rank is {rank}")
    for name in adapter.pairs:
        if name not in stacks:
            problem = "which the engine does not adapt"
            problem += ": load it with models.with_lora" if name == "output.weight" else ""
            raise ValueError(f"the adapter changes {name}, {problem}")
    found: Stacks = {}
    for name, stack in stacks.items():
        pair = adapter.pairs.get(name)
        of_a, of_b = (rank, stack["a"].shape[1]), (stack["b"].shape[0], rank)
        a, b, factor = np.zeros(of_a, np.float32), np.zeros(of_b, np.float32), 0.0
        if pair is not None:
            own = len(pair.a)
            if pair.a.shape[1] != of_a[1] or len(pair.b) != of_b[0]:
                shape = len(pair.b), pair.a.shape[1]
                raise ValueError(f"the adapter of {name} has shape {shape}, not {of_b[0], of_a[1]}")
            a[:own], b[:, :own], factor = pair.a, pair.b, scale * pair.scale
        found[name] = {"a": a, "b": b, "scale": np.full(rank, factor, np.float32)}
    return found


def put_entry(stacks: Stacks, place: jax.Array, entry: Stacks) -> Stacks:
    """Returns `stacks` with an entry of `arrays_for` at `place`, counted from 0."""
    axes = {"a": 0, "b": 1, "scale": 0}

    def put(stack: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        first = place * part.shape[axis]
        return jax.lax.dynamic_update_slice_in_dim(stack, part, first, axis)

    return {
        name: {part: put(stack[part], entry[name][part], axis) for part, axis in axes.items()}
        for name, stack in stacks.items()
    }

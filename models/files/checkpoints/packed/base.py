"""Defines PackedTensor, the interface of a quantized checkpoint's weights."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator

import numpy as np

from ..safetensors import Weights

#: Types of scales that also are the types of decoded weights.
FLOATS = ("F32", "F16", "BF16")
_WEIGHTS = 1 << 21  # weights decoded at a time; tens of megabytes of temporary arrays

#: Suffixes of tensors of a quantized module that only concern its activations.
_OF_ACTIVATIONS = (
    "activation_scale",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)


@dataclasses.dataclass(frozen=True)
class PackedTensor(abc.ABC):
    """A weight that several tensors of a checkpoint encode.

    Attributes:
      name: its name in an unquantized checkpoint.
      shape: (n, k), or (experts, n, k).
      dtype: type of the decoded weights, one of FLOATS.
      parts: names of the stored tensors.
      label: name of the type in warnings; None for types in which models are trained or released.
      format: block format with exactly the same values, up to a common factor; None: none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    label: str | None = None
    format: str | None = None

    @abc.abstractmethod
    def floats(self, weights: Weights, rows: slice) -> np.ndarray:
        """Returns the rows (or experts) of a slice with step 1, in `dtype`.

        Values that are not finite are reported by the caller. Raises CheckpointError for values of
        parts that contradict each other.
        """

    def blocks(self, weights: Weights, rows: slice) -> np.ndarray:
        """Returns the rows of a slice as blocks of `format`, uint8 (..., bytes of a row)."""
        raise NotImplementedError

    def factor(self, weights: Weights) -> np.float32 | None:
        """Returns the factor of the values in `blocks`; None means 1."""
        return None


def beside(weights: Weights, module: str) -> tuple[str, ...]:
    """Returns the names of a module's tensors that only concern its activations."""
    names = (f"{module}.{suffix}" for suffix in _OF_ACTIVATIONS)
    return tuple(name for name in names if name in weights.stored)


def modules(weights: Weights, suffix: str) -> Iterator[str]:
    """Yields the names of the modules that have a tensor `module.suffix`."""
    ending = f".{suffix}"
    return (name.removesuffix(ending) for name in list(weights.stored) if name.endswith(ending))


def pieces(start: int, stop: int, k: int, unit: int = 1) -> Iterator[slice]:
    """Yields slices of rows of k weights, each of a bounded number, from `start` to `stop`.

    unit: number that the bounds between slices are multiples of.
    """
    step = max(1, _WEIGHTS // (k * unit)) * unit
    first = start
    while first < stop:
        last = min(stop, first // unit * unit + step)
        yield slice(first, last)
        first = last

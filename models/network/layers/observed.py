"""A matrix that reports its inputs while a program is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array


class Observed(nnx.Module):
    """Reports the inputs of a matrix, and returns the matrix's outputs.

    Since it is no Linear, fused operations run step by step, so that every matrix's input exists.

    Attributes:
      base: a Linear, AdaptedLinear or ExpertLinear.
      report: called with the arguments of each call: activations (..., k), and for experts or heads
        also the ids (..., top) of their matrices.
    """

    def __init__(self, base: Any, report: Callable[..., None]) -> None:
        self.base = base
        self.report = report

    def __call__(self, *inputs: Array) -> Array:
        self.report(*inputs)
        output: Array = self.base(*inputs)
        return output

"""GGUF models inside JAX programs: packed weights, jit-compatible primitives, PTX kernels on a GPU."""

from __future__ import annotations

from .arrays import QuantizedArray
from .errors import GGUFError

__all__ = ["GGUFError", "QuantizedArray"]

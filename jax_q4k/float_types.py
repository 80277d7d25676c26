"""The types of numbers that are not packed: activations, float weights and a cache's pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class FloatType(NamedTuple):
    """One type, by all its names."""

    dtype: np.dtype[Any]
    kernel: str  # an argument of kernels
    ptx: str  # of a kernel's buffer
    xla: str  # in XLA's texts
    ggml: str | None = None  # in GGUF files, and of matrices in `native/src`; None: pages alone
    exponent: int = 0  # mask of the bits that are all set in NaN and infinities

    @property
    def bits(self) -> np.dtype[Any]:
        """The unsigned integer of its size."""
        return np.dtype(f"u{self.dtype.itemsize}")


F32 = FloatType(np.dtype(np.float32), "f32", "f32", "f32", "F32", 0x7F800000)
BF16 = FloatType(np.dtype(jnp.bfloat16), "bf16", "bf16", "bf16", "BF16", 0x7F80)
F16 = FloatType(np.dtype(np.float16), "f16", "f16", "f16", "F16", 0x7C00)
INT8 = FloatType(np.dtype(np.int8), "int8", "s8", "s8")  # of pages, with a scale for each vector
FP8 = FloatType(np.dtype(jnp.float8_e4m3fn), "fp8", "e4m3", "f8e4m3fn")

#: Types of activations, and of float weights.
FLOATS = (F32, BF16, F16)
#: Types of a cache's pages.
PAGES = (*FLOATS, INT8, FP8)

#: ggml's name -> type.
GGML: dict[str, FloatType] = {str(of.ggml): of for of in (F32, F16, BF16)}

_BY_DTYPE = {of.dtype: of for of in PAGES}
_GGML_NAMES = {of.dtype.name: name for name, of in GGML.items()}
_BY_PTX = {of.ptx: of for of in PAGES}


def of_dtype(dtype: Any) -> FloatType:
    """The type of a dtype; KeyError for another."""
    return _BY_DTYPE[np.dtype(dtype)]


def ggml_name(dtype: Any) -> str | None:
    """ggml's name of a dtype, or None for one that it has no name for here."""
    return _GGML_NAMES.get(str(dtype))


def of_ptx(name: str) -> FloatType | None:
    """The type of a kernel's buffer, or None for one that is not in the table."""
    return _BY_PTX.get(name)

"""Table of the unpacked number types, for activations, float weights and KV-cache pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class FloatType(NamedTuple):
    """A number type and its names in NumPy, kernels, PTX, XLA and ggml."""

    dtype: np.dtype[Any]
    kernel: str  # in arguments of kernels
    ptx: str  # in a kernel's buffers
    xla: str  # in XLA's texts
    ggml: str | None = None  # in GGUF files, and for matrices in `native/src`; None: only for pages
    exponent: int = 0  # mask of the exponent's bits, all set in NaN and infinities

    @property
    def bits(self) -> np.dtype[Any]:
        """Unsigned integer dtype of the same size."""
        return np.dtype(f"u{self.dtype.itemsize}")


F32 = FloatType(np.dtype(np.float32), "f32", "f32", "f32", "F32", 0x7F800000)
BF16 = FloatType(np.dtype(ml_dtypes.bfloat16), "bf16", "bf16", "bf16", "BF16", 0x7F80)
F16 = FloatType(np.dtype(np.float16), "f16", "f16", "f16", "F16", 0x7C00)
INT8 = FloatType(np.dtype(np.int8), "int8", "s8", "s8")  # in pages, with a scale per vector
FP8 = FloatType(np.dtype(ml_dtypes.float8_e4m3fn), "fp8", "e4m3", "f8e4m3fn")

#: Types of activations and float weights.
FLOATS = (F32, BF16, F16)
#: Types of KV-cache pages.
PAGES = (*FLOATS, INT8, FP8)
PAGE_DTYPES: tuple[np.dtype[Any], ...] = tuple(of.dtype for of in PAGES)

#: ggml's name -> type.
GGML: dict[str, FloatType] = {str(of.ggml): of for of in (F32, F16, BF16)}

_BY_DTYPE = {of.dtype: of for of in PAGES}
_GGML_NAMES = {of.dtype.name: name for name, of in GGML.items()}
_BY_PTX = {of.ptx: of for of in PAGES}


def of_dtype(dtype: Any) -> FloatType:
    """Returns the FloatType with this NumPy dtype; raises KeyError if there is none."""
    return _BY_DTYPE[np.dtype(dtype)]


def ggml_name(dtype: Any) -> str | None:
    """Returns ggml's name of a dtype, None if ggml has no such type."""
    return _GGML_NAMES.get(str(dtype))


def of_ptx(name: str) -> FloatType | None:
    """Returns the FloatType with this PTX name, None if it is not in the table."""
    return _BY_PTX.get(name)

"""Quantizes floats to ggml's quantization blocks, always on the CPU.

`affine` and `symmetric` search for scales, and `pack` packs the bytes. Each format has a module
with a `QUANTIZER`; there is no other list of formats. Programs take a fixed number of blocks. This
bounds memory, and makes a block's bytes depend only on its own values and importance.
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ptx_kernels import formats

from .quantizer import Quantizer

__all__ = ["names", "quantize"]

#: Weights per program; with temporaries of 30 bytes each, about a core's L2 cache.
CHUNK = 32768
_DTYPES = ("float32", "float16", "bfloat16", "float64")
# relative to a block's largest importance; even values of importance zero are rounded properly
_LEAST_IMPORTANCE = 2.0**-20


@functools.cache
def _found() -> dict[str, Quantizer]:
    """Returns the quantizers of this package by format, in the order of `formats.names()`."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    loaded = [importlib.import_module(f"{__name__}.{name}") for name in modules]
    found = {m.QUANTIZER.format: m.QUANTIZER for m in loaded if hasattr(m, "QUANTIZER")}
    return {name: found[name] for name in formats.names() if name in found}


def largest(format: str) -> float:
    """Returns the largest magnitude that a format accepts."""
    return _found()[format].largest


def names() -> tuple[str, ...]:
    """Returns the formats that `quantize` supports: ("Q4_0", ...)."""
    return tuple(_found())


def quantize(w: Any, format: str, importance: Any = None) -> np.ndarray:
    """Quantizes rows of floats to ggml's quantization blocks, as the bytes of a GGUF file.

    Has the arguments, accuracy and errors of `jax_q4k.quantize`.

    Returns:
      uint8 (..., k / block_size, block_bytes).
    """
    if format not in names():  # a tuple, because the argument may not be hashable
        raise ValueError(f"format={format!r} must be one of {', '.join(names())}")
    for name, argument in (("w", w), ("importance", importance)):
        if isinstance(argument, jax.core.Tracer):
            raise TypeError(
                f"{name} is traced; quantize needs its values: call it outside jit, vmap and grad"
            )
    block, quantizer = formats.get(format), _found()[format]
    values = np.asarray(w)
    if values.dtype.name not in _DTYPES:
        raise TypeError(f"w has dtype {values.dtype.name}; it must be one of {', '.join(_DTYPES)}")
    if not values.ndim or not values.size:
        raise ValueError(
            f"w has shape {values.shape}; it must have at least one axis, and every axis at least 1"
        )
    *leading, k = values.shape
    if k % block.block_size:
        raise ValueError(
            f"w has shape {values.shape}: k={k} must be a multiple of {block.block_size}, "
            f"{format}'s block"
        )
    even = np.ones((1, block.block_size), np.float32)
    row_importance = (
        even if importance is None else _checked_importance(importance, k, block.block_size)
    )
    flat = values.reshape(-1, block.block_size)
    packed = np.empty((len(flat), block.block_bytes), np.uint8)
    step = CHUNK // block.block_size

    def fill(start: int) -> None:
        chunk = flat[start : start + step]
        rows = np.arange(start, start + step) % len(row_importance)
        x = np.zeros((step, block.block_size), np.float32)
        with np.errstate(over="ignore"):  # large float64 become infinite, and are rejected below
            x[: len(chunk)] = chunk
        if not np.abs(x).max() <= quantizer.largest:
            first = int(np.argmax(~(np.abs(x) <= quantizer.largest)))
            at = np.unravel_index(start * block.block_size + first, values.shape)
            raise ValueError(
                f"w[{', '.join(map(str, at))}] is {values[at]}; "
                f"{format} takes finite values of magnitude up to {quantizer.largest:g}"
            )
        packed[start : start + step] = quantizer.blocks(x, row_importance[rows])[: len(chunk)]

    fill(0)  # compiles
    with ThreadPoolExecutor(_threads()) as pool:
        for _ in pool.map(fill, range(step, len(flat), step)):
            pass
    return packed.reshape(*leading, k // block.block_size, block.block_bytes)


def _checked_importance(importance: Any, k: int, block_size: int) -> np.ndarray:
    """Returns the importance as float32 (k / block_size, block_size).

    Each block is scaled so that its largest element is 1; a block of zeros becomes uniform.
    """
    found = np.asarray(importance)
    if found.dtype.kind not in "iuf" and found.dtype.name != "bfloat16":
        raise TypeError(f"importance has dtype {found.dtype.name}; it must be real numbers")
    if found.shape != (k,):
        raise ValueError(
            f"importance has shape {found.shape}; it must be ({k},), "
            "one number for each column of w"
        )
    found = found.astype(np.float64)
    bad = ~(np.isfinite(found) & (found >= 0))
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(
            f"importance[{first}] is {found[first]}; it must be finite and not negative"
        )
    blocks = found.reshape(-1, block_size)
    largest = blocks.max(-1, keepdims=True)
    scaled = np.where(largest > 0, blocks / np.where(largest > 0, largest, 1), 1)
    return np.maximum(scaled, _LEAST_IMPORTANCE).astype(np.float32)


@functools.cache
def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

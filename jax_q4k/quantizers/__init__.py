"""Floats to ggml's blocks, on the CPU whatever JAX's default device is.

`affine` and `symmetric` search for scales, `pack` makes bytes; a module with a `QUANTIZER` puts
them together for each format, and there is no other list. A program takes one fixed number of
blocks, so that memory is bounded and a block's bytes depend on nothing but its own values and
importance.
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

#: Weights of one program: with its temporaries, 30 bytes each, about a core's second-level cache.
CHUNK = 32768
_DTYPES = ("float32", "float16", "bfloat16", "float64")
# of a block's largest: a value of importance zero is still rounded, not left to chance
_LEAST_IMPORTANCE = 2.0**-20


@functools.cache
def _found() -> dict[str, Quantizer]:
    """The quantizers of this package by format, in the order of `formats.names()`."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    loaded = [importlib.import_module(f"{__name__}.{name}") for name in modules]
    found = {m.QUANTIZER.format: m.QUANTIZER for m in loaded if hasattr(m, "QUANTIZER")}
    return {name: found[name] for name in formats.names() if name in found}


def largest(format: str) -> float:
    """The largest magnitude that a format takes."""
    return _found()[format].largest


def names() -> tuple[str, ...]:
    """The formats that `quantize` makes: ("Q4_0", ...)."""
    return tuple(_found())


def quantize(w: Any, format: str, importance: Any = None) -> np.ndarray:
    """Rows of floats as ggml's blocks, the bytes that a GGUF file holds.

    Minimizes over each block the sum of importance * sqrt(1 + x^2 / (2 * mean x^2)) * (x -
    weight)^2: ggml's objective where it has an importance matrix. Q8_0 is ggml's to the bit and
    knows no importance. Values already on a grid of the format keep it: to the bit in Q4_0, Q5_0
    and Q8_0, within an ulp in the others as far as the values tell which grid it was (see `affine`,
    `symmetric`).

    Args:
      w: (..., k), NumPy or JAX, float32, float16, bfloat16 or float64 (searched in float32).
      format: one of `names()`.
      importance: (k,) weights of the squared errors, non-negative, their scale without meaning; a
        block in which all are zero counts as even. None: all alike.

    Returns:
      uint8 (..., k / block_size, block_bytes).

    Raises:
      ValueError: an unknown format; no axis, an empty one, or k no multiple of the block; a value
        that is NaN, infinite or beyond the format's range, which names the first; an importance of
        another shape, or one that is negative, NaN or infinite. TypeError: a dtype that is not
        listed, a boolean or complex importance, a tracer.
    """
    if format not in names():  # a tuple: the argument need not be hashable
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
        with np.errstate(over="ignore"):  # of float64: an infinity is then found
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
    """float32 (k / block_size, block_size), every block's largest 1 and none zero."""
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

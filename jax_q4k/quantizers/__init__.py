"""Quantizes floats to ggml's quantization blocks, always on the CPU.

`affine` and `symmetric` search for scales, and `pack` packs the bytes. Each format has a module
with a `QUANTIZER`; there is no other list of formats. Programs take a fixed number of blocks. This
bounds memory, and makes a block's bytes depend only on its own values and importance.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels import formats

from .. import cpus, float_types, native
from . import plain
from .quantizer import Quantizer

__all__ = ["convert", "names", "quantize"]

#: Weights per program; with temporaries of 30 bytes each, about a core's L2 cache.
CHUNK = 32768
#: Weights per call of the library, which has temporaries of a few blocks only.
_CHUNK_OF_CALLS = 4 * CHUNK
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


def quantize(
    w: Any, format: str, importance: Any = None, *, threads: int | None = None
) -> np.ndarray:
    """Quantizes rows of floats to ggml's quantization blocks, as the bytes of a GGUF file.

    Has the arguments, accuracy and errors of `jax_q4k.quantize` of values.

    Args:
      threads: number of threads; None means one per core.

    Returns:
      uint8 (..., k / block_size, block_bytes).
    """
    block = checked_format(format)
    for name, argument in (("w", w), ("importance", importance)):
        if isinstance(argument, jax.core.Tracer):
            raise TypeError(
                f"{name} is traced, and the bytes of a file need its values: call it outside jit, "
                "vmap and grad, or jax_q4k.quantize, which can be traced"
            )
    values = np.asarray(w)
    check_weights(values, block)
    *leading, k = values.shape
    packed = np.empty((*leading, k // block.block_size, block.block_bytes), np.uint8)
    even = np.ones((1, block.block_size), np.float32)
    row_importance = (
        even if importance is None else _checked_importance(importance, k, block.block_size)
    )
    _fill(packed, values, _found()[format], row_importance, threads)
    return packed


def convert(values: np.ndarray, type: str, *, threads: int | None = None) -> np.ndarray:
    """Converts finite floats to ggml's type F32, F16 or BF16, rounding to nearest even.

    Args:
      values: (...), of a dtype that `quantize` takes.
      threads: number of threads; None means one per core.

    Raises ValueError for a value that is not finite or beyond the type's largest.
    """
    quantizer = plain.QUANTIZERS[type]
    converted = np.empty(values.shape, float_types.GGML[type].dtype)
    if values.size:
        packed = converted.reshape(*values.shape, 1).view(np.uint8)
        _fill(packed, values, quantizer, np.ones((1, 1), np.float32), threads)
    return converted


def _fill(
    packed: np.ndarray,
    values: np.ndarray,
    quantizer: Quantizer,
    importance: np.ndarray,
    threads: int | None,
) -> None:
    """Fills `packed`, contiguous uint8 (..., blocks, block_bytes), with quantized values (..., k).

    Args:
      importance: float32 (period, block_size), by turns for the blocks.
      threads: see `quantize`.

    Raises ValueError for a value that is not finite or too large.
    """
    block_size = importance.shape[1]
    flat, blocks = values.reshape(-1, block_size), packed.reshape(-1, packed.shape[-1])
    by_one_call = quantizer.native and native.available()
    step = (_CHUNK_OF_CALLS if by_one_call else CHUNK) // block_size
    # the library also reads float16 and bfloat16, in the byte order of this processor
    dtype = np.dtype("float32" if values.dtype.name == "float64" else values.dtype.name)

    def refuse(x: np.ndarray, start: int) -> NoReturn:
        first = int(np.argmax(~(np.abs(x) <= quantizer.largest)))
        at = np.unravel_index(start * block_size + first, values.shape)
        raise ValueError(
            f"w[{', '.join(map(str, at))}] is {values[at]}; {quantizer.format} takes finite values "
            f"of magnitude up to {quantizer.largest:g}"
        )

    def fill(start: int) -> None:
        chunk = flat[start : start + step]
        if by_one_call:
            with np.errstate(over="ignore"):
                x = np.ascontiguousarray(chunk, dtype)
            part = blocks[start : start + step]
            args = importance, start, quantizer.largest, part
            if not native.quantize(quantizer.format, x, *args):
                refuse(x.astype(np.float32), start)
            return
        rows = np.arange(start, start + step) % len(importance)
        x = np.zeros((step, block_size), np.float32)
        with np.errstate(over="ignore"):  # large float64 become infinite, and are rejected below
            x[: len(chunk)] = chunk
        if not np.abs(x).max() <= quantizer.largest:
            refuse(x, start)
        blocks[start : start + step] = quantizer.blocks(x, importance[rows])[: len(chunk)]

    starts = range(0, len(flat), step)
    if not by_one_call:
        fill(0)  # compiles
        starts = starts[1:]
    if threads == 1 or len(starts) <= 1:
        for start in starts:
            fill(start)
        return
    with ThreadPoolExecutor(threads or cpus.available()) as pool:
        for _ in pool.map(fill, starts):
            pass


def traced(x: jax.Array, format: str, importance: jax.Array | None = None) -> jax.Array:
    """Quantizes traced float32 x (m, k) to uint8 (m, k / block_size, block_bytes), in plain JAX.

    All bytes of a block are 255 if a value is not finite or beyond the format's range, or if an
    importance is negative or not finite: the weights of such a block are NaN or infinite.

    Raises TypeError if the format has no quantizer in JAX.
    """
    block, quantizer = formats.get(format), _found()[format]
    if quantizer.traced is None:
        can = ", ".join(name for name, q in _found().items() if q.traced is not None)
        raise TypeError(
            f"w is traced; quantize to {format} needs its values: call it outside jit and vmap, or "
            f"use one of {can}"
        )
    rows, (m, k), count = quantizer.traced, x.shape, x.size // block.block_size
    if importance is None:
        weights = jnp.ones((k,), jnp.float32)
    else:
        weights = importance.astype(jnp.float32)
    weights = weights.reshape(-1, block.block_size)
    largest = weights.max(-1, keepdims=True)
    scaled = jnp.where(largest > 0, weights / jnp.where(largest > 0, largest, 1), 1)
    scaled = jnp.maximum(scaled, _LEAST_IMPORTANCE)
    unusable = ~(jnp.isfinite(weights) & (weights >= 0)).all(-1)

    step = min(CHUNK // block.block_size, count)
    chunks = -(-count // step)
    flat = jnp.pad(x.reshape(count, -1), ((0, chunks * step - count), (0, 0)))

    def chunk(start: jax.Array, values: jax.Array) -> jax.Array:
        column = (start + jnp.arange(step)) % len(weights)
        packed = rows(values, scaled[column])
        bad = ~(jnp.abs(values) <= quantizer.largest).all(-1) | unusable[column]
        return jnp.where(bad[:, None], jnp.uint8(255), packed)

    starts = jnp.arange(chunks) * step
    packed = jax.lax.map(
        lambda part: chunk(*part), (starts, flat.reshape(chunks, step, block.block_size))
    )
    return packed.reshape(chunks * step, -1)[:count].reshape(m, k // block.block_size, -1)


def checked_format(format: Any) -> formats.BlockFormat:
    """Returns the block format of a quantizer's name; raises ValueError for another name."""
    if format not in names():  # a tuple, because the argument may not be hashable
        raise ValueError(formats.unknown(format, names()))
    return formats.get(format)


def check_weights(w: Any, block: formats.BlockFormat) -> None:
    """Raises TypeError or ValueError for a dtype or shape that `quantize` does not take."""
    if w.dtype.name not in _DTYPES:
        raise TypeError(f"w has dtype {w.dtype.name}; it must be one of {', '.join(_DTYPES)}")
    if not w.ndim or not w.size:
        raise ValueError(
            f"w has shape {w.shape}; it must have at least one axis, and every axis at least 1"
        )
    if w.shape[-1] % block.block_size:
        raise ValueError(
            f"w has shape {w.shape}: k={w.shape[-1]} must be a multiple of {block.block_size}, "
            f"{block.name}'s block"
        )


def check_importance(importance: Any, k: int) -> None:
    """Raises TypeError or ValueError for a dtype or shape that `quantize` does not take."""
    if importance.dtype.kind not in "iuf" and importance.dtype.name != "bfloat16":
        raise TypeError(f"importance has dtype {importance.dtype.name}; it must be real numbers")
    if importance.shape != (k,):
        raise ValueError(
            f"importance has shape {importance.shape}; it must be ({k},), "
            "one number for each column of w"
        )


def _checked_importance(importance: Any, k: int, block_size: int) -> np.ndarray:
    """Returns the importance as float32 (k / block_size, block_size).

    Each block is scaled so that its largest element is 1; a block of zeros becomes uniform.
    """
    found = np.asarray(importance)
    check_importance(found, k)
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

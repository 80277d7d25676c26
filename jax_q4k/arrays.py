"""QuantizedArray: a matrix that stays packed, as a pytree of byte planes."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ptx_kernels import formats


@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """A packed array of logical shape (..., n, k), quantized along k in ggml's blocks.

    `planes` holds one uint8 array (..., n, k / block_size, bytes) per plane of the format, in the
    order of `ptx_kernels.formats.get(format).planes`. They are the leaves of the pytree; the format
    is static. `shape` follows from the planes, so that `vmap`, `scan` and `shard_map`, which hand
    on parts of the leaves, hand on arrays whose shape is right.
    """

    __slots__ = ("format", "planes")
    format: str
    planes: tuple[Any, ...]

    def __init__(self, format: str, shape: Sequence[int], planes: Sequence[Any]) -> None:
        block = formats.get(format)
        shape = _checked_shape(shape, block)
        if len(planes) != len(block.planes):
            wanted = ", ".join(plane.name for plane in block.planes)
            raise ValueError(
                f"planes has {len(planes)} arrays; {format} has {len(block.planes)}: {wanted}"
            )
        for plane, data in zip(block.planes, planes, strict=True):
            want = (*shape[:-1], shape[-1] // block.block_size, plane.bytes_per_block)
            found, dtype = np.shape(data), getattr(data, "dtype", type(data).__name__)
            if found != want or dtype != np.uint8:
                raise ValueError(
                    f"plane {plane.name} of {format} {shape} must be uint8 {want}, "
                    f"not {dtype} {found}"
                )
        self.format = format
        self.planes = tuple(planes)

    @classmethod
    def from_gguf_bytes(cls, raw: Any, format: str, shape: Sequence[int]) -> QuantizedArray:
        """Bytes as a GGUF file holds them (any buffer) -> an array of shape (..., n, k).

        Raises ValueError for an unknown format, a k that is no multiple of its block, or a byte
        count that is not the shape's.
        """
        block = formats.get(format)
        shape = _checked_shape(shape, block)
        data = np.frombuffer(raw, np.uint8) if not isinstance(raw, np.ndarray) else raw.reshape(-1)
        if data.dtype != np.uint8:
            raise TypeError(f"raw must hold uint8, not {data.dtype}")
        blocks = math.prod(shape) // block.block_size
        if data.size != blocks * block.block_bytes:
            raise ValueError(
                f"raw has {data.size} bytes; {format} of shape {shape} takes "
                f"{blocks} blocks of {block.block_bytes} = {blocks * block.block_bytes} bytes"
            )
        packed = data.reshape(*shape[:-1], shape[-1] // block.block_size, block.block_bytes)
        return cls(format, shape, tuple(jnp.array(plane) for plane in block.split(packed)))

    def to_gguf_bytes(self) -> bytes:
        """The bytes of a GGUF tensor: the exact inverse of `from_gguf_bytes`."""
        block = formats.get(self.format)
        return block.join([np.asarray(plane) for plane in self.planes]).tobytes()

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Weights as an array of this shape and a floating dtype.

        In float32 they are exactly ggml's values.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype={jnp.dtype(dtype).name} must be a floating type")
        return _dequantize(self, jnp.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (..., n, k)."""
        *leading, blocks, _ = self.planes[0].shape
        return (*leading, blocks * formats.get(self.format).block_size)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Packed bytes."""
        return sum(math.prod(plane.shape) for plane in self.planes)

    def __len__(self) -> int:
        if self.ndim < 2:
            raise TypeError(
                f"a packed row of shape {self.shape} has no length: its one axis is packed"
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantizedArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Index leading axes (all but k) by integers, slices or integer arrays, as NumPy does.

        Raises IndexError for too many and for what is out of range (of a traced array: the nearest
        row), TypeError for others.
        """
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) >= self.ndim:
            raise IndexError(
                f"{len(parts)} indices for shape {self.shape}: the last axis is packed"
            )
        checked = tuple(
            _checked_index(part, axis, self.shape[axis]) for axis, part in enumerate(parts)
        )
        return _make(self.format, tuple(plane[checked] for plane in self.planes))

    def __repr__(self) -> str:
        if not all(hasattr(plane, "shape") for plane in self.planes):
            return f"QuantizedArray({self.format}, planes={self.planes})"
        return f"QuantizedArray({self.format}, shape={self.shape}, nbytes={self.nbytes})"

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], str]:
        names = [plane.name for plane in formats.get(self.format).planes]
        keys = [jax.tree_util.GetAttrKey(name) for name in names]
        return tuple(zip(keys, self.planes, strict=True)), self.format

    def tree_flatten(self) -> tuple[tuple[Any, ...], str]:
        return self.planes, self.format

    @classmethod
    def tree_unflatten(cls, format: str, planes: Sequence[Any]) -> QuantizedArray:
        return _make(format, tuple(planes))


def _make(format: str, planes: tuple[Any, ...]) -> QuantizedArray:
    # Unchecked: JAX unflattens with leaves that are no arrays (specs, None, object()).
    array = object.__new__(QuantizedArray)
    array.format, array.planes = format, planes
    return array


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(w: QuantizedArray, dtype: Any) -> jax.Array:
    return formats.get(w.format).decode(w.planes, jnp).astype(dtype)


def _checked_shape(shape: Sequence[int], block: formats.BlockFormat) -> tuple[int, ...]:
    checked = tuple(operator.index(n) for n in shape)
    if not checked or any(n < 1 for n in checked):
        raise ValueError(f"shape={checked} must have at least one axis, and every axis at least 1")
    if checked[-1] % block.block_size:
        rule = f"a multiple of {block.block_size}, the block of {block.name}"
        raise ValueError(f"shape={checked}: k={checked[-1]} must be {rule}")
    return checked


def _checked_index(part: Any, axis: int, size: int) -> Any:
    if isinstance(part, slice):
        return part
    if part is None or part is Ellipsis or isinstance(part, (bool, np.bool_)):
        raise TypeError(
            f"index {part!r} of axis {axis} must be an integer, a slice or an integer array"
        )
    if isinstance(part, (int, np.integer)):
        if not -size <= part < size:  # jax.numpy would clamp
            raise IndexError(f"index {part} is out of range for axis {axis} of size {size}")
        return int(part)
    if not isinstance(part, jax.core.Tracer):
        values = np.asarray(part)
        if np.issubdtype(values.dtype, np.integer) and ((values < -size) | (values >= size)).any():
            raise IndexError(
                f"an index of axis {axis} is out of range for size {size}: "
                f"{values.min()} to {values.max()}"
            )
    return part

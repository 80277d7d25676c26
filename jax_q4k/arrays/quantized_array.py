"""Defines QuantizedArray: packed weights, held as a pytree of byte planes."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ptx_kernels import formats

from ..sharding.layout import Layout, explicit_mesh, explicit_plan, over_devices
from . import flax_registration, indexing
from .refusals import missing_attribute, refuse_arithmetic
from .transposed import TransposedArray


@refuse_arithmetic
@jax.tree_util.register_pytree_with_keys_class
class QuantizedArray:
    """A packed array of logical shape (..., n, k), quantized along k in ggml's blocks.

    `planes` holds one uint8 array (..., n, k / block_size, bytes) per plane of the format, in the
    order of `ptx_kernels.formats.get(format).planes`. The planes are the leaves of the pytree; the
    format is static. `shape` is computed from the planes, so it stays right when `vmap`, `scan` and
    `shard_map` slice the leaves.

    A plane is also an attribute under its name, such as `w.block` for Q4_K. `==` and `hash` compare
    identity.
    """

    __slots__ = ("format", "planes")
    __array_ufunc__ = None  # keeps NumPy's operators from iterating over the rows
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
        flax_registration.if_imported(QuantizedArray)

    @classmethod
    def from_gguf_bytes(cls, raw: Any, format: str, shape: Sequence[int]) -> QuantizedArray:
        """Builds an array of shape (..., n, k) from a GGUF tensor's bytes (any buffer).

        Raises ValueError for an unknown format, a k that is not a multiple of its block size, or
        a byte count that does not match the shape; TypeError for an array that is not uint8.
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
        return cls(
            format, shape, tuple(jax.device_put(plane.copy()) for plane in block.split(packed))
        )

    @classmethod
    def abstract(
        cls, format: str, shape: Sequence[int], sharding: jax.sharding.Sharding | None = None
    ) -> QuantizedArray:
        """Returns an array of this shape whose planes are `jax.ShapeDtypeStruct`s.

        It is the target of a restored checkpoint, or an argument of `jax.eval_shape` and
        `jit(...).lower`. `sharding` is that of all planes: its spec may split the axes of `shape`.

        Raises ValueError for an unknown format, or a k that is not a multiple of its block size.
        """
        block = formats.get(format)
        *leading, k = _checked_shape(shape, block)
        blocks = (*leading, k // block.block_size)
        planes = [
            jax.ShapeDtypeStruct((*blocks, plane.bytes_per_block), np.uint8, sharding=sharding)
            for plane in block.planes
        ]
        return _make(format, tuple(planes))

    @classmethod
    def zeros(cls, format: str, shape: Sequence[int]) -> QuantizedArray:
        """Returns an array of this shape whose weights are 0, on the default device.

        Raises ValueError for an unknown format, or a k that is not a multiple of its block size.
        """
        return jax.tree.map(  # type: ignore[no-any-return]
            lambda plane: jnp.zeros(plane.shape, plane.dtype), cls.abstract(format, shape)
        )

    def to_gguf_bytes(self) -> bytes:
        """Returns the bytes of a GGUF tensor: the exact inverse of `from_gguf_bytes`.

        Raises TypeError if a plane has a wrong dtype or shape.
        """
        block = formats.get(self.format)
        self._check_planes()
        return block.join([np.asarray(plane) for plane in self.planes]).tobytes()

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Returns the weights as an array of this shape and a floating dtype.

        In float32 they equal ggml's values exactly, including subnormals. Raises TypeError for a
        dtype that is not floating, and if a plane has a wrong dtype or shape.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype={jnp.dtype(dtype).name} must be a floating type")
        self._check_planes()
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
        return sum(math.prod(plane.shape) * plane.dtype.itemsize for plane in self.planes)

    @property
    def dtype(self) -> np.dtype:
        """Always float32: the weights' type in every format, and the default of `dequantize`."""
        return np.dtype(np.float32)

    @property
    def T(self) -> TransposedArray:
        """Transposed view (k, n) of weights (n, k), without a copy, for `x @ w.T`.

        `x @ w.T` is `jq.matmul(x, w)`.

        Raises ValueError unless there are two axes.
        """
        if self.ndim != 2:
            raise ValueError(f"w has shape {self.shape}; w.T needs two axes (n, k)")
        return TransposedArray(self)

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Sharding of the first plane. Its PartitionSpec also fits the other planes."""
        return self.planes[0].sharding

    def devices(self) -> set[jax.Device]:
        """Returns the devices that hold planes."""
        return set().union(*(plane.devices() for plane in self.planes))

    def block_until_ready(self) -> QuantizedArray:
        """Waits until all planes are computed and returns this array."""
        return jax.block_until_ready(self)

    def plane_problem(self) -> str | None:
        """Describes the first plane with a wrong dtype or shape; None if all are right."""
        for plane, data in zip(formats.get(self.format).planes, self.planes, strict=True):
            dtype = getattr(data, "dtype", None)
            if dtype != np.uint8:
                found = type(data).__name__ if dtype is None and data is not None else dtype
                return (
                    f'plane "{plane.name}" of {self.format} is {found}, not uint8: '
                    "was params mapped leaf by leaf? use is_leaf=jq.is_quantized"
                )
            want = (*self.planes[0].shape[:-1], plane.bytes_per_block)
            if data.shape != want:
                return (
                    f'plane "{plane.name}" of {self.format} has shape {data.shape}, not {want}: '
                    "split rows or whole blocks of all planes alike, never the bytes of a block"
                )
        return None

    def _check_planes(self) -> None:
        if (problem := self.plane_problem()) is not None:
            raise TypeError(problem)

    def __getattr__(self, name: str) -> Any:
        # Copy and pickle look slots up here before they are set.
        if name not in self.__slots__ and not name.startswith("__"):
            for plane, data in zip(formats.get(self.format).planes, self.planes, strict=True):
                if plane.name == name:
                    return data
        if hasattr(type(self), name):  # a property failed because the planes lack the attribute
            raise AttributeError(f"{self!r} has no {name}: its planes have none", name=name)
        if name == "aval":  # jnp.zeros_like would otherwise make an array of floats
            self.refuse()
        raise missing_attribute(self, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(f"{self!r} is packed, not an array of numbers: use w.dequantize()")

    def refuse(self) -> NoReturn:
        """Raises the TypeError of uses as an array of numbers."""
        raise TypeError(
            f"{self!r} is packed, not an array of numbers: use jq.matmul(x, w), which is x @ w.T, "
            "or w.dequantize(); jax.tree.map(lambda *planes: jnp.stack(planes), w, v) stacks"
        )

    __jax_array__ = refuse

    def __len__(self) -> int:
        if self.ndim < 2:
            raise TypeError(
                f"a packed row of shape {self.shape} has no length: its one axis is packed"
            )
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantizedArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> QuantizedArray:
        """Indexes the leading axes (all but k) as NumPy does.

        An index is an integer, a slice, an integer array, None for a new axis, or `...`. Raises
        IndexError for too many indices and for an index out of range, TypeError for other types. A
        traced index out of range is clamped.
        """
        checked = indexing.leading(index, self.shape)
        return _make(self.format, tuple(plane[checked] for plane in self.planes))

    def __repr__(self) -> str:
        if not all(hasattr(p, "shape") and hasattr(p, "dtype") for p in self.planes):
            return f"QuantizedArray({self.format}, planes={self.planes})"
        wrong = ", ".join(
            f"{plane.name} is {data.dtype}"
            for plane, data in zip(formats.get(self.format).planes, self.planes, strict=True)
            if data.dtype != np.uint8
        )
        about = f"not uint8: {wrong}" if wrong else f"nbytes={self.nbytes}"
        return f"QuantizedArray({self.format}, shape={self.shape}, {about})"

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], str]:
        names = [plane.name for plane in formats.get(self.format).planes]
        keys = [jax.tree_util.GetAttrKey(name) for name in names]
        return tuple(zip(keys, self.planes, strict=True)), self.format

    def tree_flatten(self) -> tuple[tuple[Any, ...], str]:
        return self.planes, self.format

    @classmethod
    def tree_unflatten(cls, format: str, planes: Sequence[Any]) -> QuantizedArray:
        return _make(format, tuple(planes))


jax.export.register_pytree_node_serialization(
    QuantizedArray,
    serialized_name="jax_q4k.QuantizedArray",
    serialize_auxdata=str.encode,
    deserialize_auxdata=lambda data: bytes(data).decode(),
)


def is_quantized(x: Any) -> bool:
    """Returns True if `x` is a QuantizedArray.

    `jax.tree.map(f, params, is_leaf=jq.is_quantized)` calls `f` with each packed array; without
    `is_leaf` it would call `f` with the byte planes.
    """
    return isinstance(x, QuantizedArray)


def _make(format: str, planes: tuple[Any, ...]) -> QuantizedArray:
    # Unchecked, because JAX unflattens with leaves that are not arrays (specs, None, object()).
    array = object.__new__(QuantizedArray)
    array.format, array.planes = format, planes
    flax_registration.if_imported(QuantizedArray)
    return array


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(w: QuantizedArray, dtype: Any) -> jax.Array:
    def decode(*planes: Any) -> list[jax.Array]:
        with jax.numpy_rank_promotion("allow"):
            return [formats.get(w.format).decode(planes, jnp).astype(dtype)]

    mesh = explicit_mesh("dequantize", w.planes)
    if mesh is None:
        return decode(*w.planes)[0]
    names = " ".join(f"axis{i}" for i in range(w.ndim))
    result = jax.ShapeDtypeStruct(w.shape, dtype)
    placed = explicit_plan("dequantize", mesh, Layout(names, names), w.planes, result)
    (weights,) = over_devices("dequantize", decode, mesh, placed)(*w.planes)
    return weights  # type: ignore[no-any-return]


def _checked_shape(shape: Sequence[int], block: formats.BlockFormat) -> tuple[int, ...]:
    checked = tuple(operator.index(n) for n in shape)
    if not checked or any(n < 1 for n in checked):
        raise ValueError(f"shape={checked} must have at least one axis, and every axis at least 1")
    if checked[-1] % block.block_size:
        rule = f"a multiple of {block.block_size}, the block of {block.name}"
        raise ValueError(f"shape={checked}: k={checked[-1]} must be {rule}")
    return checked

"""Defines TransposedArray: the transposed view of packed weights, for `x @ w.T`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from .refusals import NotAnArray, missing_attribute, refuse_arithmetic


@refuse_arithmetic
@jax.tree_util.register_pytree_with_keys_class
class TransposedArray:
    """`w.T` of packed weights `w` (n, k): the same planes with the logical shape (k, n).

    `x @ w.T` is `jq.matmul(x, w)`: (..., k) floats -> (..., n), differentiable in x.
    """

    __slots__ = ("T",)
    #: `jq.matmul`. Its module imports this one and sets this attribute.
    matmul: ClassVar[Callable[[Any, Any], jax.Array]]
    T: Any  # the QuantizedArray (n, k)

    def __init__(self, w: Any) -> None:
        self.T = w

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape (k, n)."""
        *leading, n, k = self.T.shape
        return (*leading, k, n)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Always float32, like `QuantizedArray.dtype`."""
        return np.dtype(self.T.dtype)

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """Returns the weights as an array (k, n) of a floating dtype."""
        weights: jax.Array = self.T.dequantize(dtype)
        return weights.swapaxes(-1, -2)

    def __rmatmul__(self, x: Any) -> jax.Array:
        return type(self).matmul(x, self.T)

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> jax.Array:
        """Multiplies a NumPy array, by `@` or `np.matmul`, and refuses all other functions."""
        if ufunc is not np.matmul or method != "__call__" or operands[0] is self or options:
            self.refuse()
        return self.__rmatmul__(operands[0])

    def __jax_array__(self) -> NotAnArray:
        return NotAnArray(self._problem())

    def refuse(self) -> NoReturn:
        """Raises the TypeError of uses as an array of numbers."""
        raise TypeError(self._problem())

    def _problem(self) -> str:
        return (
            f"{self!r} is packed, not an array of numbers: use x @ w.T or jq.matmul(x, w), or "
            "w.dequantize().T"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self.refuse()

    def __getattr__(self, name: str) -> Any:
        if name == "aval":  # jnp.zeros_like would otherwise make an array of floats
            self.refuse()
        raise missing_attribute(self, name)

    def __repr__(self) -> str:
        return f"{self.T!r}.T"

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], None]:
        return ((jax.tree_util.GetAttrKey("T"), self.T),), None

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return (self.T,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> TransposedArray:
        return cls(*children)


jax.export.register_pytree_node_serialization(
    TransposedArray,
    serialized_name="jax_q4k.TransposedArray",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)

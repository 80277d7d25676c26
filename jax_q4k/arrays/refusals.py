"""Errors of packed weights used as arrays of numbers, which say what to write instead."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import jax

from ..jax_internals import refuse_as_value

Class = TypeVar("Class", bound=type)

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
#: `__rmatmul__` of the transposed view is the product.
_OPERATORS = [f"__{side}{name}__" for name in _BINARY for side in ("", "r")] + [
    f"__{name}__" for name in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "bool")
]


class NotAnArray:
    """The result of `__jax_array__` of a type that arrays multiply by its own `__rmatmul__`.

    JAX's operators take it for an unknown operand, and then Python calls that method. JAX's
    functions refuse it: those that ask for its shape with the message, others with one that
    contains its repr.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    @property
    def shape(self) -> NoReturn:
        raise TypeError(self._message)

    def __repr__(self) -> str:
        return self._message


def refuse_arithmetic(cls: Class) -> Class:
    """Makes operators and JAX's functions of a class raise the TypeError of its `refuse` method.

    A class decorator. Operators that the class defines stay.
    """

    def refuse(self: Any, *_: Any) -> Any:
        self.refuse()

    for name in _OPERATORS:
        if name not in vars(cls):
            setattr(cls, name, refuse)
    refuse_as_value(cls, refuse)
    return cls


def missing_attribute(array: Any, name: str) -> AttributeError:
    """Returns the error of an attribute that packed weights lack, with a hint if arrays have it."""
    message = f"{type(array).__name__!r} object has no attribute {name!r}"
    if hasattr(jax.Array, name) and not name.startswith("_"):
        decoded = "w.dequantize(dtype)" if name == "astype" else "w.dequantize()"
        message = f"{message}: it is packed; {decoded} is an array of numbers"
    return AttributeError(message, name=name, obj=array)

"""Checks and converts the arguments of kernel functions by their annotated types."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
import reprlib
import struct
import types
import typing
from collections.abc import Callable
from typing import Any

from .errors import KernelError


def checked(function: Callable[..., None], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a kernel function, each converted to its annotated type.

    NumPy numbers become Python numbers. An int must be at least 1, or at least 0 if its default is
    0. A float must be finite in f32. The same holds for the fields of a Config. Arguments that the
    function does not have are passed on, so that Python refuses them.

    Raises:
      KernelError: an argument, or a field of a Config, of a wrong type or out of range.
    """
    hints = _hints(function)
    parameters = inspect.signature(function).parameters
    return {
        name: _typed(name, value, hints[name], parameters[name].default) if name in hints else value
        for name, value in arguments.items()
    }


_hints = functools.cache(typing.get_type_hints)


def _typed(name: str, value: Any, kind: Any, default: Any) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (some,) = (part for part in parts if part is not types.NoneType)
        return None if value is None else _typed(name, value, some, default)
    if origin is tuple:
        if not isinstance(value, tuple):
            raise KernelError(f"{name}={reprlib.repr(value)} must be a tuple")
        return tuple(_typed(f"{name}[{i}]", item, parts[0], None) for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, kind):
        return _fields(name, value)
    if kind is int:
        return _integer(name, value, 0 if default == 0 else 1)
    if kind is float:
        return _float(name, value)
    if isinstance(kind, type) and not isinstance(value, kind):
        raise KernelError(f"{name}={reprlib.repr(value)} must be of type {kind.__name__}")
    return value


def _fields(name: str, config: Any) -> Any:
    hints = _hints(config.__class__)
    fields = {
        field.name: _typed(
            f"{name}.{field.name}", getattr(config, field.name), hints[field.name], field.default
        )
        for field in dataclasses.fields(config)
    }
    return dataclasses.replace(config, **fields)


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise KernelError(f"{name}={reprlib.repr(value)} must be an integer, at least {least}")
    return number


def _float(name: str, value: Any) -> float:
    try:
        number = float(value)
        struct.pack("<f", number)  # OverflowError if f32 cannot hold it
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, (bool, str)):
        raise KernelError(f"{name}={reprlib.repr(value)} must be a number, finite in f32")
    return number

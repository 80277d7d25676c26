"""Checks and converts the arguments of kernel functions by their annotated types; groups them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import operator
import reprlib
import struct
import types
import typing
from collections.abc import Callable
from typing import Any

from .errors import KernelError


class Group:
    """Base of keyword-only dataclasses that group arguments of kernel functions.

    A call passes the fields of a group as keyword arguments: `heads: Heads` is `num_heads=32,
    num_kv_heads=8, head_dim=128`. `__post_init__` may check that they fit together.
    """


def call_signature(function: Callable[..., None]) -> inspect.Signature:
    """Returns the keyword arguments of calls of a kernel function, where groups are their fields.

    Annotations are types. Raises ValueError if two groups have a field of the same name.
    """
    parameters = [
        _parameters(each.annotation) if _is_group(each.annotation) else [each]
        for each in _parameters(function)
    ]
    return inspect.Signature([*itertools.chain(*parameters)])


def grouped(function: Callable[..., None], arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a kernel function for those of a call, with their groups built."""
    built = {}
    for parameter in _parameters(function):
        name, kind = parameter.name, parameter.annotation
        if _is_group(kind):
            built[name] = kind(**{each.name: arguments[each.name] for each in _parameters(kind)})
        else:
            built[name] = arguments[name]
    return built


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the keyword arguments of a kernel function or group, with types as annotations."""
    hints = _hints(function)
    return [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Group)


def checked(signature: inspect.Signature, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, with defaults, each converted to its annotated type.

    NumPy numbers become Python numbers. An int must be at least 1, or at least 0 if its default is
    0. A float must be finite in f32. The same holds for the fields of a Config.

    Raises:
      KernelError: an argument, or a field of a Config, of a wrong type or out of range.
      TypeError: a missing or unknown argument.
    """
    bound = signature.bind(**arguments)
    bound.apply_defaults()
    parameters = signature.parameters
    return {
        name: _typed(name, value, parameters[name].annotation, parameters[name].default)
        for name, value in bound.arguments.items()
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

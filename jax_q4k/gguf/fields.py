"""Typed, checked access to values of a file: GGUF metadata, or JSON objects in a subclass."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import numpy as np

from ..errors import CheckpointError, GGUFError

REQUIRED: Any = object()  # the default of a key that must be present

_NAMES = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}

D = TypeVar("D")


class Fields:
    """A mapping whose values are checked when they are read.

    Every method raises `error`, with the file and the key, if a value has another type, is out of
    range, or is missing without a default. None counts as missing; NumPy scalars count as Python
    scalars.
    """

    error: ClassVar[type[GGUFError] | type[CheckpointError]] = GGUFError
    names: ClassVar[dict[type, str]] = _NAMES

    def __init__(self, values: Mapping[str, Any], file: str, prefix: str = "") -> None:
        """Wraps `values`; `file` and `prefix` (of keys) appear in errors only."""
        self.values = values
        self.file = file
        self.prefix = prefix

    def under(self, prefix: str) -> Self:
        """Returns the Fields whose keys begin with `prefix`, with the prefix removed."""
        size = len(prefix)
        values = {key[size:]: value for key, value in self.values.items() if key.startswith(prefix)}
        return type(self)(values, self.file, self.prefix + prefix)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raises `error`, which names the file, the key and the problem."""
        raise self.error(self.file, self.prefix + key, problem)

    def value(self, key: str, default: D = REQUIRED) -> Any | D:
        """Returns the value of a key, of any type."""
        value = self.values.get(key)
        if value is None:
            return self.fail(key, "is missing") if default is REQUIRED else default
        return value.item() if isinstance(value, np.generic) else value

    def string(self, key: str, default: D = REQUIRED) -> str | D:
        """Returns a string."""
        return self._typed(key, str, default)

    def boolean(self, key: str, default: D = REQUIRED) -> bool | D:
        """Returns a boolean."""
        return self._typed(key, bool, default)

    def integer(
        self,
        key: str,
        default: D = REQUIRED,
        *,
        least: int | None = None,
        most: int | None = None,
        repeated: bool = False,
    ) -> int | D:
        """Returns an integer from `least` to `most`, if they are set; checks the default, too.

        repeated: accepts an array of equal elements as one integer.
        """
        if least is most is None and not repeated:
            return self._typed(key, int, default)
        value = self._present(key, int, default)
        if value is None:
            return default
        if repeated and isinstance(value, np.ndarray) and value.size:
            value = value[0].item() if (value == value[0]).all() else value
        low, high = -math.inf if least is None else least, math.inf if most is None else most
        if not _is_a(value, int) or not low <= value <= high:
            from_least = "" if least is None else f" from {least}"
            to_most = "" if most is None else f" to {most}"
            self.fail(key, f"must be an integer{from_least}{to_most}, not {value!r}")
        return value

    def number(
        self,
        key: str,
        default: D = REQUIRED,
        *,
        above: float | None = None,
        most: float | None = None,
    ) -> float | D:
        """Returns a finite float above `above` and up to `most`, if set; accepts integers."""
        if above is most is None:
            value = self._typed(key, float, default)
            if value is default:
                return default
            if not abs(value) <= sys.float_info.max:  # an integer may exceed float64
                self.fail(key, "must be a finite number")
            return float(value)
        value = self._present(key, float, default)
        if value is None:
            return default
        low, high = -math.inf if above is None else above, math.inf if most is None else most
        finite = _is_a(value, float) and abs(value) <= sys.float_info.max
        if not finite or not low < value <= high:
            bounds = [] if above is None else [f"above {above}"]
            bounds += [] if most is None else [f"up to {most:g}"]
            self.fail(key, f"must be a number {' and '.join(bounds)}, not {value!r}")
        return float(value)

    def strings(self, key: str) -> list[str]:
        """Returns an array of strings."""
        values = self.value(key)
        if not isinstance(values, list | tuple) or not all(isinstance(v, str) for v in values):
            self.fail(key, "is not an array of strings")
        return list(values)

    def numbers(self, key: str, dtype: type[np.generic], default: D = REQUIRED) -> np.ndarray | D:
        """Returns an array (n,) of `dtype`, from integers, or any numbers for a float dtype."""
        values = self.value(key, default)
        if values is default:
            return default
        array = np.asarray(values)
        floats = np.issubdtype(dtype, np.floating)
        if array.ndim != 1 or (array.dtype.kind not in ("fiu" if floats else "iu") and array.size):
            self.fail(key, f"is not an array of {'numbers' if floats else 'integers'}")
        return array.astype(dtype)

    def _present(self, key: str, kind: type, default: Any) -> Any:
        if default is REQUIRED and self.values.get(key) is None:
            self.fail(key, f"is missing, expected {self.names[kind]}")
        return self.value(key, default)

    def _typed(self, key: str, kind: type, default: Any) -> Any:
        value = self._present(key, kind, default)
        if value is not default and not _is_a(value, kind):
            self.fail(key, self._wrong_type(value, kind))
        return value

    def _wrong_type(self, value: Any, kind: type) -> str:
        return f"is of type {type(value).__name__}, expected {kind.__name__}"


def _is_a(value: Any, kind: type) -> bool:
    """Returns whether `value` is a `kind`. No boolean is a number; every integer is a float."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)

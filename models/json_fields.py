"""JSON files that nobody vouches for: read with a bound, every field checked for its type."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

from jax_q4k import CheckpointError

_REQUIRED = object()
_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
}


def read(path: str | os.PathLike[str], max_bytes: int) -> Any:
    """The value that a file holds: strict JSON in UTF-8, no key twice.

    Raises:
      CheckpointError: no regular file, larger than `max_bytes`, not JSON. OSError: it cannot be
        read.
    """
    file = os.fsdecode(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(file, "path", "must be a regular file")
    with open(path, "rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(file, "size", f"must be at most {max_bytes} bytes")
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(file, "JSON", "is nested too deeply") from None
    except (
        ValueError
    ) as error:  # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise CheckpointError(file, "JSON", f"is malformed: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:100]!r} stands twice in one object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Fields:
    """Checked access to a JSON object; what is missing or of another type raises CheckpointError.

    file: what errors call the source. path: the field that the object stands in, "" at the top.
    """

    def __init__(self, values: Any, file: str, path: str = "") -> None:
        self.file = file
        self.path = path
        if not isinstance(values, dict):
            raise CheckpointError(file, path or "JSON", f"must be an object, not {_kind(values)}")
        self.values: dict[str, Any] = values

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(self.file, self._name(key), problem)

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of a key; null counts as missing. `float` takes integers too, and gives a
        finite float.
        """
        value: Any = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                self.fail(key, f"is missing, expected {_NAMES[kind]}")
            return default
        matches = isinstance(value, (int, float) if kind is float else kind)
        if not matches or (isinstance(value, bool) and kind is not bool):
            self.fail(key, f"must be {_NAMES[kind]}, not {_kind(value)}")
        if kind is float:
            if not -sys.float_info.max <= value <= sys.float_info.max:
                self.fail(key, "must be a finite number")
            return float(value)
        return value

    def fields(self, key: str) -> Fields | None:
        """The object under a key, None where there is none."""
        value = self.values.get(key)
        return None if value is None else Fields(value, self.file, self._name(key))

    def objects(self, key: str) -> list[Fields]:
        """The objects of the array under a key; missing: none."""
        values = enumerate(self.get(key, list, []))
        return [Fields(value, self.file, f"{self._name(key)}[{i}]") for i, value in values]

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _kind(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)

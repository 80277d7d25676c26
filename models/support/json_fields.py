"""Reads untrusted JSON files: limits their size, and checks the type of every field."""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn, TypeVar

from jax_q4k import CheckpointError
from jax_q4k.gguf import REQUIRED, Fields

D = TypeVar("D")


def read(path: str | os.PathLike[str], max_bytes: int) -> Any:
    """Reads a file of strict JSON in UTF-8; an object may not repeat a key.

    Raises:
      CheckpointError: as in `read_bytes`, or the file is not JSON.
      OSError: the file cannot be read.
    """
    file, data = os.fsdecode(path), read_bytes(path, max_bytes)
    try:
        return json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError(file, "JSON", "is nested too deeply") from None
    except ValueError as error:  # malformed JSON or UTF-8, an integer of thousands of digits
        raise CheckpointError(file, "JSON", f"is malformed: {error}") from None


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Returns the bytes of a regular file of limited size.

    Raises:
      CheckpointError: not a regular file (a pipe could block forever), or larger than `max_bytes`.
      OSError: the file cannot be read.
    """
    file = os.fsdecode(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(file, "path", "must be a regular file")
    with open(path, "rb") as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(file, "size", f"must be at most {max_bytes} bytes")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:100]!r} appears twice in one object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class JSONFields(Fields):
    """A JSON object; null counts as missing, and errors use the names of JSON types."""

    error = CheckpointError
    names = Fields.names | {dict: "an object", list: "an array"}

    def __init__(self, values: Any, file: str, prefix: str = "") -> None:
        if not isinstance(values, dict):
            problem = f"must be an object, not {self._kind(values)}"
            raise CheckpointError(file, prefix.removesuffix(".") or "JSON", problem)
        super().__init__(values, file, prefix)

    @classmethod
    def read(cls, path: str | os.PathLike[str], max_bytes: int) -> JSONFields:
        """Reads a JSON file that holds an object; raises like the function `read`."""
        return cls(read(path, max_bytes), os.fsdecode(path))

    def mapping(self, key: str) -> dict[str, Any]:
        """Returns the object at a key, as a dict of unchecked values."""
        return self._typed(key, dict, REQUIRED)

    def array(self, key: str, default: D = REQUIRED) -> list[Any] | D:
        """Returns the array at a key; its elements are unchecked."""
        return self._typed(key, list, default)

    def object(self, key: str) -> JSONFields | None:
        """Returns the object at a key; None if it is missing."""
        value = self.values.get(key)
        return None if value is None else JSONFields(value, self.file, f"{self.prefix}{key}.")

    def objects(self, key: str) -> list[JSONFields]:
        """Returns the objects of the array at a key; an empty list if it is missing."""
        return [
            JSONFields(value, self.file, f"{self.prefix}{key}[{i}].")
            for i, value in enumerate(self.array(key, []))
        ]

    def _wrong_type(self, value: Any, kind: type) -> str:
        return f"must be {self.names[kind]}, not {self._kind(value)}"

    def _kind(self, value: Any) -> str:
        return "null" if value is None else self.names.get(type(value), type(value).__name__)

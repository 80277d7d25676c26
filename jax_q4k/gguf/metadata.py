"""Reads metadata values, and checks a tokenizer's lists for consistency.

Scalars become Python's int, float, bool and str; arrays of strings become lists of str; arrays of
numbers and booleans become one-dimensional NumPy arrays of the file's type.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType, TokenType

from .fields import Fields
from .source import REPLACED, Cursor, Source

MAX_KEY = (1 << 16) - 1  # bytes, from the GGUF specification
MIN_ENTRY = 8 + 1 + 4 + 1  # bytes of the shortest entry: key length, key, type, value

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_NUMBERS = {  # format codes that struct and NumPy share
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<B",  # checked to be 0 or 1
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_STRUCTS = {kind: struct.Struct(code) for kind, code in _NUMBERS.items()}
DTYPES = {kind: np.dtype(code) for kind, code in _NUMBERS.items()}


class Metadata(dict[str, Any]):
    """GGUF metadata: a dict, with the value types of a file's scalars in `types`.

    Python's int and float do not distinguish UINT16 from UINT32, or FLOAT32 from FLOAT64. With
    `types`, a file that is loaded and saved keeps its types. Arrays of numbers have theirs in
    NumPy's dtype.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.types: dict[str, GGUFValueType] = dict(getattr(values, "types", {}))


def read_key(cursor: Cursor, field: str) -> str:
    """Reads a metadata key of 1 to 65535 bytes."""
    key = cursor.string(f"{field}: key", MAX_KEY)
    if not key:
        cursor.fail(f"{field}: key", "must not be empty")
    return key


def read_value(cursor: Cursor, field: str) -> tuple[GGUFValueType, Any]:
    """Reads the value that follows a key; returns its type and the value."""
    kind = _value_type(cursor, f"{field}: value type")
    if kind is GGUFValueType.STRING:
        return kind, cursor.string(field, errors=REPLACED)
    if kind is GGUFValueType.ARRAY:
        return kind, _array(cursor, field)
    value = cursor.unpack(_STRUCTS[kind], field)
    if kind is GGUFValueType.BOOL:
        if value > 1:
            cursor.fail(field, f"a boolean must be 0 or 1, not {value}")
        value = bool(value)
    return kind, value


def _value_type(cursor: Cursor, field: str) -> GGUFValueType:
    number = cursor.unpack(_U32, field)
    try:
        return GGUFValueType(number)
    except ValueError:
        cursor.fail(field, f"must be {min(GGUFValueType)} to {max(GGUFValueType)}, not {number}")


def _array(cursor: Cursor, field: str) -> Any:
    kind = _value_type(cursor, f"{field}: element type")
    if kind is GGUFValueType.ARRAY:
        cursor.fail(f"{field}: element type", "arrays in arrays are not supported")
    count = cursor.unpack(_U64, f"{field}: length")
    # A string takes at least the 8 bytes of its length.
    size = 8 if kind is GGUFValueType.STRING else DTYPES[kind].itemsize
    if count > cursor.remaining // size:
        left = f"more than the {cursor.remaining} bytes left"
        cursor.fail(f"{field}: length", f"{count} elements of at least {size} bytes are {left}")
    if kind is GGUFValueType.STRING:
        return cursor.strings(count, field)
    values = cursor.array(DTYPES[kind], count, field)
    if kind is GGUFValueType.BOOL:
        if count and values.max() > 1:
            cursor.fail(field, f"a boolean must be 0 or 1, not {values.max()}")
        values = values.view(np.bool_)
    values.flags.writeable = False
    return values


def check_tokenizer(source: Source, metadata: dict[str, Any]) -> None:
    """Raises GGUFError for tokenizer lists and ids of wrong types, and lists of wrong lengths.

    The tokenizer checks the values of ids: real files name tokens that do not exist.
    """
    prefix = "tokenizer.ggml."
    tokens = metadata.get(prefix + "tokens")
    for name in ("tokens", "merges"):
        values = metadata.get(prefix + name)
        if values is not None and not isinstance(values, list):
            source.fail(prefix + name, "must be an array of strings")
    for name, kinds in (("scores", "f"), ("token_type", "iu")):
        values = metadata.get(prefix + name)
        if values is None:
            continue
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
            what = "floats" if kinds == "f" else "integers"
            source.fail(prefix + name, f"must be an array of {what}")
        if len(values) != len(tokens or ()):
            problem = f"has {len(values)} entries, but there are {len(tokens or ())} tokens"
            source.fail(prefix + name, problem)
    if tokens is None:
        return
    fields = Fields(metadata, source.name)
    for name in ("bos_token_id", "eos_token_id"):
        fields.integer(prefix + name, None)
    types = metadata.get(prefix + "token_type")
    if types is not None:
        for i in np.flatnonzero(types == TokenType.BYTE).tolist():
            if not re.fullmatch("<0x[0-9A-Fa-f]{2}>", tokens[i]):
                problem = f"a byte token must read <0x00> to <0xFF>, not {tokens[i]!r}"
                source.fail(f"{prefix}tokens[{i}]", problem)

"""Chooses the GGUF value types in which metadata is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from .metadata import DTYPES, MAX_KEY

# A Python value gets the first type that can hold it. llama.cpp reads integers as UINT32, but token
# types as INT32.
_SCALARS = ("BOOL", "STRING", "UINT32", "INT32", "UINT64", "INT64", "FLOAT32", "FLOAT64")
_ELEMENTS = ("STRING", "BOOL", "INT32", "UINT32", "INT64", "UINT64", "FLOAT32", "FLOAT64")
_EXACT = 1 << 53  # integers up to this magnitude are exact as floats


def typed(metadata: Mapping[str, Any], key: str) -> tuple[GGUFValueType, GGUFValueType | None, Any]:
    """Returns the GGUF value type to write a key with, and the value as Python objects.

    The second result is the element type of an array, None for a scalar.

    A scalar keeps its type in the file that it came from (`Metadata.types`) if the value still
    fits; NumPy scalars and arrays keep theirs. Otherwise an integer gets the first of UINT32,
    INT32, UINT64 and INT64 that holds it (in a list, INT32 before UINT32), and a float FLOAT32.

    Raises:
      TypeError, ValueError: GGUF cannot hold the value; the message names the key.
    """
    if not _is_text(key) or not 0 < len(key.encode()) <= MAX_KEY:
        raise ValueError(f"metadata key {key!r} must be text of 1 to {MAX_KEY} bytes")
    value = metadata[key]
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise ValueError(
                f"metadata {key!r} has shape {value.shape}; GGUF's arrays have one axis"
            )
        return GGUFValueType.ARRAY, _of_dtype(key, value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        elements = [
            element.item() if isinstance(element, np.generic) else element for element in value
        ]
        for name in _ELEMENTS:
            if all(_fits(element, GGUFValueType[name]) for element in elements):
                return GGUFValueType.ARRAY, GGUFValueType[name], elements
        raise TypeError(
            f"metadata {key!r} must hold only texts, only booleans or only numbers of 64 bits"
        )
    plain = value.item() if isinstance(value, np.generic) else value
    recorded = getattr(metadata, "types", {}).get(key)
    if recorded is not None and _fits(plain, recorded):
        return recorded, None, plain
    if isinstance(value, np.number):
        return _of_dtype(key, value.dtype), None, plain
    for name in _SCALARS:
        if _fits(plain, GGUFValueType[name]):
            return GGUFValueType[name], None, plain
    expected = "a boolean, text, a number of 64 bits or a list of these"
    raise TypeError(f"metadata {key!r} is {value!r}, expected {expected}")


def _fits(value: Any, kind: GGUFValueType) -> bool:
    if kind is GGUFValueType.BOOL or isinstance(value, bool):
        return kind is GGUFValueType.BOOL and isinstance(value, bool)
    if kind is GGUFValueType.STRING:
        return _is_text(value)
    dtype = DTYPES.get(kind)
    if dtype is None or not isinstance(value, (int, float)):
        return False
    if dtype.kind == "f":
        if isinstance(value, int):
            return abs(value) <= _EXACT
        return not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max)
    limits = np.iinfo(dtype)
    return isinstance(value, int) and int(limits.min) <= value <= int(limits.max)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _of_dtype(key: str, dtype: np.dtype) -> GGUFValueType:
    if dtype == np.bool_:
        return GGUFValueType.BOOL
    for kind, known in DTYPES.items():
        if kind is not GGUFValueType.BOOL and known == dtype:
            return kind
    raise TypeError(f"metadata {key!r} has dtype {dtype}, which GGUF does not hold")

"""Compares two GGUF files: their metadata, and their tensors' types, shapes and values."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_q4k import QuantizedArray, formats, gguf

_WEIGHTS = 1 << 21  # weights decoded at a time


@dataclasses.dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs between two files.

    Attributes:
      types, shapes: in both files; None in a file that lacks the tensor.
      nmse: sum of squared differences of the values, divided by that of the first file's values.
      largest: largest difference of two values. Both are None if the shapes differ, or if a type
        cannot be decoded.
    """

    name: str
    types: tuple[str | None, str | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    nmse: float | None = None
    largest: float | None = None


@dataclasses.dataclass(frozen=True)
class Differences:
    """Differences of two GGUF files.

    Attributes:
      metadata: key -> its value in both files; None in a file that lacks the key.
      tensors: tensors that differ.
      compared: number of tensors in either file.
    """

    metadata: dict[str, tuple[Any, Any]]
    tensors: list[TensorDifference]
    compared: int

    def __bool__(self) -> bool:
        """Whether the files differ."""
        return bool(self.metadata or self.tensors)


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Differences:
    """Compares two GGUF files, or split models by their first parts.

    Tensors are compared by name, whatever their order. Values are compared decoded, so a tensor in
    another type differs.

    progress: called with (tensors done, number of tensors).

    Raises:
      jax_q4k.GGUFError: a file is malformed. OSError: it cannot be read.
    """
    headers = gguf.read_header(first), gguf.read_header(second)
    keys = dict.fromkeys((*headers[0].metadata, *headers[1].metadata))
    metadata = {
        key: (headers[0].metadata.get(key), headers[1].metadata.get(key))
        for key in keys
        if not _same(headers, key)
    }
    names = dict.fromkeys((*headers[0].tensors, *headers[1].tensors))
    found = []
    with _opened(first) as one, _opened(second) as other:
        for done, name in enumerate(names, 1):
            infos = [header.tensors.get(name) for header in headers]
            difference = _difference(name, infos, one, other)
            if difference is not None:
                found.append(difference)
            if progress is not None:
                progress(done, len(names))
    return Differences(metadata, found, len(names))


def _opened(path: str | os.PathLike[str]) -> gguf.TensorFile:
    """Opens a file for reading the tensors that can be decoded."""

    def decodable(header: gguf.Header) -> dict[str, gguf.TensorInfo]:
        return {name: info for name, info in header.tensors.items() if info.supported}

    return gguf.TensorFile(path, select=decodable, check_scales=False)


def _same(headers: tuple[gguf.Header, ...], key: str) -> bool:
    """Returns whether both files have the key, with the same type and value."""
    if not all(key in header.metadata for header in headers):
        return False
    one, other = (header.metadata[key] for header in headers)
    types = [header.metadata.types.get(key) for header in headers]
    if types[0] != types[1] or isinstance(one, np.ndarray) != isinstance(other, np.ndarray):
        return False
    if not isinstance(one, np.ndarray):
        return bool(one == other or (one != one and other != other))  # NaN equals NaN
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _difference(
    name: str, infos: list[gguf.TensorInfo | None], one: gguf.TensorFile, other: gguf.TensorFile
) -> TensorDifference | None:
    """Compares a tensor; None if it is the same in both files."""
    types = tuple(None if info is None else info.type.name for info in infos)
    shapes = tuple(None if info is None else info.shape for info in infos)
    differs = TensorDifference(name, (types[0], types[1]), (shapes[0], shapes[1]))
    readable = name in one.header.tensors and name in other.header.tensors
    if shapes[0] != shapes[1] or not readable:
        return differs
    squares = difference = largest = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in zip(_values(one.read(name)), _values(other.read(name)), strict=True):
            delta = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b)
            squares += float(np.square(a).sum())
            difference += float(np.square(delta).sum())
            largest = max(largest, float(np.abs(delta).max()), key=_nan_last)
    if types[0] == types[1] and difference == 0:
        return None
    nmse = difference / squares if squares else (0.0 if difference == 0 else math.inf)
    return dataclasses.replace(differs, nmse=nmse, largest=largest)


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _values(tensor: QuantizedArray | np.ndarray) -> Iterator[np.ndarray]:
    """Yields a tensor's values, float64, some rows at a time."""
    if tensor.ndim < 2:
        yield np.asarray(_decoded(tensor), np.float64).reshape(-1)
        return
    step = max(1, _WEIGHTS // math.prod(tensor.shape[1:]))
    for at in range(0, tensor.shape[0], step):
        yield np.asarray(_decoded(tensor[at : at + step]), np.float64).reshape(-1)


def _decoded(tensor: QuantizedArray | np.ndarray) -> np.ndarray:
    if isinstance(tensor, QuantizedArray):
        decoded: np.ndarray = formats.get(tensor.format).decode(tensor.planes)
        return decoded
    return tensor

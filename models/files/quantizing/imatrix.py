"""Reads llama.cpp's importance matrices, which weight the squared errors of columns."""

from __future__ import annotations

import os
import struct
from typing import Any, NoReturn

import numpy as np

from jax_q4k import GGUFError, QuantizedArray, gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_GGUF = b"GGUF"  # first bytes of GGUF files
_I32 = struct.Struct("<i")
_MAX_NAME = 1 << 16  # bytes of a name in a .dat file


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns GGUF tensor name -> mean squared activation per column, float32 (k,) or (experts, k).

    The layout is that of llama.cpp's `llama-imatrix`. Per tensor it has NAME.in_sum2 (k,), the sums
    of squares over rows of activations, and NAME.counts (1,), the number of rows. For experts they
    are (experts, k) and (experts, 1). If each head has a matrix and rows are counted together, sums
    and weights of all heads are one row, (heads * k,). Columns without rows, as for an expert that
    no token used, get weight 1.

    Also reads the older .dat files, in which the weights of all experts are one row.

    Raises jax_q4k.GGUFError if the file is not an importance matrix. OSError: it cannot be read.
    """
    file = os.fsdecode(path)
    if os.path.isfile(path):
        with open(path, "rb") as stream:
            if stream.read(4) != _GGUF:
                stream.seek(0)
                return _Older(file, stream.read()).entries()
    read = gguf.read(path)
    found = read.metadata.get("general.type")
    if found != "imatrix":
        raise GGUFError(file, "general.type", f"must be 'imatrix', not {found!r}")
    sums, counts = (
        {
            name.removesuffix(end): _numbers(file, name, tensor)
            for name, tensor in read.tensors.items()
            if name.endswith(end)
        }
        for end in (_SUMS, _COUNTS)
    )
    return {name: _means(file, name, total, counts.get(name)) for name, total in sums.items()}


class _Older:
    """Reader of a .dat file, as llama.cpp's common/imatrix-loader.cpp.

    The number of entries; per entry the length of its name and the name, a count, the number of
    values, and values, which are means times the count. All integers are int32. The number of
    chunks and the name of the text may follow.
    """

    def __init__(self, file: str, data: bytes) -> None:
        self._file, self._data, self._at = file, data, 0

    def entries(self) -> dict[str, np.ndarray]:
        """Returns tensor name -> means, float32 (k,), or (experts * k,)."""
        found: dict[str, np.ndarray] = {}
        count = self._integer("entries")
        if count < 1:
            self._fail("entries", f"is {count}, expected a positive number")
        for entry in range(count):
            length = self._integer(f"entry {entry}")
            if not 0 < length <= _MAX_NAME:
                self._fail(f"entry {entry}", f"has a name of {length} bytes")
            name = self._take(f"entry {entry}", length).decode(errors="replace")
            rows, size = self._integer(name), self._integer(name)
            if size < 1:
                self._fail(f"tensor {name!r}", f"has {size} values")
            values = np.frombuffer(self._take(name, 4 * size), "<f4")
            if not (np.isfinite(values) & (values >= 0)).all():
                self._fail(f"tensor {name!r}", "must hold non-negative float32 numbers")
            if name in found:
                self._fail(f"tensor {name!r}", "appears twice")
            found[name] = values / np.float32(rows) if rows > 0 else values
        return found

    def _integer(self, field: str) -> int:
        return _I32.unpack(self._take(field, _I32.size))[0]

    def _take(self, field: str, size: int) -> bytes:
        start = self._at
        self._at += size
        if self._at > len(self._data):
            self._fail(field, "is cut off")
        return self._data[start : self._at]

    def _fail(self, field: str, problem: str) -> NoReturn:
        what = "neither a GGUF file nor an importance matrix in the .dat format"
        raise GGUFError(self._file, field, f"{problem}: the file is {what}, or is damaged")


def _means(file: str, name: str, sums: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """Divides sums (k,) or (experts, k) by one count, or by one count per expert."""
    if sums.ndim not in (1, 2):
        problem = f"has shape {sums.shape}, expected (k,) or (experts, k)"
        raise GGUFError(file, f"tensor {name + _SUMS!r}", problem)
    experts = 1 if sums.ndim == 1 else len(sums)
    if counts is None or counts.size not in (1, experts):
        found = "is missing" if counts is None else f"has shape {counts.shape}"
        problem = f"{found}, but sums have shape {sums.shape}"
        raise GGUFError(file, f"tensor {name + _COUNTS!r}", problem)
    rows = counts.reshape(-1, 1).astype(np.float64)
    means = np.where(rows > 0, sums.reshape(len(rows), -1) / np.where(rows > 0, rows, 1), 1)
    if means.max() > np.finfo(np.float32).max:
        problem = "is so small that means are infinite in float32"
        raise GGUFError(file, f"tensor {name + _COUNTS!r}", problem)
    return means.astype(np.float32).reshape(sums.shape)


def _numbers(file: str, name: str, tensor: Any) -> np.ndarray:
    packed = isinstance(tensor, QuantizedArray)
    if packed or tensor.dtype != np.float32 or (values := np.asarray(tensor)).min() < 0:
        raise GGUFError(file, f"tensor {name!r}", "must hold non-negative float32 numbers")
    return values

"""Reads and writes llama.cpp's importance matrices, which weight the squared errors of columns.

Files are GGUF, or of the older .dat format, which has no counts per expert and no chunk size.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

import numpy as np

from jax_q4k import GGUFError, QuantizedArray, gguf
from jax_q4k.cache.atomic_files import replacing

from ...runner.imatrix import ImportanceMatrix
from ...support.warn import warn

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNKS, _SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_MAGIC = b"GGUF"
_I32 = struct.Struct("<i")
#: Limit on the bytes of a .dat file.
_MAX_DAT = 1 << 32
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns GGUF tensor name -> mean squared activation per column, float32 (k,) or (experts, k).

    Reads files of llama.cpp's `llama-imatrix` and of `save_imatrix`. If each head has a matrix, the
    weights of all heads are one row, (heads * k,). Columns without rows, as for an expert that no
    token used, get weight 1.

    Raises jax_q4k.GGUFError if the file is not an importance matrix. OSError: it cannot be read.
    """
    return load_imatrix(path).means()


def load_imatrix(path: str | os.PathLike[str], *, chunk_size: int = 512) -> ImportanceMatrix:
    """Reads an importance matrix with its sums and counts, to add those of further texts.

    A GGUF file has NAME.in_sum2 (k,), the sums of squares over rows of activations, and NAME.counts
    (1,), the number of rows. For experts they are (experts, k) and (experts, 1). A .dat file has
    means and numbers of chunks instead, from which sums are computed.

    Args:
      chunk_size: tokens of a chunk, for a .dat file.

    Raises:
      jax_q4k.GGUFError: the file is not an importance matrix. OSError: it cannot be read.
    """
    file = os.fsdecode(path)
    if os.path.isfile(path):
        with open(path, "rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                opened.seek(0)
                return _read_dat(file, opened, chunk_size)
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
    counted = {name: _counts(file, name, total, counts.get(name)) for name, total in sums.items()}
    fields = gguf.Fields(read.metadata, file)
    datasets = fields.strings(_DATASETS) if _DATASETS in read.metadata else []
    chunks, size = (fields.integer(key, 0, least=0) for key in (_CHUNKS, _SIZE))
    return ImportanceMatrix(sums, counted, tuple(datasets), chunks, size)


def save_imatrix(
    matrix: ImportanceMatrix,
    path: str | os.PathLike[str],
    format: Literal["gguf", "dat"] = "gguf",
) -> None:
    """Writes an importance matrix for `read_imatrix` and llama.cpp; a failure leaves no file.

    Args:
      format: "gguf", or "dat", llama.cpp's older format, which leaves out tensors without rows of
        activations and gives experts without rows the weight 1.

    Raises:
      ValueError: an unknown format; sums beyond float32, with the tensor's name. OSError: the file
        cannot be written.
    """
    if format not in ("gguf", "dat"):
        raise ValueError(f"format={format!r} must be 'gguf' or 'dat'")
    names = sorted(matrix.sums)
    for name in names:
        if not matrix.sums[name].max(initial=0.0) <= _MAX_FLOAT32:
            raise ValueError(f"the squared activations of {name!r} exceed float32")
    if unused := [name for name in names if not matrix.counts[name].all()]:
        shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        warn(f"no token used some experts of {len(unused)} tensors: {shown}")
    if format == "dat":
        with replacing(path, ".dat") as partial, open(partial, "wb") as file:
            file.writelines(_dat(matrix, names))
        return
    tensors: dict[str, Any] = {}
    for name in names:
        sums, counts = matrix.sums[name], matrix.counts[name]
        tensors[name + _SUMS] = sums.astype(np.float32)
        of_experts = sums.ndim > 1
        tensors[name + _COUNTS] = counts.astype(np.float32).reshape(-1, *[1] * of_experts)
    metadata = {
        "general.type": "imatrix",
        _DATASETS: list(matrix.datasets),
        _CHUNKS: np.uint32(matrix.chunks),
        _SIZE: np.uint32(matrix.chunk_size),
    }
    gguf.write(path, metadata, tensors)


def _dat(matrix: ImportanceMatrix, names: list[str]) -> Iterator[bytes]:
    """Yields the bytes of a .dat file."""
    held = [name for name in names if matrix.counts[name].any()]
    yield _I32.pack(len(held))
    means = matrix.means()
    for name in held:
        calls = max(1, -(-int(matrix.counts[name].max()) // max(1, matrix.chunk_size)))
        values = (means[name].reshape(-1) * np.float32(calls)).astype("<f4")
        text = name.encode()
        yield _I32.pack(len(text)) + text + _I32.pack(calls) + _I32.pack(values.size)
        yield values.tobytes()
    dataset = (matrix.datasets[-1] if matrix.datasets else "").encode()
    yield _I32.pack(matrix.chunks) + _I32.pack(len(dataset)) + dataset


def _read_dat(file: str, opened: BinaryIO, chunk_size: int) -> ImportanceMatrix:
    """Reads a .dat file; its values are means times the number of chunks, `calls`."""

    def fail(field: str, problem: str) -> Any:
        raise GGUFError(file, field, f"{problem}: this is no importance matrix")

    left = os.fstat(opened.fileno()).st_size

    def take(size: int, field: str) -> bytes:
        nonlocal left
        if not 0 <= size <= left:
            fail(field, f"takes {size} bytes of the {left} that are left")
        left -= size
        data = opened.read(size)
        return data if len(data) == size else bytes(fail(field, "shrank while it was read"))

    def integer(field: str, least: int) -> int:
        (value,) = _I32.unpack(take(_I32.size, field))
        if value < least:
            fail(field, f"is {value}, less than {least}")
        return int(value)

    def text(field: str) -> str:
        try:
            return take(integer(f"length of {field}", 0), field).decode()
        except UnicodeDecodeError:
            return str(fail(field, "is not UTF-8"))

    if left > _MAX_DAT:
        fail("file", f"has more than {_MAX_DAT} bytes")
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for index in range(integer("number of entries", 1)):
        name = text(f"name of entry {index}")
        calls = integer(f"entry {name!r:.100}: chunks", 0) or 1  # without a number: means
        size = integer(f"entry {name!r:.100}: size", 1)
        values = np.frombuffer(take(4 * size, f"entry {name!r:.100}"), "<f4").astype(np.float64)
        if not (values >= 0).all() or not (values <= _MAX_FLOAT32).all():
            fail(f"entry {name!r:.100}", "must hold finite non-negative numbers")
        if name in sums:
            fail(f"entry {name!r:.100}", "is there twice")
        sums[name] = values * chunk_size
        counts[name] = np.array([calls * chunk_size], np.float64)
    chunks = max(int(count[0]) for count in counts.values()) // chunk_size
    datasets: tuple[str, ...] = ()
    if left:  # the oldest files end here
        chunks = integer("number of chunks", 0)
        datasets = (text("dataset"),) if left else ()
    return ImportanceMatrix(sums, counts, datasets, chunks, chunk_size)


def _counts(file: str, name: str, sums: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    """Checks the counts of sums (k,) or (experts, k): one, or one per expert; returns (n,)."""
    if sums.ndim not in (1, 2):
        problem = f"has shape {sums.shape}, expected (k,) or (experts, k)"
        raise GGUFError(file, f"tensor {name + _SUMS!r}", problem)
    experts = 1 if sums.ndim == 1 else len(sums)
    if counts is None or counts.size not in (1, experts):
        found = "is missing" if counts is None else f"has shape {counts.shape}"
        problem = f"{found}, but sums have shape {sums.shape}"
        raise GGUFError(file, f"tensor {name + _COUNTS!r}", problem)
    rows = counts.reshape(-1)
    means = sums.reshape(len(rows), -1) / np.where(rows > 0, rows, 1)[:, None]
    if means.max() > _MAX_FLOAT32:
        problem = "is so small that means are infinite in float32"
        raise GGUFError(file, f"tensor {name + _COUNTS!r}", problem)
    return rows


def _numbers(file: str, name: str, tensor: Any) -> np.ndarray:
    packed = isinstance(tensor, QuantizedArray)
    if packed or tensor.dtype != np.float32 or (values := np.asarray(tensor)).min() < 0:
        raise GGUFError(file, f"tensor {name!r}", "must hold non-negative float32 numbers")
    return values.astype(np.float64)

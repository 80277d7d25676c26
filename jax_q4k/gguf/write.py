"""Writes GGUF files atomically; `gguf.GGUFWriter` encodes the format."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from .. import cpus, float_types
from ..arrays import QuantizedArray
from ..cache.atomic_files import replacing
from . import parts
from .header import MAX_ALIGNMENT
from .tensors import MAX_DIMS, MAX_NAME, PLAIN, supported_types
from .value_types import typed

_AHEAD = 2  # pieces per core that are made before they are written
_WRITEBACK = 1 << 25  # bytes that go to disk while the next are made, so that fsync waits less


@dataclasses.dataclass(frozen=True)
class TensorPieces:
    """A tensor to write whose bytes are produced during writing; `write` calls `pieces()` once.

    Attributes:
      type: ggml's name.
      shape: row-major.
      pieces: returns contiguous arrays or bytes, in order. A piece may also be a function that
        returns them; threads call several at once, while earlier pieces are written.
    """

    type: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Any]]

    @classmethod
    def of(cls, name: str, tensor: Any) -> TensorPieces:
        """Returns a QuantizedArray, an array or TensorPieces as TensorPieces.

        Raises TypeError or ValueError with the tensor's name.
        """
        if not isinstance(name, str) or not 0 < len(name.encode(errors="replace")) <= MAX_NAME:
            raise ValueError(f"tensor name {name!r} must be text of 1 to {MAX_NAME} bytes")
        if isinstance(tensor, cls):
            made = tensor
        elif isinstance(tensor, QuantizedArray):
            if (problem := tensor.plane_problem()) is not None:
                raise TypeError(f"tensor {name!r}: {problem}")
            made = cls(tensor.format, tensor.shape, lambda: [tensor.to_gguf_bytes()])
        else:
            dtype = str(getattr(tensor, "dtype", type(tensor).__name__))
            if (plain := float_types.ggml_name(dtype)) is None:
                supported = ", ".join(of.dtype.name for of in PLAIN.values())
                rule = f"it must be a QuantizedArray or of {supported}"
                raise TypeError(f"tensor {name!r} has dtype {dtype}; {rule}")
            made = cls(plain, tuple(tensor.shape), lambda: [np.asarray(tensor)])
        if made.type not in supported_types():
            rule = f"it must be one of {', '.join(supported_types())}"
            raise ValueError(f"tensor {name!r} has type {made.type!r}; {rule}")
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[made.type]]
        if not 0 < len(made.shape) <= MAX_DIMS or min(made.shape) < 1 or made.shape[-1] % block:
            last = f"the last a multiple of {block}, the block of {made.type}"
            rule = f"it must have 1 to {MAX_DIMS} axes of at least 1, {last}"
            raise ValueError(f"tensor {name!r} has shape {made.shape}; {rule}")
        return made

    def made(self) -> Iterator[Any]:
        """Yields the pieces one after another, and the results of those that are functions."""
        for piece in self.pieces():
            yield piece() if callable(piece) else piece

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        return math.prod(self.shape) // block * block_bytes


def write(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    max_bytes: int | None = None,
    max_tensors: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> list[Path]:
    """Writes a GGUF file of version 3, then atomically replaces the file at `path`.

    After a failure or an interruption, `path` is unchanged and no other file is left. A process
    that is killed leaves its temporary file, `.HEX.gguf.partial`.

    Args:
      metadata: must contain `general.architecture`, except for an importance matrix, whose
        `general.type` is "imatrix". Values are bool, int, float, str, NumPy
        scalars, arrays with one axis, or lists of one of these kinds; `value_types.typed` gives
        their types in the file. Tensors are aligned to `general.alignment` bytes, by default 32.
      tensors: name -> QuantizedArray, float32, float16 or bfloat16 array, or `TensorPieces`.
      max_bytes: limit on the tensor data of a file. A larger model is split into files
        NAME-00001-of-00003.gguf, ... for a `path` of NAME.gguf, as by llama-gguf-split. A tensor
        above the limit has a file of its own.
      max_tensors: limit on the tensors of a file, like `max_bytes`.
      progress: called with (bytes of tensor data written, total bytes).

    Returns:
      The files that were written.

    Raises:
      TypeError, ValueError: a key, value, name, type or shape that GGUF cannot hold, which the
        message names; a limit that is not a positive integer, or that makes more files than can be
        read. OSError: a file cannot be written; the message names it.
    """
    is_imatrix = metadata.get("general.type") == "imatrix"
    architecture = metadata.get("general.architecture", "" if is_imatrix else None)
    if not isinstance(architecture, str):
        raise ValueError(
            f"metadata 'general.architecture' is {architecture!r}, expected the architecture's name"
        )
    _check_limit("max_bytes", max_bytes)
    _check_limit("max_tensors", max_tensors)
    entries = {key: typed(metadata, key) for key in metadata}
    alignment = _alignment(entries)
    described = {name: TensorPieces.of(name, tensor) for name, tensor in tensors.items()}
    sizes = {name: -(-t.nbytes // alignment) * alignment for name, t in described.items()}
    groups = parts.grouped(sizes, max_bytes, max_tensors)
    paths = parts.names_for(path, len(groups))
    report = _Report(progress, sum(tensor.nbytes for tensor in described.values()))
    with contextlib.ExitStack() as stack:
        # The files are replaced in reverse order: once the first part exists, all parts do.
        partials = [stack.enter_context(replacing(file, ".gguf")) for file in paths]
        for number, (partial, names) in enumerate(zip(partials, groups, strict=True)):
            if len(groups) > 1:
                said = parts.metadata_of_part(metadata, number, len(groups), len(described))
                entries = {key: typed(said, key) for key in said}
            _write_file(
                partial, architecture, entries, alignment, {n: described[n] for n in names}, report
            )
    return paths


def _check_limit(name: str, limit: Any) -> None:
    if limit is None:
        return
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ValueError(f"{name}={limit!r} must be a positive integer")


class _Report:
    """Calls `progress` with the bytes of finished tensors plus those of the current one."""

    def __init__(self, progress: Callable[[int, int], object] | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        self(0)

    def __call__(self, written: int) -> None:
        """Reports `written` bytes of the current tensor."""
        if self.progress is not None:
            self.progress(self.done + written, self.total)


def _write_file(
    path: Path,
    architecture: str,
    entries: Mapping[str, tuple[GGUFValueType, GGUFValueType | None, Any]],
    alignment: int,
    tensors: Mapping[str, TensorPieces],
    report: _Report,
) -> None:
    """Writes one complete GGUF file to `path`, which the caller then renames."""
    with contextlib.closing(_Writer(path, architecture)) as writer:
        writer.data_alignment = alignment
        if "general.architecture" not in entries:  # as in parts but the first, and imatrix files
            writer.kv_data[0].clear()
        for key, (kind, element, value) in entries.items():
            if key not in writer.kv_data[0]:  # the writer has the architecture, unless it is empty
                writer.add_key_value(key, value, kind, element)
        for name, tensor in tensors.items():
            writer.add_tensor_info(
                name,
                tensor.shape,
                np.dtype(np.float32),
                tensor.nbytes,
                GGMLQuantizationType[tensor.type],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_data(writer, tensors, report)


class _Writer(gguf.GGUFWriter):
    """GGUFWriter that also writes empty arrays, which real files have."""

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        if vtype is GGUFValueType.ARRAY and not val and sub_type is not None:
            return self._pack("I", vtype) + self._pack("I", sub_type) + self._pack("Q", 0)
        return super()._pack_val(val, vtype, add_vtype, sub_type)


def _alignment(entries: Mapping[str, tuple[GGUFValueType, GGUFValueType | None, Any]]) -> int:
    """Returns the alignment of tensors in bytes."""
    if "general.alignment" not in entries:
        return gguf.GGUF_DEFAULT_ALIGNMENT
    kind, _, value = entries["general.alignment"]
    power_of_two = kind is GGUFValueType.UINT32 and value > 0 and not value & (value - 1)
    if not power_of_two or value > MAX_ALIGNMENT:
        rule = f"it must be a power of two up to {MAX_ALIGNMENT}"
        raise ValueError(f"metadata 'general.alignment' is {value!r}; {rule}")
    return value


def _write_data(
    writer: gguf.GGUFWriter, tensors: Mapping[str, TensorPieces], report: _Report
) -> None:
    assert writer.fout is not None
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    written, behind, threads = 0, 0, cpus.available()
    pool = ThreadPoolExecutor(threads)
    try:
        for name, piece in _in_order(tensors, pool, _AHEAD * threads):
            tensor = tensors[name]
            if piece is not None:
                data = memoryview(_bytes(piece))
                written += data.nbytes
                if written <= tensor.nbytes:
                    file.write(data)
                    behind = _start_writeback(file, behind)
                    report(written)
                    continue
            if written != tensor.nbytes:
                found = f"more than {tensor.nbytes}" if written > tensor.nbytes else f"{written}"
                takes = f"{tensor.type} of shape {tensor.shape} takes {tensor.nbytes}"
                raise ValueError(f"tensor {name!r} has {found} bytes; {takes}")
            writer.write_padding(file, written)
            report.done += written
            written = 0
    finally:
        pool.shutdown(cancel_futures=True)
    file.flush()
    os.fsync(file.fileno())


def _start_writeback(file: BinaryIO, behind: int) -> int:
    """Lets the system write the bytes from `behind` on to disk, if they are many.

    Returns the end of the bytes that it writes. They stay in its cache.
    """
    end = file.tell()
    if end - behind < _WRITEBACK or not hasattr(os, "posix_fadvise"):
        return behind
    os.posix_fadvise(file.fileno(), behind, end - behind, os.POSIX_FADV_DONTNEED)
    return end


def _in_order(
    tensors: Mapping[str, TensorPieces], pool: ThreadPoolExecutor, count: int
) -> Iterator[tuple[str, Any]]:
    """Yields (name, piece) of all tensors, and (name, None) at the end of each.

    The pool calls those that are functions, up to `count` ahead of the one that is yielded.
    """
    ahead: collections.deque[tuple[str, Any]] = collections.deque()

    def first() -> tuple[str, Any]:
        name, piece = ahead.popleft()
        return name, piece.result() if isinstance(piece, Future) else piece

    for name, tensor in tensors.items():
        for piece in tensor.pieces():
            ahead.append((name, pool.submit(piece) if callable(piece) else piece))
            while len(ahead) > (count if callable(piece) else 0):
                yield first()
        ahead.append((name, None))
    while ahead:
        yield first()


def _bytes(piece: Any) -> Any:
    if isinstance(piece, (bytes, bytearray, memoryview)):
        return piece
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8)

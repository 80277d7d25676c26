"""Tensors from a checked file, packed as they are: one at a time, or all as JAX arrays."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Self

import jax
import numpy as np

from ptx_kernels import formats

from ..arrays import QuantizedArray
from .header import Header, open_source, parse_source
from .metadata import Metadata
from .source import Source
from .tensors import PLAIN, TensorInfo, supported_types

#: Bytes read, checked and split at a time, while in a cache: all memory beside the tensors.
CHUNK = 1 << 20
THREADS = min(len(os.sched_getaffinity(0)), 8)  # that read tensors
BUFFER_ALIGNMENT = 64  # bytes; JAX takes over a CPU buffer that is so aligned, without a copy
QUANTIZATION_VERSION = 2  # ggml's GGML_QNT_VERSION, of the block layouts here

#: Header -> names of tensors that are not read.
Skip = Callable[[Header], Collection[str]]
#: Tensor -> where it goes; None: to the default device. A packed one has axes (..., n, blocks).
Place = Callable[[TensorInfo], jax.sharding.Sharding | None]


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A loaded file: `metadata` as in the header, `tensors` in the order of the file."""

    header: Header
    tensors: dict[str, QuantizedArray | jax.Array]

    @property
    def metadata(self) -> Metadata:
        """Scalars as int, float, bool or str; arrays as lists of str or NumPy arrays (n,)."""
        return self.header.metadata


class TensorFile:
    """An open file whose tensors are read one at a time, into host memory; its header is checked.

    A context manager; the file stays open until it is left, so that the checked file is the one
    that is read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, skip: Skip | None = None, check_scales: bool = True
    ) -> None:
        """Raises GGUFError for a malformed file and for tensor types that are not supported."""
        self._file = open_source(path)
        try:
            self._source = Source(self._file, os.fsdecode(path))
            self.header = _loadable_header(self._source, skip)
        except BaseException:
            self._file.close()
            raise
        self._check_scales = check_scales

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str) -> QuantizedArray | np.ndarray:
        """A tensor as NumPy's arrays (planes of a packed one); checked as `gguf.read` does."""
        reader = _TensorReader(self._source, self.header.data_start, self._check_scales)
        return reader.tensor(self.header.tensors[name])


def read(
    path: str | os.PathLike[str],
    *,
    skip: Skip | None = None,
    check: Callable[[Header], object] | None = None,
    check_scales: bool = True,
    progress: Callable[[int, int], object] | None = None,
    place: Place | None = None,
) -> GGUFFile:
    """Loads a GGUF file: packed tensors as QuantizedArray, F32, F16 and BF16 as jax.Array.

    Shapes are row-major: a matrix is (n, k), y = x @ w.T. Everything the file claims is checked
    before it is used.

    Args:
      skip: called with the header; the tensors that it names are left out of it, and not read.
      check: called with the header before any tensor is read; may raise.
      check_scales: refuse a NaN or infinite block scale, or element of a tensor that is not packed.
      progress: called after every tensor with (bytes of tensor data loaded, bytes in all).
      place: called with each tensor's `TensorInfo`: the sharding that it is read into, part by
        part, or None. A process reads the parts of its own devices alone.

    Raises:
      GGUFError: the first thing that is wrong. OSError: the file cannot be read.
    """
    with open_source(path) as file:
        return load(
            Source(file, os.fsdecode(path)),
            skip=skip,
            check=check,
            check_scales=check_scales,
            progress=progress,
            place=place,
        )


def load(
    source: Source,
    *,
    skip: Skip | None = None,
    check: Callable[[Header], object] | None = None,
    check_scales: bool = True,
    progress: Callable[[int, int], object] | None = None,
    place: Place | None = None,
) -> GGUFFile:
    """`read` from a source that is already open."""
    header = _loadable_header(source, skip)
    if check is not None:
        check(header)
    infos = header.tensors.values()
    total, done = sum(info.nbytes for info in infos), 0
    reader = _TensorReader(source, header.data_start, check_scales)
    tensors: dict[str, QuantizedArray | jax.Array] = {}

    def tensor_of(info: TensorInfo) -> QuantizedArray | jax.Array:
        sharding = None if place is None else place(info)
        return (
            jax.device_put(reader.tensor(info))
            if sharding is None
            else reader.placed(info, sharding)
        )

    if progress is not None:
        progress(done, total)
    with ThreadPoolExecutor(THREADS) as pool:
        for info, tensor in zip(infos, pool.map(tensor_of, infos), strict=True):
            tensors[info.name] = tensor
            done += info.nbytes
            if progress is not None:
                progress(done, total)
    return GGUFFile(header, tensors)


def _loadable_header(source: Source, skip: Skip | None) -> Header:
    header = parse_source(source)
    if skip is not None:
        skipped = frozenset(skip(header))
        kept = {name: info for name, info in header.tensors.items() if name not in skipped}
        header = dataclasses.replace(header, tensors=kept)
    _check_loadable(source, header)
    return header


def _check_loadable(source: Source, header: Header) -> None:
    """Refuses parts of split files, unsupported tensor types and unknown block layouts."""
    parts = header.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts not in (0, 1):  # 0: merged by llama.cpp
        source.fail("split.count", f"must be 1, not {parts!r}: merge the parts into one file first")
    for info in header.tensors.values():
        if not info.supported:
            problem = (
                f"{info.type.name} is not supported; supported are {', '.join(supported_types())}"
            )
            source.fail(f"tensor {info.name!r}: type", problem)
    version = header.metadata.get("general.quantization_version", QUANTIZATION_VERSION)
    packed = any(info.type.name not in PLAIN for info in header.tensors.values())
    if packed and not (isinstance(version, int) and version == QUANTIZATION_VERSION):
        source.fail(
            "general.quantization_version", f"must be {QUANTIZATION_VERSION}, not {version!r}"
        )


@dataclasses.dataclass(frozen=True)
class _TensorReader:
    """Reads tensors of a checked header; several threads may at a time."""

    source: Source
    data_start: int
    check_scales: bool

    def tensor(self, info: TensorInfo) -> QuantizedArray | np.ndarray:
        plain = info.type.name in PLAIN
        return self._plain(info) if plain else self._packed(info, formats.get(info.type.name))

    def placed(
        self, info: TensorInfo, sharding: jax.sharding.Sharding
    ) -> QuantizedArray | jax.Array:
        """The tensor over devices; parts that several of them hold are read once."""
        plain = PLAIN.get(info.type.name)
        block = None if plain else formats.get(info.type.name)
        *leading, k = info.shape
        axes = (*leading, k // (block.block_size if block else 1))
        parts: dict[tuple[tuple[int, int], ...], list[np.ndarray]] = {}
        buffers: list[list[jax.Array]] = []
        for device, index in sharding.addressable_devices_indices_map(axes).items():
            assert index is not None
            key = tuple(part.indices(size)[:2] for part, size in zip(index, axes, strict=True))
            if key not in parts:
                parts[key] = self._part(info, axes, key)
            buffers.append([jax.device_put(array, device) for array in parts[key]])
        whole = [
            jax.make_array_from_single_device_arrays(
                (*axes, *arrays[0].shape[len(axes) :]), sharding, list(arrays)
            )
            for arrays in zip(*buffers, strict=True)
        ]
        return QuantizedArray(block.name, info.shape, whole) if block else whole[0]

    def _part(
        self, info: TensorInfo, axes: tuple[int, ...], key: tuple[tuple[int, int], ...]
    ) -> list[np.ndarray]:
        """Planes of a packed tensor's part, or the one array of another's.

        axes: of the tensor, the last in blocks. key: (first, end) of the part along each.
        """
        plain = PLAIN.get(info.type.name)
        block = None if plain else formats.get(info.type.name)
        unit = block.block_bytes if block else info.nbytes // math.prod(axes)  # bytes
        per_row, (first, end) = axes[-1], key[-1]
        rows = np.arange(math.prod(axes[:-1])).reshape(axes[:-1])
        rows = rows[tuple(slice(*part) for part in key[:-1])].reshape(-1)
        shape = len(rows), end - first
        sizes = [plane.bytes_per_block for plane in block.planes] if block else [unit]
        planes = [_aligned((*shape, size), np.dtype(np.uint8)) for size in sizes]
        step = max(1, CHUNK // max(1, shape[1] * unit))
        buffer = np.empty((min(step, len(rows)), shape[1], unit), np.uint8)
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            raw = buffer[: len(chunk)]
            if shape[1] == per_row and (np.diff(chunk) == 1).all():
                self._read(info, int(chunk[0]) * per_row * unit, raw)
            else:
                for row, target in zip(chunk.tolist(), raw, strict=True):
                    self._read(info, (row * per_row + first) * unit, target)
            split = block.split(raw) if block else [raw]
            for plane, part in zip(planes, split, strict=True):
                plane[start : start + len(chunk)] = part
            if self.check_scales:
                self._require_finite_part(info, chunk, per_row, first, split)
        extents = tuple(stop - start for start, stop in key)
        if plain:
            return [planes[0].view(plain.dtype).reshape(extents)]
        return [plane.reshape(*extents, plane.shape[-1]) for plane in planes]

    def _require_finite_part(
        self, info: TensorInfo, rows: np.ndarray, per_row: int, first: int, parts: Any
    ) -> None:
        """As `_require_finite`, of blocks from `first` on of these rows."""
        plain = PLAIN.get(info.type.name)
        if plain:
            bits = np.ascontiguousarray(parts[0]).view(plain.bits)[..., 0]
            finite, what = (bits & plain.exponent) != plain.exponent, "element"
        else:
            finite = formats.get(info.type.name).finite(parts)
            what = "a scale of block"
        if not finite.all():
            row, column = np.unravel_index(int(finite.argmin()), finite.shape)
            self._refuse(info, what, int(rows[row]) * per_row + first + int(column))

    def _plain(self, info: TensorInfo) -> np.ndarray:
        plain = PLAIN[info.type.name]
        dtype, exponent = plain.dtype, plain.exponent
        values = _aligned((info.nbytes // dtype.itemsize,), dtype)
        step = CHUNK // dtype.itemsize
        for start in range(0, len(values), step):
            chunk = values[start : start + step].view(plain.bits)
            self._read(info, start * dtype.itemsize, chunk)
            if self.check_scales:
                self._require_finite(info, "element", start, (chunk & exponent) != exponent)
        return values.reshape(info.shape)

    def _packed(self, info: TensorInfo, block: formats.BlockFormat) -> QuantizedArray:
        count = info.nbytes // block.block_bytes
        planes = [
            _aligned((count, plane.bytes_per_block), np.dtype(np.uint8)) for plane in block.planes
        ]
        step = CHUNK // block.block_bytes
        in_place = len(planes) == 1  # one plane is the block as it lies
        buffer = np.empty((0 if in_place else min(step, count), block.block_bytes), np.uint8)
        for start in range(0, count, step):
            stop = min(start + step, count)
            raw = planes[0][start:stop] if in_place else buffer[: stop - start]
            self._read(info, start * block.block_bytes, raw)
            parts = block.split(raw)
            if not in_place:
                for plane, part in zip(planes, parts, strict=True):
                    plane[start:stop] = part
            if self.check_scales:
                self._require_finite(info, "a scale of block", start, block.finite(parts))
        leading = (*info.shape[:-1], info.shape[-1] // block.block_size)
        return QuantizedArray(
            block.name, info.shape, [plane.reshape(*leading, plane.shape[-1]) for plane in planes]
        )

    def _read(self, info: TensorInfo, offset: int, target: np.ndarray) -> None:
        where = self.data_start + info.offset + offset
        self.source.read_into(where, target.data.cast("B"), f"tensor {info.name!r}")

    def _require_finite(self, info: TensorInfo, what: str, start: int, finite: np.ndarray) -> None:
        if not finite.all():
            self._refuse(info, what, start + int(finite.argmin()))

    def _refuse(self, info: TensorInfo, what: str, at: int) -> NoReturn:
        found = f"{what} {at} is NaN or infinite"
        problem = f"{found} (check_scales=False loads it all the same)"
        self.source.fail(f"tensor {info.name!r}", problem)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An empty array that begins at a multiple of BUFFER_ALIGNMENT."""
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    buffer = np.empty(nbytes + BUFFER_ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % BUFFER_ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)

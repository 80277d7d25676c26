"""Tensors of a checked file, or boxes of them, in pieces of bounded size.

A tensor is an array of blocks, of a packed format or of one float each, with axes (..., n, blocks).
A box is a range along each of these axes: a whole tensor, or what a device holds of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ptx_kernels import formats

from .. import native
from ..arrays import QuantizedArray
from .source import Source
from .tensors import PLAIN, TensorInfo

#: Bytes read, checked and split at a time, while in a cache: all memory beside the tensors.
CHUNK = 1 << 20
#: Bytes of arrays that are mapped, and of those that ask for huge pages, as NumPy's do.
MAPPED, HUGE = 1 << 16, 1 << 22
BUFFER_ALIGNMENT = 64  # bytes; JAX takes over a CPU buffer that is so aligned, without a copy

#: (first, end) along each axis.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class TensorReader:
    """Reads tensors of a checked header; several threads may at a time."""

    source: Source
    data_start: int
    check_scales: bool

    def tensor(self, info: TensorInfo) -> QuantizedArray | np.ndarray:
        """The tensor in host memory."""
        blocks = Blocks.of(info)
        (planes,) = self.boxes(blocks, [tuple((0, size) for size in blocks.axes)])
        return blocks.joined(planes)

    def placed(
        self, info: TensorInfo, sharding: jax.sharding.Sharding
    ) -> QuantizedArray | jax.Array:
        """The tensor over devices; what several devices of this process hold is read once."""
        blocks = Blocks.of(info)
        held: dict[Box, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(blocks.axes).items():
            sides = zip(index or (), blocks.axes, strict=True)
            box = tuple(part.indices(size)[:2] for part, size in sides)
            held.setdefault(box, []).append(device)
        planes = []
        for arrays in zip(*self.boxes(blocks, list(held)), strict=True):
            parts = zip(arrays, held.values(), strict=True)
            on_devices = [jax.device_put(array, device) for array, to in parts for device in to]
            shape = (*blocks.axes, *arrays[0].shape[len(blocks.axes) :])
            planes.append(jax.make_array_from_single_device_arrays(shape, sharding, on_devices))
        return blocks.joined(planes)

    def boxes(self, blocks: Blocks, boxes: Sequence[Box]) -> list[list[np.ndarray]]:
        """For each of some boxes, which share nothing, its planes, or its one array of floats."""
        planes = [
            [_aligned((*_extents(box), size)) for size in blocks.plane_bytes] for box in boxes
        ]
        # Boxes that fill a larger one are read as that: its runs of bytes are longer.
        ends = [(min(side)[0], max(side)[1]) for side in zip(*boxes, strict=True)]
        filled = sum(map(_volume, boxes)) == _volume(ends)
        for box in [tuple(ends)] if filled else boxes:
            own = planes[boxes.index(box)] if box in boxes else []
            in_place = len(own) == 1  # a single plane is the blocks as they lie
            most = min(_volume(box), max(1, CHUNK // blocks.nbytes))
            buffer = np.empty((0 if in_place else most, blocks.nbytes), np.uint8)
            for piece in _pieces(box, most):
                if in_place:
                    raw = own[0][_within(piece, box)]
                else:
                    raw = buffer[: _volume(piece)].reshape(*_extents(piece), -1)
                self._read(blocks, piece, raw)
                split = blocks.split(raw)
                if self.check_scales:
                    self._require_finite(blocks, piece, split)
                if not in_place:
                    _scatter(piece, split, boxes, planes)
        if blocks.dtype is None:
            return planes
        return [[floats.view(blocks.dtype)[..., 0] for floats in one] for one in planes]

    def _read(self, blocks: Blocks, box: Box, raw: np.ndarray) -> None:
        """Fills `raw`, (*extents, bytes), with a box's blocks: a call for each run of the file."""
        axes, box = blocks.in_file(box)
        cut = [at for at, side in enumerate(box) if side != (0, axes[at])]
        at = cut[-1] if cut else 0  # what lies behind this axis is whole: in one run with it
        firsts = [range(*side) for side in box[:at]] + [range(*side)[:1] for side in box[at:]]
        size = _volume(box[at:]) * blocks.nbytes
        start, target = self.data_start + blocks.info.offset, raw.data.cast("B")
        for run, first in enumerate(blocks.numbers(firsts)):
            into = target[run * size : (run + 1) * size]
            self.source.read_into(start + first * blocks.nbytes, into, blocks.field)

    def _require_finite(self, blocks: Blocks, box: Box, planes: Sequence[np.ndarray]) -> None:
        finite = blocks.finite(planes)
        if finite.all():
            return
        index = np.unravel_index(int(finite.argmin()), finite.shape)
        _, box = blocks.in_file(box)
        (at,) = blocks.numbers([[first + int(i)] for (first, _), i in zip(box, index, strict=True)])
        found = f"{blocks.finite_name} {at} is NaN or infinite"
        file = self.source.file_at(self.data_start + blocks.info.offset)
        file.fail(blocks.field, f"{found} (check_scales=False loads it all the same)")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """What a tensor is an array of.

    Attributes:
      axes: blocks along each.
      plane_bytes: of a block in each plane.
      split: uint8 (..., bytes) as they lie -> planes, uint8 (..., bytes of each).
      finite: planes -> bool (...).
      finite_name: what the test is of, for messages.
      dtype: of floats; None: they are packed.
    """

    info: TensorInfo
    axes: tuple[int, ...]
    plane_bytes: Sequence[int]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]
    finite: Callable[[Sequence[np.ndarray]], np.ndarray]
    finite_name: str
    dtype: np.dtype | None = None

    @classmethod
    def of(cls, info: TensorInfo) -> Blocks:
        plain = PLAIN.get(info.type.name)
        if plain is None:
            block = formats.get(info.type.name)
            axes = (*info.shape[:-1], info.shape[-1] // block.block_size)
            plane_bytes = [plane.bytes_per_block for plane in block.planes]
            return cls(info, axes, plane_bytes, block.split, block.finite, "a scale of block")

        def finite(planes: Sequence[np.ndarray]) -> np.ndarray:
            return (planes[0].view(plain.bits)[..., 0] & plain.exponent) != plain.exponent

        size = plain.dtype.itemsize
        return cls(info, info.shape, [size], lambda raw: [raw], finite, "element", plain.dtype)

    @property
    def nbytes(self) -> int:
        """Of a block."""
        return sum(self.plane_bytes)

    @property
    def field(self) -> str:
        """The tensor in messages."""
        return f"tensor {(self.info.file_name or self.info.name)!r}"

    def in_file(self, box: Box) -> tuple[tuple[int, ...], Box]:
        """The axes of the file's tensor, of whose rows these may be some, and a box within them."""
        at, first, rows = self.info.row_axis, self.info.first_row, self.info.file_rows
        if rows is None or not self.axes:
            return self.axes, box
        if at == len(self.axes) - 1:  # which counts blocks
            first, rows = first // self.info.block_size, rows // self.info.block_size
        start, end = box[at]
        axes = (*self.axes[:at], rows, *self.axes[at + 1 :])
        return axes, (*box[:at], (start + first, end + first), *box[at + 1 :])

    def numbers(self, along: Sequence[Sequence[int]]) -> list[int]:
        """Of the blocks at these indices along each axis of the file's tensor, from its first."""
        found = np.zeros(1, np.int64)
        axes, _ = self.in_file(tuple((0, size) for size in self.axes))
        for indices, size in zip(along, axes, strict=True):
            found = np.add.outer(found * size, indices).reshape(-1)
        return found.tolist()

    def joined(self, planes: Sequence[Any]) -> Any:
        """The tensor of its planes, or of its floats."""
        kind, shape = self.info.type.name, self.info.shape
        if self.dtype is not None:
            return planes[0]
        native.prepare(kind)  # for programs that an earlier process compiled
        return QuantizedArray(kind, shape, planes)


def _scatter(
    piece: Box, split: Sequence[np.ndarray], boxes: Sequence[Box], planes: list[list[np.ndarray]]
) -> None:
    """Copies a piece's planes to where they belong in the boxes'."""
    for box, targets in zip(boxes, planes, strict=True):
        sides = zip(piece, box, strict=True)
        common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in sides)
        if all(first < end for first, end in common):
            for target, plane in zip(targets, split, strict=True):
                target[_within(common, box)] = plane[_within(common, piece)]


def _pieces(box: Box, most: int) -> Iterator[Box]:
    """The box, cut into boxes of at most `most` blocks, in the file's order."""
    if _volume(box) <= most:
        yield box
        return
    (first, end), *rest = box
    step = max(1, most // _volume(rest))
    for start in range(first, end, step):
        for piece in _pieces(tuple(rest), most):
            yield (start, min(start + step, end)), *piece


def _extents(box: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(end - first for first, end in box)


def _volume(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(_extents(box))


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in an array of a larger one."""
    sides = zip(inner, outer, strict=True)
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in sides)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An empty array of bytes that begins at a multiple of BUFFER_ALIGNMENT.

    A large one is mapped, so that the system has its memory back once it is dropped: glibc would
    keep what several threads have asked it for, several times a model's size after some loads.
    """
    nbytes = math.prod(shape)
    if nbytes >= MAPPED:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)  # fewer misses where addresses are looked up
        return np.frombuffer(mapped, np.uint8).reshape(shape)
    buffer = np.empty(nbytes + BUFFER_ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % BUFFER_ALIGNMENT
    return buffer[start : start + nbytes].reshape(shape)

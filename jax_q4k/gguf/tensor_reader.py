"""Reads complete tensors or shards of them from a GGUF file, in pieces of bounded size.

A tensor is an array of blocks with axes (..., n, blocks); if it is not packed, each block is one
float. A box is a range along each of these axes: the complete tensor, or a device's shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ptx_kernels import formats

from .. import native
from ..arrays import QuantizedArray
from .memory import aligned
from .source import Source
from .tensors import PLAIN, TensorInfo

#: Bytes read, checked and split at a time. They fit in a cache, and are the only memory that is
#: needed besides the tensors.
CHUNK = 1 << 20

#: (first, end) along each axis.
Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class TensorReader:
    """Reads tensors of a checked header; safe to use from several threads."""

    source: Source
    data_start: int
    check_scales: bool
    allocate: Callable[[tuple[int, ...]], np.ndarray] = aligned

    def tensor(self, info: TensorInfo) -> QuantizedArray | np.ndarray:
        """Reads a tensor into host memory."""
        blocks = Blocks.of(info)
        (planes,) = self.boxes(blocks, [tuple((0, size) for size in blocks.axes)])
        return blocks.joined(planes)

    def placed(
        self, info: TensorInfo, sharding: jax.sharding.Sharding
    ) -> QuantizedArray | jax.Array:
        """Reads a tensor into device memory with a sharding.

        Reads a shard only once if several local devices hold it.
        """
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
        """Reads disjoint boxes; returns each box's planes, or [array of floats]."""
        planes = [
            [self.allocate((*_extents(box), size)) for size in blocks.plane_bytes] for box in boxes
        ]
        # Boxes that fill a larger one are read as that one, in longer contiguous runs.
        ends = [(min(side)[0], max(side)[1]) for side in zip(*boxes, strict=True)]
        filled = sum(map(_volume, boxes)) == _volume(ends)
        for box in [tuple(ends)] if filled else boxes:
            box_planes = planes[boxes.index(box)] if box in boxes else []
            in_place = len(box_planes) == 1  # a single plane has the blocks' bytes in file order
            max_blocks = min(_volume(box), max(1, CHUNK // blocks.nbytes))
            buffer = np.empty((0 if in_place else max_blocks, blocks.nbytes), np.uint8)
            for piece in _pieces(box, max_blocks):
                if in_place:
                    raw = box_planes[0][_within(piece, box)]
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
        """Reads a box's blocks into `raw`, (*extents, bytes), with one read per contiguous run."""
        axes, box = blocks.in_file(box)
        cut = [at for at, side in enumerate(box) if side != (0, axes[at])]
        at = cut[-1] if cut else 0  # later axes are complete, so that they lie in one run
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
        file.fail(blocks.field, f"{found} (check_scales=False loads it anyway)")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Description of a tensor as an array of quantization blocks, or of floats.

    Attributes:
      axes: number of blocks along each axis.
      plane_bytes: bytes of a block in each plane.
      split: blocks as stored, uint8 (..., bytes) -> planes, uint8 (..., bytes of each).
      finite: planes -> bool (...), whether each block is finite.
      finite_name: what `finite` checks, for messages.
      dtype: dtype of floats; None means that the blocks are packed.
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
        """Bytes of a block."""
        return sum(self.plane_bytes)

    @property
    def field(self) -> str:
        """Name of the tensor in messages."""
        return f"tensor {(self.info.file_name or self.info.name)!r}"

    def in_file(self, box: Box) -> tuple[tuple[int, ...], Box]:
        """Returns the axes of the tensor in the file, and `box` in that tensor's coordinates.

        They differ from this tensor's if it is made of only some rows of the file's tensor.
        """
        at, first, rows = self.info.row_axis, self.info.first_row, self.info.file_rows
        if rows is None or not self.axes:
            return self.axes, box
        if at == len(self.axes) - 1:  # which counts blocks
            first, rows = first // self.info.block_size, rows // self.info.block_size
        start, end = box[at]
        axes = (*self.axes[:at], rows, *self.axes[at + 1 :])
        return axes, (*box[:at], (start + first, end + first), *box[at + 1 :])

    def numbers(self, along: Sequence[Sequence[int]]) -> list[int]:
        """Returns the flat indices, in the file's tensor, of blocks at these indices per axis."""
        found = np.zeros(1, np.int64)
        axes, _ = self.in_file(tuple((0, size) for size in self.axes))
        for indices, size in zip(along, axes, strict=True):
            found = np.add.outer(found * size, indices).reshape(-1)
        return found.tolist()

    def joined(self, planes: Sequence[Any]) -> Any:
        """Returns the QuantizedArray with these planes, or the one array if it holds floats."""
        kind, shape = self.info.type.name, self.info.shape
        if self.dtype is not None:
            return planes[0]
        native.prepare(kind)  # for programs that an earlier process compiled
        return QuantizedArray(kind, shape, planes)


def _scatter(
    piece: Box, split: Sequence[np.ndarray], boxes: Sequence[Box], planes: list[list[np.ndarray]]
) -> None:
    """Copies a piece's planes into the boxes that it overlaps."""
    for box, targets in zip(boxes, planes, strict=True):
        sides = zip(piece, box, strict=True)
        common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in sides)
        if all(first < end for first, end in common):
            for target, plane in zip(targets, split, strict=True):
                target[_within(common, box)] = plane[_within(common, piece)]


def _pieces(box: Box, max_blocks: int) -> Iterator[Box]:
    """Cuts a box into boxes of at most `max_blocks` blocks, in file order."""
    if _volume(box) <= max_blocks:
        yield box
        return
    (first, end), *rest = box
    step = max(1, max_blocks // _volume(rest))
    for start in range(first, end, step):
        for piece in _pieces(tuple(rest), max_blocks):
            yield (start, min(start + step, end)), *piece


def _extents(box: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(end - first for first, end in box)


def _volume(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(_extents(box))


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the slices that select box `inner` in an array of box `outer`."""
    sides = zip(inner, outer, strict=True)
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in sides)

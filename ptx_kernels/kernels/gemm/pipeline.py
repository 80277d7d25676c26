"""Software pipeline: `cp.async` copies matrix tiles into a ring of stages in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...formats.unpack.packed_tile import TilePlane
from ...ptx import Builder, Pointer, Value, all_of, s32, u8, u32
from .fragments import TILE_ROWS
from .spans import ALL, StepSpan


def odd_pitch(nbytes: int) -> int:
    """Returns `nbytes` rounded up to an odd number of 16-byte chunks, in bytes.

    Chunk c of 8 consecutive rows then covers all banks.
    """
    return (-(-nbytes // 16) | 1) * 16


@dataclass(frozen=True)
class Rows:
    """`count` rows of a matrix in global memory, from row `first` on: the source of a copy.

    `matrix` is u8 (rows, row bytes). If it has fewer than `count` rows, rows past its end become
    zeros; otherwise the caller ensures that first + count does not exceed its rows. `span`: the
    pipeline steps (along the columns) that this thread block loads.
    """

    matrix: Pointer
    first: Value
    count: int
    span: StepSpan = ALL

    @property
    def clip(self) -> bool:
        return self.matrix.shape[0] < self.count


class TileCopy:
    """Copies the next `nbytes` of every row in each pipeline step; zeros past the row's end.

    Chunk c of row r is stored at r * pitch + c * chunk_pitch in a stage. A power of two of threads
    shares a row, so that they read adjacent chunks and the rows of a thread are at constant
    distances. A step has one or more parts of `part` bytes per row.
    """

    def __init__(
        self,
        k: Builder,
        rows: Rows,
        nbytes: int,
        threads: int,
        *,
        part: int,
        chunk: int = 0,
        pitch: int = 0,
        chunk_pitch: int = 0,
    ) -> None:
        row_bytes = rows.matrix.shape[1]
        chunk = chunk or math.gcd(16, row_bytes, nbytes)
        self.pitch = pitch or odd_pitch(nbytes)
        chunk_pitch = chunk_pitch or chunk
        self._part = part * chunk_pitch // chunk  # bytes from one part to the next in a stage
        self.size = max(rows.count * self.pitch, nbytes // chunk * chunk_pitch)  # bytes in a stage
        self._k, self._rows, self._nbytes, self._chunk = k, rows, nbytes, chunk
        self._rest = None  # remaining bytes of a row, if steps reach beyond its end
        if row_bytes % nbytes or row_bytes < rows.span.total * nbytes:
            self._rest = k.var(s32, rows.span.rest(row_bytes, nbytes))
        self._parts = []  # (rows at once, the thread's first row and byte, target, source)
        column = 0
        while column < nbytes // chunk:
            width = min(1 << (nbytes // chunk - column).bit_length() - 1, threads)
            row, first = k.thread_id // width, k.thread_id % width + column
            begin = rows.span.after(first * chunk, nbytes)
            source = rows.matrix.at(rows.first + row, begin).moving()
            self._parts.append(
                (
                    threads // width,
                    row,
                    first * chunk,
                    row * self.pitch + first * chunk_pitch,
                    source,
                )
            )
            column += width

    def part(self, address: Pointer, number: Value | int) -> Pointer:
        """Returns the address of part `number` of a step's rows in the stage at `address`."""
        return address.at(0, number * self._part).reshape(*address.shape)

    def tile(self, address: Pointer, row: Value, step: Value, part: Value | int) -> TilePlane:
        """Returns 16 rows, from `row` on, of a step's part `part` in the stage at `address`."""
        rows = self.part(address, part).at(row)
        return TilePlane(self._k, rows.reshape(TILE_ROWS, self.pitch))

    def start(self, address: Pointer) -> None:
        """Emits the asynchronous copies of the next step to shared memory at `address`."""
        k, rows = self._k, self._rows
        for height, row, byte, offset, source in self._parts:
            target = address.at(offset)
            for r in range(0, rows.count, height):
                valid = all_of(
                    rows.first + row + r < rows.matrix.shape[0] if rows.clip else None,
                    byte.bits(s32) < self._rest if self._rest is not None else None,
                )
                size = None if valid is None else k.select(valid, k.const(u32, self._chunk), 0)
                where = row < rows.count - r if height > rows.count - r else None
                origin = source.at(r * rows.matrix.shape[1])
                k.cp_async(target.at(r * self.pitch), origin, self._chunk, size=size, where=where)
            source.advance(self._nbytes)
        if self._rest is not None:
            self._rest -= self._nbytes


class WordCopy:
    """Copies the next `nbytes` of every row in each pipeline step, for 2-byte aligned rows.

    The aligned words that contain a row's bytes are stored at row * pitch, so the bytes begin there
    or two bytes later. The bytes after a row's end are those of the next row, or zeros after the
    last.
    """

    def __init__(self, k: Builder, rows: Rows, nbytes: int, threads: int, *, part: int) -> None:
        self.pitch, self._part = nbytes // 4 * 4 + 4, part
        self.size = rows.count * self.pitch
        self._k, self._rows, self._threads = k, rows, threads
        self._stride = rows.matrix.shape[1] // 2  # pairs of bytes per row
        self._step = nbytes // 2
        self._beyond = rows.span.total * self._step >= self._stride + self._step  # complete steps
        begin = rows.span.after((rows.first + k.thread_id) * self._stride, self._step)
        self._index = k.var(u32, begin)

    def tile(self, address: Pointer, row: Value, step: Value, part: Value | int) -> TilePlane:
        step = self._rows.span.after(step, 1)
        first = (self._rows.first + row) * self._stride + step * self._step
        rows = address.at(row).at(part * self._part).reshape(TILE_ROWS, self.pitch)
        return TilePlane(self._k, rows, first, self._stride)

    def start(self, address: Pointer) -> None:
        k, rows = self._k, self._rows
        total = rows.matrix.shape[0] * self._stride
        words = rows.matrix.reshape(total // 2 + 1, 4)
        for r in range(0, rows.count, self._threads):
            index = self._index + r * self._stride
            where = k.thread_id < rows.count - r if self._threads > rows.count - r else None
            for word in range(self.pitch // 4):
                size = None
                # the matrix may end inside the word
                if rows.clip or self._beyond or total % 2 or word:
                    last = (index | 1) + 2 * word
                    inside = k.select(last <= total, k.const(u32, 2), 0)
                    size = k.select(last < total, k.const(u32, 4), inside)
                target = address.at(k.thread_id * self.pitch).at(self.pitch * r + 4 * word)
                k.cp_async(target, words.at((index >> 1) + word), 4, size=size, where=where)
        self._index += self._step


Copy = TileCopy | WordCopy


class StageCopy(Protocol):
    """Interface of a copy that every pipeline step performs.

    Attributes:
      size: bytes of the copy in a stage.
      pitch: bytes between its rows.
    """

    size: int
    pitch: int

    def start(self, address: Pointer) -> None:
        """Emits the asynchronous copies of the next step to `address`, its part of a stage."""


class Pipeline:
    """Ring of stages in shared memory, each with room for every copy; all threads fill it."""

    def __init__(self, k: Builder, stages: int, copies: Sequence[StageCopy]) -> None:
        self._k, self._copies, self._stages = k, copies, stages
        self._offsets = [0]
        for copy in copies:
            self._offsets.append(self._offsets[-1] + -(-copy.size // 16) * 16)
        self._nbytes = self._offsets.pop()
        self._last = (stages - 1) * self._nbytes
        self._memory = k.shared("ring", u8, (stages * self._nbytes,), dynamic=True)
        self._filled, self._taken = k.var(u32, 0), k.var(u32, 0)

    def steps(self, count: int) -> Iterator[tuple[Value, list[Pointer]]]:
        """Yields (step, address of each copy's data) in a loop, with later steps in flight."""
        self.begin(count)
        yield from self.between(0, count, count)

    def begin(self, count: Value | int) -> None:
        """Starts the copies of the first steps; all threads have the same count of steps."""
        k = self._k
        for step in range(self._stages - 1):
            if isinstance(count, Value):
                with k.when(count > step):
                    self._fill()
            elif step < count:
                self._fill()
            k.cp_async_commit()

    def between(
        self, start: Value | int, stop: Value | int, count: Value | int
    ) -> Iterator[tuple[Value, list[Pointer]]]:
        """Like `steps`, but yields only steps from `start` up to `stop`, of `count`.

        `begin` must have been called before.
        """
        k, in_flight = self._k, self._stages - 1
        with k.loop(start, stop) as at:
            k.cp_async_wait(in_flight - 1)
            k.barrier()
            with k.when(at + in_flight < count):
                self._fill()
            k.cp_async_commit()
            yield at, self._take()

    def _fill(self) -> None:
        """Emits all copies of the next step, into the next stage."""
        stage = self._memory.at(self._filled)
        for copy, offset in zip(self._copies, self._offsets, strict=True):
            copy.start(stage.at(offset))
        self._filled.set(self._k.select(self._filled < self._last, self._filled + self._nbytes, 0))

    def _take(self) -> list[Pointer]:
        """Returns the address of each copy's data in the next stage, u8 (rows, pitch)."""
        stage = self._memory.at(self._taken)
        self._taken.set(self._k.select(self._taken < self._last, self._taken + self._nbytes, 0))
        return [
            stage.at(offset).reshape(copy.size // copy.pitch, copy.pitch)
            for offset, copy in zip(self._offsets, self._copies, strict=True)
        ]

"""Loads activations for the dot products, from global or shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ...ptx import WARP, Builder, Group, KernelError, Pointer, Value, f32, s8
from ..quantize_q8_1 import GROUP, store_group
from ..rms_norm import normalize
from ..vectors import RUN, Run, float_type, load_runs, store_floats
from .activations import Activations, Floats, Ordered, Quantized
from .config import MatvecConfig
from .reading_order import SPAN, ReadingOrder, row_bytes
from .rows import BlockRow, one_row

_AHEAD = 4  # loads in flight per thread
_CHUNK_BYTES = 32 << 10  # of f32 activations, for all rows together
_CHUNK_STEP = 256  # columns: a chunk is a multiple of super-blocks
_STATIC_BYTES = 40 << 10  # larger buffers are dynamic; leaves room for others
MOST_BYTES = 96 << 10  # every target has 99 KB per block


def int8_bytes(m: int, columns: int) -> int:
    """Returns the shared-memory bytes of m rows as q8_1: one per value, 8 per group of 32."""
    return m * row_bytes(columns)


@dataclass(frozen=True, kw_only=True)
class InputRows(Group):
    """Activation rows x (m, columns) that a mat-vec multiplies.

    Attributes:
      norm: whether x becomes x / sqrt(mean(x^2) + eps) * norm_weight.
      dtype: of x; f32 if x is q8_1.
    """

    columns: int
    m: int
    norm: bool = False
    eps: float = 0.0
    dtype: str = "f32"


class Prologue:
    """Declares a mat-vec's activation operands and supplies the activations to the dot products.

    Operands: (values, scale_sum) for q8_1 activations, else x of `dtype` (m, columns), and the
    norm's weight f32 (columns,). `stage` is called once per thread block, before its rows, and
    `pieces` once per team of rows; all threads must reach both. With
    `block_row` a thread block has one of the m rows.
    """

    def __init__(
        self, k: Builder, x: InputRows, config: MatvecConfig, block_row: BlockRow | None = None
    ) -> None:
        x_type, columns, norm = float_type(x.dtype), x.columns, x.norm
        row, m = (None, x.m) if block_row is None else (block_row.token, 1)
        self._k, self._m, self._columns, self._eps, self._config = k, m, columns, x.eps, config
        self._threads = WARP * config.warps
        self._staged: Pointer | None = None  # complete rows: f32, or int8 with their scales
        self._order = ReadingOrder(config.lanes)
        self._chunk: Pointer | None = None
        inline = config.activations == "inline_q8"
        if norm and not (inline or config.stage == "whole"):
            raise KernelError(
                "norm=True needs activations='inline_q8' or stage='whole', for whole rows in "
                f"shared memory, not {config.activations!r} and {config.stage!r}"
            )
        if config.activations == "q8_1":
            if x.dtype != "f32":  # it would name the same kernel again
                raise KernelError(f"dtype={x.dtype!r} is for activations that come as floats")
            values = k.input("values", s8, (x.m, columns))
            pairs = k.input("scale_sum", f32, (x.m, columns // GROUP, 2))
            self._whole: Activations = Quantized(one_row(values, row), one_row(pairs, row))
            return
        self._x = one_row(k.input("x", x_type, (x.m, columns)), row)
        self._weight = k.input("norm_weight", f32, (columns,), constant=True) if norm else None
        self._whole = Floats(self._x)
        if norm:
            self._parts = k.shared("norm_parts", f32, (m, config.warps))
        if inline:
            dynamic = self._is_dynamic(int8_bytes(m, columns))
            self._staged = k.shared("staged", s8, (m, row_bytes(columns)), dynamic=dynamic)
            self._whole = Ordered(self._staged, self._order)
        elif config.stage == "whole":
            self._staged = k.shared(
                "staged", f32, (m, columns), dynamic=self._is_dynamic(4 * m * columns)
            )
            self._whole = Floats(self._staged)
        elif config.stage == "chunks":
            most = _CHUNK_BYTES // 4 // m // _CHUNK_STEP
            steps = -(-columns // _CHUNK_STEP)
            # the fewest chunks, about equal: the last is often like the others
            even = -(-steps // -(-steps // most))
            self._chunk = k.shared("chunk", f32, (m, min(even * _CHUNK_STEP, columns)))

    def _is_dynamic(self, nbytes: int) -> bool:
        if nbytes > MOST_BYTES:
            raise KernelError(
                f"m={self._m} rows of columns={self._columns} take {nbytes} bytes of shared "
                f"memory, of at most {MOST_BYTES}: bring them in chunks, or quantize "
                "them in a kernel of its own"
            )
        return nbytes > _STATIC_BYTES

    def stage(self) -> None:
        """Emits the copy of complete rows to shared memory, with the configured norm and dtype."""
        staged = self._staged
        if staged is None:
            return
        if not self._config.floats:  # once, or ptxas computes a thread's positions for every run
            self._first_positions = self._order.positions(self._k.thread_id * RUN)
        if self._weight is not None:
            self._normalize(self._weight, staged)
        elif self._config.floats:
            self._copy(staged, 0, self._columns)
        else:  # all rows as one if each is a multiple of spans
            rows, columns = self._m, self._columns
            if columns % SPAN == 0:
                rows, columns = 1, rows * columns
            for j in range(rows):
                for run in self._loaded(self._x.at(j), columns):
                    self._put(staged, j, run)
        self._k.barrier()

    def pieces(self) -> Iterator[tuple[Activations, int]]:
        """Yields (activations, columns) for consecutive chunks of the columns.

        The body uses a chunk while it is in shared memory; without `stage="chunks"` there is one
        chunk.
        """
        k, chunk = self._k, self._chunk
        if chunk is None:
            yield self._whole, self._columns
            return
        step = chunk.shape[1]
        whole, rest = divmod(self._columns, step)
        with k.loop(0, whole) if whole > 1 else contextlib.nullcontext(0) as number:
            yield self._next(chunk, number * step, step), step
        if rest:
            yield self._next(chunk, whole * step, rest), rest

    def _next(self, chunk: Pointer, first: Value | int, columns: int) -> Activations:
        self._k.barrier()  # the previous chunk has been read
        self._copy(chunk, first, columns)
        self._k.barrier()
        return Floats(chunk)

    def _normalize(self, weight: Pointer, staged: Pointer) -> None:
        """Emits the RMSNorm of each row into shared memory; a row passes through registers once."""
        k, warps = self._k, self._config.warps
        with k.loop(0, self._m) if self._m > 1 else contextlib.nullcontext(0) as row:
            x = self._x.at(row)
            for run in normalize(
                k, x, weight, self._parts.at(row), columns=self._columns, eps=self._eps, warps=warps
            ):
                self._put(staged, row, run)

    def _put(self, staged: Pointer, row: Value | int, run: Run) -> None:
        """Emits the store of a run of a row to shared memory, as f32 or q8_1."""
        if self._config.floats:
            store_floats(staged.at(row, run.first), run.values, where=run.inside)
            return
        positions, offset = self._first_positions, run.offset * 5 // 4
        if RUN * self._threads % SPAN:
            positions, offset = self._order.positions(run.first), 0
        values, pair = (staged.at(row, position).at(offset) for position in positions)
        store_group(self._k, run.values, values, pair.cast(f32), where=run.inside)

    def _copy(self, target: Pointer, first: Value | int, columns: int) -> None:
        """Emits target[:, :columns] = x[:, first : first + columns]."""
        for j in range(self._m):
            for run in self._loaded(self._x.at(j, first), columns):
                store_floats(target.at(j).at(run.first), run.values, where=run.inside)

    def _loaded(self, x: Pointer, columns: int) -> Iterator[Run]:
        """Yields this thread's share of `columns` f32 at x as runs, several loads in flight."""
        step = RUN * self._threads * _AHEAD
        whole = columns - columns % step
        if whole:
            with self._k.loop(0, whole, step) as start:
                yield from load_runs(self._k, x, step, self._threads, start)
        yield from load_runs(self._k, x, columns - whole, self._threads, whole)

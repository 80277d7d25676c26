"""Epilogue of a thread block's matmul: adds bias and residual, gates, quantizes and stores."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...ptx import Builder, KernelError, Pointer, Value, all_of, f32, s8
from ..activation import GATES
from ..quantize_f16 import LANE, SUPER_BLOCK, F16Rows, f16_scale
from ..quantize_q8_1 import GROUP, largest_magnitude, store_group
from ..vectors import load_floats
from .config import GemmConfig
from .fragments import TILE_COLUMNS, Accumulators, accumulator_index
from .spans import ExpertTile, Span, tile_count

OUTPUTS = ("f32", "q8_1", "f16")
_SHARES = {"f32": 4, "q8_1": 4, "f16": LANE}  # adjacent values per lane


class _Share(NamedTuple):
    """Adjacent results of a lane: from weight row `n` on, for the activations in row `m`.

    Attributes:
      j: index of row `m` in the thread block's tile.
      where: whether the thread block stores these results; None means yes.
    """

    n: Value
    m: Value
    j: Value
    values: list[Value]
    where: Value | None


class TileEpilogue:
    """Declares the results (n weight rows, m rows of activations), and stores accumulated totals.

    The results are y f32 (m, n); with output "q8_1" values s8 (m, n) and scale_sum f32 (m, n / 32,
    2), as in `quantize_q8_1`; with "f16" values, means and scale, as in `quantize_f16`. Optional
    operands: `bias` f32 (n,) and `residual` f32 (m, n). With an activation, it gates the second
    matrix's totals by the first's (`GATES`).

    Thread blocks that split the columns, or that share 256 rows of an f16 result, form a cluster.
    """

    def __init__(
        self,
        k: Builder,
        n: int,
        m: int,
        config: GemmConfig,
        *,
        bias: bool = False,
        residual: bool = False,
        activation: str | None = None,
        output: str = "f32",
        suffix: str = "",
    ) -> None:
        if activation not in (None, *GATES):
            raise KernelError(f"activation={activation!r} must be one of {', '.join(GATES)}")
        if output not in OUTPUTS:
            raise KernelError(f"output={output!r} must be one of {', '.join(OUTPUTS)}")
        self._k, self._config, self.output, self._n = k, config, output, n
        self._gate = None if activation is None else GATES[activation]
        self._bias = k.input(f"bias{suffix}", f32, (n,), constant=True) if bias else None
        self._residual = k.input(f"residual{suffix}", f32, (m, n)) if residual else None
        #: Whether totals go through shared memory, replacing the ring.
        self.staged = output != "f32" or config.splits > 1
        #: Blocks along the weight rows that share super-blocks of an f16 result.
        self.together = 1
        if output == "f32":
            self._y = k.output(f"y{suffix}", f32, (m, n))
        elif output == "q8_1":
            self._check_rows(n % GROUP == 0 and config.rows % GROUP == 0, GROUP)
            self._values = k.output(f"values{suffix}_out", s8, (m, n))
            self._scale_sum = k.output(f"scale_sum{suffix}_out", f32, (m, n // GROUP, 2))
        else:
            self._check_rows(n % SUPER_BLOCK == 0 and SUPER_BLOCK % config.rows == 0, SUPER_BLOCK)
            names = [f"{name}{suffix}_out" for name in ("values", "means", "scale")]
            self._halves = F16Rows.outputs(k, m, n, names)
            self.together = SUPER_BLOCK // config.rows
        if self.together > 1 and config.splits > 1:
            raise KernelError(f"splits={config.splits}: blocks share rows of an f16 result already")

    @property
    def blocks(self) -> int:
        """Number of thread blocks along the weight rows."""
        return -(-self._n // self._config.rows)

    def _check_rows(self, fit: bool, unit: int) -> None:
        if not fit:
            raise KernelError(
                f"output={self.output!r} needs n={self._n} and a block's rows, 16 * tiles * "
                f"row_warps = {self._config.rows}, to be multiples of {unit}, or parts of it"
            )

    def clear(self, block_n: Span, rows: ExpertTile) -> None:
        """Emits stores of zeros to the tile's f32 results, for the thread block's weight rows."""
        k, threads = self._k, self._config.threads
        with k.loop(rows.first, rows.end) as row:
            for base in range(0, self._config.rows, threads):
                r = block_n.start + k.thread_id + base
                where = all_of(block_n.owns(r), k.thread_id < self._config.rows - base)
                self._y.at(row, r).store(0, 0.0, where=where)

    def store(
        self,
        totals: Sequence[Accumulators],
        first_rows: Sequence[Value],
        block_n: Span,
        block_m: Span | ExpertTile,
        summed: Value | None,
    ) -> None:
        """Emits the epilogue for the totals of the warp's tiles, one `Accumulators` per matrix.

        `first_rows`: the tiles' first weight rows in the thread block. All threads must reach it;
        `summed` is true in threads that hold the sums (None means all). If `staged`, the results
        overwrite the pipeline's ring in shared memory.
        """
        k = self._k
        finished = self._finished(totals, first_rows, block_n, block_m)
        if not self.staged:
            with _where(k, summed):
                for n, m, (value,), where in finished:
                    self._y.at(m, n).store(0, value, where=where)
            return
        # with this pitch, a tile's lanes (8 rows, every other activation) cover all banks
        shape = (block_m.size, self._config.rows + 4)
        count = len(totals) if self._config.splits > 1 else 1
        staged = [k.shared(f"results{i}", f32, shape, dynamic=True) for i in range(count)]
        with _where(k, summed):
            for n, m, values, _ in finished:
                for each, value in zip(staged, values, strict=True):
                    each.at(m - block_m.start, n - block_n.start).store(0, value)
        if self.output == "f16":
            self._store_halves(staged[0], block_n, block_m)
            return
        self._together()
        for share in self._shares(staged, block_n, block_m):
            self._store(share)
        if self._config.splits > 1:
            k.cluster_barrier()  # no block may exit while others read its shared memory

    def _together(self) -> None:
        """Emits a barrier of all thread blocks that share results."""
        if self._config.splits > 1 or self.together > 1:
            self._k.cluster_barrier()
        else:
            self._k.barrier()

    def _finished(
        self,
        totals: Sequence[Accumulators],
        first_rows: Sequence[Value],
        block_n: Span,
        block_m: Span | ExpertTile,
    ) -> Iterator[tuple[Value, Value, Sequence[Value], Value | None]]:
        """Yields (weight row, activation row, values, whether the thread block owns them).

        If thread blocks split the columns, the values are the totals of each matrix, and ownership
        is decided later; else there is one finished value.
        """
        k = self._k
        for first, *tiles in zip(first_rows, *totals, strict=True):
            for i, four in enumerate(zip(*tiles, strict=True)):
                for lane, values in enumerate(zip(*four, strict=True)):
                    n, m = accumulator_index(
                        k, block_n.start + first, block_m.start + TILE_COLUMNS * i, lane
                    )
                    if self._config.splits > 1:
                        yield n, m, values, None
                        continue
                    where = all_of(block_n.owns(n), block_m.owns(m))
                    yield n, m, [self._finish(n, m, values, where)], where

    def _finish(
        self, n: Value, m: Value, totals: Sequence[Value], where: Value | None, offset: int = 0
    ) -> Value:
        """Returns the finished result of weight row n + offset and activation row m."""
        total, *gated = totals
        if self._bias is not None:
            total = total + self._bias.at(n).load(offset, where=where)
        if self._residual is not None:
            total = total + self._residual.at(m, n).load(offset, where=where)
        return self._gate(self._k, total, *gated) if self._gate else total

    def _shares(
        self, staged: Sequence[Pointer], block_n: Span, block_m: Span | ExpertTile
    ) -> Iterator[_Share]:
        """Yields a lane's shares of the results staged in shared memory; the body is in a loop.

        In a cluster the loop covers only this thread block's part.
        """
        k, config = self._k, self._config
        # a row count that is not a multiple of four breaks alignment
        width = _SHARES[self.output] if self._n % 4 == 0 else 1
        per_row, count = config.rows // width, block_m.size // config.splits
        first = k.cluster_rank * count if config.splits > 1 else 0
        items = count * per_row
        with k.loop(0, items, config.threads) as base:
            item = base + k.thread_id
            inside = item < items if items % config.threads else None
            r, j = item % per_row * width, item // per_row + first
            n, m = block_n.start + r, block_m.start + j
            where = all_of(inside, block_n.owns(n), block_m.owns(m))
            addresses = [each.at(j, r) for each in staged]
            if config.splits == 1:
                values = load_floats(addresses[0], width, where=inside)
            else:
                sums = [self._summed(each, width, inside) for each in addresses]
                values = [
                    self._finish(n, m, of_matrices, where, i)
                    for i, of_matrices in enumerate(zip(*sums, strict=True))
                ]
            yield _Share(n, m, j, values, where)

    def _summed(self, address: Pointer, width: int, where: Value | None) -> list[Value]:
        """Sums `width` floats at one shared-memory address over the cluster, in order of rank."""
        parts = [
            load_floats(self._k.peer(address, rank), width, where=where)
            for rank in range(self._config.splits)
        ]
        return [functools.reduce(lambda a, b: a + b, column) for column in zip(*parts, strict=True)]

    def _store(self, share: _Share) -> None:
        """Emits the stores of a lane's share, as f32 or q8_1."""
        n, m, _, values, where = share
        if self.output == "f32":
            self._y.at(m, n).store_run(0, values, where=where)
            return
        targets = self._values.at(m, n), self._scale_sum.at(m, n // GROUP)
        store_group(self._k, values, *targets, where=where)

    def _store_halves(self, staged: Pointer, block_n: Span, block_m: Span | ExpertTile) -> None:
        """Emits the stores of f16 results.

        Thread blocks that share a super-block of 256 exchange their maxima first.
        """
        k, lanes = self._k, self._config.rows // LANE
        largest = k.shared("largest", f32, (block_m.size,), dynamic=True)
        k.barrier()
        for share in self._shares([staged], block_n, block_m):
            most = largest_magnitude(k, share.values, lanes)
            inside = share.j < block_m.size
            first = k.thread_id % lanes == 0
            largest.at(share.j).store(0, most, where=all_of(first, inside))
        self._together()
        for share in self._shares([staged], block_n, block_m):
            inside = share.j < block_m.size
            parts = [self._of_peer(largest.at(share.j), rank, inside) for rank in self._ranks]
            largest_of_all = functools.reduce(lambda a, b: k.maximum(a, b, keep_nan=True), parts)
            self._halves.store(
                share.m, share.n, share.values, f16_scale(k, largest_of_all), where=share.where
            )
        if self.together > 1:
            k.cluster_barrier()  # no block may exit while others read its shared memory

    @property
    def _ranks(self) -> range:
        return range(self.together)

    def _of_peer(self, address: Pointer, rank: int, where: Value) -> Value:
        return (address if self.together == 1 else self._k.peer(address, rank)).load(where=where)


def launch(
    k: Builder, config: GemmConfig, m: int, *epilogues: TileEpilogue, experts: int = 0
) -> None:
    """Sets the grid: (activation tiles, thread blocks of all weight rows, splits of columns)."""
    blocks = sum(e.blocks for e in epilogues)
    cluster = 1, epilogues[0].together, config.splits
    grid = tile_count(m, experts, config.m_tile), blocks, config.splits
    k.launch(grid, config.threads, resident_blocks=1, cluster=cluster)


def _where(k: Builder, condition: Value | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if condition is None else k.when(condition)

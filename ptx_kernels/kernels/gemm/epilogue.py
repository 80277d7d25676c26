"""The epilogue of a thread block's totals: bias, residual, gating, quantization, the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ...ptx import Builder, KernelError, Pointer, Value, all_of, f32, s8
from ..activation import GATES
from ..quantize_q8_1 import GROUP, store_group
from ..vectors import load_floats
from .config import GemmConfig
from .fragments import TILE_COLUMNS, Accumulators, place
from .spans import ExpertTile, Span

_SHARE = 4  # values of a group of 32 that a lane quantizes


class TileEpilogue:
    """Results of n weight rows and m rows of activations: declares them, stores totals.

    y f32 (m, n), or with output "q8_1" values s8 (m, n) and scale_sum f32 (m, n / 32, 2), as
    `quantize_q8_1` makes them. Operands: `bias` f32 (n,) and `residual` f32 (m, n), each where
    asked for. With an activation: that of the first matrix's totals and the second's (`GATES`).
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
        if output not in ("f32", "q8_1"):
            raise KernelError(f"output={output!r} must be f32 or q8_1")
        self._k, self._config, self.output = k, config, output
        self._gate = None if activation is None else GATES[activation]
        self._bias = k.input(f"bias{suffix}", f32, (n,), constant=True) if bias else None
        self._residual = k.input(f"residual{suffix}", f32, (m, n)) if residual else None
        if output == "f32":
            self._y = k.output(f"y{suffix}", f32, (m, n))
            return
        if n % GROUP or config.rows % GROUP:
            raise KernelError(
                f"output='q8_1' needs n={n} and a block's rows, 16 * tiles * row_warps = "
                f"{config.rows}, to be multiples of {GROUP}"
            )
        self._values = k.output(f"values{suffix}_out", s8, (m, n))
        self._scale_sum = k.output(f"scale_sum{suffix}_out", f32, (m, n // GROUP, 2))

    def clear(self, block_n: Span, rows: ExpertTile) -> None:
        """Zeros in the f32 results of the tile's rows and the block's weight rows."""
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
        """Finishes and stores totals, of each matrix those of the warp's tiles.

        `first_rows`: the tiles' first weight rows in the block. All threads come here; `summed`
        says which have the sums (None: all). For q8_1 what the ring held is overwritten.
        """
        k = self._k
        finished = self._finished(totals, first_rows, block_n, block_m)
        if self.output == "f32":
            with _where(k, summed):
                for n, m, value, where in finished:
                    self._y.at(m, n).store(0, value, where=where)
            return
        # a pitch at which the lanes of a tile, 8 rows and every other activation, meet all banks
        staged = k.shared("results", f32, (block_m.size, self._config.rows + 4), dynamic=True)
        with _where(k, summed):
            for n, m, value, _ in finished:
                staged.at(m - block_m.start, n - block_n.start).store(0, value)
        k.barrier()
        self._quantize(staged, block_n, block_m)

    def _finished(
        self,
        totals: Sequence[Accumulators],
        first_rows: Sequence[Value],
        block_n: Span,
        block_m: Span | ExpertTile,
    ) -> Iterator[tuple[Value, Value, Value, Value | None]]:
        """(weight row, activation, value, whether it is the block's)."""
        k = self._k
        for first, *tiles in zip(first_rows, *totals, strict=True):
            for i, four in enumerate(zip(*tiles, strict=True)):
                for lane, (value, *gated) in enumerate(zip(*four, strict=True)):
                    n, m = place(k, block_n.start + first, block_m.start + TILE_COLUMNS * i, lane)
                    where = all_of(block_n.owns(n), block_m.owns(m))
                    total: Value = value
                    if self._bias is not None:
                        total = total + self._bias.at(n).load(where=where)
                    if self._residual is not None:
                        total = total + self._residual.at(m, n).load(where=where)
                    yield n, m, self._gate(k, total, *gated) if self._gate else total, where

    def _quantize(self, staged: Pointer, block_n: Span, block_m: Span | ExpertTile) -> None:
        """Eight lanes for each group of 32 weight rows and row of activations."""
        k, lanes = self._k, GROUP // _SHARE
        groups, at_once = self._config.rows // GROUP, self._config.threads // lanes
        items = block_m.size * groups
        with k.loop(0, items, at_once) as base:
            item = base + k.thread_id // lanes
            inside = item < items if items % at_once else None
            r, j = item % groups * GROUP + k.thread_id % lanes * _SHARE, item // groups
            n, m = block_n.start + r, block_m.start + j
            share = load_floats(staged.at(j, r), _SHARE, where=inside)
            store_group(
                k,
                share,
                self._values.at(m, n),
                self._scale_sum.at(m, n // GROUP),
                where=all_of(inside, block_n.owns(n), block_m.owns(m)),
            )


def _where(k: Builder, condition: Value | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if condition is None else k.when(condition)

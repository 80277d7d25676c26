"""Epilogue of a mat-vec: adds bias and residual to a row's total, gates, quantizes and stores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ...ptx import WARP, Builder, KernelError, Pointer, Value, Var, f32, s8, u32
from ..activation import GATES
from ..quantize_q8_1 import GROUP, store_group
from .config import MatvecConfig
from .heads import HeadRows
from .rows import BlockRow, LaneResult, RowTotals, Team, one_row

_RESULTS_BYTES = 2048  # shared memory for the results of several rounds of a block


class Epilogue:
    """Declares the results (n weight rows, m activation rows), and finishes each team's totals.

    The results are y f32 (m, n), or with output "q8_1" values s8 (m, n) and scale_sum f32 (m, n /
    32, 2), as in `quantize_q8_1`. Optional operands: `bias` f32 (n,), two for gated projections,
    and `residual` f32 (m, n). Lane i of a team's first warp finishes value i of the team's
    rows_per_warp * m. With `block_row` a thread block has one of the m rows; an expert's bias is
    then f32 (experts, n). `heads`, if given, stores the results in the heads' layout, and there is
    no y.
    """

    def __init__(
        self,
        k: Builder,
        n: int,
        m: int,
        config: MatvecConfig,
        *,
        bias: bool = False,
        residual: bool = False,
        output: str = "f32",
        activation: str | None = None,
        suffix: str = "",
        block_row: BlockRow | None = None,
        heads: HeadRows | None = None,
    ) -> None:
        if activation not in (None, *GATES):
            raise KernelError(f"activation={activation!r} must be one of {', '.join(GATES)}")
        self._k, self._n, self.config = k, n, config
        row, self.m = (None, m) if block_row is None else (block_row.row, 1)
        self._gate = None if activation is None else GATES[activation]
        self._sums = RowTotals(
            k, config, config.rows_per_warp * self.m * (2 if activation else 1), suffix
        )
        prefixes = () if not bias else ("gate_", "up_") if activation else ("",)
        expert = None if block_row is None else block_row.expert
        shape = (n,) if block_row is None or expert is None else (block_row.experts, n)
        self._biases = [k.input(f"{p}bias{suffix}", f32, shape, constant=True) for p in prefixes]
        if expert is not None:
            self._biases = [bias.at(expert).reshape(n) for bias in self._biases]
        self._residual = (
            one_row(k.input(f"residual{suffix}", f32, (m, n)), row) if residual else None
        )
        self._addends = len(self._biases) + residual  # per value
        self._staged: Pointer | None = None
        self._heads, self._results = heads, list[Pointer]()
        if output not in ("f32", "q8_1"):
            raise KernelError(f"output={output!r} must be f32 or q8_1")
        if heads is None and output == "f32":
            self._y = one_row(k.output(f"y{suffix}", f32, (m, n)), row)
            self._results = [self._y]
        elif heads is None:
            self._declare_q8_1(m, row, suffix)

    def _declare_q8_1(self, m: int, row: Value | None, suffix: str) -> None:
        """Declares q8_1 results, and the shared memory in which they are collected."""
        k, n, config = self._k, self._n, self.config
        rows = config.block_rows
        if n % GROUP or rows % GROUP:
            raise KernelError(
                f"output='q8_1' needs n={n} and a block's rows, warps / warps_per_row * "
                f"rows_per_warp = {rows}, to be multiples of {GROUP}"
            )
        groups = (m, n // GROUP, 2)
        self._values = one_row(k.output(f"values{suffix}_out", s8, (m, n)), row)
        self._scale_sum = one_row(k.output(f"scale_sum{suffix}_out", f32, groups), row)
        self._results = [self._values, self._scale_sum]
        blocks = -(-n // rows)
        self._blocks = min(config.persistent or blocks, blocks)
        self._rounds = -(-blocks // self._blocks)
        self._slots = min(self._rounds, max(1, _RESULTS_BYTES // (4 * self.m * rows)))
        self._staged = k.shared(f"results{suffix}", f32, (self._slots, self.m, rows))
        self._arrived = k.shared(f"arrived{suffix}", u32, (self._slots,))

    @property
    def pair_stride(self) -> int:
        """Distance between the two rows of a pair (see `Team`); 0 if rows are not paired."""
        return 0 if self._heads is None else self._heads.pair_stride

    def begin(self) -> None:
        """Resets the arrival counters; all threads of the thread block must reach it, once."""
        k, config = self._k, self.config
        if self._staged is None:
            return
        self._arrived.store(k.thread_id, 0, where=k.thread_id < self._slots)
        if config.activations != "inline_q8" and config.stage != "whole":
            k.barrier()  # otherwise staging the activations executes one

    def load(self, team: Team) -> list[Value]:
        """Starts the loads of bias, residual and RoPE angles, in flight during the dot products.

        Returns the loaded values, for `store`.
        """
        terms: list[Value] = []
        for result in self._lane_results(team) if self._addends or self._heads else ():
            for bias in self._biases:
                at = bias.at(team.start).at(team.offset(result.r))
                terms.append(at.load(where=result.valid))
            if self._residual is not None:
                terms.append(self._of(self._residual, team, result).load(where=result.valid))
            if self._heads is not None:
                terms += self._heads.load(team, result)
        return terms

    def store(self, team: Team, parts: Sequence[Sequence[Var]], terms: Sequence[Value]) -> None:
        """Emits the sum of all lanes' partial totals[r][j], the epilogue, and the stores.

        `terms`: from `load`. All threads of the thread block must reach it. An activation is
        applied to totals[r][j] and totals[rows_per_warp + r][j] (`GATES`).
        """
        k, rows = self._k, self.config.rows_per_warp
        totals = self._sums(team, parts)
        slot = 0 if self._staged is None else self._slot(team)
        waiting = iter(terms)
        for result in self._lane_results(team):
            products = [
                self._lane_total(totals[first : first + rows], result.base)
                for first in range(0, len(totals), rows)
            ]
            for i, addend in enumerate(itertools.islice(waiting, self._addends)):
                at = i % len(products)
                products[at] = products[at] + addend
            value = products[0] if self._gate is None else self._gate(k, *products)
            if self._heads is not None:
                self._heads.store(team, result, value, waiting)
            elif self._staged is None:
                self._of(self._y, team, result).store(0, value, where=result.valid)
            else:
                column = team.row + result.r - self._first_row(team)
                self._staged.at(slot, result.j, column).store(0, value, where=result.valid)
        if self._staged is None:
            return
        k.warp_barrier()
        count = self._arrived.atomic_add(slot, 1, where=k.lane_id == 0, ordered=True)
        with k.when(k.shuffle(count, 0) == self.config.warps - 1):
            k.warp_barrier()  # makes what lane 0 has acquired visible to the other lanes
            if self._rounds > self._slots:
                self._arrived.store(slot, 0, where=k.lane_id == 0)
            self._quantize(self._staged, slot, self._first_row(team))

    def _slot(self, team: Team) -> Value | int:
        """Returns the index of the shared-memory slot for a round's results.

        Warps do not wait for each other until all slots are used. Then the thread block waits until
        all earlier rounds are quantized.
        """
        if self._rounds == 1:
            return 0
        k, slots = self._k, self._slots
        number = self._first_row(team) // (self.config.block_rows * self._blocks)
        if self._rounds == slots:
            return number
        slot = number % slots
        with k.when((slot == 0) & (number > 0)):
            k.barrier()
        return slot

    def clear(self, blocks: int) -> None:
        """Emits stores of zeros to all results of this activation row.

        `blocks` thread blocks along x divide the stores.
        """
        k, threads = self._k, WARP * self.config.warps
        first = k.block_id() * threads + k.thread_id
        for results in self._results:
            words = results.cast(u32)
            count = math.prod(words.shape)
            for base in range(0, count, blocks * threads):
                index = first + base
                words.store(index, 0, where=index < count)

    def _lane_results(self, team: Team) -> list[LaneResult]:
        k, rows = self._k, self.config.rows_per_warp
        results = []
        for base in range(0, rows * self.m, WARP):
            value = k.lane_id + base if base else k.lane_id
            r, j = value % rows, value // rows if self.m > 1 else 0
            valid = value < rows * self.m
            if team.first is not None:
                valid = valid & (team.row + r >= team.first)
            if team.member is not None:
                valid = valid & (team.member == 0)
            results.append(LaneResult(base, j, r, valid))
        return results

    def _of(self, results: Pointer, team: Team, result: LaneResult) -> Pointer:
        """Returns the address in `results` (m, n) of the lane's value `result`.

        The address that all lanes share is computed first, which saves registers.
        """
        return results.at(0, team.row).at(
            result.r if isinstance(result.j, int) else result.j * self._n + result.r
        )

    def _lane_total(self, totals: Sequence[Sequence[Value]], base: int) -> Value:
        """Emits the selection of the lane's total from totals[r][j], ordered as `_lane_results`."""
        flat = [row[j] for j in range(self.m) for row in totals][base : base + WARP]
        selected = flat[0]
        for lane, total in enumerate(flat[1:], 1):
            selected = self._k.select(self._k.lane_id == lane, total, selected)
        return selected

    def _first_row(self, team: Team) -> Value:
        """Returns the thread block's first weight row."""
        first = team.row if team.first is None else team.first
        return first - team.number * self.config.rows_per_warp

    def _quantize(self, staged: Pointer, slot: Value | int, first_row: Value) -> None:
        """Emits q8_1 quantization, by one warp, of each group of 32 rows per activation row."""
        k = self._k
        groups = self.config.block_rows // GROUP
        for j, group in itertools.product(range(self.m), range(groups)):
            column = k.lane_id + group * GROUP
            row = first_row + column
            inside = row < self._n
            share = staged.at(slot, j, column).load(where=inside)
            store_group(
                k,
                [share],
                self._values.at(j, row),
                self._scale_sum.at(j, row // GROUP),
                where=inside,
            )

"""The epilogue of a row's total: bias, residual, gating, quantization, the store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ...ptx import WARP, Builder, KernelError, Pointer, Value, Var, f32, s8
from ..activation import GATES
from ..quantize_q8_1 import GROUP, store_group
from .config import MatvecConfig
from .rows import RowTotals, Team


@dataclass(frozen=True)
class _Place:
    """A lane's value base + lane: of activations `j` and the team's row `r`, finished if `mine`."""

    base: int
    j: Value | int
    r: Value
    mine: Value


class Epilogue:
    """Results of n weight rows and m rows of activations: declares them, finishes teams' totals.

    y f32 (m, n), or with output "q8_1" values s8 (m, n) and scale_sum f32 (m, n / 32, 2), as
    `quantize_q8_1` makes them. Operands: `bias` f32 (n,), `residual` f32 (m, n), each where asked
    for. Lane i of a team's first warp finishes value i of the team's rows_per_warp * m.
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
    ) -> None:
        if activation not in (None, *GATES):
            raise KernelError(f"activation={activation!r} must be one of {', '.join(GATES)}")
        self._k, self._n, self.m, self.config = k, n, m, config
        self._gate = None if activation is None else GATES[activation]
        self._sums = RowTotals(
            k, config, config.rows_per_warp * m * (2 if activation else 1), suffix
        )
        self._bias = k.input(f"bias{suffix}", f32, (n,), constant=True) if bias else None
        self._residual = k.input(f"residual{suffix}", f32, (m, n)) if residual else None
        self._addends = bias + residual  # of a value
        self._staged: Pointer | None = None
        if output == "f32":
            self._y = k.output(f"y{suffix}", f32, (m, n))
            return
        if output != "q8_1":
            raise KernelError(f"output={output!r} must be f32 or q8_1")
        rows = config.block_rows
        if n % GROUP or rows % GROUP:
            raise KernelError(
                f"output='q8_1' needs n={n} and a block's rows, warps / warps_per_row * "
                f"rows_per_warp = {rows}, to be multiples of {GROUP}"
            )
        self._values = k.output(f"values{suffix}_out", s8, (m, n))
        self._scale_sum = k.output(f"scale_sum{suffix}_out", f32, (m, n // GROUP, 2))
        self._staged = k.shared(f"results{suffix}", f32, (m, rows))

    def load(self, team: Team) -> list[Value]:
        """Starts the loads of this lane's addends; they arrive while the dot products run."""
        addends: list[Value] = []
        for place in self._places(team) if self._addends else ():
            if self._bias is not None:
                addends.append(self._bias.at(team.row).at(place.r).load(where=place.mine))
            if self._residual is not None:
                addends.append(self._of(self._residual, team, place).load(where=place.mine))
        return addends

    def store(self, team: Team, parts: Sequence[Sequence[Var]], addends: Sequence[Value]) -> None:
        """Adds the lanes' parts to a team's totals[r][j], and stores these + what `load` gave.

        All threads of the block come here.

        With an activation: that of totals[r][j] and totals[rows_per_warp + r][j] (`GATES`).
        """
        k, rows = self._k, self.config.rows_per_warp
        totals = self._sums(team, parts)
        if self._staged is not None and self.config.persistent:
            k.barrier()  # the previous rows have been quantized
        waiting = iter(addends)
        for place in self._places(team):
            value = self._mine(totals[:rows], place.base)
            for addend in itertools.islice(waiting, self._addends):
                value = value + addend
            if self._gate is not None:
                value = self._gate(k, value, self._mine(totals[rows:], place.base))
            if self._staged is None:
                self._of(self._y, team, place).store(0, value, where=place.mine)
            else:
                column = team.row + place.r - self._first_row(team)
                self._staged.at(place.j, column).store(0, value, where=place.mine)
        if self._staged is not None:
            k.barrier()
            self._quantize(self._staged, self._first_row(team))

    def _places(self, team: Team) -> list[_Place]:
        k, rows = self._k, self.config.rows_per_warp
        places = []
        for base in range(0, rows * self.m, WARP):
            value = k.lane_id + base if base else k.lane_id
            r, j = value % rows, value // rows if self.m > 1 else 0
            mine = value < rows * self.m
            if team.first is not None:
                mine = mine & (team.row + r >= team.first)
            if team.member is not None:
                mine = mine & (team.member == 0)
            places.append(_Place(base, j, r, mine))
        return places

    def _of(self, results: Pointer, team: Team, place: _Place) -> Pointer:
        """Place of a value in (m, n) results.

        The address that all lanes share comes first, which saves registers.
        """
        return results.at(0, team.row).at(
            place.r if isinstance(place.j, int) else place.j * self._n + place.r
        )

    def _mine(self, totals: Sequence[Sequence[Value]], base: int) -> Value:
        """This lane's of the totals[r][j], in the order of `_places`."""
        flat = [row[j] for j in range(self.m) for row in totals][base : base + WARP]
        mine = flat[0]
        for lane, total in enumerate(flat[1:], 1):
            mine = self._k.select(self._k.lane_id == lane, total, mine)
        return mine

    def _first_row(self, team: Team) -> Value:
        """The thread block's first row."""
        first = team.row if team.first is None else team.first
        return first - team.number * self.config.rows_per_warp

    def _quantize(self, staged: Pointer, first_row: Value) -> None:
        """A warp for each group of 32 rows and row of activations in turn, a value a lane."""
        k = self._k
        groups = self.config.block_rows // GROUP
        for base in range(0, self.m * groups, self.config.warps):
            item = k.warp_id + base
            column = item % groups * GROUP + k.lane_id
            j, row = item // groups, first_row + column
            there = (row < self._n) & (j < self.m)
            share = staged.at(j, column).load(where=there)
            store_group(
                k,
                [share],
                self._values.at(j, row),
                self._scale_sum.at(j, row // GROUP),
                where=there,
            )

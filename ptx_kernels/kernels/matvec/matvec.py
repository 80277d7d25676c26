"""Packed weights times one to eight rows of activations: the decode step's matrix products."""

from __future__ import annotations

from ...ptx import Builder, f32, kernel
from .activations import inputs
from .config import MatvecConfig
from .rows import Dots, matrix, row_totals, teams


@kernel
def matvec(k: Builder, *, format: str, n: int, columns: int, m: int, config: MatvecConfig) -> None:
    """y[j, r] = dequantize(w[r]) . x[j] for rows r < n of `columns` weights and activations j < m.

    A team of `warps_per_row` warps takes `rows_per_warp` rows. With q8_1 activations the integer dot products of a
    sub-block come from dp4a, and its scale and the activations' scale are applied once per sub-block; with f32
    activations the quants become floats. A butterfly adds the lanes' totals, shared memory those of the warps.
    """
    config.check(format, n, columns, m)
    k.name = f"matvec_{format.lower()}_m{m}"
    weights = matrix(k, format, n, columns)
    x = inputs(k, config.activations, m, columns)
    y = k.output("y", f32, (m, n))
    with teams(k, n, config) as team:
        dots = Dots(k, weights, team, m, config, floats=x.floats)
        with team.active(k):
            dots.add(x, weights.blocks)
        for r, totals in enumerate(row_totals(k, team, dots.totals, config)):
            for j, total in enumerate(totals):
                y.at(j, team.row + r).store(0, total, where=team.owns(k, r))

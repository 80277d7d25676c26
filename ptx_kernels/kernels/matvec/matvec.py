"""Mat-vec kernel: packed weights times one to eight rows of activations, for decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

from ...ptx import Builder, Value, kernel
from .config import MatvecConfig
from .dot import MatrixLoads
from .epilogue import Epilogue
from .experts import Choice, Experts, chosen, where_named
from .prologue import InputRows, Prologue
from .rows import Matrix, Team, launch, matrix, team_of, teams
from .weights import PrefetchedWeights, Weights


def multiply(
    k: Builder,
    weights: Weights,
    prologue: Prologue,
    epilogue: Epilogue,
    block_teams: AbstractContextManager[Team],
    *,
    ends_loads: bool,
) -> None:
    """Emits a mat-vec with the weight rows of a thread block's teams (see `teams`).

    The activations are staged. `ends_loads`: whether no load of the kernel follows those of the
    dot products.
    """
    with block_teams as team:
        addends = epilogue.load(team)
        dots = weights.dots(team)
        for x, columns in prologue.pieces():
            weights.add(dots, team, x, columns)
        if ends_loads:
            k.loads_end()  # before the sums, whose registers are still free
        epilogue.store(team, [row for part in dots for row in part.totals], addends)


def product(
    k: Builder,
    matrices: Sequence[Matrix],
    prologue: Prologue,
    epilogue: Epilogue,
    blocks: int,
    block: Value | None = None,
    *,
    single: bool = False,
) -> None:
    """Emits `multiply` for all rows of a matrix, or of a gated pair, over `blocks` thread blocks.

    See `teams` for `blocks` and `block`. With `config.ahead` it stages the activations while the
    first rows' weights are in flight; otherwise the caller has staged them. `single`: the kernel
    contains nothing else, and this is not in a branch.
    """
    config, n, stride = epilogue.config, matrices[0].rows, epilogue.pair_stride
    # not earlier: addresses of other products would occupy registers
    loads = [MatrixLoads(k, each, each.planes.of_matrix(), epilogue.m, config) for each in matrices]
    weights = PrefetchedWeights(loads) if config.ahead else Weights(loads)
    if isinstance(weights, PrefetchedWeights):
        group = k.block_id() if block is None else block
        if weights.first_trip is not None:
            weights.first_trip.load(team_of(k, n, config, group, stride))
        epilogue.begin()
        prologue.stage()
    block_teams = teams(k, n, config, blocks, block=block, pair_stride=stride)
    ends_loads = single and not config.persistent
    multiply(k, weights, prologue, epilogue, block_teams, ends_loads=ends_loads)


def whole_product(
    k: Builder,
    matrices: Sequence[Matrix],
    prologue: Prologue,
    epilogue: Epilogue,
    choice: Choice | None,
) -> None:
    """Emits `product` on the full grid, or on the thread blocks whose expert id is in range."""
    times = 1 if choice is None else choice.count
    (blocks,) = launch(k, epilogue.config, matrices[0].rows, times=times)
    with where_named(k, choice, epilogue, blocks):
        if not epilogue.config.ahead:
            epilogue.begin()
            prologue.stage()
        product(k, matrices, prologue, epilogue, blocks, single=choice is None)


@kernel
def matvec(
    k: Builder,
    *,
    format: str,
    n: int,
    x: InputRows,
    layers: int = 0,
    bias: bool = False,
    residual: bool = False,
    moe: Experts,
    output: Literal["f32", "q8_1"] = "f32",
    config: MatvecConfig,
) -> None:
    """Kernel: y[j, r] = dequantize(w[r]) . x[j] for weight rows r < n and activation rows j < m.

    Rows have `columns` values. A team of `warps_per_row` warps processes `rows_per_warp` rows. With
    q8_1 activations dp4a computes the integer dot products of a sub-block; its scale and the
    activations' scale are applied once per sub-block. With f32 activations the quants become
    floats. A butterfly adds the lanes' totals; the warps' totals are added in shared memory.

    Operands: the planes, or with `layers` the planes of a stack and an index (see `input_planes`);
    values s8 (m, columns) and scale_sum f32 (m, columns / 32, 2), or x of `dtype` (m, columns) if
    `config.activations` is not q8_1; with `norm`, norm_weight f32 (columns,); bias f32 (n,);
    residual f32 (m, n). Result: y f32 (m, n), or as q8_1.

    With `experts` the planes and the bias are stacks (experts, n, ...). The first operand `ids`,
    s32 (m, top), selects the matrix for y[j * top + i, r]: ids[j, i] is selected expert i of row j.
    An id outside 0 to experts - 1 gives zeros. y and the residual then have m * top rows.
    """
    m, columns = x.m, x.columns
    choice = chosen(k, m, moe)
    config.check(format, n, columns, 1 if choice else m)
    k.name = f"{'expert_' if choice else ''}matvec_{format.lower()}_m{m}"
    weights = matrix(
        k, format, n, columns, layers=layers, block_row=choice, streamed=config.streamed
    )
    prologue = Prologue(k, x, config, choice)
    results = choice.count if choice else m
    epilogue = Epilogue(
        k, n, results, config, bias=bias, residual=residual, output=output, block_row=choice
    )
    whole_product(k, [weights], prologue, epilogue, choice)

"""Mat-vec kernel: packed weights times one to eight rows of activations, for decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ...ptx import Builder, Value, kernel
from .config import MatvecConfig
from .dot import Dots, Early
from .epilogue import Epilogue
from .experts import Choice, chosen, where_named
from .prologue import Prologue
from .rows import Matrix, Team, launch, matrix, team_of, teams


def product(
    k: Builder,
    weights: Sequence[Matrix],
    prologue: Prologue,
    epilogue: Epilogue,
    count: int,
    block: Value | None = None,
    *,
    alone: bool = False,
) -> None:
    """Emits a mat-vec with all rows of a matrix, or of a gated pair, over `count` thread blocks.

    See `teams` for `count` and `block`. With `config.ahead` it stages the activations while the
    first rows' weights are in flight; otherwise the caller has staged them. `alone`: the kernel
    contains nothing else, and this is not in a branch.
    """
    config = epilogue.config
    # not earlier: addresses of other products would occupy registers
    planes = [each.planes.of_matrix() for each in weights]
    early = [
        Early(k, each.format, own, epilogue.m, config)
        if config.ahead and each.columns >= config.trip(each.format)
        else None
        for each, own in zip(weights, planes, strict=True)
    ]
    if config.ahead:
        group = k.block_id() if block is None else block
        if early[0] is not None:
            early[0].load(team_of(k, weights[0].rows, config, group, epilogue.apart))
        epilogue.begin()
        prologue.stage()
    with teams(k, weights[0].rows, config, count, block=block, apart=epilogue.apart) as team:
        terms = epilogue.load(team)
        dots = [
            Dots(k, each.format, own, team, epilogue.m, config, early=there)
            for each, own, there in zip(weights, planes, early, strict=True)
        ]
        for x, width in prologue.pieces():
            for i, (part, each) in enumerate(zip(dots, weights, strict=True)):
                with team.active(k):
                    part.add(x, width // each.block_size)
                _load_next(k, early, i, team)
        if alone and not config.persistent:
            k.loads_end()  # before the sums, whose registers are still free
        epilogue.store(team, [row for part in dots for row in part.totals], terms)


def _load_next(k: Builder, early: Sequence[Early | None], i: int, team: Team) -> None:
    """Emits, after matrix i, the first loads of the next matrix, or of the next team."""
    if i + 1 < len(early):
        if (following := early[i + 1]) is not None:
            following.load(team)
    elif (first := early[0]) is not None and team.following is not None:
        assert team.goes_on is not None
        with k.when(team.goes_on):
            first.load(team.following)


def whole_product(
    k: Builder,
    weights: Sequence[Matrix],
    prologue: Prologue,
    epilogue: Epilogue,
    choice: Choice | None,
) -> None:
    """Emits `product` on the full grid, or on the thread blocks whose expert id is in range."""
    times = 1 if choice is None else choice.count
    (blocks,) = launch(k, epilogue.config, weights[0].rows, times=times)
    with where_named(k, choice, epilogue, blocks):
        if not epilogue.config.ahead:
            epilogue.begin()
            prologue.stage()
        product(k, weights, prologue, epilogue, blocks, alone=choice is None)


@kernel
def matvec(
    k: Builder,
    *,
    format: str,
    n: int,
    columns: int,
    m: int,
    layers: int = 0,
    norm: bool = False,
    eps: float = 0.0,
    dtype: str = "f32",
    bias: bool = False,
    residual: bool = False,
    experts: int = 0,
    top: int = 0,
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
    `config.activations` is not q8_1; with `norm`, norm_weight f32 (columns,), and x becomes x /
    sqrt(mean(x^2) + eps) * norm_weight; bias f32 (n,); residual f32 (m, n). Result: y f32 (m, n),
    or as q8_1.

    With `experts` the planes and the bias are stacks (experts, n, ...). The first operand `ids`,
    s32 (m, top), selects the matrix for y[j * top + i, r]: ids[j, i] is selected expert i of row j.
    An id outside 0 to experts - 1 gives zeros. y and the residual then have m * top rows.
    """
    choice = chosen(k, m, experts, top)
    config.check(format, n, columns, 1 if choice else m)
    k.name = f"{'expert_' if choice else ''}matvec_{format.lower()}_m{m}"
    weights = matrix(k, format, n, columns, layers=layers, own=choice, streamed=config.streamed)
    prologue = Prologue(
        k, m=m, columns=columns, norm=norm, eps=eps, dtype=dtype, config=config, own=choice
    )
    results = choice.count if choice else m
    epilogue = Epilogue(
        k, n, results, config, bias=bias, residual=residual, output=output, own=choice
    )
    whole_product(k, [weights], prologue, epilogue, choice)

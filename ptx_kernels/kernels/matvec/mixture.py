"""Down projection of a mixture of experts (MoE): sums a token's selected experts in one mat-vec."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import formats
from ...ptx import Builder, KernelError, Pointer, Value, Var, f32, kernel, s8, s32, u32
from ..planes import input_planes
from ..quantize_q8_1 import GROUP
from .activations import Floats, Quantized
from .config import MatvecConfig
from .dot import Dots, MatrixLoads, Streams, team_streams
from .epilogue import Epilogue
from .experts import Experts, check_choices, check_shared
from .rows import BlockRow, Matrix, Team, launch, teams

_COLUMNS_AT_ONCE = 256  # columns per choice, so that its loads use complete lines


@kernel
def mixture_matvec(
    k: Builder,
    *,
    format: str,
    n: int,
    columns: int,
    m: int,
    moe: Experts,
    biases: bool = False,
    scales: bool = False,
    residual: bool = False,
    config: MatvecConfig,
) -> None:
    """Kernel: y[t, r] = sum over selected experts of weight * (scale * (w[r] . h) + bias[r]).

    With `residual`, residual[t, r] is added. Selected expert i < top of token t is e = ids[t, i]
    with weight = weights[t, i], w = w[e], scale = expert_scales[e], bias = biases[e] and h = h[t *
    top + i]. An id outside 0 to experts - 1 adds nothing. The streams of a team are divided over
    the selected experts, several at once (`choices_at_once`). A row of all selected experts
    together is then as much work as one of a dense matrix, and no intermediate result goes through
    memory. The order of the sums is fixed.

    A `shared` expert is expert number `experts`, the last of every token: ids and weights are (m,
    top + 1), h has m * (top + 1) rows, and its planes (n, ...) follow those of the stack.

    Operands: ids s32 (m, top), weights f32 (m, top), the planes (experts, n, ...), h like the
    activations of `matvec` without a norm, f32 or q8_1 with m * top rows; biases f32 (experts, n);
    expert_scales f32 (experts,); residual f32 (m, n). Result: y f32 (m, n).
    """
    experts, top = moe.experts, moe.top + moe.shared
    check_choices(experts, moe.top)
    if moe.shared:
        check_shared(biases or scales)
    config.check(format, n, columns, 1)
    if config.activations == "inline_q8" or config.stage != "none" or config.broadcast_header:
        raise KernelError(
            "a mixture's activations are q8_1 or f32, stage='none', broadcast_header=False, not "
            f"{config.activations}, stage={config.stage!r}, {config.broadcast_header}"
        )
    k.name = f"mixture_{'shared_' if moe.shared else ''}matvec_{format.lower()}_m{m}"
    token = k.block_id("y")
    block_row = BlockRow(token, token, experts)
    ids, weights = k.input("ids", s32, (m, top)), k.input("weights", f32, (m, top))
    stack: dict[str, Any] = dict(experts=experts, shared=moe.shared, streamed=config.streamed)
    planes = input_planes(k, format, n, columns, **stack)
    h = _activations(k, config, m * top, columns)
    terms = _Terms(
        token,
        ids,
        weights,
        k.input("biases", f32, (experts, n), constant=True) if biases else None,
        k.input("expert_scales", f32, (experts,), constant=True) if scales else None,
    )
    epilogue = Epilogue(k, n, m, config, residual=residual, block_row=block_row)
    (blocks,) = launch(k, config, n, times=m)
    matrix = Matrix(format, n, columns, planes)
    with teams(k, n, config, blocks) as team:
        addends = epilogue.load(team)
        totals = [k.var(f32, 0.0) for _ in range(config.rows_per_warp)]
        with team.active(k):
            _add_choices(k, matrix, h, terms, team, config, totals)
        epilogue.store(team, [[total] for total in totals], addends)


@dataclass(frozen=True)
class _Terms:
    """Operands for summing a token's selected experts, without the experts' matrices."""

    token: Value
    ids: Pointer
    weights: Pointer
    biases: Pointer | None
    scales: Pointer | None


def _activations(k: Builder, config: MatvecConfig, rows: int, columns: int) -> Quantized | Floats:
    if config.floats:
        return Floats(k.input("h", f32, (rows, columns)))
    pairs = (rows, columns // GROUP, 2)
    return Quantized(k.input("values", s8, (rows, columns)), k.input("scale_sum", f32, pairs))


def choices_at_once(config: MatvecConfig, format: str, columns: int, top: int) -> int:
    """Returns how many of a token's selected experts a team's streams process at once.

    The streams are divided equally. It is the number that takes the fewest loop trips. An expert
    has at least 256 columns at a time, so that its loads use complete lines.
    """
    streams, block = config.streams(format), formats.get(format).block_size
    least = max(1, _COLUMNS_AT_ONCE // block)
    parts = [p for p in range(1, streams // least + 1) if streams % p == 0] or [1]
    return min(
        reversed(parts),
        key=lambda p: -(-top // p) * -(-columns // (block * (streams // p))),
    )


def _add_choices(
    k: Builder,
    matrix: Matrix,
    h: Quantized | Floats,
    terms: _Terms,
    team: Team,
    config: MatvecConfig,
    totals: Sequence[Var],
) -> None:
    """Emits totals[r] += this lane's part of the sum over the token's selected experts."""
    top = terms.ids.shape[1]
    experts = matrix.planes.operands[0].shape[0] + bool(matrix.planes.last)
    at_once = choices_at_once(config, matrix.format, matrix.columns, top)
    streams = team_streams(k, matrix.format, team, config)
    each, lanes = streams.count // at_once, config.lanes_per_block(matrix.format)
    part, choice_streams = streams.number // each, Streams(each, streams.number % each)
    rounds = -(-top // at_once)
    lane = choice_streams.number * lanes + k.lane_id % lanes  # among the lanes that share a choice
    first = terms.token * top + part  # among all tokens' choices
    with k.loop(0, rounds) if rounds > 1 else contextlib.nullcontext(0) as number:
        choice = first if rounds == 1 else number * at_once + first
        inside = choice < terms.token * top + top if top % at_once else None
        expert = terms.ids.at(0, choice).load(where=inside).bits(u32)
        weight = terms.weights.at(0, choice).load(where=inside)
        named = expert < experts
        with k.when(named if inside is None else named & inside):
            loads = MatrixLoads(k, matrix, matrix.planes.of_matrix(expert), 1, config)
            dots = Dots(loads, team, choice_streams)
            dots.add(h.row(choice), matrix.columns // matrix.block_size)
            scale = None if terms.scales is None else terms.scales.at(expert).load()
            for r, (total, (part_of_row,)) in enumerate(zip(totals, dots.totals, strict=True)):
                value: Value = part_of_row if scale is None else part_of_row * scale
                if terms.biases is not None:
                    bias = terms.biases.at(expert, team.row).load(r, where=lane == 0)
                    value = value + bias
                k.accumulate(total, value, weight)

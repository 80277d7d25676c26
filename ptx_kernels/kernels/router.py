"""Kernel that computes an MoE router's logits: few rows of f32 weights times few activations.

The rows may be those of several matrices, such as a router's and a shared expert's gate.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from dataclasses import dataclass
from typing import Any

from ..limits import MAX_ROUTED_EXPERTS, MAX_ROWS
from ..ptx import WARP, Builder, KernelError, Value, f32, kernel
from .family import Case, Family, Rule, once
from .vectors import RUN, load_floats

_UNROLL = 2  # runs in flight per thread


@dataclass(frozen=True)
class RouterConfig:
    warps: int = 8  # per block, one row of weights each


@kernel
def router(
    k: Builder,
    *,
    rows: tuple[int, ...],
    columns: int,
    m: int,
    norm: bool = False,
    eps: float = 0.0,
    biases: bool = False,
    config: RouterConfig = RouterConfig(),
) -> None:
    """Kernel: y_i[j, r] = w_i[r] . x[j] [+ bias_i[r]] in f32, one thread block per weight row.

    Matrix i has rows[i] rows. Weights are read once. With `norm`, x is replaced by x /
    sqrt(mean(x^2) + eps) * norm_weight. A thread block sums the squares along with the products and
    scales them at the end, so the norm needs no separate pass.

    Operands: each w f32 (rows[i], columns), x f32 (m, columns), with `norm` norm_weight f32
    (columns,), with `biases` each bias f32 (rows[i],). Results: each y f32 (m, rows[i]).
    """
    if not rows or sum(rows) > MAX_ROUTED_EXPERTS or m > MAX_ROWS or columns % RUN:
        raise KernelError(
            f"rows={rows} must be 1 to {MAX_ROUTED_EXPERTS} in total, m={m} at most {MAX_ROWS}, "
            f"and columns={columns} a multiple of {RUN}"
        )
    names = [""] if len(rows) == 1 else [str(i) for i in range(len(rows))]
    each = [*zip(names, rows, strict=True)]
    matrices = [k.input(f"w{i}", f32, (n, columns), constant=True) for i, n in each]
    x = k.input("x", f32, (m, columns))
    factors = k.input("norm_weight", f32, (columns,), constant=True) if norm else None
    addends = [k.input(f"bias{i}", f32, (n,), constant=True) for i, n in each] if biases else []
    results = [k.output(f"y{i}", f32, (m, n)) for i, n in each]
    warps, places = config.warps, _places(k, rows)
    k.launch((sum(rows),), WARP * warps)
    w, *others = (
        matrix.at(row).reshape(columns) for matrix, (row, _) in zip(matrices, places, strict=True)
    )
    for other, (_, inside) in zip(others, places[1:], strict=True):
        assert inside is not None
        w = other.where(inside, w)
    parts = k.shared("parts", f32, ((1 + norm) * m, warps))
    products = [k.var(f32, 0.0) for _ in range(m)]
    squares = [k.var(f32, 0.0) for _ in range(m)] if norm else []

    def add(start: Value | int, count: int) -> None:
        """Emits this thread's products of `count` columns from `start` on, added to the totals."""
        offsets: list[tuple[Value, Value | None]] = []
        for base in range(0, count, RUN * WARP * warps):
            offset = k.thread_id * RUN + base
            inside = None if base + RUN * WARP * warps <= count else offset < count
            offsets.append((offset + start, inside))
        weights = [load_floats(w.at(at), RUN, where=inside) for at, inside in offsets]
        inputs = [
            [load_floats(x.at(j, at), RUN, where=inside) for at, inside in offsets]
            for j in range(m)
        ]
        if factors is not None:
            scales = [load_floats(factors.at(at), RUN, where=inside) for at, inside in offsets]
            weights = [
                [a * b for a, b in zip(*pair, strict=True)]
                for pair in zip(weights, scales, strict=True)
            ]
        for j, runs in enumerate(inputs):
            for run, run_weights in zip(runs, weights, strict=True):
                for value, weight in zip(run, run_weights, strict=True):
                    k.accumulate(products[j], value, weight)
                    if norm:
                        k.accumulate(squares[j], value, value)

    step = RUN * WARP * warps * _UNROLL
    whole, rest = divmod(columns, step)
    if whole:
        with k.loop(0, whole) if whole > 1 else contextlib.nullcontext(0) as number:
            add(number * step, step)
    if rest:
        add(whole * step, rest)
    totals = [k.warp_sum(total) for total in (*products, *squares)]
    for i, total in enumerate(totals):
        parts.at(i, k.warp_id).store(0, total, where=k.lane_id == 0)
    k.barrier()
    j = k.thread_id
    with k.when(j < m):
        value = _sum(parts.at(j).load_run(0, warps))
        if norm:
            mean = _sum(parts.at(j + m).load_run(0, warps)) * (1 / columns)
            value = value * (k.const(f32, 1.0) / k.sqrt(mean + eps))
        for addend, (row, inside) in zip(addends, places, strict=False):
            value = value + addend.at(row).load(where=inside)
        for y, (row, inside) in zip(results, places, strict=True):
            y.at(j, row).store(0, value, where=inside)


def _places(k: Builder, rows: tuple[int, ...]) -> list[tuple[Value, Value | None]]:
    """Returns the thread block's row in each matrix, and whether the matrix has that row.

    Consecutive thread blocks have the rows of the matrices in order; a row before those of its
    matrix wraps around. None means that there is one matrix.
    """
    block, start, found = k.block_id(), 0, list[tuple[Value, Value | None]]()
    for n in rows:
        row = block - start if start else block
        found.append((row, row < n if len(rows) > 1 else None))
        start += n
    return found


def _sum(values: list[Value]) -> Value:
    return functools.reduce(operator.add, values)


def _rule(columns: int) -> RouterConfig:
    """Returns the Config for a row length: per thread two 16-byte loads of each operand.

    A thread block has up to 16 warps.
    """
    return RouterConfig(warps=min(1 << max(columns // 256 - 1, 0).bit_length(), 16))


router_rule: Rule[RouterConfig] = Rule("router", _rule)


_ONE: dict[str, Any] = dict(columns=2048, m=1)

ROUTER = Family(
    router,
    (
        Case.of(router, "128x2048-m1", rows=(128,), norm=True, eps=1e-6, **_ONE),
        Case.of(router, "256+1x2048-m1", rows=(256, 1), norm=True, eps=1e-6, **_ONE),
        Case.of(router, "128x2048-m8", rows=(128,), columns=2048, m=8, norm=True, eps=1e-6),
        Case.of(
            *(router, "32x2880-m1"),
            rows=(32,),
            columns=2880,
            m=1,
            biases=True,
            config=RouterConfig(16),
        ),
    ),
    rules=(router_rule,),
    passes=once,
)

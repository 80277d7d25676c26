"""RMSNorm of rows, one thread block per row: a kernel, and code for a mat-vec's prologue."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..ptx import WARP, Builder, KernelError, Pointer, Value, f32, half_of_warps, kernel, s8
from .family import Case, Family, Rule, once
from .quantize_f16 import LANE, F16Rows, f16_scale
from .quantize_q8_1 import GROUP, largest_magnitude, store_group
from .reduce import across_warps
from .vectors import RUN, Run, load_floats, load_runs, store_floats

_MAX_RUNS = 16  # runs of a row that a thread holds in registers
MAX_COLUMNS = _MAX_RUNS * RUN * WARP * 32  # of a row that the largest block (32 warps) holds


@dataclass(frozen=True)
class RmsNormConfig:
    warps: int = 8  # per block, one row each


def inverse_rms(
    k: Builder, mine: Sequence[Value], total: Callable[[Value], Value], *, count: int, eps: float
) -> Value:
    """Emits 1 / sqrt(mean(x^2) + eps) of `count` values.

    `mine`: this thread's values; `total` emits a sum over threads.
    """
    squares = functools.reduce(lambda part, x: k.fma(x, x, part), mine, k.const(f32, 0.0))
    mean = total(squares) * (1 / count)
    return k.const(f32, 1.0) / k.sqrt(mean + eps)


def normalize(
    k: Builder,
    x: Pointer,
    weight: Pointer,
    parts: Pointer,
    *,
    columns: int,
    eps: float,
    warps: int,
    run: int = RUN,
    residual: Pointer | None = None,
) -> list[Run]:
    """Emits [residual +] x / sqrt(mean(x^2) + eps) * weight for a row of f32.

    Returns this thread's share, in runs of `run` values. The row, at `x`, has `columns` values. It
    is read once and stays in registers. `parts` is as in `across_warps`, whose barrier this emits.
    """
    most = _MAX_RUNS * RUN * WARP * warps
    if columns % run or columns > most:
        raise KernelError(
            f"columns={columns} must be a multiple of {run}, and of {warps} warps at most {most}"
        )
    row = load_runs(k, x, columns, WARP * warps, run=run)
    # loaded before the sum is known, since nothing else hides their latency
    factors = [load_floats(weight.at(each.first), run, where=each.inside) for each in row]
    addends = [
        load_floats(residual.at(each.first), run, where=each.inside)
        for each in row
        if residual is not None
    ]
    mine = [value for each in row for value in each.values]
    inverse = inverse_rms(
        k,
        mine,
        lambda part: across_warps(k, parts, part, operator.add, warps=warps),
        count=columns,
        eps=eps,
    )
    scaled = []
    for i, (each, weights) in enumerate(zip(row, factors, strict=True)):
        values = [x * inverse * weight for x, weight in zip(each.values, weights, strict=True)]
        if addends:
            values = [value + addend for value, addend in zip(values, addends[i], strict=True)]
        scaled.append(replace(each, values=values))
    return scaled


@kernel
def rms_norm(
    k: Builder,
    *,
    rows: int,
    columns: int,
    eps: float,
    residual: bool = False,
    output: Literal["f32", "q8_1", "f16"] = "f32",
    config: RmsNormConfig = RmsNormConfig(),
) -> None:
    """Kernel: y = [residual +] x / sqrt(mean(x^2) + eps) * weight, one thread block per row.

    The outputs "q8_1" and "f16" are those of `quantize_q8_1` and `quantize_f16` for y.
    """
    if output not in ("f32", "q8_1", "f16"):
        raise KernelError(f"output={output!r} must be f32, q8_1 or f16")
    x = k.input("x", f32, (rows, columns))
    weight = k.input("weight", f32, (columns,), constant=True)
    addend = k.input("residual", f32, (rows, columns)) if residual else None
    k.launch((rows,), WARP * config.warps, resident_blocks=half_of_warps(config.warps))
    row = k.block_id()
    parts = k.shared("parts", f32, (config.warps,))
    normal = functools.partial(
        normalize,
        k,
        x.at(row),
        weight,
        parts,
        columns=columns,
        eps=eps,
        warps=config.warps,
        residual=None if addend is None else addend.at(row),
    )
    if output == "f32":
        y = k.output("y", f32, (rows, columns))
        for run in normal():
            store_floats(y.at(row, run.first), run.values, where=run.inside)
        return
    if output == "f16":
        halves = F16Rows.outputs(k, rows, columns)
        for run in normal(run=LANE):  # a warp has a super-block
            factors = f16_scale(k, largest_magnitude(k, run.values, WARP))
            halves.store(row, run.first, run.values, factors, where=run.inside)
        return
    if columns % GROUP:
        raise KernelError(f"columns={columns} must be a multiple of {GROUP} for output={output!r}")
    values = k.output("values", s8, (rows, columns))
    scale_sum = k.output("scale_sum", f32, (rows, columns // GROUP, 2))
    for run in normal():
        group = run.first // GROUP
        store_group(
            k, run.values, values.at(row, run.first), scale_sum.at(row, group), where=run.inside
        )


def _rule(columns: int) -> RmsNormConfig:
    """Returns the Config for a row length: four 16-byte loads per thread, up to 32 warps."""
    return RmsNormConfig(warps=min(1 << max(columns // 512 - 1, 0).bit_length(), 32))


rms_norm_rule: Rule[RmsNormConfig] = Rule("rms_norm", _rule)


def _case(output: str, columns: int, warps: int, *, residual: bool = False) -> Case:
    sizes = dict(rows=1, columns=columns, eps=1e-5, residual=residual)
    config, label = RmsNormConfig(warps), f"{output}-{columns}{'-residual' if residual else ''}"
    return Case.of(rms_norm, label, **sizes, output=output, config=config)


RMS_NORM = Family(
    rms_norm,
    (
        _case("f32", 4096, 8),
        _case("q8_1", 4096, 8),
        _case("q8_1", 896, 2),
        _case("q8_1", 16384, 32),
        _case("f16", 4096, 8),
        _case("f32", 5376, 16, residual=True),
    ),
    rules=(rms_norm_rule,),
    passes=once,
)

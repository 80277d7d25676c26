"""Kernel that scales rows of activations by powers of two and casts them to f16, for XLA's matmul.

`quantize_f16` has a scale per 256 columns, which kernels of this package apply as they accumulate.
A matmul without scale support needs one scale for the full sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..limits import MAX_F16_ROW
from ..ptx import WARP, Builder, KernelError, Value, bf16, f16, f32, half_of_warps, kernel
from .activation import GATES
from .family import Case, Family, Rule, once
from .quantize_f16 import MOST, block_f16_scale
from .rms_norm import normalize
from .vectors import RUN, Run, float_type, load_floats, load_runs, store_floats

#: Maximum columns of normalized rows: a thread also holds the norm's weight.
MAX_NORMALIZED = MAX_F16_ROW // 2
_GATED_RUN = 8  # f16 per 16-byte load


@dataclass(frozen=True)
class F16RowsConfig:
    warps: int = 8  # per block, one row each


@kernel
def f16_rows(
    k: Builder,
    *,
    rows: int,
    columns: int,
    dtype: str = "f32",
    eps: float | None = None,
    activation: str | None = None,
    below: int = MOST,
    config: F16RowsConfig = F16RowsConfig(),
) -> None:
    """Kernel: values = f16(x / scale), with a power-of-two scale per row; one row per thread block.

    The scale is `f16_scale` of the row's largest magnitude and `below`. With `eps`, x is first
    normalized like in `rms_norm`. With `activation`, x is that gate applied to two matmul results,
    which are f16 with scales per row and per column.

    Operands: x of `dtype` (rows, columns) and, with `eps`, which requires f32, weight f32
    (columns,); or gate and up f16 (rows, columns), row_scale f32 (rows,), gate_scale and up_scale
    bf16 (columns,). Results: values f16 (rows, columns), scale f32 (rows,). columns: a multiple of
    4, of 8 with `activation`, and at most MAX_F16_ROW, or MAX_NORMALIZED with `eps`.
    """
    multiple = _GATED_RUN if activation else RUN
    most = MAX_F16_ROW if eps is None else MAX_NORMALIZED
    if columns % multiple or columns > most:
        raise KernelError(f"columns={columns} must be a multiple of {multiple}, and at most {most}")
    if eps is not None and (activation or dtype != "f32"):
        raise KernelError(f"dtype={dtype!r} must be f32, without an activation, for eps={eps}")
    parts = k.shared("parts", f32, (config.warps,))
    plain = eps is None and not activation
    resident = None if plain else half_of_warps(config.warps)
    k.launch((rows,), WARP * config.warps, resident_blocks=resident)
    row = k.block_id()
    if activation:
        mine = _gated(k, row, (rows, columns), activation, config.warps)
    elif eps is None:
        x = k.input("x", float_type(dtype), (rows, columns)).at(row)
        mine = load_runs(k, x, columns, WARP * config.warps)
    else:
        x = k.input("x", f32, (rows, columns)).at(row)
        weight = k.input("weight", f32, (columns,), constant=True)
        squares = k.shared("squares", f32, (config.warps,))
        mine = normalize(k, x, weight, squares, columns=columns, eps=eps, warps=config.warps)
    values = k.output("values", f16, (rows, columns))
    scales = k.output("scale", f32, (rows,))
    every = [value for run in mine for value in run.values]
    inverse, scale = block_f16_scale(k, parts, every, below, warps=config.warps)
    for run in mine:
        scaled = [value * inverse for value in run.values]
        store_floats(values.at(row, run.first), scaled, where=run.inside)
    scales.at(row).store(0, scale, where=k.thread_id == 0)


def _gated(
    k: Builder, row: Value, shape: tuple[int, int], activation: str, warps: int
) -> Sequence[Run]:
    """Emits the gate applied to one row; returns this thread's share of the result."""
    gate, up = (k.input(name, f16, shape) for name in ("gate", "up"))
    row_scale = k.input("row_scale", f32, shape[:1]).at(row).load()
    of_columns = [k.input(name, bf16, shape[1:]) for name in ("gate_scale", "up_scale")]
    loaded = [
        load_runs(k, product.at(row), shape[1], WARP * warps, run=_GATED_RUN)
        for product in (gate, up)
    ]
    runs = []
    for pair in zip(*loaded, strict=True):
        first, inside = pair[0].first, pair[0].inside
        products = []
        for run, scale in zip(pair, of_columns, strict=True):
            factors = load_floats(scale.at(first), _GATED_RUN, where=inside)
            pairs = zip(run.values, factors, strict=True)
            products.append([value * row_scale * factor for value, factor in pairs])
        values = [GATES[activation](k, g, u) for g, u in zip(*products, strict=True)]
        runs.append(Run(first, values, inside))
    return runs


def _rule(columns: int) -> F16RowsConfig:
    """Returns the Config for a row length: 16 values per thread, up to 32 warps."""
    return F16RowsConfig(warps=min(1 << max(columns // 512 - 1, 0).bit_length(), 32))


f16_rows_rule: Rule[F16RowsConfig] = Rule("f16_rows", _rule)


def _case(label: str, columns: int, warps: int, **arguments: object) -> Case:
    sizes = dict(rows=512, columns=columns, config=F16RowsConfig(warps))
    return Case.of(f16_rows, label, **sizes, **arguments)


F16_ROWS = Family(
    f16_rows,
    (
        _case("f32", 4096, 8),
        _case("bf16", 4096, 8, dtype="bf16"),
        _case("norm", 4096, 8, eps=1e-5, below=1),
        _case("longest-norm", MAX_NORMALIZED, 32, eps=1e-5),
        *(_case(name, 14336, 32, activation=name) for name in GATES),
        _case("longest-gate", MAX_F16_ROW, 32, activation="silu"),
    ),
    rules=(f16_rows_rule,),
    passes=once,
)

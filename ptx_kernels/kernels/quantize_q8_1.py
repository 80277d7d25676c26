"""Activations to int8 in groups of 32, the right-hand side of the dp4a mat-vecs."""

from __future__ import annotations

from dataclasses import dataclass

from ..ptx import Builder, f32, kernel, s8, s32, u32, u64
from .vectors import float_type, load_floats

GROUP = 32  # values that share a scale
_LANES = 8  # per group; each holds 4 values


@dataclass(frozen=True)
class QuantizeConfig:
    warps: int = 4  # per block


@kernel
def quantize_q8_1(
    k: Builder, *, rows: int, columns: int, dtype: str = "f32", config: QuantizeConfig = QuantizeConfig()
) -> None:
    """values = round(x * (127 / amax)), scale = amax * (1 / 127), sum = scale * sum(values), per group of 32.

    Eight lanes share a group, four values each. The sum is exact before it is scaled, and kept in f32: in f16,
    as ggml's q8_1 has it, it overflows for activations above about 2,000. A NaN or an infinity in a group makes
    its scale NaN or infinite and so every output of that row NaN; other rows are untouched.
    """
    groups = rows * columns // GROUP
    x = k.input("x", float_type(dtype), (rows, columns))
    values = k.output("values", s8, (rows, columns))
    scale_sum = k.output("scale_sum", f32, (rows, columns // GROUP, 2))
    threads = 32 * config.warps
    k.launch((-(-groups * _LANES // threads),), threads)

    thread = k.block_id() * threads + k.thread_id
    group, part = thread // _LANES, thread % _LANES
    inside = group < groups
    mine = load_floats(x.at(0, thread.to(u64) * 4), 4, where=inside)  # lanes past the end shuffle zeros
    amax = k.const(f32, 0.0)
    for value in mine:
        amax = k.instruction("max.NaN.f32", amax, k.instruction("abs.f32", value))
    amax = k.warp_reduce(amax, lambda a, b: k.instruction("max.NaN.f32", a, b), lanes=_LANES)
    inverse = k.select(amax == 0.0, k.const(f32, 0.0), k.const(f32, 127.0) / amax)
    # the bounds matter for an amax below 2^-120, whose inverse rounds up or overflows
    quants = [k.maximum(k.minimum((value * inverse).to(s32), 127), -127) for value in mine]
    total = k.warp_reduce(quants[0] + quants[1] + quants[2] + quants[3], lambda a, b: a + b, lanes=_LANES)
    with k.when(inside):
        low = [q.bits(u32) & 0xFF for q in quants]
        word = low[0] | (low[1] << 8) | (low[2] << 16) | (low[3] << 24)
        values.cast(u32).store(thread, word)
        with k.when(part == 0):
            scale = amax * (1 / 127)
            scale_sum.store(group * 2, (scale, scale * total.to(f32)))

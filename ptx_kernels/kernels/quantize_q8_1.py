"""Kernel that quantizes activations to int8 in groups of 32 (q8_1), the input of dp4a mat-vecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..limits import GROUP
from ..ptx import Builder, Pointer, Value, all_of, f32, kernel, s8, s32, u32, u64
from .family import Case, Family, once
from .vectors import float_type, load_floats, pack_bytes

_LANES = 8  # per group; each holds 4 values


@dataclass(frozen=True)
class QuantizeConfig:
    warps: int = 4  # per block


def largest_magnitude(k: Builder, share: Sequence[Value], lanes: int) -> Value:
    """Emits the largest magnitude of f32 over `lanes` adjacent lanes; every lane gets it.

    The result is NaN if any f32 is.
    """
    amax = k.const(f32, 0.0)
    for value in share:
        amax = k.maximum(amax, k.abs(value), keep_nan=True)
    return k.warp_reduce(amax, lambda a, b: k.maximum(a, b, keep_nan=True), lanes=lanes)


def to_int8(k: Builder, share: Sequence[Value], lanes: int) -> tuple[list[Value], Value]:
    """Emits the quantization of f32 in `lanes` adjacent lanes; returns (quants, amax).

    quants are s32 round(x * (127 / amax)) of this lane's f32.
    """
    amax = largest_magnitude(k, share, lanes)
    inverse = k.select(amax == 0.0, k.const(f32, 0.0), k.const(f32, 127.0) / amax)
    # the bounds matter for an amax below 2^-120, whose inverse rounds up or overflows
    quants = [k.maximum(k.minimum((value * inverse).to(s32), 127), -127) for value in share]
    return quants, amax


def store_group(
    k: Builder,
    share: Sequence[Value],
    values: Pointer,
    scale_sum: Pointer,
    *,
    where: Value | None = None,
) -> None:
    """Emits quantization and store of a group of 32; adjacent lanes hold 1 or 4 of its f32 each.

    values = round(x * (127 / amax)), scale = amax * (1 / 127), sum = scale * sum(values). The sum
    is exact before it is scaled, and stored in f32. In f16, as in ggml's q8_1, it overflows for
    activations above about 2,000. A NaN or an infinity makes the group's scale NaN or infinite.
    Full warps must reach it, in groups that begin at a multiple of their lanes.

    `values` (s8) and `scale_sum` (f32) point to this lane's first value and its group's pair, in
    global or shared memory. Nothing is stored if `where` is false (the same for all lanes of a
    group).
    """
    lanes = GROUP // len(share)
    quants, amax = to_int8(k, share, lanes)
    total = quants[0]
    for quant in quants[1:]:
        total = total + quant
    total = k.warp_sum(total, lanes=lanes)
    if len(quants) == 1:
        values.store(0, quants[0], where=where)
    else:
        values.cast(u32).store(0, pack_bytes([q.bits(u32) & 0xFF for q in quants]), where=where)
    first = k.lane_id % lanes == 0
    scale = amax * (1 / 127)
    scale_sum.store(0, (scale, scale * total.to(f32)), where=all_of(first, where))


@kernel
def quantize_q8_1(
    k: Builder,
    *,
    rows: int,
    columns: int,
    dtype: str = "f32",
    config: QuantizeConfig = QuantizeConfig(),
) -> None:
    """Kernel: quantizes x in groups of 32 per row to (values, scale_sum), eight lanes per group.

    See `store_group`. A NaN or an infinity in a group makes every product with that row NaN; other
    rows are not affected.
    """
    groups = rows * columns // GROUP
    x = k.input("x", float_type(dtype), (rows, columns))
    values = k.output("values", s8, (rows, columns))
    scale_sum = k.output("scale_sum", f32, (rows, columns // GROUP, 2))
    threads = 32 * config.warps
    k.launch((-(-groups * _LANES // threads),), threads)

    thread = k.block_id() * threads + k.thread_id
    group, first = thread // _LANES, thread.to(u64) * 4
    inside = group < groups
    mine = load_floats(x.at(0, first), 4, where=inside)  # lanes past the end shuffle zeros
    store_group(k, mine, values.at(0, first), scale_sum.at(0, group), where=inside)


QUANTIZE_Q8_1 = Family(
    quantize_q8_1,
    tuple(
        Case.of(quantize_q8_1, dtype, rows=1, columns=4096, dtype=dtype)
        for dtype in ("f32", "bf16", "f16")
    ),
    passes=once,
)

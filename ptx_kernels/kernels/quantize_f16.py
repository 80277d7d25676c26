"""Activations to f16 for tensor cores, in super-blocks of 256 that share a power of two."""

from __future__ import annotations

from ..ptx import WARP, Builder, Value, f16, f32, kernel, u32, u64
from .family import Case, Family, once
from .quantize_q8_1 import GROUP, largest_magnitude
from .vectors import float_type, load_floats, pack_floats

SUPER_BLOCK = 256
_LANE = SUPER_BLOCK // WARP  # values
_WARPS = 4  # per block


def f16_scale(k: Builder, largest: Value) -> tuple[Value, Value]:
    """(1 / scale, scale) of values up to `largest`, f32: a power of two.

    Over the scale the largest lies in [2^14, 2^15), one below 2^-112 to 2^126 times as much. NaN or
    infinity makes the scale NaN.
    """
    exponent = largest.bits(u32) & 0x7F800000
    inverse = k.minimum((127 + 127 + 14 << 23) - exponent, 253 << 23)
    scale = k.select(exponent == 0x7F800000, k.const(u32, 0x7FC00000), (254 << 23) - inverse)
    return inverse.bits(f32), scale.bits(f32)


@kernel
def quantize_f16(k: Builder, *, rows: int, columns: int, dtype: str = "f32") -> None:
    """values = x / scale rounded to f16, with a power of two for 256 columns, which a warp has.

    It brings the largest magnitude into [2^14, 2^15), one below 2^-112 to 2^126 times as much.
    Values lie in the order that `gemm.fragments.f16_weights` wants. The mean of every 32 of them is
    the sum of two f16, (high, low). A NaN or an infinity makes the scale NaN.
    """
    count = rows * columns // SUPER_BLOCK
    x = k.input("x", float_type(dtype), (rows, columns))
    values = k.output("values", f16, (rows, columns))
    means = k.output("means", f16, (rows, columns // GROUP, 2))
    scales = k.output("scale", f32, (rows, columns // SUPER_BLOCK))
    k.launch((-(-count // _WARPS),), WARP * _WARPS)

    block, lane = k.block_id() * _WARPS + k.warp_id, k.lane_id
    first = block.to(u64) * SUPER_BLOCK
    with k.when(block < count):
        mine = load_floats(x.at(0, first).at(lane * _LANE), _LANE)
        inverse, scale = f16_scale(k, largest_magnitude(k, mine, WARP))
        rounded = [(value * inverse).to(f16).to(f32) for value in mine]
        pairs = [pack_floats(a, b, f16) for a, b in zip(rounded[::2], rounded[1::2], strict=True)]
        place = values.at(0, first).cast(u32).at(lane // 2 * 8 + lane % 2 * 2)
        place.store(0, (pairs[0], pairs[2]))
        place.store(4, (pairs[1], pairs[3]))
        mean = k.warp_sum(sum(rounded[1:], rounded[0]), lanes=GROUP // _LANE) * (1 / GROUP)
        high = mean.to(f16).to(f32)
        words = means.cast(u32).at(0, block.to(u64) * (SUPER_BLOCK // GROUP) + (lane // 4).to(u64))
        words.store(0, pack_floats(high, mean - high, f16), where=lane % 4 == 0)
        scales.at(0, block).store(0, scale, where=lane == 0)


QUANTIZE_F16 = Family(
    "quantize_f16",
    quantize_f16,
    tuple(
        Case(f"quantize_f16-{dtype}", "quantize_f16", dict(rows=512, columns=4096, dtype=dtype))
        for dtype in ("f32", "bf16", "f16")
    ),
    passes=once,
)

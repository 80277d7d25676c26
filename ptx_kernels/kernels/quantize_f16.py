"""Kernel that scales activations by powers of two, one per 256 columns, and casts them to f16."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from ..limits import SUPER_BLOCK
from ..ptx import WARP, Builder, KernelError, Pointer, Value, all_of, f16, f32, kernel, u32
from .family import Case, Family, once
from .quantize_q8_1 import GROUP, largest_magnitude
from .reduce import across_warps
from .vectors import float_type, load_floats, pack_floats

LANE = SUPER_BLOCK // WARP  # values
NAMES = ("values", "means", "scale")  # names of the results
MOST = 1 << 15  # default upper bound of scaled f16 magnitudes, a power of two
_WARPS = 4  # per block


def f16_scale(k: Builder, largest: Value, below: int = MOST) -> tuple[Value, Value]:
    """Emits (1 / scale, scale), a power of two that brings f32 up to `largest` into f16's range.

    Divided by the scale, the largest magnitude is in [below / 2, below). A magnitude less than
    2^-126 * below is multiplied by 2^126. If `below` is 1, a magnitude of 2^126 or more stays above
    the range. NaN or infinity makes the scale NaN. KernelError: `below` is not a power of two from
    1 to MOST.
    """
    if below & (below - 1) or not 0 < below <= MOST:
        raise KernelError(f"below={below} must be a power of two from 1 to {MOST}")
    top = below.bit_length() - 2
    exponent = largest.bits(u32) & 0x7F800000
    # an inverse must not be subnormal
    finite = exponent if top > 0 else k.minimum(exponent, (253 + top) << 23)
    inverse = k.minimum((127 + 127 + top << 23) - finite, 253 << 23)
    scale = k.select(exponent == 0x7F800000, k.const(u32, 0x7FC00000), (254 << 23) - inverse)
    return inverse.bits(f32), scale.bits(f32)


def block_f16_scale(
    k: Builder, parts: Pointer, values: Sequence[Value], below: int, *, warps: int
) -> tuple[Value, Value]:
    """Emits `f16_scale` of all values of a thread block's threads; all threads must reach it.

    `parts`: shared memory, f32 (warps,), as in `across_warps`.
    """
    larger = functools.partial(k.maximum, keep_nan=True)
    mine = largest_magnitude(k, values, WARP)
    return f16_scale(k, across_warps(k, parts, mine, larger, warps=warps), below)


@dataclass(frozen=True)
class F16Rows:
    """Output arrays for f16 activations (rows, columns), in super-blocks of 256 that share a scale.

    Attributes:
      values: f16 (rows, columns), in the order that `gemm.fragments.f16_weights` expects.
      means: f16 (rows, columns / 32, 2): a group's mean is the sum of (high, low).
      scales: f32 (rows, columns / 256), powers of two.
    """

    k: Builder
    values: Pointer
    means: Pointer
    scales: Pointer

    @classmethod
    def outputs(cls, k: Builder, rows: int, columns: int, names: Sequence[str] = NAMES) -> F16Rows:
        """Declares the output arrays.

        Raises KernelError if columns is not a multiple of a super-block.
        """
        if columns % SUPER_BLOCK:
            raise KernelError(f"columns={columns} must be a multiple of {SUPER_BLOCK} for f16")
        values, means, scales = names
        return cls(
            k,
            k.output(values, f16, (rows, columns)),
            k.output(means, f16, (rows, columns // GROUP, 2)),
            k.output(scales, f32, (rows, columns // SUPER_BLOCK)),
        )

    def store(
        self,
        row: Value | int,
        column: Value,
        share: Sequence[Value],
        factors: tuple[Value, Value],
        *,
        where: Value | None = None,
    ) -> None:
        """Emits the scaling, cast and store of a lane's 8 f32, of `row`, from `column` (u32) on.

        The next lanes hold the next columns. `factors`: `f16_scale` of the super-block. Full warps
        must reach it, with four lanes per group.
        """
        k, (inverse, scale) = self.k, factors
        rounded = [(value * inverse).to(f16).to(f32) for value in share]
        pairs = [pack_floats(a, b, f16) for a, b in zip(rounded[::2], rounded[1::2], strict=True)]
        lane = column // LANE
        address = self.values.at(row).cast(u32).at(lane // 2 * 8 + lane % 2 * 2)
        address.store(0, (pairs[0], pairs[2]), where=where)
        address.store(4, (pairs[1], pairs[3]), where=where)
        mean = k.warp_sum(sum(rounded[1:], rounded[0]), lanes=GROUP // LANE) * (1 / GROUP)
        high = mean.to(f16).to(f32)
        first = all_of(lane % (GROUP // LANE) == 0, where)
        words = self.means.at(row).cast(u32).at(column // GROUP)
        words.store(0, pack_floats(high, mean - high, f16), where=first)
        first = all_of(column % SUPER_BLOCK == 0, where)
        self.scales.at(row, column // SUPER_BLOCK).store(0, scale, where=first)


@kernel
def quantize_f16(k: Builder, *, rows: int, columns: int, dtype: str = "f32") -> None:
    """Kernel: values = f16(x / scale), with a power-of-two scale per 256 columns, one per warp.

    The scale brings the largest magnitude into [2^14, 2^15); a magnitude below 2^-112 is multiplied
    by 2^126. Values are in the order that `gemm.fragments.f16_weights` expects. The mean of every
    32 values is the sum of two f16, (high, low). A NaN or an infinity makes the scale NaN.
    """
    count = rows * columns // SUPER_BLOCK
    x = k.input("x", float_type(dtype), (rows, columns))
    out = F16Rows.outputs(k, rows, columns)
    k.launch((-(-count // _WARPS),), WARP * _WARPS)

    block = k.block_id() * _WARPS + k.warp_id
    blocks = columns // SUPER_BLOCK  # per row
    with k.when(block < count):
        row, column = block // blocks, block % blocks * SUPER_BLOCK + k.lane_id * LANE
        mine = load_floats(x.at(row, column), LANE)
        out.store(row, column, mine, f16_scale(k, largest_magnitude(k, mine, WARP)))


QUANTIZE_F16 = Family(
    quantize_f16,
    tuple(
        Case.of(quantize_f16, dtype, rows=512, columns=4096, dtype=dtype)
        for dtype in ("f32", "bf16", "f16")
    ),
    passes=once,
)

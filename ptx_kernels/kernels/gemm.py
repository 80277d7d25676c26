"""Packed weights times many rows of q8_1 activations on tensor cores: prompts, and batches beyond the mat-vec's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import formats
from ..formats import q4_0, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0
from ..formats.fragments import UNITS, Fragments, Group
from ..ptx import WARP, Builder, KernelError, Pointer, Value, Var, all_of, f32, kernel, s8, s32, u8
from .quantize_q8_1 import GROUP
from .ring import HalfCopy, Ring, Rows, TileCopy

SUPER_BLOCK = 256
_GROUPS = SUPER_BLOCK // GROUP
_COLUMNS = 64  # two f16 scales: copies take 4 bytes at least
_FRAGMENTS: dict[str, Fragments] = {
    module.FORMAT.name: module.fragments_of for module in (q4_k, q5_k, q6_k, q8_0, q5_0, q5_1, q4_0)
}
FORMATS = tuple(_FRAGMENTS)
#: 1.5 * 2^23 as bits: an integer below 2^22 added to them gives the float of the sum, with no conversion
_MAGIC_BITS, _MAGIC = 0x4B400000, 12582912.0

Totals = list[list[list[Var]]]  # [tile of 16 weight rows][8 activations][as mma's C]


@dataclass(frozen=True)
class GemmConfig:
    """How a product spreads over the GPU. A block makes y for 16 * tiles * row_warps weight rows, m_tile activations.

    Attributes:
      row_warps: warps with weight rows of their own.
      column_warps: 1, 2 or 4 warps that share rows and split each super-block's columns; their totals meet at the end.
      tiles: of 16 weight rows, per warp; they share the loads of activations.
      m_tile: rows of activations of a block, a multiple of 16.
      stages: super-blocks in shared memory, one in use and the others on their way.
    """

    row_warps: int = 4
    column_warps: int = 1
    tiles: int = 2
    m_tile: int = 64
    stages: int = 2

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return 16 * self.tiles * self.row_warps

    def check(self, format: str, columns: int) -> None:
        """KernelError where rows of so many weights of the format cannot be multiplied so."""
        if format not in FORMATS:
            raise KernelError(f"format={format!r} must be one of {', '.join(FORMATS)}")
        if not takes(format, columns):
            multiple = max(_COLUMNS, formats.get(format).block_size)
            raise KernelError(f"columns={columns} must be a multiple of {multiple} for {format}")
        if self.m_tile < 16 or self.m_tile % 16:
            raise KernelError(f"m_tile={self.m_tile} must be a multiple of 16")
        if self.column_warps not in (1, 2, 4):
            raise KernelError(f"column_warps={self.column_warps} must be 1, 2 or 4")
        for name, least, most in (("row_warps", 1, 32 // self.column_warps), ("tiles", 1, 8), ("stages", 2, 16)):
            if not least <= (value := getattr(self, name)) <= most:
                raise KernelError(f"{name}={value} must be {least} to {most}")


def takes(format: str, columns: int) -> bool:
    """Whether there is a kernel for rows of so many weights."""
    return format in FORMATS and columns > 0 and columns % max(_COLUMNS, formats.get(format).block_size) == 0


@kernel
def gemm(k: Builder, *, format: str, n: int, columns: int, m: int, config: GemmConfig = GemmConfig()) -> None:
    """y[j, r] = dequantize(w[r]) . x[j] for rows r < n of `columns` weights and q8_1 activations j < m.

    mma gives the exact integer dot products of every group of 32 columns, of 16 weight rows with 8 activations; the
    scales of both are applied to these in f32, as in the mat-vec. Packed weights and activations come through a ring
    of stages of one super-block each.
    """
    config.check(format, columns)
    k.name = f"gemm_{format.lower()}_m{config.m_tile}"
    layout = formats.get(format)
    steps, threads = -(-columns // SUPER_BLOCK), WARP * config.row_warps * config.column_warps
    blocks = columns // layout.block_size
    planes = [k.input(p.name, u8, (n, blocks, p.bytes_per_block), constant=True) for p in layout.planes]
    values = k.input("values", s8, (m, columns))
    scale_sum = k.input("scale_sum", f32, (m, columns // GROUP, 2))
    y = k.output("y", f32, (m, n))
    k.launch((-(-m // config.m_tile), -(-n // config.rows)), threads, resident_blocks=1)

    row_warp, column_warp = k.warp_id % config.row_warps, k.warp_id // config.row_warps
    m_tile, n_tile = _Tile(k, k.block_id("x"), m, config.m_tile), _Tile(k, k.block_id("y"), n, config.rows)
    copies: list[TileCopy | HalfCopy] = []
    for plane, pointer in zip(layout.planes, planes, strict=True):
        nbytes = plane.bytes_per_block * SUPER_BLOCK // layout.block_size
        rows = Rows(pointer.reshape(n, blocks * plane.bytes_per_block), n_tile.start, config.rows)
        copies.append(HalfCopy(k, rows, threads) if nbytes == 2 else TileCopy(k, rows, nbytes, threads))
    copies.append(TileCopy(k, Rows(values.cast(u8), m_tile.start, config.m_tile), SUPER_BLOCK, threads))
    pairs = Rows(scale_sum.cast(u8).reshape(m, columns // GROUP * 8), m_tile.start, config.m_tile)
    group_pitch = config.m_tile * 8 + 32  # neighbouring activations of a group side by side
    copies.append(TileCopy(k, pairs, _GROUPS * 8, threads, chunk=8, pitch=8, chunk_pitch=group_pitch))
    ring = Ring(k, config.stages, copies)
    totals = [[[k.var(f32, 0.0) for _ in range(4)] for _ in range(config.m_tile // 8)] for _ in range(config.tiles)]
    magic = [k.const(s32, _MAGIC_BITS)] * 4

    for ahead in range(config.stages - 1):
        if ahead < steps:
            ring.fill()
        k.cp_async_commit()
    with k.loop(0, steps) as step:
        k.cp_async_wait(config.stages - 2)
        k.barrier()
        with k.when(step + (config.stages - 1) < steps):
            ring.fill()
        k.cp_async_commit()
        *weights, activations, scales = ring.take()
        activations, scales = activations.reshape(config.m_tile, copies[-2].pitch), scales.reshape(_GROUPS, group_pitch)
        with k.loop(column_warp, UNITS, config.column_warps) as unit:
            groups = []
            for t in range(config.tiles):
                row = (row_warp * config.tiles + t) * 16
                tile = [
                    place.reshape(config.rows, copy.pitch).at(row).reshape(16, copy.pitch)
                    for place, copy in zip(weights, copies, strict=False)
                ]
                groups.append(_FRAGMENTS[format](k, tile, unit, (n_tile.start + row) * steps + step, steps))
            for of_tiles in zip(*groups, strict=True):
                _multiply(k, of_tiles, activations, scales, totals, magic)

    _add_columns(k, config, totals, column_warp, row_warp)
    with k.when(column_warp == 0):
        for t, tile_totals in enumerate(totals):
            for i, column_totals in enumerate(tile_totals):
                for j, total in enumerate(column_totals):
                    row = n_tile.start + (row_warp * config.tiles + t) * 16 + k.lane_id // 4 + 8 * (j // 2)
                    column = m_tile.start + 8 * i + k.lane_id % 4 * 2 + j % 2
                    y.at(column, row).store(0, total, where=all_of(n_tile.owns(row), m_tile.owns(column)))


class _Tile:
    """`size` rows of `total`, from `start` on: the last may overlap its neighbour, a single one be cut short."""

    def __init__(self, k: Builder, number: Value, total: int, size: int) -> None:
        self._total, self._size, self._first = total, size, number * size
        self.start = self._first if total <= size else k.minimum(self._first, total - size)

    def owns(self, row: Value) -> Value | None:
        """What has to hold for a row to be this tile's and no other's; None: nothing."""
        if self._total % self._size == 0:
            return None
        return row < self._total if self._total < self._size else row >= self._first


def _multiply(
    k: Builder, groups: Sequence[Group], activations: Pointer, scales: Pointer, totals: Totals, magic: Sequence[Value]
) -> None:
    """totals += group . activations, for the same group of 32 columns of all tiles.

    With s one of mma's integers, magic + s arrives as a float; times scale, less magic * scale, is s * scale rounded
    once, because magic * scale is exact.
    """
    lane, index = k.lane_id, groups[0].index
    unmagic = [[tuple(s * -_MAGIC for s in pair) for pair in group.scales] for group in groups]
    row, half = lane % 8 + lane // 16 * 8, lane // 8 % 2  # two fragments of B: 16 activations
    fragments = activations.at(row, index * GROUP + half * 16)
    pairs = scales.at(index, lane % 4 * 16).cast(f32)
    for i in range(len(totals[0])):
        if i % 2 == 0:
            words = k.ldmatrix(fragments.at(i * 8 * activations.shape[1]))
        b = words[i % 2 * 2 : i % 2 * 2 + 2]
        scale_0, sum_0, scale_1, sum_1 = pairs.load(16 * i, vector=4)
        for group, negative, total in zip(groups, unmagic, totals, strict=True):
            parts = len(group.scales)  # of 32 / parts columns
            for p, (pair, less) in enumerate(zip(group.scales, negative, strict=True)):
                a = group.words if parts == 1 else group.words[2 * p : 2 * p + 2]
                products = k.mma(a, b if parts == 1 else b[p : p + 1], magic, group.type, s8)
                for j, product in enumerate(products):
                    scaled = k.fma(product.bits(f32), pair[j // 2], less[j // 2])
                    k.accumulate(total[i][j], scaled, (scale_0, scale_1)[j % 2])
            if group.offsets is not None:
                for j in range(4):
                    k.accumulate(total[i][j], group.offsets[j // 2], (sum_0, sum_1)[j % 2])


def _add_columns(k: Builder, config: GemmConfig, totals: Totals, column_warp: Value, row_warp: Value) -> None:
    """The totals of the first column warp += those of the others."""
    if config.column_warps == 1:
        return
    flat = [total for tile in totals for column in tile for total in column]
    shared = k.shared("partial", f32, (config.column_warps - 1, config.row_warps, len(flat) * WARP), dynamic=True)
    with k.when(column_warp > 0):
        mine = shared.at(column_warp - 1, row_warp, k.lane_id)
        for i, total in enumerate(flat):
            mine.store(i * WARP, total)
    k.barrier()
    with k.when(column_warp == 0):
        for other in range(config.column_warps - 1):
            others = shared.at(other, row_warp, k.lane_id)
            for i, total in enumerate(flat):
                total += others.load(i * WARP)

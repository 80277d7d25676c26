"""Packed weights times many rows of activations on tensor cores: prompts, and batches beyond the
mat-vec's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import formats
from ...formats import q4_0, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0
from ...formats.packed_tile import UNITS, Fragments
from ...ptx import WARP, Builder, KernelError, Pointer, Value, all_of, f16, f32, kernel, s8, u8
from ..quantize_f16 import SUPER_BLOCK
from ..quantize_q8_1 import GROUP
from .pipeline import HalfCopy, Ring, Rows, TileCopy
from .products import (
    HalfProducts,
    IntegerProducts,
    PackedTile,
    Products,
    Totals,
    pair_pitch,
)

_COLUMNS = 64  # two f16 scales: copies take 4 bytes at least
_FRAGMENTS: dict[str, Fragments] = {
    module.FORMAT.name: module.fragments_of for module in (q4_k, q5_k, q6_k, q8_0, q5_0, q5_1, q4_0)
}
FORMATS = tuple(_FRAGMENTS)
_HALVES = {module.FORMAT.name: (module.halves_of, module.block_of) for module in (q4_k, q5_k, q6_k)}
#: Formats that `products="f16"` takes: weights that are f16 but for a factor of 256 columns.
F16_FORMATS = tuple(_HALVES)


@dataclass(frozen=True)
class GemmConfig:
    """How a product spreads over the GPU. A block makes y for 16 * tiles * row_warps weight rows,
    m_tile activations.

    Attributes:
      row_warps: warps with weight rows of their own.
      column_warps: 1, 2 or 4 warps that share rows and split each super-block's columns; their
        totals meet at the end.
      tiles: of 16 weight rows, per warp; they share the loads of activations.
      m_tile: rows of activations of a block, a multiple of 16.
      stages: super-blocks in shared memory, one in use and the others on their way.
      products: `int8` of quants with q8_1 activations, whose sums of 32 columns f32 scales; or
        `f16` of scaled quants with f16 activations, added up by mma for 256 columns: half the
        instructions, twice the tensor cores' time.
    """

    row_warps: int = 4
    column_warps: int = 1
    tiles: int = 2
    m_tile: int = 64
    stages: int = 2
    products: str = "int8"

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
        for name, least, most in (
            ("row_warps", 1, 32 // self.column_warps),
            ("tiles", 1, 8),
            ("stages", 2, 16),
        ):
            if not least <= (value := getattr(self, name)) <= most:
                raise KernelError(f"{name}={value} must be {least} to {most}")
        if self.products not in ("int8", "f16"):
            raise KernelError(f"products={self.products!r} must be int8 or f16")
        if self.products == "f16" and (format not in F16_FORMATS or self.column_warps > 1):
            raise KernelError(f"products='f16' is for column_warps=1 and {', '.join(F16_FORMATS)}")


def takes(format: str, columns: int) -> bool:
    """Whether there is a kernel for rows of so many weights."""
    return (
        format in FORMATS
        and columns > 0
        and columns % max(_COLUMNS, formats.get(format).block_size) == 0
    )


@kernel
def gemm(
    k: Builder, *, format: str, n: int, columns: int, m: int, config: GemmConfig = GemmConfig()
) -> None:
    """y[j, r] = dequantize(w[r]) . x[j] for rows r < n of `columns` weights and activations j < m.

    A warp has tiles of 16 weight rows and all activations of its block (see `formats.products`).
    Packed weights and activations come through a ring of stages of one super-block each.
    """
    config.check(format, columns)
    k.name = f"gemm_{format.lower()}_{'f16_' if config.products == 'f16' else ''}m{config.m_tile}"
    layout = formats.get(format)
    steps, threads = -(-columns // SUPER_BLOCK), WARP * config.row_warps * config.column_warps
    blocks = columns // layout.block_size
    planes = [
        k.input(p.name, u8, (n, blocks, p.bytes_per_block), constant=True) for p in layout.planes
    ]
    activations = _activations(k, config, m, columns)
    y = k.output("y", f32, (m, n))
    k.launch((-(-m // config.m_tile), -(-n // config.rows)), threads, resident_blocks=1)

    row_warp, column_warp = k.warp_id % config.row_warps, k.warp_id // config.row_warps
    m_tile, n_tile = (
        _Tile(k, k.block_id("x"), m, config.m_tile),
        _Tile(k, k.block_id("y"), n, config.rows),
    )
    copies: list[TileCopy | HalfCopy] = []
    for plane, pointer in zip(layout.planes, planes, strict=True):
        nbytes = plane.bytes_per_block * SUPER_BLOCK // layout.block_size
        rows = Rows(pointer.reshape(n, blocks * plane.bytes_per_block), n_tile.start, config.rows)
        copies.append(
            HalfCopy(k, rows, threads) if nbytes == 2 else TileCopy(k, rows, nbytes, threads)
        )
    for pointer, nbytes, pitches in activations:
        rows = Rows(
            pointer.cast(u8).reshape(m, columns * nbytes // SUPER_BLOCK),
            m_tile.start,
            config.m_tile,
        )
        copies.append(TileCopy(k, rows, nbytes, threads, **pitches))
    ring = Ring(k, config.stages, copies)
    totals = [
        [[k.var(f32, 0.0) for _ in range(4)] for _ in range(config.m_tile // 8)]
        for _ in range(config.tiles)
    ]
    if config.products == "f16":
        products: Products = HalfProducts(k, *_HALVES[format], totals)
    else:
        products = IntegerProducts(k, _FRAGMENTS[format], totals)

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
        places, tiles = ring.take(), []
        for t in range(config.tiles):
            row = (row_warp * config.tiles + t) * 16
            weights = [place.at(row).reshape(16, place.shape[1]) for place in places[: len(planes)]]
            tiles.append(PackedTile(weights, (n_tile.start + row) * steps + step, steps))
        with k.loop(column_warp, UNITS, config.column_warps) as unit:
            products.add(tiles, unit, places[len(planes) :])
        products.finish(tiles, places[len(planes) :])

    _add_columns(k, config, totals, column_warp, row_warp)
    with k.when(column_warp == 0):
        for t, tile_totals in enumerate(totals):
            for i, column_totals in enumerate(tile_totals):
                for j, total in enumerate(column_totals):
                    row = (
                        n_tile.start
                        + (row_warp * config.tiles + t) * 16
                        + k.lane_id // 4
                        + 8 * (j // 2)
                    )
                    column = m_tile.start + 8 * i + k.lane_id % 4 * 2 + j % 2
                    y.at(column, row).store(
                        0, total, where=all_of(n_tile.owns(row), m_tile.owns(column))
                    )


def _activations(
    k: Builder, config: GemmConfig, m: int, columns: int
) -> list[tuple[Pointer, int, dict[str, int]]]:
    """The operands that make up x: pointer, bytes of a super-block, and how a stage holds them (see
    TileCopy).
    """
    per_group = (m, columns // GROUP, 2)
    if config.products == "f16":
        values, means = k.input("values", f16, (m, columns)), k.input("means", f16, per_group)
        scale = k.input("scale", f32, (m, columns // SUPER_BLOCK))
        return [(values, 512, {}), (means, 32, {}), (scale, 4, {"pitch": 4})]
    values, scale_sum = k.input("values", s8, (m, columns)), k.input("scale_sum", f32, per_group)
    return [
        (values, 256, {}),
        (scale_sum, 64, {"chunk": 8, "pitch": 8, "chunk_pitch": pair_pitch(config.m_tile)}),
    ]


class _Tile:
    """`size` rows of `total`, from `start` on: the last may overlap its neighbour, a single one be
    cut short.
    """

    def __init__(self, k: Builder, number: Value, total: int, size: int) -> None:
        self._total, self._size, self._first = total, size, number * size
        self.start = self._first if total <= size else k.minimum(self._first, total - size)

    def owns(self, row: Value) -> Value | None:
        """What has to hold for a row to be this tile's and no other's; None: nothing."""
        if self._total % self._size == 0:
            return None
        return row < self._total if self._total < self._size else row >= self._first


def _add_columns(
    k: Builder, config: GemmConfig, totals: Totals, column_warp: Value, row_warp: Value
) -> None:
    """The totals of the first column warp += those of the others."""
    if config.column_warps == 1:
        return
    flat = [total for tile in totals for column in tile for total in column]
    shared = k.shared(
        "partial", f32, (config.column_warps - 1, config.row_warps, len(flat) * WARP), dynamic=True
    )
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

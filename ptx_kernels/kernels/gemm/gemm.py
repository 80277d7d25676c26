"""Packed weights times many activations, on tensor cores: prompts, batches beyond the mat-vec's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ... import formats
from ...ptx import (
    WARP,
    Builder,
    KernelError,
    Pointer,
    Value,
    all_of,
    f16,
    f32,
    kernel,
    s8,
    s32,
    u8,
    u32,
)
from ..planes import input_planes
from ..quantize_f16 import SUPER_BLOCK
from ..quantize_q8_1 import GROUP
from .config import GemmConfig
from .fragments import TILE_COLUMNS, TILE_ROWS, Accumulators, TileSums, accumulators, place
from .pipeline import Copy, Pipeline, Rows, TileCopy, WordCopy
from .products import UNITS, F16Products, IntegerProducts, Products, pair_pitch

_DEFAULT = GemmConfig()


@kernel
def gemm(
    k: Builder,
    *,
    format: str,
    n: int,
    columns: int,
    m: int,
    config: GemmConfig = _DEFAULT,
    layers: int = 0,
    experts: int = 0,
) -> None:
    """y[j, r] = dequantize(w[r]) . x[j] for rows r < n of `columns` weights and activations j < m.

    A warp has tiles of 16 weight rows and all activations of its thread block (see `products`).
    Packed weights and activations come through a pipeline whose steps have 256 columns each.

    Operands: the planes, with `layers` a stack's and an index (see `input_planes`); values s8 (m,
    columns) and scale_sum f32 (m, columns / 32, 2), or for f16 products values f16 (m, columns),
    means f16 (m, columns / 32, 2) and scale f32 (m, columns / 256). Result: y f32 (m, n).

    With `experts` the planes are a stack's (experts, n, ...), and the rows of activations lie
    sorted by expert. The first operand, `tiles`, s32 (`tile_count`, 3), says of each tile along the
    grid's first axis by which expert it multiplies which rows: (expert, first row, end), at most
    m_tile of them. An expert outside 0 to experts - 1 gives zeros; all tiles' rows are all m.
    """
    config.check(format, columns)
    if (layers or experts) and not stackable(format, n, columns):
        raise KernelError(f"a stack's matrices {format} ({n}, {columns}) do not begin at words")
    products = "f16_" if config.products == "f16" else ""
    k.name = f"{'expert_' if experts else ''}gemm_{format.lower()}_{products}m{config.m_tile}"
    count = tile_count(m, experts, config.m_tile)
    number = k.block_id("x")
    tile = _ExpertTile(k, number, count, m, config.m_tile) if experts else None
    planes = input_planes(
        k, format, n, columns, layers=layers, experts=experts, expert=tile.expert if tile else None
    )
    activations = _activations(k, config, m, columns)
    y = k.output("y", f32, (m, n))
    threads = WARP * config.row_warps * config.column_warps
    k.launch((count, -(-n // config.rows)), threads, resident_blocks=1)
    block_m = _Span(k, number, m, config.m_tile) if tile is None else tile
    block_n = _Span(k, k.block_id("y"), n, config.rows)
    if tile is None:
        _multiply(k, format, config, planes.of_matrix(), activations, y, block_n, block_m)
        return
    with k.when(tile.expert < experts) as branch:
        _multiply(k, format, config, planes.of_matrix(), activations, y, block_n, block_m)
    with branch.otherwise(), k.loop(tile.first, tile.end) as row:
        for base in range(0, config.rows, threads):
            r = block_n.start + k.thread_id + base
            where = all_of(block_n.owns(r), k.thread_id < config.rows - base)
            y.at(row, r).store(0, 0.0, where=where)


def _multiply(
    k: Builder,
    format: str,
    config: GemmConfig,
    planes: Sequence[Pointer],
    activations: Sequence[tuple[Pointer, int, dict[str, int]]],
    y: Pointer,
    block_n: _Span,
    block_m: _Span | _ExpertTile,
) -> None:
    """The thread block's part of y."""
    threads = WARP * config.row_warps * config.column_warps
    columns = planes[0].shape[1] * formats.get(format).block_size
    row_warp, column_warp = k.warp_id % config.row_warps, k.warp_id // config.row_warps
    weights = _weight_copies(k, format, planes, block_n, threads)
    copies = [*weights, *_activation_copies(k, activations, block_m, threads)]
    pipeline = Pipeline(k, config.stages, copies)
    totals = accumulators(k, config.tiles, config.m_tile)
    products = _products(k, format, config, totals)
    first_rows = [(row_warp * config.tiles + t) * TILE_ROWS for t in range(config.tiles)]

    for step, places in pipeline.steps(-(-columns // SUPER_BLOCK)):
        x = places[len(weights) :]
        tiles = [
            [copy.tile(at, row, step) for copy, at in zip(weights, places, strict=False)]
            for row in first_rows
        ]
        with k.loop(column_warp, UNITS, config.column_warps) as unit:
            products.add(tiles, unit, x)
        products.finish(tiles, x)

    _add_column_warps(k, config, totals, column_warp, row_warp)
    with k.when(column_warp == 0):
        for row, tile in zip(first_rows, totals, strict=True):
            _store(k, y, tile, row, block_n, block_m)


def tile_count(m: int, experts: int, m_tile: int) -> int:
    """Tiles of m rows, or of as many sorted by expert, where each ends with a tile of its own.

    Rows of no expert come as one more.
    """
    return -(-m // m_tile) + experts


# --- operands ---


def stackable(format: str, n: int, columns: int) -> bool:
    """True if matrices (n, columns) of a stack begin at the words that `WordCopy` brings."""
    layout = formats.get(format)
    blocks = n * columns // layout.block_size
    return all(blocks * plane.bytes_per_block % 4 == 0 for plane in layout.planes)


def _activations(
    k: Builder, config: GemmConfig, m: int, columns: int
) -> list[tuple[Pointer, int, dict[str, int]]]:
    """Operands of x: pointer, bytes of 256 columns, and how a stage holds them (see TileCopy)."""
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


# --- the thread block's share ---


class _Span:
    """Span of `size` rows of `total`, from `start` on.

    The last span may overlap its neighbour; a single one may be cut short.
    """

    def __init__(self, k: Builder, number: Value, total: int, size: int) -> None:
        self._total, self._first, self.size = total, number * size, size
        self.start = self._first if total <= size else k.minimum(self._first, total - size)

    def owns(self, row: Value) -> Value | None:
        """Condition for a row to be this span's and no other's; None: it always is."""
        if self._total % self.size == 0:
            return None
        return row < self._total if self._total < self.size else row >= self._first


class _ExpertTile:
    """Span of `size` rows of `total` from `start` on, of which those of one expert count.

    `expert` (u32) may be none that there is; the rows from `first` to `end` are the tile's.
    """

    def __init__(self, k: Builder, number: Value, count: int, total: int, size: int) -> None:
        tile = k.input("tiles", s32, (count, 3)).at(number)
        self.expert, self.first, self.end = (tile.load(i).bits(u32) for i in range(3))
        self.size = size
        self.start = k.const(u32, 0) if total <= size else k.minimum(self.first, total - size)

    def owns(self, row: Value) -> Value:
        """Condition for a row to be the tile's."""
        return (row >= self.first) & (row < self.end)


def _weight_copies(
    k: Builder, format: str, planes: Sequence[Pointer], span: _Span, threads: int
) -> list[Copy]:
    copies: list[Copy] = []
    for plane in planes:
        n, blocks, size = plane.shape
        nbytes = size * SUPER_BLOCK // formats.get(format).block_size
        rows = Rows(plane.reshape(n, blocks * size), span.start, span.size)
        words = nbytes % 4 == 0 and blocks * size % 4 == 0  # all that is copied begins at words
        copies.append((TileCopy if words else WordCopy)(k, rows, nbytes, threads))
    return copies


def _activation_copies(
    k: Builder,
    activations: Sequence[tuple[Pointer, int, dict[str, int]]],
    span: _Span | _ExpertTile,
    threads: int,
) -> list[Copy]:
    copies: list[Copy] = []
    for pointer, nbytes, pitches in activations:
        m, *rest = pointer.cast(u8).shape
        matrix = pointer.cast(u8).reshape(m, math.prod(rest))
        copies.append(TileCopy(k, Rows(matrix, span.start, span.size), nbytes, threads, **pitches))
    return copies


def _products(k: Builder, format: str, config: GemmConfig, totals: Accumulators) -> Products:
    layout = formats.get(format)
    if config.products == "int8":
        assert layout.int8_tile is not None
        return IntegerProducts(k, layout.int8_tile, totals)
    assert layout.f16_tile is not None
    return F16Products(k, layout.f16_tile, totals)


# --- epilogue ---


def _add_column_warps(
    k: Builder, config: GemmConfig, totals: Accumulators, column_warp: Value, row_warp: Value
) -> None:
    """Adds the totals of the other column warps to those of the first."""
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


def _store(
    k: Builder,
    y: Pointer,
    tile: TileSums,
    row: Value,
    block_n: _Span,
    block_m: _Span | _ExpertTile,
) -> None:
    """Stores a tile's totals, from weight row `row` of the thread block on."""
    for i, column_totals in enumerate(tile):
        for j, total in enumerate(column_totals):
            n, m = place(k, block_n.start + row, block_m.start + TILE_COLUMNS * i, j)
            y.at(m, n).store(0, total, where=all_of(block_n.owns(n), block_m.owns(m)))

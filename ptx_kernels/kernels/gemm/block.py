"""Emits one thread block's part of a tensor-core matmul: pipeline of copies, mma, epilogue."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ... import formats
from ...ptx import WARP, Builder, KernelError, Pointer, Value, f16, f32, s8, u8, u32
from ..matvec.rows import Matrix
from ..quantize_f16 import SUPER_BLOCK
from ..quantize_q8_1 import GROUP
from .config import GemmConfig
from .epilogue import TileEpilogue
from .fragments import TILE_ROWS, Accumulators, accumulators
from .pipeline import Copy, Pipeline, Rows, TileCopy, WordCopy
from .products import UNITS, F16Products, IntegerProducts, Products, Tile, pair_pitch
from .spans import ExpertTile, Span, StepSpan

#: Operands of x: pointer, bytes per 256 columns, and their layout in a stage (see TileCopy).
Activations = list[tuple[Pointer, int, dict[str, int]]]


def stackable(format: str, n: int, columns: int) -> bool:
    """Returns whether each matrix (n, columns) of a stack begins at a 4-byte word.

    `WordCopy` requires it.
    """
    layout = formats.get(format)
    blocks = n * columns // layout.block_size
    return all(blocks * plane.bytes_per_block % 4 == 0 for plane in layout.planes)


def check_stack(format: str, n: int, columns: int, matrices: int) -> None:
    """Raises KernelError if the kernel cannot read matrices of such a stack.

    `matrices` 0 means that there is no stack.
    """
    if matrices and not stackable(format, n, columns):
        raise KernelError(f"a stack's matrices {format} ({n}, {columns}) do not begin at words")


def input_activations(k: Builder, config: GemmConfig, m: int, columns: int) -> Activations:
    """Declares the operands for m rows of activations, in the dtype of `config.products`."""
    per_group = (m, columns // GROUP, 2)
    if config.products == "f16":
        values, means = k.input("values", f16, (m, columns)), k.input("means", f16, per_group)
        scale = k.input("scale", f32, (m, columns // SUPER_BLOCK))
        by_row = {"chunk": 4, "pitch": 4, "chunk_pitch": 4 * config.m_tile}
        return [(values, 512, {}), (means, 32, {}), (scale, 4, by_row)]
    values, scale_sum = k.input("values", s8, (m, columns)), k.input("scale_sum", f32, per_group)
    return [
        (values, 256, {}),
        (scale_sum, 64, {"chunk": 8, "pitch": 8, "chunk_pitch": pair_pitch(config.m_tile)}),
    ]


def multiply(
    k: Builder,
    config: GemmConfig,
    matrices: Sequence[Matrix],
    activations: Activations,
    epilogue: TileEpilogue,
    block_n: Span,
    block_m: Span | ExpertTile,
) -> None:
    """Emits the thread block's matmul with one matrix, or with gate and up matrices."""
    row_warp, column_warp = k.warp_id % config.row_warps, k.warp_id // config.row_warps
    part = column_warp if config.column_warps > 1 else 0  # of a step
    with k.free_shared():
        steps = config.steps(matrices[0].columns)
        first = k.block_id("z") * steps if config.splits > 1 else 0
        span = StepSpan(first, steps * config.splits)
        weights = [_weight_copies(k, config, each, block_n, span) for each in matrices]
        planes = [copy for copies in weights for copy in copies]
        x = _activation_copies(k, config, activations, block_m, span)
        pipeline = Pipeline(k, config.stages, [*planes, *x])
        totals = [accumulators(k, config.tiles, config.m_tile) for _ in matrices]
        products = _products(k, config, [each.format for each in matrices], totals)
        first_rows = [(row_warp * config.tiles + t) * TILE_ROWS for t in range(config.tiles)]
        for step, buffers in pipeline.steps(steps):
            at = iter(buffers)
            tiles = [
                _tiles(copies, [next(at) for _ in copies], first_rows, step, part)
                for copies in weights
            ]
            rows = [copy.part(buffer, part) for copy, buffer in zip(x, at, strict=True)]
            for unit in _units(k, config, matrices):
                for each, mine in products:
                    each.add([tile for i in mine for tile in tiles[i]], unit, rows)
            for each, mine in products:
                each.finish([tile for i in mine for tile in tiles[i]], rows)
    if config.column_warps > 1 or epilogue.staged:
        k.barrier()  # all warps have read the ring, whose memory is reused
    tiles_of_all = [tile for each in totals for tile in each]
    _add_column_warps(k, config, tiles_of_all, column_warp, row_warp)
    summed = column_warp == 0 if config.column_warps > 1 else None
    epilogue.store(totals, first_rows, block_n, block_m, summed)


# --- operands in shared memory ---


def _weight_copies(
    k: Builder, config: GemmConfig, matrix: Matrix, block: Span, span: StepSpan
) -> list[Copy]:
    copies: list[Copy] = []
    for plane in matrix.planes.of_matrix():
        n, blocks, size = plane.shape
        part = size * SUPER_BLOCK // matrix.block_size
        nbytes = part * config.column_warps
        rows = Rows(plane.reshape(n, blocks * size), block.start, block.size, span)
        words = nbytes % 4 == 0 and blocks * size % 4 == 0  # all copied ranges begin at words
        kind = TileCopy if words else WordCopy
        copies.append(kind(k, rows, nbytes, config.threads, part=part))
    return copies


def _activation_copies(
    k: Builder,
    config: GemmConfig,
    activations: Activations,
    block: Span | ExpertTile,
    span: StepSpan,
) -> list[TileCopy]:
    copies = []
    for pointer, part, pitches in activations:
        m, *rest = pointer.cast(u8).shape
        rows = Rows(pointer.cast(u8).reshape(m, math.prod(rest)), block.start, block.size, span)
        nbytes = part * config.column_warps
        copies.append(TileCopy(k, rows, nbytes, config.threads, part=part, **pitches))
    return copies


def _tiles(
    copies: Sequence[Copy],
    buffers: Sequence[Pointer],
    first_rows: Sequence[Value],
    step: Value,
    part: Value | int,
) -> list[Tile]:
    """Returns the warp's tiles of one matrix in a pipeline stage, one per 16 weight rows."""
    return [
        [copy.tile(at, row, step, part) for copy, at in zip(copies, buffers, strict=True)]
        for row in first_rows
    ]


# --- products ---


def _products(
    k: Builder, config: GemmConfig, names: Sequence[str], totals: Sequence[Accumulators]
) -> list[tuple[Products, list[int]]]:
    """Returns pairs (`Products`, indices of its matrices), one per format.

    Matrices of the same format share the loads of activations.
    """
    found: list[tuple[Products, list[int]]] = []
    for name in dict.fromkeys(names):
        layout, mine = formats.get(name), [i for i, each in enumerate(names) if each == name]
        sums = [tile for i in mine for tile in totals[i]]
        if config.products == "int8":
            assert layout.int8_tile is not None
            integers = IntegerProducts(k, layout.int8_tile, layout.int8_minimums, sums)
            found.append((integers, mine))
        else:
            assert layout.f16_tile is not None
            found.append((F16Products(k, layout.f16_tile, sums), mine))
    return found


def _units(k: Builder, config: GemmConfig, matrices: Sequence[Matrix]) -> Iterator[Value]:
    """Yields the indices of the units (64 columns each) of a step's 256 columns.

    The units are unrolled, with constants folded into the code, if the registers suffice for the
    prefetched loads; otherwise they are in a loop.
    """
    most = min(formats.get(each.format).tuning.gemm_unrolled for each in matrices)
    if len(matrices) * config.tiles * config.m_tile > most:
        with k.loop(0, UNITS) as unit:
            yield unit
    else:
        yield from (k.const(u32, unit) for unit in range(UNITS))


def _add_column_warps(
    k: Builder, config: GemmConfig, totals: Accumulators, column_warp: Value, row_warp: Value
) -> None:
    """Emits the addition, in shared memory, of all column warps' totals to those of the first."""
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

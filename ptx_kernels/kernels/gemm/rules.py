"""Selection rules: choose the Configs of tensor-core matmuls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...devices import Target
from ...formats import get as block_format
from ...limits import MAX_ROWS, gemm_takes
from ...ptx import WARP, KernelError
from ..family import Key, Match, Rule, TableRows
from .config import GemmConfig
from .fragments import TILE_COLUMNS
from .tilings import Shape, stage_bytes

#: Maximum rows of activations for which one thread block has all, so that weights are read once.
FEW_ROWS = 64

_M_TILES = (16, 32, 64)

#: Number of activations from which a quantizing launch pays.
_LEAST_VALUES = 8192


def _tensor_cores(formats: tuple[str, ...], columns: int, m: int) -> bool:
    """Returns whether m rows of q8_1 activations use tensor-core matmuls rather than mat-vecs.

    A mat-vec's instructions grow with every row, those of a tensor-core matmul with every eight.
    For few activations, every thread block of a mat-vec can normalize and quantize them itself. In
    a small model this saves a launch, which matters more than the instructions.
    """
    if m <= MAX_ROWS and m * columns < _LEAST_VALUES:
        return False
    return all(gemm_takes(f, columns) and m >= block_format(f).tuning.gemm_rows for f in formats)


def _gemm(device: Target, format: str, n: int, columns: int, m: int) -> GemmConfig:
    """Returns the Config for n rows of `columns` weights and m rows of activations.

    For few rows of activations see `_fused_gemm`. For many, large tiles spend the fewest
    instructions on unpacking and loads, but leave a device with more multiprocessors than thread
    blocks partly idle. A thread block's rows are therefore reduced until there are one and a half
    thread blocks per multiprocessor, down to 16 weight rows, whose columns four warps then share,
    by 16 activations. No choice needs more than the shared memory that a thread block has on every
    device since sm_80, 99 KB, or on Turing.
    """
    if m <= FEW_ROWS:
        return _fused_gemm(device, (format,), (n,), columns, m)
    return _tiling(device, format, n, 64, lambda m_tile: -(-m // m_tile))


_GAIN = 1.25  # minimum predicted gain of f16 products, since the model is inexact


def _f16_products(device: Target, formats: tuple[str, ...], m: int) -> bool:
    """Returns whether matmuls with m rows of activations multiply f16, if the formats allow it.

    Scales and sums of every 32 columns are most of what int8 products issue for 16 rows and more.
    f16 products take half of these slots and wait for the tensor cores, whose rate decides on each
    device. The rate is known only for sm_90.
    """
    facts = device.facts
    if facts is None or facts.arch != "sm_90" or m <= 2 * TILE_COLUMNS:
        return False
    tensor = 4 * 2 * 16 * 8 * 32 / facts.mma_float_ops  # clocks of a quarter of a multiprocessor
    slots = [block_format(name).tuning.int8_issue_slots for name in formats]
    return all(each is not None and each >= _GAIN * tensor for each in slots)


def _fused_gemm(
    device: Target,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    output: str = "f32",
    products: str = "int8",
) -> GemmConfig:
    """Returns the Config for one matrix, a gated pair, or several joined matrices.

    Every thread block reads its activations again, and thread blocks with other activations read
    its weights again. Large tilings move the fewest bytes through L2. Small ones balance the
    multiprocessors, and so do thread blocks that split the columns of large ones. Rows per thread
    block are 64 or 128, 32 with two warps per 16 rows, or 16 with four; f16 products may have 256.
    For quantized output they are at least 32. If each thread block has its own multiprocessor, more
    warps share each row. There are as many stages as keep memory busy, if they fit.
    """
    shape = Shape(device, formats, rows, columns, m)
    tilings = [(4, 1, 1), (2, 2, 1), (1, 4, 1)][: 3 if output == "f32" else 2]
    tilings += [(8, 1, 1), (4, 2, 1), (8, 2, 1), (4, 4, 1)]
    tunings = [block_format(name).tuning for name in formats]
    # beyond eight rows, two tiles take too many registers for a pair and for some formats; blocks
    # of mixed matrices are best small
    two = shape.together == 1 and min(t.gemm_tiles for t in tunings) > 1
    two |= m <= TILE_COLUMNS and len(rows) == 1
    if products == "f16":
        largest = min(t.gemm_f16_rows for t in tunings)
        m_tiles = sorted({min(-(-m // 16) * 16, s, largest) for s in _M_TILES})
        two = shape.together == 1
        tilings += [(8, 1, 2), (4, 2, 2)] * two
        if m > FEW_ROWS:  # all tiles of a prompt pass through L2: large ones of all rows
            m_tiles, two, tilings = m_tiles[-1:], False, [(8, 1, 2)] * two + [(8, 1, 1), (4, 1, 1)]
    else:
        largest = min(t.gemm_few_rows for t in tunings)
        m_tiles = [8] if m <= 8 else sorted({min(-(-m // 16) * 16, s, largest) for s in _M_TILES})
    choices = (
        GemmConfig(row_warps, column_warps, tiles, m_tile, products=products)
        for row_warps, column_warps, tiles in [*tilings, *[(4, 1, 2)] * two]
        for m_tile in m_tiles
    )
    fit = [c for c in shape.fitting(choices) if c.threads <= WARP * shape.most_warps(c)]
    if output != "f16":  # f16 output already uses clusters, by rows
        fit = list(shape.split(fit))
    return shape.staged(min(map(shape.widened, fit), key=shape.seconds))


def _tiling(
    device: Target, format: str, n: int, largest: int, m_tiles: Callable[[int], int]
) -> GemmConfig:
    """Returns `_gemm`'s Config for tiles of at most `largest` rows of activations.

    `m_tiles`: function from m_tile to the number of tiles.
    """
    most = block_format(format).tuning.gemm_tiles
    # column warps have their own super-blocks, which leaves less room for activations
    choices = [
        GemmConfig(4, 1, most, largest),
        GemmConfig(4, 1, 1, largest),
        GemmConfig(4, 1, 1, min(largest, 32)),
        GemmConfig(2, 2, 1, min(largest, 32)),
        GemmConfig(1, 4, 1, 16),
    ]

    def fills(config: GemmConfig) -> bool:
        blocks = m_tiles(config.m_tile) * -(-n // config.rows)
        return blocks >= device.multiprocessors * 3 // 2

    stages = {c: device.common_shared_bytes // stage_bytes(c, (format,)) for c in choices}
    choices = [c for c in choices if stages[c] >= 2]
    config = next((c for c in choices if fills(c)), choices[-1])
    wanted = 2 if config.rows > 64 else {16: 4, 32: 3}.get(config.m_tile, 2)
    return replace(config, stages=min(wanted, stages[config]))


def _expert_gemm(
    device: Target, format: str, n: int, columns: int, m: int, experts: int
) -> GemmConfig:
    """Returns the Config for m rows of activations sorted by expert.

    Tiles are as large as an expert's share of the rows if they are evenly distributed. Larger tiles
    would multiply other experts' rows in vain; smaller ones read weights again.
    """
    share = -(-m // experts)
    largest = next((m_tile for m_tile in (16, 32) if share <= m_tile), 64)
    # experts that have rows: all, or as many as there are rows
    return _tiling(device, format, n, largest, lambda m_tile: max(min(m, experts), m // m_tile))


def _check_gemm(config: GemmConfig, format: str, n: int, columns: int, m: int) -> None:
    config.check(format, columns)
    if m <= 8 < config.m_tile:
        raise KernelError(
            f"m_tile={config.m_tile} multiplies more rows than m={m}, and 8 are a tile"
        )
    if config.products != "int8":
        raise KernelError(f"products={config.products!r} must be 'int8', what callers bring")


_SIZE = Key(int, Match.NEAR)

gemm_rule: Rule[GemmConfig] = Rule(
    "gemm",
    _gemm,
    TableRows(
        GemmConfig,
        dict(format=Key(str, Match.EQUAL), n=_SIZE, columns=_SIZE, m=Key(int, Match.COVERS)),
        _check_gemm,
    ),
)
tensor_cores_rule: Rule[bool] = Rule("tensor_cores", _tensor_cores)
f16_products_rule: Rule[bool] = Rule("f16_products", _f16_products)
fused_gemm_rule: Rule[GemmConfig] = Rule("fused_gemm", _fused_gemm)
expert_gemm_rule: Rule[GemmConfig] = Rule("expert_gemm", _expert_gemm)

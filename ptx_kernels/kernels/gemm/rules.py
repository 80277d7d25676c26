"""Rules of choice of the tensor-core products."""

from __future__ import annotations

from collections.abc import Callable

from ...devices import Target
from ...formats import get as block_format
from ...ptx import KernelError
from ..family import Key, Match, Rule, TableRows
from .config import GemmConfig


def _gemm(device: Target, format: str, n: int, columns: int, m: int) -> GemmConfig:
    """Config for n rows of `columns` weights and m rows of activations.

    Large tiles spend fewest instructions on unpacking and loads, but leave a device idle that has
    more multiprocessors than there are blocks: the weights' rows of a block are cut until there are
    one and a half blocks for each, down to 16, whose columns four warps then share, and after that
    the activations' rows. Few activations make short stages, so that more of them are needed to
    keep loads in flight; no choice needs more shared memory than the 99 KB that a block of sm_120
    has.
    """
    return _tiling(device, format, n, min(64, -(-m // 16) * 16), lambda m_tile: -(-m // m_tile))


def _tiling(
    device: Target, format: str, n: int, largest: int, m_tiles: Callable[[int], int]
) -> GemmConfig:
    """`_gemm` for tiles of `largest` rows of activations at most; `m_tiles`: m_tile -> tiles."""
    most = block_format(format).tuning.gemm_tiles
    shapes = [(4, 1, most), (2, 2, most), (2, 2, 1), (1, 4, 1)]
    # row warps, column warps, tiles, rows of activations
    choices = [(*shape, largest) for shape in shapes]
    choices += [(1, 4, 1, m_tile) for m_tile in (32, 16) if m_tile < largest]

    def fills(row_warps: int, column_warps: int, tiles: int, m_tile: int) -> bool:
        blocks = m_tiles(m_tile) * -(-n // (16 * tiles * row_warps))
        return blocks >= device.multiprocessors * 3 // 2

    row_warps, column_warps, tiles, m_tile = next((c for c in choices if fills(*c)), choices[-1])
    stages = 2 if row_warps * tiles > 4 else {16: 4, 32: 3}.get(m_tile, 2)
    return GemmConfig(row_warps, column_warps, tiles, m_tile, stages)


def _expert_gemm(
    device: Target, format: str, n: int, columns: int, m: int, experts: int
) -> GemmConfig:
    """Config for m rows of activations sorted by expert.

    Tiles as large as an expert's share of the rows, where they are dealt evenly: larger ones would
    multiply rows of others in vain, smaller ones read weights again.
    """
    share = -(-m // experts)
    largest = next((m_tile for m_tile in (16, 32) if share <= m_tile), 64)
    # experts that have rows: all, or as many as there are rows
    return _tiling(device, format, n, largest, lambda m_tile: max(min(m, experts), m // m_tile))


_GAIN = 1.25  # what f16 products have to win by, of which the model is not sure


def _f16_gemm(device: Target, format: str, n: int, columns: int, m: int) -> GemmConfig | None:
    """Config of f16 products for a `gemm` shape; None where int8 ones are as fast, or nobody knows.

    Int8 products wait for issue slots; f16 ones take half of these and wait for the tensor cores,
    whose f16 rate decides on each device. They read activations of two bytes: 256 weight rows a
    block keep that near what the L2 delivers, and take the shared memory of an sm_90 (sm_100 has it
    too, but its rates of `mma.sync` are not known). So large a tile pays where no more than a
    quarter of all rounds is idle.
    """
    facts, tuning = device.facts, block_format(format).tuning
    slots = tuning.int8_issue_slots
    if facts is None or facts.arch != "sm_90" or slots is None or m <= 32:
        return None
    tensor = 4 * 2 * 16 * 8 * 32 / facts.mma_float_ops  # clocks of a quarter of a multiprocessor
    m_tile = min(tuning.gemm_f16_rows, -(-m // 16) * 16)
    config = GemmConfig(8, 1, 2, m_tile, 2, products="f16")
    blocks = -(-m // config.m_tile) * -(-n // config.rows)
    rounds = -(-blocks // device.multiprocessors)
    pays = slots >= _GAIN * tensor and 4 * blocks >= 3 * rounds * device.multiprocessors
    return config if pays else None


def _check_gemm(config: GemmConfig, format: str, n: int, columns: int, m: int) -> None:
    config.check(format, columns)
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
f16_gemm_rule: Rule[GemmConfig | None] = Rule("f16_gemm", _f16_gemm)
expert_gemm_rule: Rule[GemmConfig] = Rule("expert_gemm", _expert_gemm)

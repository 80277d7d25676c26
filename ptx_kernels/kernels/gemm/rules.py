"""Rules of choice of the tensor-core products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...devices import Target
from ...formats import get as block_format
from ...limits import MAX_ROWS, gemm_takes
from ...ptx import WARP, KernelError
from ..family import Key, Match, Rule, TableRows
from .config import GemmConfig
from .pipeline import odd_pitch
from .products import pair_pitch

#: Rows of activations that one thread block has, so that weights are read once.
FEW_ROWS = 64

#: Activations that are worth a launch that quantizes them.
_LEAST_VALUES = 8192

#: Bytes of weights on their way to a multiprocessor that keep memory busy: 0.8 us of its share of
#: an H200's bandwidth, and a tenth more.
_IN_FLIGHT = 29 << 10

#: Warps of a multiprocessor that hide each other's waits.
_WARPS = 8

#: Bytes of 256 activations, with their scales and sums.
_Q8_1_BYTES = 320

#: Bytes of shared memory that a block has on each target; sm_120 has least.
_SHARED_BYTES = 99 << 10


def _tensor_cores(formats: tuple[str, ...], columns: int, m: int) -> bool:
    """True if tensor cores multiply m rows of q8_1 activations by these, and not mat-vecs.

    A mat-vec's instructions grow with every row, a tensor-core product's with every eight. Few
    activations every block of a mat-vec normalizes and quantizes for itself: in a small model that
    saves a launch, which is more than what instructions cost.
    """
    if m <= MAX_ROWS and m * columns < _LEAST_VALUES:
        return False
    return all(gemm_takes(f, columns) and m >= block_format(f).tuning.gemm_rows for f in formats)


def _gemm(device: Target, format: str, n: int, columns: int, m: int) -> GemmConfig:
    """Config for n rows of `columns` weights and m rows of activations.

    Few rows of activations: see `_fused_gemm`. Of many, large tiles spend fewest instructions on
    unpacking and loads, but leave a device idle that has more multiprocessors than there are
    blocks: a block's rows are cut until there are one and a half blocks for each, down to 16
    weight rows, whose columns four warps then share, by 16 activations. No choice
    needs more shared memory than the 99 KB that a block of sm_120 has.
    """
    if m <= FEW_ROWS:
        return _fused_gemm(device, (format,), (n,), columns, m)
    return _tiling(device, format, n, 64, lambda m_tile: -(-m // m_tile))


def _fused_gemm(
    device: Target,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    output: str = "f32",
) -> GemmConfig:
    """Config for few rows of activations and one matrix, two that gate each other, or several.

    Every block reads its activations again, and blocks with other activations its weights: of the
    tilings that give nearly every multiprocessor a block, the one that brings fewest bytes through
    the L2. Rows of a block are 64, 32 with two warps for each 16 of them, or 16 with four; for q8_1
    output at least the 32 of a group. Where each has a multiprocessor for itself, more warps share
    each row. Stages are as many as keep memory busy, where they fit.
    """
    together = len(formats) // len(rows)  # matrices whose rows a block has at once
    shapes = [(4, 1), (2, 2), (1, 4)][: 2 if output == "q8_1" else 3]
    largest = min(block_format(name).tuning.gemm_few_rows for name in formats)
    sizes = {min(-(-m // 16) * 16, size, largest) for size in (16, 32, 64)}
    m_tiles = [8] if m <= 8 else sorted(sizes)

    def stage_bytes(config: GemmConfig) -> int:
        return max(_stage_bytes(config, (name,) * together) for name in formats)

    def blocks(config: GemmConfig) -> int:
        return -(-m // config.m_tile) * sum(-(-n // config.rows) for n in rows)

    def l2_bytes(config: GemmConfig) -> int:
        per_block = together * config.rows * max(map(_super_block_bytes, formats))
        return blocks(config) * (per_block + config.m_tile * _Q8_1_BYTES)

    choices = [
        config
        for row_warps, column_warps in shapes
        for m_tile in m_tiles
        for config in [GemmConfig(row_warps, column_warps, 1, m_tile)]
        if 2 * stage_bytes(config) <= _SHARED_BYTES
    ]
    filling = [c for c in choices if 8 * blocks(c) >= 7 * device.multiprocessors]
    config = min(filling, key=l2_bytes) if filling else max(choices, key=blocks)
    # one block a multiprocessor may have all of its shared memory
    facts, alone = device.facts, blocks(config) <= device.multiprocessors
    room = facts.block_shared_bytes if facts and alone else _SHARED_BYTES
    while alone and config.threads < WARP * _WARPS and config.column_warps < 8:
        wider = replace(config, column_warps=2 * config.column_warps)
        if columns < wider.columns or 2 * stage_bytes(wider) > room:
            break
        config = wider
    weights = together * config.rows * config.column_warps * max(map(_super_block_bytes, formats))
    resident = max(1, blocks(config) // device.multiprocessors)
    wanted = max(3, 1 + -(-_IN_FLIGHT // (weights * resident)))
    return replace(config, stages=min(wanted, room // stage_bytes(config)))


def _stage_bytes(config: GemmConfig, formats: Sequence[str]) -> int:
    """Bytes of the ring that a step takes, of int8 products."""
    layouts = [block_format(name) for name in formats]
    planes = [(p.bytes_per_block, 256 // f.block_size) for f in layouts for p in f.planes]
    parts = [size * blocks * config.column_warps for size, blocks in planes]
    x = odd_pitch(256 * config.column_warps) * config.m_tile
    pairs = 8 * config.column_warps * pair_pitch(config.m_tile)
    return config.rows * sum(map(odd_pitch, parts)) + x + pairs


def _super_block_bytes(format: str) -> int:
    """Bytes of 256 weights."""
    layout = block_format(format)
    return 256 // layout.block_size * layout.block_bytes


def _tiling(
    device: Target, format: str, n: int, largest: int, m_tiles: Callable[[int], int]
) -> GemmConfig:
    """`_gemm` for tiles of `largest` rows of activations at most; `m_tiles`: m_tile -> tiles."""
    most = block_format(format).tuning.gemm_tiles
    # column warps have super-blocks of their own, and so less room for activations
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

    config = next((c for c in choices if fills(c)), choices[-1])
    wanted = 2 if config.rows > 64 else {16: 4, 32: 3}.get(config.m_tile, 2)
    fit = _SHARED_BYTES // _stage_bytes(config, (format,))
    return replace(config, stages=max(2, min(wanted, fit)))


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
fused_gemm_rule: Rule[GemmConfig] = Rule("fused_gemm", _fused_gemm)
f16_gemm_rule: Rule[GemmConfig | None] = Rule("f16_gemm", _f16_gemm)
expert_gemm_rule: Rule[GemmConfig] = Rule("expert_gemm", _expert_gemm)

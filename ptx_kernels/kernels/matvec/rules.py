"""Rules of choice of the mat-vec family."""

from __future__ import annotations

from dataclasses import replace

from ...devices import Target
from ...formats import get as block_format
from ...ptx import WARP
from ..family import Key, Match, Rule, TableRows
from ..quantize_q8_1 import GROUP
from .config import LANE_WEIGHTS, PRESETS, MatvecConfig
from .prologue import MOST_BYTES, int8_bytes

#: Of a matrix on each multiprocessor, for four warps with two rows each: a dozen 16-byte loads per
#: lane are then 24 KB in flight.
ROWS_TO_FILL = 8

#: Activations that every block may normalize and quantize for itself: 64 KB from the L2, 20 KB of
#: shared memory.
INLINE_VALUES = 16384

#: Bytes of f32 activations that every block may normalize for itself in its shared memory.
STAGED_BYTES = 64 << 10


#: Bytes of weights under way to a multiprocessor, where registers allow it: what memory brings in
#: its latency under load, nearly twice that of an idle one.
BYTES_AHEAD = 48 << 10


def _fewest_lanes(format: str) -> int:
    """Lanes that share 256 weights, each with a whole block of 32 or a quarter of a larger one."""
    layout = block_format(format)
    return max(4 if layout.block_size == 256 else 8, layout.tuning.gemv_fewest_lanes)


def _rows_that_fill(device: Target, rows: int, n: int) -> int:
    """`rows` of a warp, or fewer where n of them would leave multiprocessors without work."""
    while rows > 1 and n < ROWS_TO_FILL * device.multiprocessors * rows // 2:
        rows //= 2
    return rows


def _matvec(device: Target, format: str, n: int, columns: int, m: int) -> MatvecConfig:
    """Config for n rows of `columns` weights and m rows of activations.

    Two rows a warp, of some formats four, halve the loads of activations, which are the larger part
    of what a warp reads, wherever enough rows are there to fill the device all the same. With one
    row of activations loads are the limit, so as many lanes share 256 weights as read whole lines
    by 16 bytes each; with more, instructions are: as few lanes as can be. The more activations, the
    more registers hold them, and the fewer blocks are resident: as many as spill on no target.
    """
    tuning = block_format(format).tuning
    lanes = tuning.gemv_lanes if m == 1 else _fewest_lanes(format)
    rows = _rows_that_fill(device, tuning.gemv_rows if m == 1 else 2, n)
    # blocks of a lane in flight; many activations fill the registers instead
    loads = 4 // rows if m == 1 else 1
    resident = 3 if m > 2 else 6 if m == 1 and lanes == 8 else tuning.gemv_resident_blocks
    return MatvecConfig(
        rows_per_warp=rows,
        lanes=lanes,
        unroll=max(1, min(loads, columns * lanes // (256 * 32))),
        resident_blocks=resident,
    )


def _fused_matvec(
    device: Target,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    floats: bool = False,
    output: str = "f32",
) -> MatvecConfig:
    """Config of a mat-vec with prologue or epilogue, `gated_matvec` or `qkv_matvec` (several rows).

    With `floats`, f32 activations to begin with, `inline_q8` says that each block normalizes and
    quantizes for itself, which pays while that is little work beside its share of the weights;
    `q8_1` that a kernel of its own does. Sixteen warps are resident on a multiprocessor, whose
    lanes have 128 registers each and two blocks of weights in flight for one row of activations;
    without the prologue's shared memory more rows take more registers. For q8_1 output a block has
    the 32 rows of a group. As many blocks as share the rounds of rows evenly repeat the prologue
    least.

    Weights that are loaded ahead are used half a trip later, so they go to as few lanes as can be,
    which unpack scales least often: each reads 32 neighbouring bytes by two loads.
    """
    # four rows of many activations fill the registers
    eight = output == "q8_1" and m > 4
    if m == 1:
        eight = any(block_format(each).tuning.gemv_lanes > 4 for each in formats)
    lanes = max(8 if eight else 4, *map(_fewest_lanes, formats))
    inline = floats and m * columns <= INLINE_VALUES
    ahead = m == 1 and all(block_format(each).tuning.gemv_ahead for each in formats)
    if ahead and columns % (LANE_WEIGHTS * WARP // 4) == 0:
        lanes = max(4, *map(_fewest_lanes, formats))
    elif not inline:  # what is left of a row is not loaded ahead, and nothing hides it
        ahead = False
    warps, per_warp = 8 if inline else 4, min(_rows_that_fill(device, 2, sum(rows)), *rows)
    if output == "q8_1":
        warps, per_warp = (8, 4) if ahead or (m > 2 and not inline) else (16, 2)
    elif ahead and lanes == 4 and _joins_wide(device, rows):
        warps, per_warp = 16, 4
    resident = 16 // warps
    if m > 2 and not inline:
        resident = {4: 3 if m <= 4 else 2}.get(warps, 1)
    config = MatvecConfig(
        activations="inline_q8" if inline else "q8_1",
        warps=warps,
        rows_per_warp=per_warp,
        lanes=lanes,
        ahead=ahead,
        unroll=_unroll(formats, columns, lanes, per_warp, ahead, inline) if m == 1 else 1,
        resident_blocks=resident,
        persistent=even_blocks(rows, warps * per_warp, resident, device.multiprocessors)
        if inline
        else 0,
    )
    return slim(config, formats, columns)


def _unroll(
    formats: tuple[str, ...], columns: int, lanes: int, rows: int, ahead: bool, inline: bool
) -> int:
    """Blocks of each lane under way, for one row of activations and so many `rows` of a warp."""
    trips = columns * lanes // (LANE_WEIGHTS * WARP)
    if lanes > 4:  # four rows ahead fill the registers
        return 2 if trips >= 2 and not (ahead and rows == 4) else 1
    # four lanes' blocks are as wide as two of eight; of two of them ptxas would move loads to where
    # the weights are used
    under_way = 16 * rows * WARP // 4 * max(block_format(f).super_block_bytes for f in formats)
    return 3 if trips >= 3 and ahead and not inline and under_way < BYTES_AHEAD else 1


def slim(config: MatvecConfig, formats: tuple[str, ...], columns: int) -> MatvecConfig:
    """The Config with its headers spread, where four rows ahead fill the registers.

    Without, where no format has a header or a warp's lanes do not all have blocks.
    """
    whole = columns % (config.streams(formats[0]) * block_format(formats[0]).block_size) == 0
    headers = any(block_format(each).broadcast_header for each in formats)
    fills = config.ahead and config.lanes == 4 and config.rows_per_warp >= 4
    return replace(config, broadcast_header=fills and headers and whole)


def _joins_wide(device: Target, rows: tuple[int, ...]) -> bool:
    """Whether joined matrices are two thirds of a device's blocks, of 64 rows each.

    Fewer blocks bring the activations into fewer multiprocessors, and the rest is idle: L2 is the
    limit of these.
    """
    busy = 3 * sum(n // 64 for n in rows) >= 2 * device.multiprocessors
    return busy and len(rows) > 1 and not any(n % 64 for n in rows)


def _qkv_append(
    device: Target,
    floats: bool,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
) -> MatvecConfig:
    """Config of `qkv_append_matvec`: that of `qkv_matvec`, with a pair of rows a warp at least."""
    config = _fused_matvec(device, formats, rows, columns, m, floats)
    if config.rows_per_warp > 1:
        return config
    config = replace(config, rows_per_warp=2)
    return replace(config, persistent=config.persistent and _even(device, rows, config))


def _even(device: Target, rows: tuple[int, ...], config: MatvecConfig) -> int:
    """`even_blocks` of a Config."""
    return even_blocks(rows, config.block_rows, config.resident_blocks, device.multiprocessors)


def _float_matvec(
    device: Target,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    norm: bool = False,
) -> MatvecConfig:
    """Config of a mat-vec of activations as they are, with a prologue or an epilogue or without.

    Every weight becomes a float, so the instructions are the limit: rows that a warp computes
    together share the loads of activations. A norm needs whole rows of activations in shared
    memory, where they fit; a kernel of its own makes it elsewhere. Otherwise up to two of them are
    read from the caches, and more come into shared memory in chunks. Where rows are too few to fill
    the device, warps share a row, as many as it has 256 weights for.
    """
    staged = norm and 4 * m * columns <= STAGED_BYTES
    together = len(formats) // len(rows)  # matrices whose rows a warp computes at once
    if not staged and together * sum(rows) < ROWS_TO_FILL * device.multiprocessors:
        return PRESETS[next(name for name, least in _SHARED_ROWS if columns >= least)]
    preset = PRESETS["tiled" if staged else "fused_f32" if m <= 2 else "chunked"]
    per_warp = min((4 if m <= 2 else 2) // together, *rows)
    blocks = 0
    if staged:
        blocks = even_blocks(
            rows, preset.warps * per_warp, preset.resident_blocks, device.multiprocessors
        )
    lanes = preset.lanes if m <= 2 else 16  # of narrower loads: with eight some formats spill
    lanes = max(lanes, *map(_fewest_lanes, formats))
    return replace(preset, rows_per_warp=per_warp, lanes=lanes, persistent=blocks)


def _expert_matvec(
    device: Target,
    formats: tuple[str, ...],
    n: int,
    columns: int,
    choices: int,
    norm: bool = False,
    output: str = "f32",
    exact: bool = False,
) -> MatvecConfig:
    """Config of `matvec` or `gated_matvec` by experts (n, columns), for so many tokens' choices.

    Each block normalizes and quantizes its token's row for itself, or with `exact` takes it as it
    is: one row, unless it is very long, is little beside the block's share of the weights. For q8_1
    output a block has the 32 rows of a group, in eight warps, so that two blocks hide each other's
    barriers; an expert's few rows are too few blocks of 16 warps to share them evenly.
    """
    if exact:
        config = _float_matvec(device, formats, (n * choices,) * len(formats), columns, 1, norm)
        config = replace(config, rows_per_warp=min(config.rows_per_warp, n))
    else:
        per_warp = 4 if output == "q8_1" else min(_rows_that_fill(device, 2, n * choices), n)
        config = replace(
            PRESETS["inline_q8"],
            activations="inline_q8" if columns <= INLINE_VALUES else "q8_1",
            rows_per_warp=per_warp,
            # what takes more of them for one row does not spill with 32 for several
            lanes=8 if all(block_format(f).tuning.gemv_lanes <= 8 for f in formats) else 32,
            unroll=2 if per_warp < 4 and columns >= 2 * 256 * 4 else 1,
            resident_blocks=2,
        )
    blocks = -(-n // config.block_rows)
    rounds = -(-blocks * choices // (device.multiprocessors * config.resident_blocks))
    return replace(config, persistent=-(-blocks // rounds) if 1 < rounds < blocks else 0)


def _mixture_matvec(
    device: Target, format: str, n: int, columns: int, m: int, exact: bool = False
) -> MatvecConfig:
    """Config of `mixture_matvec` for m tokens, experts (n, columns); `exact`: f32 activations.

    Rows are dealt to warps as those of a mat-vec. An expert's share of a row is a few trips: with
    the fewest lanes that share 256 weights most choices are worked on at once, and scales are
    unpacked least often; two trips are in flight, or one of four rows.
    """
    lanes = 8 if exact else _fewest_lanes(format)
    most = 2 if exact else block_format(format).tuning.gemv_rows
    rows = min(_rows_that_fill(device, most, n * m), n)
    return MatvecConfig(
        activations="f32" if exact else "q8_1",
        rows_per_warp=rows,
        lanes=lanes,
        unroll=1 if exact or rows > 2 else 2,
        # one less than of a plain mat-vec: a choice's terms take registers, too
        resident_blocks=4 if exact else block_format(format).tuning.gemv_resident_blocks - 1,
    )


#: (preset, least columns) for rows that several warps share, most warps first.
_SHARED_ROWS = (("wide", 2048), ("multi_warp", 1024), ("vectorized", 0))


def even_blocks(rows: tuple[int, ...], block_rows: int, resident: int, multiprocessors: int) -> int:
    """Blocks that share the rounds of all rows evenly, `resident` on each multiprocessor.

    Each matrix's share of them is rounded up. 0 means that one round will do.
    """
    blocks = sum(-(-n // block_rows) for n in rows)
    rounds = -(-blocks // max(1, multiprocessors * resident - len(rows) + 1))
    return -(-blocks // rounds) if rounds > 1 else 0


def _check_matvec(config: MatvecConfig, format: str, n: int, columns: int, m: int) -> None:
    if config.activations != "q8_1":
        raise ValueError(f"activations={config.activations!r} must be 'q8_1', what callers bring")
    config.check(format, n, columns, m)


def _check_fused(
    config: MatvecConfig,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    floats: bool,
    output: str,
) -> None:
    if not formats or len(rows) not in (1, len(formats)):
        raise ValueError(
            f"rows={rows} must be those of each of formats={formats}, or one number for all"
        )
    if config.activations not in (("q8_1", "inline_q8") if floats else ("q8_1",)):
        raise ValueError(
            f"activations={config.activations!r} must be q8_1, or with floats inline_q8"
        )
    if output not in ("f32", "q8_1"):
        raise ValueError(f"output={output!r} must be f32 or q8_1")
    if output == "q8_1" and (config.block_rows % GROUP or any(n % GROUP for n in rows)):
        raise ValueError(
            f"q8_1: rows={rows} and a block's {config.block_rows} must be multiples of {GROUP}"
        )
    if config.activations == "inline_q8" and int8_bytes(m, columns) > MOST_BYTES:
        raise ValueError(
            f"inline_q8: m={m} rows of columns={columns} take more than {MOST_BYTES} bytes"
        )
    for format in formats:
        config.check(format, min(rows), columns, m)


def _shares_rows(config: MatvecConfig) -> bool:
    """A fixed grid, or blocks that each quantize, suit their own number of rows."""
    return config.persistent > 0 or config.activations == "inline_q8"


_FORMAT, _SIZE, _ROWS = Key(str, Match.EQUAL), Key(int, Match.NEAR), Key(int, Match.COVERS)

matvec_rule: Rule[MatvecConfig] = Rule(
    "matvec",
    _matvec,
    TableRows(
        MatvecConfig,
        dict(format=_FORMAT, n=_SIZE, columns=_SIZE, m=_ROWS),
        _check_matvec,
        _shares_rows,
    ),
)
fused_matvec_rule: Rule[MatvecConfig] = Rule(
    "fused_matvec",
    _fused_matvec,
    TableRows(
        MatvecConfig,
        dict(
            formats=Key(tuple[str, ...], Match.EQUAL),
            rows=Key(tuple[int, ...], Match.NEAR),
            columns=_SIZE,
            m=_ROWS,
            floats=Key(bool, Match.EQUAL),
            output=Key(str, Match.EQUAL),
        ),
        _check_fused,
        _shares_rows,
    ),
)
float_matvec_rule: Rule[MatvecConfig] = Rule("float_matvec", _float_matvec)
qkv_append_rule: Rule[MatvecConfig] = Rule("qkv_append", _qkv_append)
expert_matvec_rule: Rule[MatvecConfig] = Rule("expert_matvec", _expert_matvec)
mixture_matvec_rule: Rule[MatvecConfig] = Rule("mixture_matvec", _mixture_matvec)

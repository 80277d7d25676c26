"""Selection rules: choose the Configs of the mat-vec kernels."""

from __future__ import annotations

from dataclasses import replace

from ...devices import Target
from ...formats import get as block_format
from ...ptx import WARP
from ..family import Key, Match, Rule, TableRows
from ..quantize_q8_1 import GROUP
from .config import LANE_WEIGHTS, PRESETS, MatvecConfig
from .prologue import MOST_BYTES, int8_bytes

#: Rows of a matrix per multiprocessor, for four warps with two rows each: a dozen 16-byte loads per
#: lane are then 24 KB in flight.
ROWS_TO_FILL = 8

#: Maximum number of activations that every block normalizes and quantizes itself: 64 KB from L2, 20
#: KB of shared memory.
INLINE_VALUES = 16384

#: Maximum bytes of f32 activations that every block normalizes itself in shared memory.
STAGED_BYTES = 64 << 10

#: Shared memory of a block beside them.
OTHERS_BYTES = 16 << 10


#: Bytes of weights in flight per multiprocessor, if registers allow it: what memory delivers during
#: its latency under load, which is nearly twice the idle latency.
BYTES_AHEAD = 48 << 10


def _fewest_lanes(format: str) -> int:
    """Returns the fewest lanes that share 256 weights.

    Each has a full quantization block of 32, or a quarter of a larger one.
    """
    layout = block_format(format)
    return max(4 if layout.block_size == 256 else 8, layout.tuning.gemv_fewest_lanes)


def _rows_that_fill(device: Target, rows: int, n: int) -> int:
    """Returns `rows` per warp, or fewer if that would leave multiprocessors without work."""
    while rows > 1 and n < ROWS_TO_FILL * device.multiprocessors * rows // 2:
        rows //= 2
    return rows


def _matvec(device: Target, format: str, n: int, columns: int, m: int) -> MatvecConfig:
    """Returns the Config for n rows of `columns` weights and m rows of activations.

    Two rows per warp (four for some formats) halve the loads of activations, the larger part of
    what a warp reads, if enough rows remain to fill the device. With one row of activations loads
    are the limit, so as many lanes share 256 weights as read complete lines in 16-byte loads. With
    more rows, instructions are the limit, so lanes are as few as possible. More activations take
    more registers and leave fewer resident thread blocks: as many as spill on no target.
    """
    tuning = block_format(format).tuning
    lanes = tuning.gemv_lanes if m == 1 else _fewest_lanes(format)
    rows = _rows_that_fill(device, tuning.gemv_rows if m == 1 else 2, n)
    # blocks per lane in flight; many activations fill the registers instead
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
    """Returns the Config of a mat-vec with prologue or epilogue.

    It is for `gated_matvec` or, with several `rows`, for `qkv_matvec`. With `floats`, f32 input
    activations, `inline_q8` means that each thread block normalizes and quantizes them itself,
    which pays while it is little work compared to its share of the weights; `q8_1` means that a
    separate kernel does. Sixteen warps are resident per multiprocessor, whose lanes have 128
    registers each and two quantization blocks of weights in flight for one row of activations.
    Without the prologue's shared memory more rows take more registers. For q8_1 output a thread
    block has the 32 rows of a group. The number of thread blocks divides the rounds of rows evenly,
    so that the prologue is repeated least.

    Prefetched weights are used half a trip later, so they go to as few lanes as possible, which
    unpack scales least often: each reads 32 adjacent bytes by two loads.
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
    elif not inline:  # the rest of a row is not prefetched, and nothing hides its latency
        ahead = False
    warps, per_warp = 8 if inline else 4, min(_rows_that_fill(device, 2, sum(rows)), *rows)
    if output == "q8_1":
        warps, per_warp = (8, 4) if ahead or (m > 2 and not inline) else (16, 2)
    elif ahead and lanes == 4 and _joins_wide(device, rows):
        warps, per_warp = 16, 4
        if columns <= LANE_WEIGHTS * WARP // 4 and sum(rows) > 64 * device.multiprocessors:
            per_warp = 2  # rows of one loop trip: both these and the next fill the registers
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
    """Returns the quantization blocks in flight per lane, for one activation, `rows` per warp."""
    trips = columns * lanes // (LANE_WEIGHTS * WARP)
    if lanes > 4:  # prefetching four rows fills the registers
        return 2 if trips >= 2 and not (ahead and rows == 4) else 1
    # the blocks of four lanes are as wide as two of eight; with two of them ptxas would sink loads
    # to the uses of the weights
    under_way = 16 * rows * WARP // 4 * max(block_format(f).super_block_bytes for f in formats)
    return 3 if trips >= 3 and ahead and not inline and under_way < BYTES_AHEAD else 1


def slim(config: MatvecConfig, formats: tuple[str, ...], columns: int) -> MatvecConfig:
    """Returns the Config with broadcast headers, if prefetching four rows fills the registers.

    The Config is unchanged if no format has a header or some lanes of a warp have no quantization
    block.
    """
    whole = columns % (config.streams(formats[0]) * block_format(formats[0]).block_size) == 0
    headers = any(block_format(each).broadcast_header for each in formats)
    fills = config.ahead and config.lanes == 4 and config.rows_per_warp >= 4
    return replace(config, broadcast_header=fills and headers and whole)


def _joins_wide(device: Target, rows: tuple[int, ...]) -> bool:
    """Returns whether thread blocks of 64 rows of the joined matrices fill two thirds of a device.

    Fewer thread blocks load the activations into fewer multiprocessors and leave the others idle;
    L2 is their limit.
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
    """Returns the Config of `qkv_append_matvec`: `qkv_matvec`'s with at least two rows per warp."""
    config = _fused_matvec(device, formats, rows, columns, m, floats)
    if config.rows_per_warp > 1:
        return config
    config = replace(config, rows_per_warp=2)
    return replace(config, persistent=config.persistent and _even(device, rows, config))


def _even(device: Target, rows: tuple[int, ...], config: MatvecConfig) -> int:
    """Returns `even_blocks` for a Config's rows and resident thread blocks."""
    return even_blocks(rows, config.block_rows, config.resident_blocks, device.multiprocessors)


def _float_matvec(
    device: Target,
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    norm: bool = False,
) -> MatvecConfig:
    """Returns the Config of a mat-vec with float activations, with or without prologue or epilogue.

    Every weight becomes a float, so instructions are the limit; rows that a warp computes together
    share the loads of activations. A norm needs complete rows of activations in shared memory, if
    they fit; otherwise a separate kernel computes it. Without a norm, up to two rows are read from
    the caches, and more are staged in chunks. If there are too few rows to fill the device, warps
    share a row, as many as its number of 256-weight groups allows.
    """
    room = min(STAGED_BYTES, device.common_shared_bytes - OTHERS_BYTES)
    staged = norm and 4 * m * columns <= room
    together = len(formats) // len(rows)  # matrices whose rows a warp computes together
    if not staged and together * sum(rows) < ROWS_TO_FILL * device.multiprocessors:
        return PRESETS[next(name for name, least in _SHARED_ROWS if columns >= least)]
    preset = PRESETS["tiled" if staged else "fused_f32" if m <= 2 else "chunked"]
    per_warp = min((4 if m <= 2 else 2) // together, *rows)
    blocks = 0
    if staged:
        blocks = even_blocks(
            rows, preset.warps * per_warp, preset.resident_blocks, device.multiprocessors
        )
    lanes = preset.lanes if m <= 2 else 16  # narrower loads: with eight some formats spill
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
    """Returns the Config of an MoE's `matvec` or `gated_matvec` with experts (n, columns).

    `choices`: (token, selected expert) pairs. Each thread block normalizes and quantizes its
    token's row itself, which costs little beside its weights unless the row is very long; with
    `exact` it uses the row unquantized. For q8_1 output a thread block computes the 32 rows of a
    group, with eight warps: two thread blocks then hide each other's barriers, and an expert's few
    rows occupy the multiprocessors more evenly than with 16 warps. Weights are prefetched if
    multiprocessors have several thread blocks; the cost model predicts no gain for a single one.
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
            # formats that need more lanes for one row do not spill with 32 for several
            lanes=8 if all(block_format(f).tuning.gemv_lanes <= 8 for f in formats) else 32,
            unroll=2 if per_warp < 4 and columns >= 2 * 256 * 4 else 1,
            resident_blocks=2,
        )
    blocks = -(-n // config.block_rows)
    rounds = -(-blocks * choices // (device.multiprocessors * config.resident_blocks))
    ahead = config.activations == "inline_q8" and blocks * choices > device.multiprocessors
    ahead = ahead and all(block_format(each).tuning.gemv_ahead for each in formats)
    fixed = -(-blocks // rounds) if 1 < rounds < blocks else 0
    return replace(config, ahead=ahead, persistent=fixed)


def _mixture_matvec(
    device: Target, format: str, n: int, columns: int, m: int, exact: bool = False
) -> MatvecConfig:
    """Returns the Config of `mixture_matvec` for m tokens, experts (n, columns).

    `exact`: f32 activations. Rows are distributed over warps as for a mat-vec. An expert's share of
    a row is a few trips. With the fewest lanes per 256 weights, most selected experts are processed
    at once and scales are unpacked least often. Two trips are in flight, or one for four rows.
    """
    lanes = 8 if exact else _fewest_lanes(format)
    most = 2 if exact else block_format(format).tuning.gemv_rows
    rows = min(_rows_that_fill(device, most, n * m), n)
    return MatvecConfig(
        activations="f32" if exact else "q8_1",
        rows_per_warp=rows,
        lanes=lanes,
        unroll=1 if exact or rows > 2 else 2,
        # one less than for a plain mat-vec: a choice's terms take registers, too
        resident_blocks=4 if exact else block_format(format).tuning.gemv_resident_blocks - 1,
    )


#: (preset, minimum columns) for rows that several warps share, most warps first
_SHARED_ROWS = (("wide", 2048), ("multi_warp", 1024), ("vectorized", 0))


def even_blocks(rows: tuple[int, ...], block_rows: int, resident: int, multiprocessors: int) -> int:
    """Returns the number of thread blocks that divide the rounds of all rows evenly.

    There are `resident` thread blocks per multiprocessor. Each matrix's share of them is rounded
    up. 0 means that one round is enough.
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
    """Returns whether a Config fits only its own number of rows: a fixed grid, or inline_q8."""
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

"""Which Config a shape gets. Heuristics live here, not in the kernels; `choices` says how tables
overrule them.

A rule that has to fill a device takes its number of `multiprocessors`; called as `tuning.gemm(...)`
it is given that of the device that is chosen for, see `choices.on_device`.
"""

from __future__ import annotations

from .choices import Rule, Tabled, current_device
from .devices import REFERENCE, find_device
from .kernels.attention import MergeConfig, PagedAttentionConfig
from .kernels.gemm import GemmConfig
from .kernels.matvec import MatvecConfig
from .kernels.pages import PAGE_TYPES
from .kernels.rms_norm import RmsNormConfig
from .kernels.top_k import MAX_PART
from .ptx import WARP

#: Of a matrix on each multiprocessor, for four warps with two rows each: a dozen 16-byte loads per
#: lane are then 24 KB in flight.
ROWS_TO_FILL = 8

#: Activations that every block may normalize and quantize for itself: 64 KB from the L2, 20 KB of
#: shared memory.
INLINE_VALUES = 16384

#: Bytes of f32 activations that every block may normalize for itself in its shared memory.
STAGED_BYTES = 64 << 10


@Tabled
def matvec(
    format: str, n: int, columns: int, m: int, *, multiprocessors: int = REFERENCE.multiprocessors
) -> MatvecConfig:
    """Config for n rows of `columns` weights and m rows of activations.

    Two rows a warp halve the loads of activations, which are the larger part of what a warp reads,
    wherever enough rows are there to fill the device all the same. With one row of activations
    loads are the limit, so as many lanes share 256 weights as read whole lines by 16 bytes each;
    with more, instructions are: as few lanes as can be. The more activations, the more registers
    hold them, and the fewer blocks are resident: as many as spill on no target.
    """
    super_blocks = format in ("Q4_K", "Q5_K", "Q6_K")
    few = 4 if super_blocks else 8
    lanes = (
        (8 if format in ("Q4_K", "Q5_K") else 16 if format == "Q8_0" else few) if m == 1 else few
    )
    rows = 2 if n >= ROWS_TO_FILL * multiprocessors else 1
    loads = (
        4 // rows if m == 1 else 1
    )  # blocks of a lane in flight; many activations fill the registers instead
    resident = 3 if m > 2 else 6 if m == 1 and lanes == 8 else 4 if format == "Q5_K" else 5
    return MatvecConfig(
        rows_per_warp=rows,
        lanes=lanes,
        unroll=max(1, min(loads, columns * lanes // (256 * 32))),
        resident_blocks=resident,
    )


@Tabled
def fused_matvec(
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    floats: bool = False,
    output: str = "f32",
    *,
    multiprocessors: int = REFERENCE.multiprocessors,
) -> MatvecConfig:
    """Config of a mat-vec with a prologue or an epilogue, of `gated_matvec` or of `qkv_matvec`
    (several rows).

    With `floats`, f32 activations to begin with, `inline_q8` says that each block normalizes and
    quantizes for itself, which pays while that is little work beside its share of the weights;
    `q8_1` that a kernel of its own does. Sixteen warps are resident on a multiprocessor, whose
    lanes have 128 registers each and two blocks of weights in flight for one row of activations;
    without the prologue's shared memory more rows take more registers. For q8_1 output a block has
    the 32 rows of a group. As many blocks as share the rounds of rows evenly repeat the prologue
    least.
    """
    few = 4 if all(format in ("Q4_K", "Q5_K", "Q6_K") for format in formats) else 8
    lanes = (
        8 if m == 1 or (output == "q8_1" and m > 4) else few
    )  # four rows of many activations fill the registers
    inline = floats and m * columns <= INLINE_VALUES
    filled = sum(rows) >= ROWS_TO_FILL * multiprocessors
    warps, per_warp = 8 if inline else 4, min(2 if filled else 1, *rows)
    if output == "q8_1":
        warps, per_warp = (8, 4) if m > 2 and not inline else (16, 2)
    resident = 16 // warps
    if m > 2 and not inline:
        resident = {4: 3 if m <= 4 else 2}.get(warps, 1)
    return MatvecConfig(
        activations="inline_q8" if inline else "q8_1",
        warps=warps,
        rows_per_warp=per_warp,
        lanes=lanes,
        unroll=2 if m == 1 and columns * lanes >= 2 * 256 * 32 else 1,
        resident_blocks=resident,
        persistent=even_blocks(rows, warps * per_warp, resident, multiprocessors) if inline else 0,
    )


@Rule
def float_matvec(
    formats: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    m: int,
    norm: bool = False,
    *,
    multiprocessors: int = REFERENCE.multiprocessors,
) -> MatvecConfig:
    """Config of a mat-vec of activations as they are, with a prologue or an epilogue or without.

    Floats are multiplied after packed weights became floats, so the instructions are the limit:
    rows that a warp computes together share the loads of activations. A norm needs whole rows in
    shared memory, where they fit; a kernel of its own makes it elsewhere.
    """
    staged = norm and 4 * m * columns <= STAGED_BYTES
    filled = sum(rows) >= 2 * ROWS_TO_FILL * multiprocessors
    warps, per_warp = 8 if staged else 4, min(4 if filled and m <= 4 else 2 if filled else 1, *rows)
    return MatvecConfig(
        activations="f32",
        stage="whole" if staged else "none",
        warps=warps,
        rows_per_warp=per_warp,
        lanes=8,
        unroll=1,
        resident_blocks=16 // warps,
        persistent=even_blocks(rows, warps * per_warp, 16 // warps, multiprocessors)
        if staged
        else 0,
    )


def even_blocks(rows: tuple[int, ...], block_rows: int, resident: int, multiprocessors: int) -> int:
    """Blocks that share the rounds of all rows evenly, `resident` of them on each multiprocessor;
    0: one round will do.

    Each matrix's share of them is rounded up.
    """
    blocks = sum(-(-n // block_rows) for n in rows)
    rounds = -(-blocks // max(1, multiprocessors * resident - len(rows) + 1))
    return -(-blocks // rounds) if rounds > 1 else 0


@Tabled
def gemm(
    format: str, n: int, columns: int, m: int, *, multiprocessors: int = REFERENCE.multiprocessors
) -> GemmConfig:
    """Config for n rows of `columns` weights and m rows of activations.

    Large tiles spend fewest instructions on unpacking and loads, but leave a device idle that has
    more multiprocessors
    than there are blocks: the weights' rows of a block are cut until there are one and a half
    blocks for each, down to 16, whose columns four warps then share, and after that the
    activations' rows. Two tiles a warp spill for Q6_K, and take too much memory for Q8_0 and Q5_1.
    Few activations make short stages, so that more of them are needed to keep loads in flight; no
    choice needs more shared memory than the 99 KB that a block of sm_120 has.
    """
    largest = min(64, -(-m // 16) * 16)
    one_tile = format in ("Q6_K", "Q8_0", "Q5_1")
    shapes = [(4, 1, 1 if one_tile else 2), (2, 2, 1 if one_tile else 2), (2, 2, 1), (1, 4, 1)]
    choices = [
        (*shape, largest) for shape in shapes
    ]  # row warps, column warps, tiles, rows of activations
    choices += [(1, 4, 1, m_tile) for m_tile in (32, 16) if m_tile < largest]

    def fills(row_warps: int, column_warps: int, tiles: int, m_tile: int) -> bool:
        return -(-m // m_tile) * -(-n // (16 * tiles * row_warps)) >= multiprocessors * 3 // 2

    row_warps, column_warps, tiles, m_tile = next((c for c in choices if fills(*c)), choices[-1])
    stages = 2 if row_warps * tiles > 4 else {16: 4, 32: 3}.get(m_tile, 2)
    return GemmConfig(row_warps, column_warps, tiles, m_tile, stages)


#: Issue slots that int8 products take for 16 x 8 x 32 of them, all of a step counted:
#: `benchmarks.tensor_cores`.
INT8_SLOTS = {"Q4_K": 19.3, "Q5_K": 20.9, "Q6_K": 28.1}
_GAIN = 1.25  # what f16 products have to win by, of which the model is not sure


@Rule
def half_gemm(
    format: str, n: int, columns: int, m: int, *, multiprocessors: int = REFERENCE.multiprocessors
) -> GemmConfig | None:
    """Config of f16 products for a shape of `gemm`'s, or None where int8 ones are as fast, or
    nobody knows.

    Int8 products wait for issue slots; f16 ones take half of these and wait for the tensor cores,
    whose f16 rate
    decides on each device. They read activations of two bytes: 256 weight rows a block keep that
    near what the L2 delivers, and take the shared memory of an sm_90 (sm_100 has it too, but its
    rates of `mma.sync` are not known). So large a tile pays where no more than a quarter of all
    rounds is idle. Of Q5_K 64 activations spill.
    """
    device = find_device(current_device().name)
    if device is None or device.arch != "sm_90" or format not in INT8_SLOTS or m <= 32:
        return None
    tensor = 4 * 2 * 16 * 8 * 32 / device.mma_float_ops  # clocks of a quarter of a multiprocessor
    config = GemmConfig(
        8, 1, 2, min(48 if format == "Q5_K" else 64, -(-m // 16) * 16), 2, products="f16"
    )
    blocks = -(-m // config.m_tile) * -(-n // config.rows)
    rounds = -(-blocks // multiprocessors)
    pays = INT8_SLOTS[format] >= _GAIN * tensor and 4 * blocks >= 3 * rounds * multiprocessors
    return config if pays else None


@Rule
def paged_attention(
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    capacity: int,
    dtype: str,
    *,
    multiprocessors: int = REFERENCE.multiprocessors,
) -> PagedAttentionConfig:
    """Config for groups of num_heads / num_kv_heads query heads and contexts (or windows) of up to
    `capacity` tokens.

    A whole group shares a block, up to eight query heads. A lane's load is 16 bytes; of int8 and
    fp8, where that is 16 values of each query, 8 for more than four. Warps wait for memory, so a
    block has as many as its lanes' registers
    allow: two blocks of eight leave each lane 128, of six 168, of four 255. Four tokens of each
    lane are in flight, two where a split has fewer tokens. A context is split to fill two blocks on
    each multiprocessor, no more, into parts of 64 tokens or more; below 256 tokens a second launch
    costs more.
    """
    size, group = PAGE_TYPES[dtype].size, num_heads // num_kv_heads
    queries = min(group, 8)
    load_bytes = 8 if size == 1 and queries > 4 else 16
    loads = -(-head_dim * size // load_bytes)
    runs = -(-loads // WARP)  # loads of a vector by a lane
    streams = WARP // min(WARP, 1 << (loads - 1).bit_length())  # tokens that a warp holds at once
    per_query = 2 * runs * load_bytes // size + 1  # values of the query, and weighted ones
    per_token = 2 * runs * load_bytes // 4 + (
        4 if dtype == "int8" else 0
    )  # as they are stored; scales and where
    blocks = batch * num_kv_heads * -(-group // queries)
    splits = max(1, min(2 * multiprocessors // blocks, capacity // 64)) if capacity >= 256 else 1
    for unroll in (4, 2):
        registers = queries * per_query + unroll * per_token  # beside some for addresses and sums
        warps = 8 if registers <= 80 else 6 if registers <= 114 else 4
        if registers <= 190 and streams * warps * unroll <= capacity // splits:
            break
    return PagedAttentionConfig(warps, queries, unroll, splits=splits, load_bytes=load_bytes)


@Rule
def merge_attention(head_dim: int, splits: int) -> MergeConfig:
    """Config for the merge of so many splits: all in flight at once, in up to eight warps, eight of
    each lane's.
    """
    per_warp = (
        WARP * 4 // (1 << (head_dim - 1).bit_length()) or 1
    )  # splits that a warp's lanes hold, four values each
    warps = min(8, -(-splits // per_warp))
    return MergeConfig(warps=warps, unroll=min(8, -(-splits // (warps * per_warp))))


@Rule
def rms_norm(columns: int) -> RmsNormConfig:
    """Config for rows of so many columns: four 16-byte loads a thread, in as many warps as that
    takes, at most 32.
    """
    return RmsNormConfig(warps=min(1 << max(columns // 512 - 1, 0).bit_length(), 32))


@Rule
def argmax_splits(columns: int, *, multiprocessors: int = REFERENCE.multiprocessors) -> int:
    """Blocks that search a row of so many values: one wave, of a thousand values each or more; 1:
    no second launch.
    """
    return _splits(columns, max(1024, -(-columns // multiprocessors)))


@Rule
def top_k_splits(columns: int, count: int) -> int:
    """Blocks that sort a row's parts: as small ones as leave no more candidates than one block then
    sorts.

    1: no second launch. Raises ValueError for a `count` that two launches cannot serve.
    """
    if columns <= MAX_PART:
        return 1
    part = max(1024, count, -(-columns // (MAX_PART // count)))
    if part > MAX_PART:
        raise ValueError(
            f"count={count} of {columns} values: parts of {part} are larger than {MAX_PART}"
        )
    return _splits(columns, part)


def _splits(columns: int, part: int) -> int:
    """Into how many equal parts, about so large, none of them empty."""
    even = -(-columns // -(-columns // part))
    return -(-columns // even)

"""Packed weights times one to eight rows of q8_1 activations: the decode step's matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from .. import formats
from ..formats import q4_k, q5_k, q6_k
from ..formats.dot import ActivationTile, PackedRow
from ..ptx import WARP, Builder, KernelError, Pointer, Value, f32, kernel, s8, u8, u32
from .quantize_q8_1 import GROUP

MAX_ROWS = 8  # of activations; above, tensor cores are the better way
SUPER_BLOCK = 256

_PACKED_ROWS: dict[str, type[PackedRow]] = {"Q4_K": q4_k.PackedRow, "Q5_K": q5_k.PackedRow, "Q6_K": q6_k.PackedRow}
FORMATS = tuple(_PACKED_ROWS)


@dataclass(frozen=True)
class MatvecConfig:
    """How a mat-vec spreads over the GPU.

    Attributes:
      warps: per block.
      rows_per_warp: weight rows that a warp computes together; they share the activations' loads.
      lanes_per_block: lanes that share a super-block. 8: every load is contiguous; 4 (the only one for Q6_K):
        fewer instructions, as scales are unpacked half as often.
      unroll: super-blocks of each lane in flight: all their loads come before the first use.
      resident_blocks: blocks that a multiprocessor holds at once; fewer leave each lane more registers for loads in
        flight.
    """

    warps: int = 4
    rows_per_warp: int = 1
    lanes_per_block: int = 4
    unroll: int = 2
    resident_blocks: int = 4


class _Activations:
    """A lane's share of the activations, moving along with its packed row."""

    def __init__(self, values: Pointer, scale_sum: Pointer, block: Value, row: PackedRow) -> None:
        self._row = row
        self._columns = values.shape[1]
        self._values = values.at(0, block * SUPER_BLOCK + row.value_base).cast(u32).moving()
        self._scale_sum = scale_sum.at(0, block * (SUPER_BLOCK // GROUP) + row.group_base).moving()

    def load(self, m: int, block: int) -> ActivationTile:
        value = m * self._columns + block * SUPER_BLOCK
        pair = 2 * value // GROUP
        words = [self._values.load((value + offset) // 4, vector=4) for offset in self._row.value_offsets]
        pairs = [self._scale_sum.load(pair + 2 * g, vector=4) for g in range(0, self._row.groups, 2)]
        flat = [number for four in pairs for number in four]
        return ActivationTile(words, flat[0::2], flat[1::2])

    def advance(self, blocks: int) -> None:
        self._values.advance(blocks * SUPER_BLOCK // 4)
        self._scale_sum.advance(blocks * 2 * SUPER_BLOCK // GROUP)


@kernel
def matvec(k: Builder, *, format: str, n: int, blocks: int, m: int, config: MatvecConfig) -> None:
    """y[j, r] = dequantize(w[r]) . x[j] for rows r < n of `blocks` super-blocks and activations j < m.

    A warp takes `rows_per_warp` rows. Its lanes split into streams of `lanes_per_block`; stream s walks super-blocks
    s, s + streams, ... The integer dot products of a sub-block come from dp4a, its scale and the activations' scale
    are applied once per sub-block, and a butterfly adds the lanes' totals. Weights are read once for all m.
    """
    if format not in _PACKED_ROWS:
        raise KernelError(f"format={format!r} must be one of {', '.join(FORMATS)}")
    packed_row = _PACKED_ROWS[format]
    lanes, rows = config.lanes_per_block, config.rows_per_warp
    if lanes not in packed_row.lanes:
        raise KernelError(f"lanes_per_block={lanes} must be one of {packed_row.lanes} for {format}")
    if not (1 <= m <= MAX_ROWS and 1 <= rows <= n):
        raise KernelError(f"m={m} must be 1 to {MAX_ROWS}, rows_per_warp={rows} 1 to n={n}")
    k.name = f"matvec_{format.lower()}_m{m}"
    planes = [k.input(p.name, u8, (n, blocks, p.bytes_per_block), constant=True) for p in formats.get(format).planes]
    values = k.input("values", s8, (m, blocks * SUPER_BLOCK))
    scale_sum = k.input("scale_sum", f32, (m, blocks * SUPER_BLOCK // GROUP, 2))
    y = k.output("y", f32, (m, n))
    k.launch((-(-n // (config.warps * rows)),), WARP * config.warps, resident_blocks=config.resident_blocks)
    streams = WARP // lanes

    first_row = (k.block_id() * config.warps + k.warp_id) * rows
    with k.when(first_row < n):  # whole warps: all lanes take the shuffles below
        row = first_row if n % rows == 0 else k.minimum(first_row, n - rows)  # the last warp may overlap its neighbour
        stream = k.lane_id // lanes
        weights = packed_row(k, planes, row, stream, k.lane_id % lanes, lanes)
        x = _Activations(values, scale_sum, stream, weights)
        totals = [[k.var(f32, 0.0) for _ in range(m)] for _ in range(rows)]

        def step(ahead: range) -> None:
            loaded = [[weights.load(r, a * streams) for r in range(rows)] for a in ahead]
            for a, tiles in zip(ahead, loaded, strict=True):
                unpacked = [weights.unpack(tile) for tile in tiles]
                for j in range(m):
                    activations = x.load(j, a * streams)
                    for r in range(rows):
                        weights.dot(unpacked[r], activations, totals[r][j])

        whole, rest = divmod(blocks, streams * config.unroll)
        if whole:
            with k.loop(0, whole):
                step(range(config.unroll))
                weights.advance(streams * config.unroll)
                x.advance(streams * config.unroll)
        step(range(rest // streams))
        if rest % streams:
            with k.when(stream < rest % streams):
                step(range(rest // streams, rest // streams + 1))

        for r in range(rows):
            for j in range(m):
                total = k.warp_sum(totals[r][j])
                mine = (k.lane_id == 0) & (row + r >= first_row)
                y.at(j, row + r).store(0, total, where=mine)

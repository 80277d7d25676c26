"""Tiling of a mat-vec (`MatvecConfig`), and named presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ... import formats
from ...limits import MAX_ROWS
from ...ptx import WARP, KernelError

ACTIVATIONS = ("q8_1", "inline_q8", "f32")
STAGES = ("none", "whole", "chunks")

LANES = (4, 8, 16, 32)
LANE_WEIGHTS = 256  # weights shared by that many lanes
_RESIDENT_WARPS = 64  # per multiprocessor at most; ptxas ignores a request for more


@dataclass(frozen=True)
class MatvecConfig:
    """Tiling of a mat-vec over thread blocks, warps and lanes.

    Attributes:
      activations: `q8_1`: int8 in groups of 32, integer dot products. `inline_q8`: the same,
        quantized from f32 by each thread block in shared memory before its rows. `f32`: f32
        products without quantization.
      stage: source of f32 activations: global memory (`none`), or shared memory, into which each
        thread block copies them in full before its rows (`whole`) or in chunks of 32 KB along the
        way (`chunks`).
      warps: per thread block.
      warps_per_row: warps that share each weight row and add their partial sums in shared memory.
      rows_per_warp: weight rows that a warp computes together; they share the activations' loads.
      lanes: lanes that share 256 weights: a super-block, or eight quantization blocks of 32, each
        of which has at least one lane. Fewer lanes load wider and unpack scales less often. More
        lanes make a warp's loads contiguous and need fewer registers.
      unroll: quantization blocks per lane in flight; all their loads are issued before the first
        use.
      ahead: whether to prefetch weights into registers: a loop trip's weights during the trip
        before it, into the registers of those already used; the weights of a warp's first trip
        before activations are staged; and those of its next rows before it stores the current ones.
      streamed: whether weights bypass L1 and are prefetched into L2 by 256 bytes (sm_80). The cost
        model sees no difference.
      broadcast_header: whether a super-block's header is loaded one word per lane and broadcast by
        shuffles, for formats with a header. It takes a quarter of the registers. With fewer than 32
        lanes, rows must be a multiple of a step of their streams, since all lanes of a warp take
        part.
      resident_blocks: thread blocks that a multiprocessor holds at once; fewer leave each lane more
        registers for loads in flight. They have at most 64 warps in total; that many leave 32
        registers, which only small Configs can use without spilling.
      persistent: thread blocks of a fixed grid that loop over the rows; 0 means as many thread
        blocks as the rows need.
    """

    activations: str = "q8_1"
    stage: str = "none"
    warps: int = 4
    warps_per_row: int = 1
    rows_per_warp: int = 1
    lanes: int = 4
    unroll: int = 2
    ahead: bool = False
    streamed: bool = False
    broadcast_header: bool = False
    resident_blocks: int = 4
    persistent: int = 0

    def check(self, format: str, n: int, columns: int, m: int) -> None:
        """Raises KernelError unless the tiling supports a matrix (n, columns) and m activations.

        ValueError for an unknown format.
        """
        block = formats.get(format).block_size
        if columns < 1 or columns % block:
            raise KernelError(
                f"columns={columns} must be a positive multiple of {block} for {format}"
            )
        if self.activations not in ACTIVATIONS:
            raise KernelError(
                f"activations={self.activations!r} must be one of {', '.join(ACTIVATIONS)}"
            )
        if self.stage not in STAGES or (self.stage != "none" and self.activations != "f32"):
            raise KernelError(
                f"stage={self.stage!r} must be one of {', '.join(STAGES)}, "
                "the latter two for f32 activations"
            )
        if self.lanes not in LANES:
            raise KernelError(f"lanes={self.lanes} must be one of {LANES}")
        limits = dict(m=(m, MAX_ROWS), warps=(self.warps, 32), unroll=(self.unroll, 16))
        limits |= dict(
            rows_per_warp=(self.rows_per_warp, min(n, 16)),
            resident_blocks=(self.resident_blocks, 32),
        )
        for name, (value, most) in limits.items():
            if not 1 <= value <= most:
                raise KernelError(f"{name}={value} must be 1 to {most}")
        if (held := self.warps * self.resident_blocks) > _RESIDENT_WARPS:
            raise KernelError(
                f"warps={self.warps} * resident_blocks={self.resident_blocks} = {held} warps: "
                f"a multiprocessor holds {_RESIDENT_WARPS}, with 32 registers a thread"
            )
        if self.ahead and self.stage == "chunks":
            raise KernelError("ahead=True needs whole rows of activations, not stage='chunks'")
        if self.persistent < 0:
            raise KernelError(f"persistent={self.persistent} must be a number of blocks, or 0")
        if self.warps_per_row < 1 or self.warps % self.warps_per_row:
            raise KernelError(
                f"warps={self.warps} must be a multiple of warps_per_row={self.warps_per_row}"
            )
        if self.broadcast_header:
            self._check_header(format, columns)

    def _check_header(self, format: str, columns: int) -> None:
        """Raises KernelError if some lanes of a shuffling warp would have no quantization block."""
        layout = formats.get(format)
        step = self.streams(format) * layout.block_size
        whole = columns % step == 0 and self.stage != "chunks"
        if layout.broadcast_header and self.lanes != WARP and not whole:
            raise KernelError(
                f"broadcast_header needs lanes={WARP}, or columns={columns} to be a multiple of "
                f"{step} and whole in a block, not stage={self.stage!r}"
            )

    @property
    def floats(self) -> bool:
        """Whether the kernel multiplies floats, not int8."""
        return self.activations == "f32"

    @property
    def block_rows(self) -> int:
        """Weight rows that a thread block computes at once."""
        return self.warps // self.warps_per_row * self.rows_per_warp

    def lanes_per_block(self, format: str) -> int:
        """Returns the lanes that share one quantization block of the format."""
        return max(1, self.lanes * formats.get(format).block_size // LANE_WEIGHTS)

    def trip(self, format: str) -> int:
        """Returns the columns that a row's warps process per loop trip."""
        return self.streams(format) * self.unroll * formats.get(format).block_size

    def streams(self, format: str) -> int:
        """Returns the quantization blocks of a row that its warps process at once."""
        return self.warps_per_row * WARP // self.lanes_per_block(format)


_DP4A = MatvecConfig(lanes=32)
_F32 = MatvecConfig(activations="f32", lanes=32)
_STAGED = replace(_F32, lanes=8, warps=8, rows_per_warp=4, unroll=1, resident_blocks=2)

#: Strategies by name. `persistent` can be combined with each of them.
PRESETS: dict[str, MatvecConfig] = {
    "tiled": replace(_STAGED, stage="whole"),
    "chunked": replace(_STAGED, stage="chunks"),
    "coalesced": replace(_F32, broadcast_header=True),
    "wide": replace(_F32, warps=8, warps_per_row=8),
    "vectorized": _F32,
    "multi_warp": replace(_F32, warps_per_row=4),
    "dp4a": _DP4A,
    "multi_warp_dp4a": replace(_DP4A, warps_per_row=4),
    "half_warp_dp4a": replace(_DP4A, lanes=16),
    "quarter_warp_dp4a": MatvecConfig(lanes=8, rows_per_warp=2, resident_blocks=6),
    "batched": MatvecConfig(lanes=4, rows_per_warp=2, unroll=1, resident_blocks=3),
    "inline_q8": MatvecConfig(
        activations="inline_q8", warps=8, lanes=8, rows_per_warp=2, resident_blocks=3
    ),
    "fused_f32": MatvecConfig(
        activations="f32", lanes=8, rows_per_warp=4, unroll=1, resident_blocks=2
    ),
}

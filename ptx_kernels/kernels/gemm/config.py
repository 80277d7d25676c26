"""The tiling of a tensor-core product, and the shapes that have one."""

from __future__ import annotations

from dataclasses import dataclass

from ... import formats
from ...limits import GEMM_COLUMNS, gemm_takes
from ...ptx import WARP, KernelError
from ..quantize_f16 import SUPER_BLOCK
from .fragments import TILE_COLUMNS, TILE_ROWS

#: Formats that `products="f16"` takes: weights that are f16 but for a factor of 256 columns.
F16_FORMATS = tuple(name for name in formats.names() if formats.get(name).f16_tile is not None)


@dataclass(frozen=True)
class GemmConfig:
    """Tiling: a thread block makes y for 16 * tiles * row_warps weight rows and m_tile activations.

    Attributes:
      row_warps: warps with weight rows of their own.
      column_warps: 1, 2, 4 or 8 warps that share rows, each with super-blocks of its own; their
        totals meet at the end.
      tiles: of 16 weight rows, per warp; they share the loads of activations.
      m_tile: rows of activations of a thread block, 8 or a multiple of 16.
      stages: of a super-block for each column warp, in shared memory: one in use and the others on
        their way.
      splits: 1, 2, 4 or 8 thread blocks, a cluster (sm_90), share rows, each with steps of its own;
        their totals meet in shared memory, and each finishes some rows of activations.
      products: `int8` of quants with q8_1 activations, whose sums of 32 columns f32 scales; or
        `f16` of scaled quants with f16 activations, added up by mma for 256 columns: half the
        instructions, twice the tensor cores' time.
    """

    row_warps: int = 4
    column_warps: int = 1
    tiles: int = 2
    m_tile: int = 64
    stages: int = 2
    products: str = "int8"
    splits: int = 1

    @property
    def rows(self) -> int:
        """Weight rows of a thread block."""
        return TILE_ROWS * self.tiles * self.row_warps

    @property
    def columns(self) -> int:
        """Columns of a step."""
        return SUPER_BLOCK * self.column_warps

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return WARP * self.row_warps * self.column_warps

    def steps(self, columns: int) -> int:
        """Steps of a thread block through its share of so many columns."""
        return -(-columns // (self.columns * self.splits))

    def check(self, format: str, columns: int) -> None:
        """KernelError where rows of so many weights of the format cannot be multiplied so.

        ValueError for an unknown format.
        """
        if formats.get(format).int8_tile is None:
            raise KernelError(f"{format} has no tensor-core product: its weights are decoded")
        if not gemm_takes(format, columns):
            multiple = max(GEMM_COLUMNS, formats.get(format).block_size)
            raise KernelError(f"columns={columns} must be a multiple of {multiple} for {format}")
        if self.m_tile != TILE_COLUMNS and (self.m_tile < 16 or self.m_tile % 16):
            raise KernelError(f"m_tile={self.m_tile} must be {TILE_COLUMNS} or a multiple of 16")
        if self.column_warps not in (1, 2, 4, 8):
            raise KernelError(f"column_warps={self.column_warps} must be 1, 2, 4 or 8")
        if self.splits not in (1, 2, 4, 8) or self.m_tile % self.splits:
            raise KernelError(
                f"splits={self.splits} must be 1, 2, 4 or 8 and divide m_tile={self.m_tile}"
            )
        for name, least, most in (
            ("row_warps", 1, 32 // self.column_warps),
            ("tiles", 1, 8),
            ("stages", 2, 16),
        ):
            if not least <= (value := getattr(self, name)) <= most:
                raise KernelError(f"{name}={value} must be {least} to {most}")
        if self.products not in ("int8", "f16"):
            raise KernelError(f"products={self.products!r} must be int8 or f16")
        if self.products == "f16" and format not in F16_FORMATS:
            raise KernelError(f"products='f16' is for {', '.join(F16_FORMATS)}")

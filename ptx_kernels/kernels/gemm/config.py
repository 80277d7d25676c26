"""Tiling of a tensor-core matmul, and a check of the shapes that support it."""

from __future__ import annotations

from dataclasses import dataclass

from ... import formats
from ...limits import GEMM_COLUMNS, gemm_takes
from ...ptx import WARP, KernelError
from ..quantize_f16 import SUPER_BLOCK
from .fragments import TILE_COLUMNS, TILE_ROWS

#: Formats that `products="f16"` supports: weights are f16 with a factor per 256 columns.
F16_FORMATS = tuple(name for name in formats.names() if formats.get(name).f16_tile is not None)


@dataclass(frozen=True)
class GemmConfig:
    """Matmul tiling: a thread block has 16 * tiles * row_warps weight rows and m_tile activations.

    Attributes:
      row_warps: warps with their own weight rows.
      column_warps: 1, 2, 4 or 8 warps that share weight rows, each with its own super-blocks of 256
        columns; their totals are added at the end.
      tiles: tiles of 16 weight rows per warp; they share the loads of activations.
      m_tile: rows of activations of a thread block, 8 or a multiple of 16.
      stages: super-blocks per column warp in shared memory: one in use and the others in flight.
      splits: 1, 2, 4 or 8 thread blocks, a cluster (sm_90), that share weight rows, each with its
        own steps (split-K). Their totals are added in shared memory, and each thread block finishes
        some rows of activations.
      products: `int8`: quants times q8_1 activations, with sums of 32 columns scaled in f32. `f16`:
        scaled quants times f16 activations, accumulated by mma over 256 columns, with half the
        instructions and twice the tensor core time.
    """

    row_warps: int = 4
    column_warps: int = 1
    tiles: int = 2
    m_tile: int = 64
    stages: int = 2
    products: str = "int8"
    splits: int = 1

    @property
    def cluster(self) -> bool:
        """Whether thread blocks that split the columns form a cluster."""
        return self.splits > 1

    @property
    def rows(self) -> int:
        """Weight rows of a thread block."""
        return TILE_ROWS * self.tiles * self.row_warps

    @property
    def columns(self) -> int:
        """Columns of a pipeline step."""
        return SUPER_BLOCK * self.column_warps

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return WARP * self.row_warps * self.column_warps

    def steps(self, columns: int) -> int:
        """Returns the pipeline steps of a thread block through its share of the columns."""
        return -(-columns // (self.columns * self.splits))

    def check(self, format: str, columns: int) -> None:
        """Raises KernelError if the tiling does not support rows of `columns` weights of a format.

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

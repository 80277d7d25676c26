"""Declares packed weights as operands of a kernel: one per plane (quants, scales, ...)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import formats
from ..ptx import Builder, KernelError, Pointer, Value, layer_index, u8


@dataclass(frozen=True)
class Planes:
    """Operands for the planes of a packed matrix (n, columns), or of a stack (layers, n, columns).

    Attributes:
      layer: index (u32) of the matrix of a stack that the kernel reads; None if there is no stack.
    """

    operands: Sequence[Pointer]
    layer: Value | None

    def of_matrix(self, layer: Value | None = None) -> list[Pointer]:
        """Returns the planes (n, blocks, bytes) of a stack's matrix; None means `self.layer`."""
        layer = self.layer if layer is None else layer
        if layer is None:
            return list(self.operands)
        return [plane.at(layer).reshape(*plane.shape[1:]) for plane in self.operands]


def input_planes(
    k: Builder,
    format: str,
    n: int,
    columns: int,
    *,
    prefix: str = "",
    layers: int = 0,
    experts: int = 0,
    expert: Value | None = None,
    streamed: bool = False,
) -> Planes:
    """Declares the planes of packed weights (n, columns) as operands, named with a `prefix`.

    Args:
      layers: number of matrices in a stack. An operand `index`, s32 (), then selects the matrix
        that the kernel reads. A negative index counts from the end; an index out of range is
        clamped.
      experts: number of experts; the kernel reads `expert` (u32, below `experts`).
      streamed: see `Builder.input`.
    """
    if layers and experts:
        raise KernelError(f"layers={layers}, experts={experts}: a stack is of one of them")
    layout = formats.get(format)
    stack = layers or experts
    shape = (*([stack] if stack else []), n, columns // layout.block_size)
    planes = [
        k.input(prefix + p.name, u8, (*shape, p.bytes_per_block), constant=True, streamed=streamed)
        for p in layout.planes
    ]
    if not layers:
        return Planes(planes, expert)
    return Planes(planes, layer_index(k, f"{prefix}index", layers))

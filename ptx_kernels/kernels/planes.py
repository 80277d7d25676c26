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
      last: planes of a matrix (n, columns) outside of the stack, whose index follows those of the
        stack; empty if there is none.
    """

    operands: Sequence[Pointer]
    layer: Value | None
    last: Sequence[Pointer] = ()

    def of_matrix(self, layer: Value | None = None) -> list[Pointer]:
        """Returns the planes (n, blocks, bytes) of a stack's matrix; None means `self.layer`."""
        layer = self.layer if layer is None else layer
        if layer is None:
            return list(self.operands)
        planes = [plane.at(layer).reshape(*plane.shape[1:]) for plane in self.operands]
        if not self.last:
            return planes
        inside = layer < self.operands[0].shape[0]
        return [a.where(inside, b) for a, b in zip(planes, self.last, strict=True)]


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
    shared: bool = False,
    streamed: bool = False,
) -> Planes:
    """Declares the planes of packed weights (n, columns) as operands, named with a `prefix`.

    Args:
      layers: number of matrices in a stack. An operand `index`, s32 (), then selects the matrix
        that the kernel reads. A negative index counts from the end; an index out of range is
        clamped.
      experts: number of experts; the kernel reads `expert` (u32, below `experts`).
      shared: whether more operands, "shared_...", are the planes of another matrix (n, columns),
        which is expert number `experts`.
      streamed: see `Builder.input`.
    """
    if layers and experts:
        raise KernelError(f"layers={layers}, experts={experts}: a stack is of one of them")
    layout = formats.get(format)
    stack = layers or experts
    of_matrix = n, columns // layout.block_size

    def planes_of(prefix: str, *shape: int) -> list[Pointer]:
        return [
            k.input(
                prefix + p.name, u8, (*shape, p.bytes_per_block), constant=True, streamed=streamed
            )
            for p in layout.planes
        ]

    planes = planes_of(prefix, *([stack] if stack else []), *of_matrix)
    if not layers:
        last = planes_of(f"shared_{prefix}", *of_matrix) if shared else []
        return Planes(planes, expert, last)
    return Planes(planes, layer_index(k, f"{prefix}index", layers))

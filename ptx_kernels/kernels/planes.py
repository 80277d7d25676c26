"""Packed weights as operands of a kernel."""

from __future__ import annotations

from .. import formats
from ..ptx import Builder, Pointer, u8


def input_planes(
    k: Builder, format: str, n: int, columns: int, *, prefix: str = ""
) -> list[Pointer]:
    """The planes of packed weights (n, columns) as operands, their names after `prefix`."""
    layout = formats.get(format)
    shape = (n, columns // layout.block_size)
    return [
        k.input(prefix + p.name, u8, (*shape, p.bytes_per_block), constant=True)
        for p in layout.planes
    ]

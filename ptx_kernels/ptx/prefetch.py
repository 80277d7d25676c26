"""Prefetches the next launch's first weights into the L2 cache at a kernel's end.

Memory is idle between two launches: the last thread blocks of the first have all their bytes, and
the first thread blocks of the second wait for a launch, a prologue and a first load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .builder import Builder
from .errors import KernelError
from .mbarrier import CHUNK, MOST_PREFETCHED
from .pointer import Pointer
from .types import s32, u8, u32
from .values import Value


@dataclass(frozen=True)
class Prefetch:
    """Rows of a packed matrix that the next launch reads, to be prefetched.

    Attributes:
      planes: (blocks, bytes) of a row of each plane.
      rows: rows of the matrix; those from `first` to below `last` are prefetched.
      layers: number of matrices in the stack, with an index operand after the planes; 0 means that
        there is no stack.
    """

    planes: tuple[tuple[int, int], ...]
    rows: int
    first: int
    last: int
    layers: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= self.rows:
            raise KernelError(
                f"prefetch of rows {self.first} to {self.last}: the matrix has {self.rows}"
            )

    def shares(self, blocks: int) -> list[tuple[int, int]]:
        """Returns (first byte to prefetch, bytes per thread block) of each plane.

        The size is at most MOST_PREFETCHED. It is 0 for a plane of a stack whose matrices do not
        all begin at a multiple of 16 bytes.
        """
        found = []
        for row in map(math.prod, self.planes):
            begin = self.first * row // CHUNK * CHUNK
            size = min(MOST_PREFETCHED, (self.last * row - begin) // blocks // CHUNK * CHUNK)
            aligned = not self.layers or self.rows * row % CHUNK == 0
            found.append((begin, size if aligned else 0))
        return found

    def operands(self, k: Builder, number: int) -> list[Pointer]:
        """Declares the planes of the matrix as operands; returns them as bytes.

        `number`: index of the matrix among the kernel's prefetched matrices, part of the operands'
        names.
        """
        stack = (self.layers,) if self.layers else ()
        planes = [
            k.input(f"ahead{number}_{p}", u8, (*stack, self.rows, *row), ahead=True)
            for p, row in enumerate(self.planes)
        ]
        if self.layers:
            layer = layer_index(k, f"ahead{number}_index", self.layers, ahead=True)
            planes = [plane.at(layer) for plane in planes]
        sizes = [self.rows * math.prod(row) for row in self.planes]
        return [plane.reshape(size) for plane, size in zip(planes, sizes, strict=True)]


def layer_index(k: Builder, name: str, layers: int, *, ahead: bool = False) -> Value:
    """Declares an operand s32 () that selects one of a stack's `layers` matrices; returns a u32.

    A negative index counts from the end. An index out of range is clamped. `ahead`: the kernel only
    prefetches from the stack.
    """
    index = k.input(name, s32, (), ahead=ahead).load()
    index = k.select(index < 0, index + layers, index)
    return k.minimum(k.maximum(index, 0), layers - 1).bits(u32)


def ask_ahead(k: Builder, wanted: tuple[Prefetch, ...]) -> None:
    """Emits the prefetches: the first thread of each thread block prefetches the block's share."""
    (x, y, z), _ = k.geometry
    blocks = x * y * z

    def read(name: str) -> Value:  # rereads, to free the registers meanwhile
        value = k.register(u32)
        k.write(f"mov.u32 {value.name}, {name};")
        return value

    with k.when(read("%tid.x") == 0):
        block = read("%ctaid.x")
        if y * z > 1:
            block = block + (read("%ctaid.z") * y + read("%ctaid.y")) * x
        for number, each in enumerate(wanted):
            planes = each.operands(k, number)
            for plane, (begin, size) in zip(planes, each.shares(blocks), strict=True):
                if size:
                    k.prefetch_l2(plane.at(begin).reshape(blocks, size).at(block), size)

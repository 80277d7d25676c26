"""Bytes that a kernel asks for at its end, so that the next launch finds them in the L2 cache.

Between two launches memory has nothing to do: the first one's last blocks have all their bytes, and
the second one's first blocks wait for a launch, a prologue and a first load.
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
    """Rows of a packed matrix that the next launch reads.

    Attributes:
      planes: (blocks, bytes) of a row of each plane.
      rows: of the matrix; those from `first` to `last` are asked for.
      layers: matrices of the stack that it is one of, an index behind the planes; 0: it lies alone.
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
        """The first byte of each plane's rows, and bytes that each of so many blocks asks for.

        At most MOST_PREFETCHED, and none of a plane whose matrices in a stack do not all begin at a
        multiple of 16 bytes.
        """
        found = []
        for row in map(math.prod, self.planes):
            begin = self.first * row // CHUNK * CHUNK
            size = min(MOST_PREFETCHED, (self.last * row - begin) // blocks // CHUNK * CHUNK)
            aligned = not self.layers or self.rows * row % CHUNK == 0
            found.append((begin, size if aligned else 0))
        return found

    def operands(self, k: Builder, number: int) -> list[Pointer]:
        """The planes of matrix `number` that the kernel asks for, as operands, in bytes."""
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
    """An operand s32 () that says which of so many matrices of a stack is meant, as u32.

    Below 0 it counts from the end; beyond either end it is the nearest. `ahead`: of a stack that
    the kernel only asks for.
    """
    index = k.input(name, s32, (), ahead=ahead).load()
    index = k.select(index < 0, index + layers, index)
    return k.minimum(k.maximum(index, 0), layers - 1).bits(u32)


def ask_ahead(k: Builder, wanted: tuple[Prefetch, ...]) -> None:
    """The end of a kernel: each block's first thread asks for its share of the bytes."""
    (x, y, z), _ = k.geometry
    blocks = x * y * z

    def read(name: str) -> Value:  # anew: what is kept from the start takes registers meanwhile
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

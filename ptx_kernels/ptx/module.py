"""Built kernels: PTX text, the buffers that it takes and its launch geometry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .types import Type

#: A block's shared memory on sm_90 and sm_100, where it is largest; sm_80 has 163 KB, sm_120 99.
MAX_SHARED_BYTES = 227 << 10

#: Blocks of a cluster: as many as every device that has clusters takes (the portable limit).
MAX_CLUSTER = 8

Role = Literal["in", "out", "inout"]


@dataclass(frozen=True)
class Buffer:
    """A device array that the kernel gets a pointer to, row-major and dense.

    Attributes:
      role: `in` is only read, `out` only written, `inout` updated in place (its result reuses its
        operand).
      ahead: the kernel asks for bytes of it, which the next launch reads, and reads none itself.
    """

    name: str
    type: Type
    shape: tuple[int, ...]
    role: Role
    ahead: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.type.size


@dataclass(frozen=True)
class Kernel:
    """PTX text and how to launch it. Hashable and deterministic: equal arguments give equal text.

    The entry's parameters are pointers: the operands (`in` and `inout` buffers, in order), then the
    results (`inout` and `out` buffers, in order). An `inout` buffer's two pointers are the same
    address; the text uses the second.

    Attributes:
      lines: number of a line of the text, from 1 -> (file, line) of the Python that wrote it; where
        that is a helper's, also of the kernel's function that called it. No part of the kernel's
        identity: equal kernels may differ in it. Where the text is changed, give `lines={}`.
      cluster: extents in blocks, which the text states: a launch need not.
      family, arguments: the function that built it and what it was given, defaults included; no
        part of it either.
    """

    name: str
    text: str
    buffers: tuple[Buffer, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared_bytes: int = 0
    lines: Mapping[int, tuple[tuple[str, int], ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    cluster: tuple[int, int, int] = (1, 1, 1)
    family: str = field(default="", compare=False, repr=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def operands(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role != "out")

    @property
    def results(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.role != "in")

    @property
    def ahead_bytes(self) -> int:
        """Bytes that all blocks together ask for, which the next launch reads."""
        blocks = math.prod(self.grid)
        wanted = (each.shares(blocks) for each in self.arguments.get("prefetch", ()))
        return blocks * sum(size for shares in wanted for _, size in shares)

    @property
    def aliases(self) -> dict[int, int]:
        """Operand index -> index of the result that reuses its buffer."""
        results = self.results
        return {i: results.index(b) for i, b in enumerate(self.operands) if b.role == "inout"}

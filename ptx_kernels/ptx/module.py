"""Built kernels: PTX text with buffers and launch geometry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .types import Type

#: Blocks of a cluster: the portable limit of all devices that have clusters.
MAX_CLUSTER = 8

Role = Literal["in", "out", "inout"]


@dataclass(frozen=True)
class Buffer:
    """A device array to which the kernel gets a pointer, row-major and dense.

    Attributes:
      role: `in` is only read, `out` only written, `inout` updated in place (its result reuses its
        operand).
      ahead: whether the kernel does not read the buffer, but prefetches bytes of it for the next
        launch.
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
    """A built kernel: PTX text and its launch configuration.

    Hashable and deterministic: equal arguments, equal text.

    The entry's parameters are pointers: the operands (`in` and `inout` buffers, in order), then the
    results (`inout` and `out` buffers, in order). An `inout` buffer's two pointers are the same
    address; the text uses the second.

    Attributes:
      lines: line number in the text, from 1 -> (file, line) of the Python that wrote it, followed
        by the kernel function's line if a helper wrote it. `lines` is not part of the kernel's
        identity. Pass `lines={}` if the text is changed.
      cluster: extents of a cluster in thread blocks. The text states them, so a launch need not.
      family, arguments: name of the function that built the kernel, and its arguments, defaults
        included; not part of the identity.
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
        """Bytes that all thread blocks together prefetch for the next launch."""
        blocks = math.prod(self.grid)
        wanted = (each.shares(blocks) for each in self.arguments.get("prefetch", ()))
        return blocks * sum(size for shares in wanted for _, size in shares)

    @property
    def aliases(self) -> dict[int, int]:
        """{operand index: index of the result that reuses its buffer}, for `inout` buffers."""
        results = self.results
        return {i: results.index(b) for i, b in enumerate(self.operands) if b.role == "inout"}

"""What the dot product of a packed row with q8_1 activations consists of, whatever the block format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..ptx import Builder, Pointer, Value, Var

Words = Sequence[Value]  # 16 bytes as four u32


@dataclass(frozen=True)
class ActivationTile:
    """The activations of one lane's share of a super-block, for one row of them.

    `words[i]`: the 16 int8 at the i-th of the format's `value_offsets`. `scales[g]`, `sums[g]`: scale and
    scale * sum of values of the g-th group of 32 that they touch, f32.
    """

    words: Sequence[Words]
    scales: Sequence[Value]
    sums: Sequence[Value]


class PackedRow(Protocol):
    """One lane's view of packed rows, a fixed share of every super-block.

    `value_base` (u32): where in a super-block's 256 activations the lane's first value lies, and `value_offsets`
    its runs of 16 from there; `group_base` and `groups`: the groups of 32 whose scales it needs. `lanes`: into how
    many shares a super-block can be cut.
    """

    lanes: tuple[int, ...]
    value_base: Value
    value_offsets: tuple[int, ...]
    group_base: Value
    groups: int

    def __init__(
        self, k: Builder, planes: Sequence[Pointer], row: Value, block: Value, part: Value, lanes: int
    ) -> None: ...

    def load(self, row: int, block: int) -> Any:
        """Starts the loads of super-block `block`, `row` rows down, both counted from where the view stands."""

    def unpack(self, loaded: Any) -> Any:
        """What all activation rows share: quants as dp4a operands, scales as numbers."""

    def dot(self, tile: Any, x: ActivationTile, total: Var) -> None:
        """total += this lane's share of weights . x."""

    def advance(self, blocks: int) -> None:
        """Moves on by so many super-blocks."""


def dp4a_chain(k: Builder, quants: Words, activations: Words, *, unsigned: bool) -> Value:
    """The s32 dot product of 4 * len(quants) bytes."""
    total: Any = 0
    for a, b in zip(quants, activations, strict=True):
        total = k.dp4a(a, b, total, unsigned_a=unsigned)
    return total

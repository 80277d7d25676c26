"""Attention's results: query heads' vectors, f32 or quantized for a mat-vec, or a split's share."""

from __future__ import annotations

from dataclasses import dataclass

from ...ptx import WARP, Builder, KernelError, Pointer, Value, f32, s8
from ..quantize_q8_1 import GROUP, store_group
from .online_softmax import Merged


@dataclass(frozen=True)
class Result:
    """Query heads' vectors.

    Attributes:
      values: f32 (batch, num_heads, head_dim), or s8 (batch, num_heads * head_dim).
      scale_sum: of s8, f32 (batch, num_heads * head_dim / 32, 2); else None.
    """

    k: Builder
    head_dim: int
    values: Pointer
    scale_sum: Pointer | None

    def store(self, sequence: Value, head: Value, group: Value, share: Value) -> None:
        """One warp writes 32 dimensions of a head, number `group` of them, a lane's each."""
        k, head_dim = self.k, self.head_dim
        if self.scale_sum is not None:
            number = head * (head_dim // GROUP) + group
            place = self.values.at(sequence, number * GROUP + k.lane_id)
            store_group(k, [share], place, self.scale_sum.at(sequence, number))
            return
        dimension = group * WARP + k.lane_id
        inside = dimension < head_dim if head_dim % WARP else None
        self.values.at(sequence, head, dimension).store(0, share, where=inside)


def declare_result(k: Builder, batch: int, num_heads: int, head_dim: int, output: str) -> Result:
    """Results of the kernel.

    `f32`: out (batch, num_heads, head_dim). `q8_1`, where head_dim is a multiple of 32: values s8
    (batch, num_heads * head_dim) and scale_sum f32 (batch, num_heads * head_dim / 32, 2), as
    `quantize_q8_1` makes them of out.

    Raises KernelError for another output, and for q8_1 of another head_dim.
    """
    if output != "f32" and (output != "q8_1" or head_dim % GROUP):
        raise KernelError(
            f"output={output!r} must be f32, or q8_1 where head_dim={head_dim} is a multiple of "
            f"{GROUP}"
        )
    if output == "f32":
        return Result(k, head_dim, k.output("out", f32, (batch, num_heads, head_dim)), None)
    values = k.output("values", s8, (batch, num_heads * head_dim))
    groups = batch, num_heads * head_dim // GROUP, 2
    return Result(k, head_dim, values, k.output("scale_sum", f32, groups))


@dataclass(frozen=True)
class Parts:
    """What several splits leave to `merge_attention`.

    Attributes:
      parts: f32 (batch, num_heads, splits, head_dim): weighted sums of values.
      marks: f32 (batch, num_heads, splits, 2): the highest score in base 2, the sum of weights.
    """

    k: Builder
    head_dim: int
    parts: Pointer
    marks: Pointer

    def store(
        self, sequence: Value, head: Value, split: Value, group: Value, merged: Merged
    ) -> None:
        """One warp writes 32 dimensions of a split's share of a head, as `Result.store`."""
        k, place = self.k, (sequence, head, split)
        first = (group == 0) & (k.lane_id == 0)
        self.marks.at(*place).store(0, (merged.m, merged.l), where=first)
        dimension = group * WARP + k.lane_id
        inside = dimension < self.head_dim if self.head_dim % WARP else None
        self.parts.at(*place, dimension).store(0, merged.o, where=inside)


def declare_parts(
    k: Builder, batch: int, num_heads: int, head_dim: int, output: str, splits: int
) -> Parts:
    """Parts of so many splits; raises KernelError for another output than f32."""
    if output != "f32":
        raise KernelError(f"output={output!r} must be f32 of splits={splits} that are no cluster")
    parts = k.output("parts", f32, (batch, num_heads, splits, head_dim))
    return Parts(k, head_dim, parts, k.output("marks", f32, (batch, num_heads, splits, 2)))

"""Stores attention results: f32, quantized as q8_1 or f16, or a split's partial results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ptx import WARP, Builder, KernelError, Pointer, Value, f32, s8
from ..activation import sigmoid
from ..quantize_f16 import LANE, SUPER_BLOCK, F16Rows, f16_scale
from ..quantize_q8_1 import GROUP, largest_magnitude, store_group
from ..vectors import load_floats
from .online_softmax import Merged, Piece


@dataclass(frozen=True)
class Result:
    """Output arrays of an attention kernel, one vector per query head.

    Attributes:
      values: f32 (batch, num_heads, head_dim), s8 (batch, num_heads * head_dim), or f16 as in
        `F16Rows`.
      scale_sum: for s8, f32 (batch, num_heads * head_dim / 32, 2); else None.
      gate: f32 (batch, num_heads, head_dim), whose sigmoid multiplies the results; None if absent.
    """

    k: Builder
    head_dim: int
    values: Pointer | F16Rows
    scale_sum: Pointer | None = None
    gate: Pointer | None = None

    @property
    def run(self) -> int:
        """Adjacent dimensions that a lane stores together."""
        return LANE if isinstance(self.values, F16Rows) else 1

    def gates(self, sequence: Value, head: Value, piece: Piece) -> Sequence[Value] | None:
        """Loads the gates of the lane's dimensions of a piece; None if there are none."""
        if self.gate is None:
            return None
        first = piece.group * WARP + piece.first
        inside = first < self.head_dim if self.head_dim % WARP else None
        return load_floats(self.gate.at(sequence, head, first), piece.run, where=inside)

    def store(
        self,
        sequence: Value,
        head: Value,
        piece: Piece,
        share: Sequence[Value],
        gates: Sequence[Value] | None,
    ) -> None:
        """Emits the stores of one warp's piece of a head, gated if there are `gates`.

        `share`: the lane's dimensions.
        """
        k, head_dim, group = self.k, self.head_dim, piece.group
        if gates is not None:
            share = [x * sigmoid(k, gate) for x, gate in zip(share, gates, strict=True)]
        if isinstance(self.values, F16Rows):
            column = (head * (head_dim // GROUP) + group) * GROUP + piece.first
            factors = f16_scale(k, largest_magnitude(k, share, WARP))
            self.values.store(sequence, column, share, factors)
            return
        (value,) = share
        if self.scale_sum is not None:
            number = head * (head_dim // GROUP) + group
            address = self.values.at(sequence, number * GROUP + k.lane_id)
            store_group(k, [value], address, self.scale_sum.at(sequence, number))
            return
        dimension = group * WARP + k.lane_id
        inside = dimension < head_dim if head_dim % WARP else None
        self.values.at(sequence, head, dimension).store(0, value, where=inside)


def leaves_f16(head_dim: int, heads: int) -> bool:
    """Returns whether a thread block's heads together fill complete f16 super-blocks of 256."""
    return head_dim % GROUP == 0 and head_dim * heads % SUPER_BLOCK == 0


def declare_result(
    k: Builder,
    batch: int,
    num_heads: int,
    head_dim: int,
    output: str,
    heads: int = 1,
    *,
    gate: bool = False,
) -> Result:
    """Declares the output arrays of an attention kernel with `heads` heads per thread block.

    With `gate`, first declares the operand `gate`, f32 (batch, num_heads, head_dim).

    `f32`: out (batch, num_heads, head_dim). `q8_1`, for head_dim a multiple of 32: values s8
    (batch, num_heads * head_dim) and scale_sum f32 (batch, num_heads * head_dim / 32, 2), as in
    `quantize_q8_1`. `f16`, if `leaves_f16`: values, means and scale, as in `quantize_f16`.

    Raises KernelError for another output, and for q8_1 or f16 if the heads do not allow it.
    """
    shape = batch, num_heads, head_dim
    gates = k.input("gate", f32, shape) if gate else None
    if output == "f16" and leaves_f16(head_dim, heads):
        rows = F16Rows.outputs(k, batch, num_heads * head_dim)
        return Result(k, head_dim, rows, gate=gates)
    if output != "f32" and (output != "q8_1" or head_dim % GROUP):
        raise KernelError(
            f"output={output!r} must be f32, q8_1 where head_dim={head_dim} is a multiple of "
            f"{GROUP}, or f16 where {heads} of a block's heads also fill multiples of {SUPER_BLOCK}"
        )
    if output == "f32":
        return Result(k, head_dim, k.output("out", f32, shape), gate=gates)
    values = k.output("values", s8, (batch, num_heads * head_dim))
    groups = batch, num_heads * head_dim // GROUP, 2
    return Result(k, head_dim, values, k.output("scale_sum", f32, groups), gates)


@dataclass(frozen=True)
class Parts:
    """Partial attention results of all splits (split-K), the input of `merge_attention`.

    Attributes:
      parts: f32 (batch, num_heads, splits, head_dim): weighted sums of values.
      marks: f32 (batch, num_heads, splits, 2): the highest score in base 2, the sum of weights.
    """

    k: Builder
    head_dim: int
    parts: Pointer
    marks: Pointer
    run = 1  # dimensions per lane and store

    def store(
        self, sequence: Value, head: Value, split: Value, piece: Piece, merged: Merged
    ) -> None:
        """Emits the stores of one warp's piece of a head's partial result, for split `split`."""
        k, index, group = self.k, (sequence, head, split), piece.group
        first = (group == 0) & (k.lane_id == 0)
        self.marks.at(*index).store(0, (merged.m, merged.l), where=first)
        dimension = group * WARP + k.lane_id
        inside = dimension < self.head_dim if self.head_dim % WARP else None
        self.parts.at(*index, dimension).store_run(0, merged.o, where=inside)


def declare_parts(
    k: Builder, batch: int, num_heads: int, head_dim: int, output: str, splits: int
) -> Parts:
    """Declares the splits' partial results; raises KernelError for another output than f32."""
    if output != "f32":
        raise KernelError(f"output={output!r} must be f32 of splits={splits} that are no cluster")
    parts = k.output("parts", f32, (batch, num_heads, splits, head_dim))
    return Parts(k, head_dim, parts, k.output("marks", f32, (batch, num_heads, splits, 2)))

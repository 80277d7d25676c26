"""Attention's results: query heads' vectors, f32 or quantized for a mat-vec, or a split's share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...ptx import WARP, Builder, KernelError, Pointer, Value, f32, s8
from ..quantize_q8_1 import GROUP, store_group
from .online_softmax import Merged

#: ((sequence, head), or with the split behind them; state) -> None: one warp writes one query
#: head's result.
Write = Callable[[tuple[Value, ...], Merged], None]


def declare_result(
    k: Builder, batch: int, num_heads: int, head_dim: int, output: str, splits: int = 1
) -> Write:
    """Results of the kernel, and what writes them.

    `f32`: out (batch, num_heads, head_dim). `q8_1`, where head_dim is a multiple of 32: values s8
    (batch, num_heads * head_dim) and scale_sum f32 (batch, num_heads * head_dim / 32, 2), as
    `quantize_q8_1` makes them of out.

    Several splits leave to `merge_attention`: parts f32 (batch, num_heads, splits, head_dim),
    weighted sums of values, and marks f32 (batch, num_heads, splits, 2), the highest score in base
    2 and the sum of weights.

    Raises KernelError for another output, for q8_1 of another head_dim, and for q8_1 of splits.
    """
    if output != "f32" and (output != "q8_1" or head_dim % GROUP or splits > 1):
        raise KernelError(
            f"output={output!r} must be f32, or q8_1 where head_dim={head_dim} is a multiple of "
            f"{GROUP} and splits={splits} is 1"
        )
    if splits > 1:
        return _parts(k, batch, num_heads, splits, head_dim)
    if output == "f32":
        out = k.output("out", f32, (batch, num_heads, head_dim))
        return lambda place, merged: _store_vector(
            k, out.at(*place), merged.normalized(k), head_dim
        )
    values = k.output("values", s8, (batch, num_heads * head_dim))
    scale_sum = k.output("scale_sum", f32, (batch, num_heads * head_dim // GROUP, 2))

    def write(place: tuple[Value, ...], merged: Merged) -> None:
        sequence, head = place
        for i, share in enumerate(merged.normalized(k)):
            group = head * (head_dim // GROUP) + i
            store_group(
                k,
                [share],
                values.at(sequence, group * GROUP + k.lane_id),
                scale_sum.at(sequence, group),
            )

    return write


def _parts(k: Builder, batch: int, num_heads: int, splits: int, head_dim: int) -> Write:
    parts = k.output("parts", f32, (batch, num_heads, splits, head_dim))
    marks = k.output("marks", f32, (batch, num_heads, splits, 2))

    def write(place: tuple[Value, ...], merged: Merged) -> None:
        marks.at(*place).store(0, (merged.m, merged.l), where=k.lane_id == 0)
        _store_vector(k, parts.at(*place), merged.o, head_dim)

    return write


def _store_vector(k: Builder, row: Pointer, values: Sequence[Value], head_dim: int) -> None:
    """Stores a vector of which lane l has dimensions l, l + 32, ...; coalesced."""
    for first, value in zip(range(0, head_dim, WARP), values, strict=True):
        mine = row.at(k.lane_id)
        inside = k.lane_id < head_dim - first if first + WARP > head_dim else None
        mine.store(first, value, where=inside)

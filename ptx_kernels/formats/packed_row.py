"""The dot product of packed rows with activations, whatever the block format and however it is
shared among lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..ptx import Builder, Pointer, Value, Var, f32
from .words import signed_floats


@dataclass(frozen=True)
class Run:
    """Neighbouring quants of one lane that have a scale in common: weight = d * scale * (quant -
    offset) - minimum.

    `quants`: u32 of four bytes each for `dot_q8_1` (no offset), f32 for `dot_f32`. `scale`: s32 for
    the former, f32 for the latter, None where it is 1.
    """

    quants: Sequence[Value]
    scale: Value | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Tile:
    """A lane's share of a block, ready for dot products with any number of activations.

    `minimums` (f32) line up with the activations' `sums`: one a run for `dot_f32`, one a sum of the
    format's `minimum_sums` for `dot_q8_1`; a lane whose term another lane of the same group adds
    has a zero. `signed`: the bytes of quants are int8.
    """

    runs: Sequence[Run]
    d: Value
    minimums: Sequence[Value] = ()
    signed: bool = False


def signed_run(
    k: Builder, words: Sequence[Value], scale: Value | None = None, *, floats: bool
) -> Run:
    """A run of quants that are the int8 in `words`, as bytes or, exactly, as floats; scale s32."""
    if not floats:
        return Run(words, scale)
    return Run(signed_floats(k, words), None if scale is None else scale.to(f32))


class ActivationTile(Protocol):
    """The activations that meet a lane's runs, for one row of them.

    `runs`: the values of each run, as u32 of four int8 or as f32. `scales`: of each run's group of
    32 (only q8_1).
    `sums`: what the tile's minimums are multiplied with.
    """

    @property
    def runs(self) -> Sequence[Sequence[Value]]: ...
    @property
    def scales(self) -> Sequence[Value]: ...
    @property
    def sums(self) -> Sequence[Value]: ...


@dataclass(frozen=True)
class Share:
    """Which part of the packed rows a lane has: part `part` of `lanes` of each block, from `row`
    and `block` on (u32).

    `floats`: its tiles go to `dot_f32`, else to `dot_q8_1`. `broadcast`: a header is loaded once a
    warp and spread by shuffles, where the format has one and a warp one block.
    """

    row: Value
    block: Value
    part: Value
    lanes: int
    floats: bool
    broadcast: bool = False


class PackedRow(Protocol):
    """One lane's view of packed rows: a fixed share of every block.

    Attributes:
      runs: (offset, length) of the lane's values in a block, counted from `value_base` (u32).
    """

    runs: Sequence[tuple[int, int]]
    value_base: Value

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None: ...

    def load(self, row: int, block: int) -> Any:
        """Starts the loads of block `block`, `row` rows down, both counted from where the view
        stands.
        """

    def unpack(self, loaded: Any) -> Tile:
        """What all rows of activations share."""

    def minimum_sums(self, sums: Sequence[Value]) -> Sequence[Value]:
        """Of the scaled sums of the groups that the runs lie in, those that go with a tile's
        minimums (q8_1).
        """

    def advance(self, blocks: int) -> None:
        """Moves on by so many blocks."""


def dot_q8_1(k: Builder, tile: Tile, x: ActivationTile, total: Var) -> None:
    """total += this lane's share of weights . x: integer dot products of runs, then their scales.

    The min terms need no dot product: the activations' sums are known.
    """
    part: Any = None
    dot: Any = 0
    for run, values, x_scale, next_scale in zip(
        tile.runs, x.runs, x.scales, [*x.scales[1:], None], strict=True
    ):
        for a, b in zip(run.quants, values, strict=True):
            dot = k.dp4a(a, b, dot, unsigned_a=not tile.signed)
        if run.scale is None and next_scale is x_scale:
            continue  # runs of one group without scales of their own add up as integers
        product = (dot if run.scale is None else dot * run.scale).to(x_scale.type)
        part = product * x_scale if part is None else k.fma(product, x_scale, part)
        dot = 0
    k.accumulate(total, part, tile.d)
    _subtract_minimums(k, tile, x, total)


def dot_f32(k: Builder, tile: Tile, x: ActivationTile, total: Var) -> None:
    """total += this lane's share of weights . x, in f32; offset and min terms take one product a
    run.
    """
    part: Any = None
    for i, (run, values) in enumerate(zip(tile.runs, x.runs, strict=True)):
        dot: Any = run.quants[0] * values[0]
        for a, b in zip(run.quants[1:], values[1:], strict=True):
            dot = k.fma(a, b, dot)
        if run.offset:
            dot = k.fma(x.sums[i], -run.offset, dot)
        if part is None:
            part = dot if run.scale is None else dot * run.scale
        else:
            part = part + dot if run.scale is None else k.fma(dot, run.scale, part)
    k.accumulate(total, part, tile.d)
    _subtract_minimums(k, tile, x, total)


def _subtract_minimums(k: Builder, tile: Tile, x: ActivationTile, total: Var) -> None:
    if tile.minimums:  # else x.sums, which cost instructions, are not asked for
        for minimum, value in zip(tile.minimums, x.sums, strict=True):
            k.accumulate(total, minimum, -value)

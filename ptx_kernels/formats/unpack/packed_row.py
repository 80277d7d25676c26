"""Interface for reading packed rows in GEMV kernels: a lane's quants and scales in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...ptx import Builder, Pointer, Value, f32
from .packed_words import signed_floats


@dataclass(frozen=True)
class Run:
    """A lane's adjacent quants with one scale: weight = d * scale * (quant - offset) - minimum.

    Attributes:
      quants: u32 of four bytes each, without an offset, or f32.
      scale: s32 or f32 with bytes, f32 with floats; None if it is 1.
      less: bytes (u32 of four); the bytes times `less_factor` are subtracted from the quants.
      unit: a power of two, another factor for quants that are bytes.
    """

    quants: Sequence[Value]
    scale: Value | None = None
    offset: float = 0.0
    less: Sequence[Value] = ()
    less_factor: int = 1
    unit: float = 1.0


@dataclass(frozen=True)
class Tile:
    """A lane's share of a quantization block, unpacked, ready to be multiplied by activations.

    Attributes:
      d: f32, the factor of all runs.
      minimums: f32, each multiplied by a sum of activations and subtracted. Floats have one per
        run. Bytes have one per group of 32 that the runs lie in, or a single one.
      minimum_d: f32, the factor of `minimums`, which are then one per run, also for bytes; None
        means that `minimums` have no further factor.
      minimum_group: u32, 0 or 1: which of the lane's two groups its single minimum belongs to;
        another lane has the other group's. None means that the lane has both.
      signed: whether the bytes of quants are int8.
    """

    runs: Sequence[Run]
    d: Value
    minimums: Sequence[Value] = ()
    minimum_group: Value | None = None
    minimum_d: Value | None = None
    signed: bool = False

    @property
    def uses_sums(self) -> bool:
        """Whether minimums or offsets need sums of activations."""
        return bool(self.minimums) or any(run.offset for run in self.runs)


def signed_run(
    k: Builder, words: Sequence[Value], scale: Value | None = None, *, floats: bool
) -> Run:
    """Returns a `Run` of the int8 quants in `words`, as bytes or as exact floats.

    `scale` is s32.
    """
    if not floats:
        return Run(words, scale)
    return Run(signed_floats(k, words), None if scale is None else scale.to(f32))


@dataclass(frozen=True)
class Share:
    """Share of packed rows that a lane reads: part `part` of `lanes` of each quantization block.

    Attributes:
      row, block: the first row and quantization block (u32).
      floats: whether quants become f32 or stay bytes.
      broadcast: whether a header is loaded one word per lane and broadcast by shuffles, if the
        format has one. All lanes of a warp must then unpack.
      activations: rows of activations that the quants are multiplied by.
    """

    row: Value
    block: Value
    part: Value
    lanes: int
    floats: bool
    broadcast: bool = False
    activations: int = 1


class PackedRow(Protocol):
    """Cursor with which one lane reads packed rows: a fixed share of every quantization block.

    Attributes:
      runs: (offset, length) of the lane's values in a block, counted from `value_base` (u32).
    """

    runs: Sequence[tuple[int, int]]
    value_base: Value

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None: ...

    def load(self, row: int, block: int) -> Any:
        """Starts the loads of the block that is `row` rows and `block` blocks after the cursor."""

    def unpack(self, loaded: Any) -> Tile:
        """Unpacks the quants loaded by `load`; all rows of activations share them."""

    def advance(self, blocks: int) -> None:
        """Advances the cursor by a number of quantization blocks."""

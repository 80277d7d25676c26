"""A lane's view of packed rows, as GEMV reads them: quants in registers with what scales them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...ptx import Builder, Pointer, Value, f32
from .packed_words import signed_floats


@dataclass(frozen=True)
class Run:
    """One lane's neighbouring quants of one scale: weight = d * scale * (quant - offset) - minimum.

    `quants`: u32 of four bytes each, without an offset, or f32. `scale`: s32 or f32 with bytes, f32
    with floats, None where it is 1. `less`: bytes (u32 of four) which, times `less_factor`, quants
    are to be lowered by. `unit`: a power of two, another factor of quants that are bytes.
    """

    quants: Sequence[Value]
    scale: Value | None = None
    offset: float = 0.0
    less: Sequence[Value] = ()
    less_factor: int = 1
    unit: float = 1.0


@dataclass(frozen=True)
class Tile:
    """A lane's share of a quantization block, ready for products with any rows of activations.

    Attributes:
      d: f32, the factor of all runs.
      minimums: f32, each to be multiplied by a sum of activations and subtracted: one per run of
        floats; of bytes one per group of 32 that the runs lie in, or a single one.
      minimum_d: f32, the factor of minimums that are one per run, also of bytes; None: as above.
      minimum_group: u32, 0 or 1: which of the lane's two groups its single minimum belongs to,
        while another lane has the other's. None: the lane has both.
      signed: the bytes of quants are int8.
    """

    runs: Sequence[Run]
    d: Value
    minimums: Sequence[Value] = ()
    minimum_group: Value | None = None
    minimum_d: Value | None = None
    signed: bool = False

    @property
    def uses_sums(self) -> bool:
        """Whether sums of activations are needed, for minimums or offsets."""
        return bool(self.minimums) or any(run.offset for run in self.runs)


def signed_run(
    k: Builder, words: Sequence[Value], scale: Value | None = None, *, floats: bool
) -> Run:
    """A run of quants that are the int8 in `words`, as bytes or, exactly, as floats; scale s32."""
    if not floats:
        return Run(words, scale)
    return Run(signed_floats(k, words), None if scale is None else scale.to(f32))


@dataclass(frozen=True)
class Share:
    """A lane's share of packed rows: part `part` of `lanes` of each block.

    It begins at `row` and `block` (u32). `floats`: quants become f32, else they stay bytes.
    `broadcast`: a header is loaded a word a lane and spread by shuffles, where the format has one;
    all lanes of a warp unpack then. `activations`: rows of them that quants are multiplied by.
    """

    row: Value
    block: Value
    part: Value
    lanes: int
    floats: bool
    broadcast: bool = False
    activations: int = 1


class PackedRow(Protocol):
    """One lane's view of packed rows: a fixed share of every block.

    Attributes:
      runs: (offset, length) of the lane's values in a block, counted from `value_base` (u32).
    """

    runs: Sequence[tuple[int, int]]
    value_base: Value

    def __init__(self, k: Builder, planes: Sequence[Pointer], share: Share) -> None: ...

    def load(self, row: int, block: int) -> Any:
        """Starts the loads of a block, `row` rows and `block` blocks past where the view stands."""

    def unpack(self, loaded: Any) -> Tile:
        """The quants of what `load` gave; all rows of activations share them."""

    def advance(self, blocks: int) -> None:
        """Moves on by a number of blocks."""

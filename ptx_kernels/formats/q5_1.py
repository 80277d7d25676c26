"""Q5_1: 32 weights in 24 bytes; weight = d * q + m.

Source: ggml, `block_q5_1`. `qh` and `qs` hold the quants as Q5_0's do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ptx import Builder, Pointer, Value, u8, u32
from . import packed_tile, q5_0
from .base import BlockFormat
from .base import half as half_values
from .packed_row import Run, Tile
from .words import ANCHOR, DecodedRun, anchored_floats, half


def _weights(field: Mapping[str, Any], xp: Any) -> Any:
    return half_values(field["d"]) * q5_0.quants(field, xp) + half_values(field["m"])


FORMAT = BlockFormat(
    name="Q5_1",
    block_size=32,
    block_bytes=24,
    struct=(("d", 2), ("m", 2), ("qh", 4), ("qs", 16)),
    layout=(("qs", ("qs",)), ("qh", ("qh",)), ("dm", ("d", "m"))),
    half_fields=("d", "m"),
    weights=_weights,
)


class PackedRow(q5_0.PackedRow):
    """A lane's share of Q5_1 rows: that of Q5_0, with unsigned quants and a minimum, which one lane
    of a block adds.
    """

    scale_type = u32  # d and m

    def unpack(self, loaded: tuple[Any, ...]) -> Tile:
        k = self._k
        pair, words, fifth = loaded
        d, minimum = half(pair), -half(pair, 1)
        if self._floats:
            runs = [
                Run(anchored_floats(k, fours), None, ANCHOR)
                for fours in self.quant_bytes(words, fifth, 2)
            ]
            return Tile(runs, d * 0.25, (minimum, minimum))
        if self._count < 4:
            minimum = k.select(self._part == 0, minimum, 0.0)
        return Tile([Run(quants) for quants in self.quant_bytes(words, fifth, 0)], d, (minimum,))


PARTS = q5_0.PARTS


def unpack(k: Builder, planes: Sequence[Pointer], part: Value) -> list[DecodedRun]:
    """All 32 weights of a block (see `words.Unpack`)."""
    qs, qh, dm = planes
    pair = dm.cast(u32).load()
    scale, offset = half(pair), half(pair, 1)
    return [
        DecodedRun(16 * i, [scale * v + offset for v in values])
        for i, values in enumerate(q5_0.unpack_quants(k, qs, qh))
    ]


def fragments_of(
    k: Builder, planes: Sequence[Pointer], unit: Value, start: Value, blocks: int
) -> tuple[packed_tile.Group, packed_tile.Group]:
    """Blocks 2 * unit and 2 * unit + 1 (see `packed_tile.Fragments`)."""
    qs, qh, dm = planes
    quants = q5_0.fragment_bytes(k, qs, qh, unit, 0, False)
    (d_low, m_low), (d_high, m_high) = (
        packed_tile.half_pairs(k, dm, unit * 8 + 4 * i) for i in range(2)
    )
    return (
        packed_tile.Group(unit * 2, quants[0], u8, [d_low], m_low),
        packed_tile.Group(unit * 2 + 1, quants[1], u8, [d_high], m_high),
    )

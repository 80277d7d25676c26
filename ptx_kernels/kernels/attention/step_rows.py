"""Loads a step's keys or values from pages into registers, and converts them to mma operands B."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...formats.unpack import e4m3 as fp8
from ...formats.unpack.packed_words import signed_byte_halves
from ...ptx import Builder, Value, Var, bf16, f16, f32, s8, u16, u32
from ...ptx.types import Type
from ..pages import Pages

STEP = 16  # tokens
COLUMNS = 8  # of operand B: tokens of keys, dimensions of values; also the rows of A in a register
#: Tokens of a step whose scores a lane has, relative to its pair.
SCORED = (0, 1, COLUMNS, COLUMNS + 1)
#: dtype of pages -> type of operands
TYPES: dict[str, Type] = {"bf16": bf16, "f16": f16, "int8": f16, "fp8": f16}

Runs = list[tuple[int, int]]
Words = Sequence[Value]


@dataclass(frozen=True)
class Lane:
    """A lane's position in mma operands: `row` of A or column of B, and `pair` along the depth."""

    row: Value
    pair: Value

    @classmethod
    def of(cls, k: Builder) -> Lane:
        return cls(k.lane_id // 4, k.lane_id % 4)


def _runs(head_dim: int, lanes: int, most: int) -> Runs:
    """Divides a vector among `lanes` into runs of up to `most` elements each.

    Returns (first, length) of each run: lane i has elements first + i * length and following.
    head_dim is a multiple of 16.
    """
    runs, first = [], 0
    while first < head_dim:
        length = min(most, 1 << ((head_dim - first) // lanes).bit_length() - 1)
        runs.append((first, length))
        first += length * lanes
    return runs


class StepRows:
    """Registers that hold a lane's share of a step's keys or values; every step reuses them.

    Attributes:
      runs: see `_runs`.
      words: for each token and run, registers (u32) of four bytes, or of two.
      scales: for int8 pages, the scales of the tokens whose scores the lane has; else None.
    """

    def __init__(
        self,
        k: Builder,
        pages: Pages,
        kv_head: Value,
        tokens: tuple[Value, Sequence[int]],
        over: tuple[Value, int],
        pair: Value,
    ) -> None:
        """Allocates the registers.

        Args:
          tokens: the first token, and the offsets added to it.
          over: the lane, and the number of lanes.
        """
        rows, (first, offsets), (lane, lanes) = pages.rows, tokens, over
        self._k, self._tokens, self._shape, self._type = k, offsets, rows.shape, rows.type
        self.runs = _runs(rows.shape[3], lanes, 16 // rows.type.size)
        self.words: list[list[list[Var]]] = [
            [
                [k.var(u32) for _ in range(-(-length * rows.type.size // 4))]
                for _, length in self.runs
            ]
            for _ in offsets
        ]
        #: run length -> the lane's first run in page 0
        self._starts = {
            length: rows.at(0, kv_head, first, lane * length) for _, length in self.runs
        }
        self.scales: list[Var] | None = None
        if pages.scales is not None:
            self.scales = [k.var(f32) for _ in SCORED]
            self._scales = pages.scales.at(0, kv_head, pair * 2)

    def load(self, page: Value, slot: Value, where: Value) -> None:
        """Starts the loads of a step from slot `slot` of a page on, where `where` is true."""
        *heads, head_dim = self._shape
        starts = {
            length: start.reshape(*self._shape).at(page, 0, slot)
            for length, start in self._starts.items()
        }
        if self.scales is not None:
            scales = self._scales.reshape(*heads).at(page, 0, slot)
            for i in (0, 2):
                scales.load_into(SCORED[i], self.scales[i : i + 2], where=where)
        for token, words in zip(self._tokens, self.words, strict=True):
            for (first, length), run in zip(self.runs, words, strict=True):
                start = starts[length].at(token * head_dim + first)
                narrow = length * self._type.size < 4
                start.cast(u16 if narrow else u32).load_into(0, run, where=where)

    def order(self) -> tuple[int, int, int, int]:
        """Returns the indices, in four adjacent dimensions, of the two pairs of an mma operand."""
        return (0, 1, 2, 3) if self._type.size == 2 else (0, 2, 1, 3)

    def key_operands(self) -> Iterator[list[Words]]:
        """Yields, for each 16 dimensions in the order of runs, operand B of each eight tokens."""
        tokens = [[word for run in token for word in run] for token in self.words]
        each = 2 if self._type.size == 2 else 1
        for i in range(0, len(tokens[0]), each):
            if each == 2:
                yield [token[i : i + 2] for token in tokens]
            else:
                yield [self._halves(token[i]) for token in tokens]

    def value_operands(self) -> Iterator[Words]:
        """Yields operands B of the values, one per element of each run.

        The operand of element e has this element of eight lanes' runs.
        """
        k = self._k
        for (_, length), *tokens in zip(self.runs, *self.words, strict=True):
            for a, b, c, d in zip(*tokens, strict=True):
                # of two tokens, the lower two bytes of each, then the upper ones
                for which in (0x5410, 0x7632)[: -(-length * self._type.size // 2)]:
                    low, high = k.permute(a, b, which), k.permute(c, d, which)
                    if self._type.size == 2:
                        yield low, high
                    else:
                        yield from zip(self._halves(low), self._halves(high), strict=True)

    def _halves(self, word: Value) -> tuple[Value, Value]:
        """Converts the four bytes of a u32 to f16; returns bytes 0 and 2, then bytes 1 and 3."""
        return signed_byte_halves(self._k, word) if self._type is s8 else fp8.halves(word)

    def hide(self, i: int, seen: Value) -> None:
        """Clears token i if `seen` is false, so that it adds nothing with a weight of 0."""
        if self.scales is not None:
            self.scales[i].set(self._k.select(seen, self.scales[i], 0.0))
            return
        for run in self.words[i]:
            for word in run:
                word.set(self._k.select(seen, word, 0))

"""Defines Plan: what one engine step runs on the device."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from .sequence import Sequence


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a prompt that one step prefills.

    Attributes:
      epoch: the sequence's epoch, by which late results are recognized.
      first, count: position of the first token, and number of tokens.
      samples: whether the piece ends the prompt, and its last token predicts a new one.
      tables: page ids of all logical pages, for each kind of layers.
    """

    sequence: Sequence
    epoch: int
    slot: int
    first: int
    count: int
    samples: bool
    tables: tuple[tuple[int, ...], ...]
    speculates: ClassVar[bool] = False

    @property
    def samples_at(self) -> int:
        """Index in the sequence's tokens of the token that follows the piece."""
        return self.first + self.count

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens[self.first : self.first + self.count]


@dataclasses.dataclass(frozen=True)
class Row:
    """A sequence for which one step samples tokens.

    Attributes:
      position: position of the last sampled token, which the step stores first.
      count: number of tokens to sample, unless an end token comes first.
      new_pages: for each kind of layers, the pages behind those of the tokens before `position`.
      speculates: whether the step decodes with drafts.
    """

    sequence: Sequence
    epoch: int
    slot: int
    position: int
    count: int
    new_pages: tuple[tuple[int, ...], ...]
    speculates: bool = False

    @property
    def samples(self) -> bool:
        """Whether the row's last token predicts a new one: always."""
        return True

    @property
    def samples_at(self) -> int:
        """Index in the sequence's tokens of the first token that the step samples."""
        return self.position + 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Work of one step, in the order of execution.

    Attributes:
      restores: (place, slot): recurrent states to copy from snapshots.
      shape: rows and tokens of the prefill program; None without pieces.
      fresh: whether all pieces begin their sequences, and may run without reading pages.
      pieces: parts of prompts, one per sequence.
      saves: (slot, place): recurrent states to copy to snapshots after the pieces.
      rows: sequences to decode; none of them has a piece in the same step.
      steps: the largest `count` of the rows.
      late_saves: like `saves`, after decoding.
      speculates: whether the rows are decoded with drafts. How many tokens they get is then not
        known before the step's end.
    """

    restores: list[tuple[int, int]]
    shape: tuple[int, int] | None
    fresh: bool
    pieces: list[Piece]
    saves: list[tuple[int, int]]
    rows: list[Row]
    steps: int
    late_saves: list[tuple[int, int]]
    speculates: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether a row's next token depends on what the host makes of its last one."""
        return any(row.sequence.constrained for row in self.rows)

"""Mutants of source files, and their random selection."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Replaces the text between two (line, column) positions.

    Lines count from 1, columns from 0.
    """

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Mutant:
    """One planted bug: `before` becomes `after` at `path:line`.

    `edits` contain `{id}` for the number of the mutant. They keep the original code next to the
    mutated code, and a call decides at run time which one runs.
    """

    operator: str
    path: str
    line: int
    before: str
    after: str
    edits: tuple[Edit, ...]

    def overlaps(self, other: Mutant) -> bool:
        (a, b), (c, d) = self._range(), other._range()
        return self.path == other.path and (a == c or (a < d and c < b))

    def _range(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return min(edit.start for edit in self.edits), max(edit.end for edit in self.edits)


def draw(found: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Chooses `count` mutants that do not overlap, alternating operators, by `seed`."""
    rng = random.Random(seed)
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in found:
        by_operator.setdefault(mutant.operator, []).append(mutant)
    for mutants in by_operator.values():
        rng.shuffle(mutants)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(by_operator.values()):
        for mutants in by_operator.values():
            while mutants and len(chosen) < count:
                mutant = mutants.pop()
                if not any(mutant.overlaps(other) for other in chosen):
                    chosen.append(mutant)
                    break
    return chosen


def apply(text: str, mutants: Sequence[tuple[int, Mutant]]) -> str:
    """Plants the numbered mutants into the text of their file."""
    lines = text.split("\n")
    edits = [(edit, number) for number, mutant in mutants for edit in mutant.edits]
    for edit, number in sorted(edits, key=lambda pair: (pair[0].start, pair[0].end), reverse=True):
        (first, left), (last, right) = edit.start, edit.end
        old = "\n".join(lines[first - 1 : last])
        tail = len(lines[last - 1]) - right
        new = old[:left] + edit.text.replace("{id}", str(number)) + old[len(old) - tail :]
        lines[first - 1 : last] = new.split("\n")
    return "\n".join(lines)

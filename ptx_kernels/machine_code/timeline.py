"""Simulates the timing of one warp alone: it issues in order and waits for loaded values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .sass import SassInstruction, filled, registers

#: Clocks per instruction of a warp alone: results take 4 to 5 clocks, with about two chains.
CLOCKS_ALONE = 2.0
#: Opcode with which a thread waits for its cluster.
CLUSTER_WAIT = "UCGABAR_WAIT"
_SETTLED = 12  # iterations of a loop, after which each takes the same time


Straight = tuple[SassInstruction, ...]


@dataclass(frozen=True)
class Section:
    """Code that a warp executes `turns` times; its parts are straight code and nested sections.

    `turns` is an average over warps and need not be an integer.
    """

    parts: tuple[Straight | Section, ...]
    turns: float = 1

    def straight(self) -> Iterator[tuple[Straight, float]]:
        """Yields (straight code, times that a warp executes it) for all parts, nested ones too."""
        for part in self.parts:
            if isinstance(part, Section):
                yield from ((code, self.turns * turns) for code, turns in part.straight())
            else:
                yield part, self.turns


class _Step(NamedTuple):
    """An instruction, and the registers that it names and fills.

    `pending`: maximum groups of asynchronous copies in flight after it; None means any.
    """

    instruction: SassInstruction
    named: frozenset[int]
    filled: range
    pending: int | None  # maximum groups of asynchronous copies in flight after it; None: any


@functools.lru_cache(maxsize=64)
def _steps(code: Straight) -> tuple[_Step, ...]:
    return tuple(
        _Step(
            i,
            frozenset(registers(i.operands)),
            filled(i) if i.category.startswith("load global") else range(0),
            int(i.operands.split(",")[-1], 0) if i.opcode == "DEPBAR.LE" else None,
        )
        for i in code
        if i.name != "NOP"
    )


Latency = Callable[[SassInstruction], float]  # clocks until a load's value arrives, or of a wait


class Warp:
    """Timing state of a running warp; `now` counts clocks.

    Loads overlap with all code up to the first use of their values, also in the loop's next
    iteration. Asynchronous copies overlap until their group is waited for.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: dict[int, float] = {}  # register -> time when its value arrives
        self._copied = 0.0  # time when the copies since the last group arrive
        self._groups: list[float] = []

    def until_there(self) -> float:
        """Returns the clocks until all loaded values have arrived that no instruction used yet.

        A negative result means that they have arrived.
        """
        return max(self._ready.values(), default=self.now) - self.now

    def run(self, section: Section, latency: Latency) -> float:
        """Executes a section; returns the clocks that it takes."""
        turns = max(1, math.ceil(section.turns))
        times = [self._turn(section, latency) for _ in range(min(turns, _SETTLED))]
        if turns <= _SETTLED:
            taken = sum(times) * section.turns / turns
        else:
            last = times[_SETTLED // 2 :]  # in a ring, some iterations wait for later ones
            taken = sum(times) + (section.turns - len(times)) * sum(last) / len(last)
        self.now += taken - sum(times)
        return taken

    def _turn(self, section: Section, latency: Latency) -> float:
        return sum(
            self.run(part, latency) if isinstance(part, Section) else self._walk(part, latency)
            for part in section.parts
        )

    def _walk(self, code: Straight, latency: Latency) -> float:
        start = self.now
        for step in _steps(code):
            for register in step.named & self._ready.keys():
                self.now = max(self.now, self._ready.pop(register))
            if step.pending is not None:
                arrived = len(self._groups) - step.pending
                self.now = max([self.now, *self._groups[: max(0, arrived)]])
                self._groups = self._groups[max(0, arrived) :]
            self.now += CLOCKS_ALONE
            if step.instruction.name == CLUSTER_WAIT:
                self.now += latency(step.instruction)
            for register in step.filled:
                self._ready[register] = self.now + latency(step.instruction)
            if step.instruction.name == "LDGSTS":
                self._copied = self.now + latency(step.instruction)
            elif step.instruction.name == "LDGDEPBAR":
                self._groups.append(self._copied)
        return self.now - start

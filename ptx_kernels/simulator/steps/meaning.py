"""Registry of functions that simulate instructions with side effects or warp-wide effects.

These instructions need the machine's state, unlike those of `table`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...ptx.instructions import machine_row
from ..batch import Batch
from ..frame import Frame
from ..races.strong import semantics_of
from ..text.program import Instruction
from .binding import Binding, Call
from .operands import Operands
from .step import Step, Wait

#: (call, *sources) -> the result, or a sequence of results for several destinations
Meaning = Callable[..., Any]

_MEANINGS: dict[str, tuple[Meaning, bool]] = {}
_WAITS: dict[str, Callable[[Binding], Wait]] = {}


def means(*names: str, synchronizes: bool = False) -> Callable[[Meaning], Meaning]:
    """Decorator that registers a function as the effect of the table rows `names`.

    Args:
      synchronizes: whether the instruction may order accesses of different threads although it is
        no barrier and has neither `.acquire` nor `.release`.
    """

    def register(meaning: Meaning) -> Meaning:
        for name in names:
            if name in _MEANINGS:
                raise ValueError(f"{name} has two meanings")
            _MEANINGS[name] = meaning, synchronizes
        return meaning

    return register


def waits(*names: str) -> Callable[[Callable[[Binding], Wait]], Callable[[Binding], Wait]]:
    """Decorator that registers the condition which lanes await before these instructions."""

    def register(wait: Callable[[Binding], Wait]) -> Callable[[Binding], Wait]:
        _WAITS.update(dict.fromkeys(names, wait))
        return wait

    return register


def meaning_names() -> set[str]:
    """Returns the names of all instruction table rows that have a registered function."""
    return set(_MEANINGS)


def compile_machine(operands: Operands, instruction: Instruction) -> Step | None:
    """Returns the step of an instruction with a function registered by `means`, else None."""
    spelled = machine_row(instruction.opcode)
    if spelled is None or spelled.row.name not in _MEANINGS:
        return None
    bound = Binding(operands, instruction, spelled)
    meaning, synchronizes = _MEANINGS[spelled.row.name]
    semantics = semantics_of(instruction.opcode)
    wait = _WAITS.get(spelled.row.name)
    return Step(
        _runner(bound, meaning),
        tuple(bound.reads),
        bound.writes,
        synchronizes=synchronizes or semantics.acquire or semantics.release,
        wait=None if wait is None else wait(bound),
    )


def _runner(bound: Binding, meaning: Meaning) -> Callable[[Batch, Frame], None]:
    instruction, words, pair = bound.instruction, bound.spelled.words, bound.pair
    readers, targets = bound.readers, bound.targets

    def run(batch: Batch, frame: Frame) -> None:
        call = Call(batch, frame, instruction, words, pair)
        results = meaning(call, *[read(frame) for read in readers])
        if not targets:
            return
        if isinstance(results, np.ndarray):
            results = (results,)
        for (slot, convert), result in zip(targets, results, strict=False):
            frame.regs[slot] = result if convert is None else convert(result)

    return run

"""Simulates long forms of setp: combined with a predicate, or with a second, negated result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...ptx.types import TYPES
from ..batch import Batch
from ..frame import Frame
from ..text.program import Instruction, Negated, Pair
from .operands import Operands
from .registry import compiles
from .step import Step
from .table import compile_row

_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


_TRUE = np.ones(1, np.bool_)


@compiles("setp")
def compile_setp(operands: Operands, instruction: Instruction) -> Step:
    """Compiles setp.CMP[.BOOL].type p[|q], a, b[, [!]c].

    p = (a CMP b) BOOL c, q = !(a CMP b) BOOL c.
    """
    parts = instruction.opcode.split(".")
    words = [p for p in parts if p in _COMBINE]
    target, *given = instruction.operands
    if not words and not isinstance(target, Pair):
        return compile_row(operands, instruction)
    combine = _COMBINE[words[0]] if words else None
    operands.count(instruction, 4 if combine else 3)
    second = target.second if isinstance(target, Pair) else None
    first = target.first if isinstance(target, Pair) else target
    slot, _ = operands.destination(first, TYPES["pred"], instruction)
    writes = (
        (slot,)
        if second is None
        else (slot, operands.destination(second, TYPES["pred"], instruction)[0])
    )
    plain = replace(
        instruction,
        opcode=".".join(p for p in parts if p not in _COMBINE),
        operands=(first, *given[:2]),
    )
    comparison = compile_row(operands, plain)
    reads, other, negated = comparison.reads, -1, False
    if combine:
        negated = isinstance(given[2], Negated)
        condition = given[2].register if isinstance(given[2], Negated) else given[2]
        other, _ = operands.source(condition, TYPES["pred"], instruction)
        reads = (*reads, *operands.register_read(other))

    def run(batch: Batch, frame: Frame) -> None:
        # read before it is overwritten
        condition = frame.fetch(other, instruction) if combine else _TRUE
        comparison.run(batch, frame)
        holds = frame.fetch(slot, instruction)
        for register, value in zip(writes, (holds, ~holds), strict=False):
            frame.regs[register] = (
                combine(value, ~condition if negated else condition) if combine else value
            )

    return Step(run, reads, writes)

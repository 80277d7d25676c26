"""Compiles compute instructions: applies the NumPy function of their instruction table row."""

from __future__ import annotations

from ...ptx.instructions import INSTRUCTIONS, is_untyped
from ..batch import Batch
from ..frame import Frame
from ..perturbation import moved
from ..text.program import Instruction
from .operands import Operands
from .step import Step


def compile_row(operands: Operands, instruction: Instruction) -> Step:
    row = INSTRUCTIONS.get(instruction.opcode)
    if row is None:
        raise operands.unknown(instruction)
    operands.needs(instruction, row.needs)
    operands.count(instruction, 1 + len(row.operands))
    untyped = is_untyped(row.opcode.rsplit(".", 1)[-1])
    wider = row.opcode.startswith("cvt.")
    destination, *given = instruction.operands
    slot, convert = operands.destination(
        destination, row.result, instruction, untyped=untyped, wider=wider
    )
    sources = [
        operands.source(o, t, instruction, untyped=untyped, wider=wider)
        for o, t in zip(given, row.operands, strict=True)
    ]
    meaning, dtype, error = row.meaning, row.result.dtype, row.error

    def run(batch: Batch, frame: Frame) -> None:
        regs = frame.regs
        values = []
        for source, view in sources:
            value = regs[source]
            if value is None:
                value = frame.fetch(source, instruction)
            values.append(value if view is None else view(value))
        result = meaning(*values)
        if result.dtype != dtype:
            raise TypeError(f"the meaning of {row.opcode} gave {result.dtype}, not {dtype}")
        if error is not None and batch.freedom.salt is not None:
            result = moved(result, values, error, batch.freedom.salt)
        regs[slot] = result if convert is None else convert(result)

    def run_two(batch: Batch, frame: Frame) -> None:
        """Runs the common case, two sources and no conversions, with less Python code."""
        regs = frame.regs
        a, b = regs[first], regs[second]
        if a is None:
            a = frame.fetch(first, instruction)
        if b is None:
            b = frame.fetch(second, instruction)
        result = meaning(a, b)
        if result.dtype != dtype:
            raise TypeError(f"the meaning of {row.opcode} gave {result.dtype}, not {dtype}")
        regs[slot] = result

    plain = (
        convert is None
        and error is None
        and len(sources) == 2
        and all(view is None for _, view in sources)
    )
    if plain:
        first, second = (source for source, _ in sources)
    reads = tuple(r for source, _ in sources for r in operands.register_read(source))
    return Step(run_two if plain else run, reads, (slot,))

"""Fuses a multiplication and an addition without stated rounding at random, as ptxas may."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...ptx.instructions import INSTRUCTIONS
from .program import Address, Instruction, Negated, Operand, Pair, Program, Register, Vector

_FUSED = {("mul.f32", "add.f32"): "fma.rn.f32", ("mul.ftz.f32", "add.ftz.f32"): "fma.rn.ftz.f32"}


def contracted(program: Program, generator: np.random.Generator) -> Program:
    """Returns the program with pairs of mul and add fused to fma, each with probability 1/2.

    A pair is a mul without a stated rounding whose only reader is an add, also without one, in the
    same basic block.
    """
    code = program.instructions
    if not any(i.opcode in ("mul.f32", "mul.ftz.f32") for i in code):
        return program
    writes = [_written(i) for i in code]
    reads = [_read(i) for i in code]
    borders = set(program.labels.values()) | {n + 1 for n, i in enumerate(code) if _ends_block(i)}
    changed = list(code)
    for at, product in enumerate(code):
        if product.opcode not in ("mul.f32", "mul.ftz.f32"):
            continue
        target = product.operands[0]
        readers = [n for n, registers in enumerate(reads) if target in registers]
        if (
            len(readers) != 1
            or sum(target in registers for registers in writes) != 1
            or product.guard
        ):
            continue
        (to,) = readers
        total = code[to]
        opcode = _FUSED.get((product.opcode, total.opcode))
        if opcode not in INSTRUCTIONS or to <= at or any(at < b <= to for b in borders):
            continue
        if (
            any(w & set(reads[at]) for w in writes[at + 1 : to])
            or total.operands.count(target) != 1
        ):
            continue
        if generator.random() < 0.5:
            addend = next(o for o in total.operands[1:] if o != target)
            changed[to] = replace(
                total, opcode=opcode, operands=(total.operands[0], *product.operands[1:], addend)
            )
    return replace(program, instructions=changed)


def _ends_block(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] in ("bra", "brx", "ret", "exit", "bar", "barrier")


def _registers(operand: Operand) -> list[Register]:
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Vector):
        return [item for item in operand.items if isinstance(item, Register)]
    if isinstance(operand, Pair):
        return [operand.first, operand.second]
    if isinstance(operand, Negated):
        return [operand.register]
    if isinstance(operand, Address) and isinstance(operand.base, Register):
        return [operand.base]
    return []


def _written(instruction: Instruction) -> set[Register]:
    """Returns the registers that an instruction writes.

    These are in the first operand, unless it is an address or a label.
    """
    first = instruction.operands[0] if instruction.operands else None
    return set(_registers(first)) if isinstance(first, Register | Vector | Pair) else set()


def _read(instruction: Instruction) -> list[Register]:
    """Returns the registers that an instruction reads, also in addresses and the guard."""
    first, *others = instruction.operands or (None,)
    found = [register for operand in others for register in _registers(operand)]
    if isinstance(first, Address):
        found += _registers(first)
    return found + ([instruction.guard[0]] if instruction.guard else [])

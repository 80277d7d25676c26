"""Simulates ld.param and cvta: reads parameters and converts addresses."""

from __future__ import annotations

import numpy as np

from ...ptx.instructions import NAMED_TYPES, is_untyped, named_type
from ..address_space import LOCAL_WINDOW, SHARED_WINDOW
from ..batch import Batch
from ..errors import ParseError
from ..frame import Frame
from ..text.program import Address, Instruction, Name
from .operands import ADDRESS_CLASSES, Operands
from .registry import compiles
from .step import Step


@compiles("ld.param")
def compile_load_parameter(operands: Operands, instruction: Instruction) -> Step:
    """Compiles the load of an entry parameter, whose bytes come from the launch's arguments."""
    operands.count(instruction, 2)
    destination, address = instruction.operands
    spelling = instruction.opcode.rsplit(".", 1)[1]
    type_ = named_type(spelling)
    if instruction.opcode.count(".") != 2 or type_ is None or type_.name in ("pred", "f16", "bf16"):
        raise operands.unknown(instruction)
    names = [p.name for p in operands.program.params]
    if (
        not isinstance(address, Address)
        or not isinstance(address.base, Name)
        or address.base.name not in names
        or not 0
        <= address.offset
        <= operands.program.params[names.index(address.base.name)].nbytes - type_.size
    ):
        raise operands.error(ParseError, instruction, "names no parameter of the kernel")
    number, offset = names.index(address.base.name), address.offset
    slot, convert = operands.destination(
        destination, type_, instruction, untyped=is_untyped(spelling), wider=True
    )
    dtype, end = type_.dtype, offset + type_.size

    def run(batch: Batch, frame: Frame) -> None:
        value = batch.parameters[number][offset:end].view(dtype)
        frame.regs[slot] = value if convert is None else convert(value)

    return Step(run, (), (slot,))


@compiles("cvta")
def compile_address_conversion(operands: Operands, instruction: Instruction) -> Step:
    """Compiles a conversion between generic addresses and those of a state space."""
    parts = instruction.opcode.split(".")
    to, space = "to" in parts, parts[-2]
    if (
        parts not in (["cvta", space, "u64"], ["cvta", "to", space, "u64"])
        or space not in ADDRESS_CLASSES
    ):
        raise operands.unknown(instruction)
    operands.count(instruction, 2)
    destination, source = instruction.operands
    type_ = NAMED_TYPES["u64"]
    slot, _ = operands.destination(destination, type_, instruction)
    if isinstance(source, Name):
        found = operands.symbol(source.name)
        if found is None or found[0] != space:
            raise operands.error(ParseError, instruction, f"{source.name} is no {space} variable")
        origin = operands.constant(np.array([found[1]], np.uint64))
    else:
        origin, _ = operands.source(source, type_, instruction)
    window = np.uint64({"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space, 0))

    def run(batch: Batch, frame: Frame) -> None:
        value = frame.fetch(origin, instruction)
        frame.regs[slot] = value - window if to else value + window

    return Step(run, operands.register_read(origin), (slot,))

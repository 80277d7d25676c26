"""ld and st of global, shared and parameter space."""

from __future__ import annotations

import numpy as np

from ..ptx.types import REGISTER_DTYPES, Type
from .errors import ParseError, TypeMismatch, UnknownInstruction
from .frame import Frame
from .operands import Operands, Step, from_type, named_type
from .program import Address, Instruction, Name, Operand, Register, Vector

_IGNORED = {
    "relaxed",
    "volatile",
    "weak",
    "acquire",
    "release",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
}  # ordering between blocks and cache hints


def compile_load(operands: Operands, instruction: Instruction) -> Step:
    operands.count(instruction, 2)
    if instruction.opcode.startswith("ld.param."):
        return _load_parameter(operands, instruction)
    space, type_, vector, modifiers = _access(operands, instruction)
    non_coherent = "nc" in modifiers
    destination, address = instruction.operands
    base, offset = _address(operands, instruction, address, space)
    registers = _elements(operands, instruction, destination, vector)
    untyped = instruction.opcode.rsplit(".", 1)[1].startswith("b")
    targets = []
    for register in registers:
        operands.check_class(register, type_, instruction, untyped, wider=True)
        held = REGISTER_DTYPES[register.cls]
        same_size = held.itemsize == type_.size
        targets.append(
            (register.index, held if same_size else type_.dtype, None if same_size else from_type(type_, register.cls))
        )
    width = type_.size * vector
    element = type_.dtype

    def run(frame: Frame) -> None:
        addresses = frame.regs[base]
        if addresses is None:
            addresses = frame.fetch(base, instruction)
        if space == "global":
            items = frame.batch.memory.load(frame, instruction, addresses, offset, width, non_coherent)
        else:
            items = frame.batch.shared.load(frame, instruction, addresses, offset, width)
        columns = items[None]
        if vector > 1:
            columns = np.ascontiguousarray(items.view(element).reshape(items.size, vector).T)
        for (slot, dtype, convert), column in zip(targets, columns, strict=True):
            value = column.view(dtype)
            frame.regs[slot] = value if convert is None else convert(value)

    return Step(run, operands.register_read(base), tuple(slot for slot, _, _ in targets))


def compile_store(operands: Operands, instruction: Instruction) -> Step:
    operands.count(instruction, 2)
    space, type_, vector, modifiers = _access(operands, instruction)
    if "nc" in modifiers:
        raise operands.error(UnknownInstruction, instruction, "only loads can be non-coherent")
    address, source = instruction.operands
    base, offset = _address(operands, instruction, address, space)
    untyped = instruction.opcode.rsplit(".", 1)[1].startswith("b")
    values: tuple[Operand, ...] = (source,) if vector == 1 else tuple(_elements(operands, instruction, source, vector))
    sources = [operands.source(v, type_, instruction, untyped=untyped, wider=True) for v in values]
    width = type_.size * vector
    element = np.dtype(f"u{type_.size}")
    item = np.dtype(np.complex128) if width == 16 else np.dtype(f"u{width}")

    def run(frame: Frame) -> None:
        regs = frame.regs
        addresses = regs[base]
        if addresses is None:
            addresses = frame.fetch(base, instruction)
        columns = []
        for slot, convert in sources:
            value = regs[slot]
            if value is None:
                value = frame.fetch(slot, instruction)
            columns.append((value if convert is None else convert(value)).view(element))
        if vector == 1:
            items = columns[0]
        else:
            rows = np.empty((max(c.size for c in columns), vector), element)
            for i, column in enumerate(columns):
                rows[:, i] = column
            items = rows.view(item).reshape(-1)
        if space == "global":
            if addresses.size < items.size:
                items = items[-1:]  # all lanes at one address: the highest wins
            frame.batch.memory.store(frame, instruction, addresses, offset, width, items)
        else:
            frame.batch.shared.store(frame, instruction, addresses, offset, width, items)

    reads = tuple(r for slot in (base, *(s for s, _ in sources)) for r in operands.register_read(slot))
    return Step(run, reads, ())


def _access(operands: Operands, instruction: Instruction) -> tuple[str, Type, int, set[str]]:
    """(space, element type, vector length, modifiers) of an opcode such as ld.global.nc.v4.u32."""
    _, *modifiers, name = instruction.opcode.split(".")
    space = modifiers.pop(0) if modifiers else ""
    # the .shared::cta spelling names the same window
    space = "shared" if space == "shared::cta" else space
    if space == "volatile" and modifiers:
        space = modifiers.pop(0)
    type_ = named_type(name)
    vector = 1
    unknown = []
    for modifier in modifiers:
        if modifier in ("v2", "v4"):
            vector = int(modifier[1])
        elif modifier not in _IGNORED and modifier != "nc" and not modifier.startswith(("L1::", "L2::")):
            unknown.append(modifier)
    if (
        space not in ("global", "shared")
        or unknown
        or type_ is None
        or name in ("pred", "f16", "bf16")
        or type_.size * vector > 16
        or ("nc" in modifiers and space != "global")
    ):
        raise operands.error(UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction")
    if space == "shared":
        operands.shared_granule = min(operands.shared_granule, type_.size)
    return space, type_, vector, set(modifiers)


def _address(operands: Operands, instruction: Instruction, address: Operand, space: str) -> tuple[int, int]:
    """(slot of the base, byte offset)."""
    if not isinstance(address, Address):
        raise operands.error(TypeMismatch, instruction, "an address in brackets is missing")
    base = address.base
    if isinstance(base, Register):
        allowed = ("b64",) if space == "global" else ("b32", "b64")
        if base.cls not in allowed:
            raise operands.error(
                TypeMismatch,
                instruction,
                f"a {space} address needs a .{' or .'.join(allowed)} register, but {base.name} is .{base.cls}",
            )
        return base.index, address.offset
    if space == "shared":
        if isinstance(base, Name) and base.name not in operands.program.symbols:
            raise operands.error(ParseError, instruction, f"{base.name} is no shared variable")
        start = operands.program.symbols[base.name] if isinstance(base, Name) else 0
        return operands.constant(np.array([start], np.uint32)), address.offset
    raise operands.error(ParseError, instruction, "a global address needs a register")


def _elements(operands: Operands, instruction: Instruction, operand: Operand, vector: int) -> tuple[Register, ...]:
    registers = operand.items if isinstance(operand, Vector) else (operand,)
    if (
        len(registers) != vector
        or isinstance(operand, Vector) != (vector > 1)
        or not all(isinstance(r, Register) for r in registers)
    ):
        raise operands.error(TypeMismatch, instruction, f"{instruction.opcode} moves {vector} register(s)")
    return registers  # type: ignore[return-value]


def _load_parameter(operands: Operands, instruction: Instruction) -> Step:
    destination, address = instruction.operands
    if (
        instruction.opcode not in ("ld.param.u64", "ld.param.b64")
        or not isinstance(destination, Register)
        or destination.cls != "b64"
    ):
        raise operands.error(TypeMismatch, instruction, "a parameter is a .u64 pointer, loaded into a .b64 register")
    if (
        not isinstance(address, Address)
        or not isinstance(address.base, Name)
        or address.offset
        or address.base.name not in operands.program.params
    ):
        raise operands.error(ParseError, instruction, "names no parameter of the kernel")
    number, slot = operands.program.params.index(address.base.name), destination.index

    def run(frame: Frame) -> None:
        frame.regs[slot] = frame.batch.parameters[number]

    return Step(run, (), (slot,))

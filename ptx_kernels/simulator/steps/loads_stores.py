"""ld and st of every memory, and cvta between their addresses and generic ones."""

from __future__ import annotations

import numpy as np

from ...ptx.types import REGISTER_DTYPES, Type
from ..access import Access
from ..address_space import LOCAL_WINDOW, SHARED_WINDOW
from ..batch import Batch
from ..errors import ParseError, TypeMismatch, UnknownInstruction
from ..frame import Frame
from ..races.strong import Change, Strong, semantics_of, unchanged
from ..text.program import (
    Address,
    Immediate,
    Instruction,
    Name,
    Operand,
    Register,
    Vector,
)
from .operands import Operands, from_type, named_type
from .registry import compiles
from .step import Step

#: How an access is ordered and for whom, which comes before the state space, and hints for the
#: caches.
_ORDERS = {"weak", "volatile", "relaxed", "acquire", "release", "mmio"}
_SCOPES = {"cta", "cluster", "gpu", "sys"}
_HINTS = {"ca", "cg", "cs", "lu", "cv", "wb", "wt"}
#: Accesses with one of these may meet others without a race. `volatile` is no order here: code that
#: relies on it is of the time when warps ran in lockstep.
_STRONG = {"relaxed", "acquire", "release"}

#: State spaces of atomics, and of loads and stores with an order.
UPDATED = ("global", "shared", "generic")

#: State space of an opcode -> register classes that may hold its addresses.
_ADDRESSES = {
    "global": ("b64",),
    "const": ("b64",),
    "generic": ("b64",),
    "shared": ("b32", "b64"),
    "local": ("b32", "b64"),
}


@compiles("ld")
def compile_load(operands: Operands, instruction: Instruction) -> Step:
    operands.count(instruction, 2)
    if instruction.opcode.startswith("ld.param."):
        return _load_parameter(operands, instruction)
    space, type_, vector, modifiers = _access(operands, instruction)
    non_coherent = "nc" in modifiers
    destination, address = instruction.operands
    base, offset = address_of(operands, instruction, address, space)
    registers = _elements(operands, instruction, destination, vector)
    untyped = instruction.opcode.rsplit(".", 1)[1].startswith("b")
    targets = []
    for register in registers:
        operands.check_class(register, type_, instruction, untyped, wider=True)
        held = REGISTER_DTYPES[register.cls]
        same_size = held.itemsize == type_.size
        targets.append(
            (
                register.index,
                held if same_size else type_.dtype,
                None if same_size else from_type(type_, register.cls),
            )
        )
    width = type_.size * vector
    element = type_.dtype
    strong = bool(_STRONG & modifiers) and space in UPDATED
    observe = Strong(unchanged, semantics_of(instruction.opcode), writes=False)

    def run(batch: Batch, frame: Frame) -> None:
        addresses = frame.regs[base]
        if addresses is None:
            addresses = frame.fetch(base, instruction)
        access = Access(frame, instruction, addresses, offset, width)
        if strong:
            every = access._replace(addresses=np.broadcast_to(addresses, frame.count))
            items = batch.spaces[space].update(every, observe)
        elif non_coherent:
            items = batch.memory.load(access, non_coherent=True)
        else:
            items = batch.spaces[space].load(access)
        columns = items[None]
        if vector > 1:
            columns = np.ascontiguousarray(items.view(element).reshape(items.size, vector).T)
        for (slot, dtype, convert), column in zip(targets, columns, strict=True):
            value = column.view(dtype)
            frame.regs[slot] = value if convert is None else convert(value)

    writes = tuple(slot for slot, _, _ in targets)
    return Step(run, operands.register_read(base), writes, synchronizes=synchronizes(instruction))


@compiles("st")
def compile_store(operands: Operands, instruction: Instruction) -> Step:
    operands.count(instruction, 2)
    space, type_, vector, modifiers = _access(operands, instruction)
    if "nc" in modifiers or space == "const":
        raise operands.error(
            UnknownInstruction, instruction, "only loads can be non-coherent or constant"
        )
    address, source = instruction.operands
    base, offset = address_of(operands, instruction, address, space)
    untyped = instruction.opcode.rsplit(".", 1)[1].startswith("b")
    values: tuple[Operand, ...] = (
        (source,) if vector == 1 else _items(operands, instruction, source, vector)
    )
    sources = [operands.source(v, type_, instruction, untyped=untyped, wider=True) for v in values]
    width = type_.size * vector
    element = np.dtype(f"u{type_.size}")
    item = np.dtype(np.complex128) if width == 16 else np.dtype(f"u{width}")
    strong = bool(_STRONG & modifiers) and space in UPDATED
    semantics = semantics_of(instruction.opcode)

    def run(batch: Batch, frame: Frame) -> None:
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
        if not strong:
            batch.spaces[space].store(Access(frame, instruction, addresses, offset, width), items)
            return
        addresses, items = (
            np.broadcast_to(addresses, frame.count),
            np.broadcast_to(items, frame.count),
        )
        update = Strong(_replaced_by(items), semantics, reads=False, returns=False)
        access = Access(frame, instruction, addresses, offset, width)
        batch.spaces[space].update(access, update)

    reads = tuple(
        r for slot in (base, *(s for s, _ in sources)) for r in operands.register_read(slot)
    )
    return Step(run, reads, (), synchronizes=synchronizes(instruction))


def _replaced_by(items: np.ndarray) -> Change:
    def change(
        view: np.ndarray, index: np.ndarray, positions: np.ndarray, turns: np.ndarray
    ) -> np.ndarray:
        found = view[index]
        view[index[turns]] = items[positions][turns].view(view.dtype)
        return found

    return change


def synchronizes(instruction: Instruction) -> bool:
    """Whether an access orders other accesses."""
    semantics = semantics_of(instruction.opcode)
    return semantics.acquire or semantics.release


def _access(operands: Operands, instruction: Instruction) -> tuple[str, Type, int, set[str]]:
    """(space, element type, vector length, modifiers) of an opcode such as ld.global.nc.v4.u32."""
    _, *modifiers, name = instruction.opcode.split(".")
    orders = set()
    while modifiers and modifiers[0] in _ORDERS | _SCOPES:
        orders.add(modifiers.pop(0))
    space = "generic"
    named = (
        modifiers[0].removesuffix("::cta") if modifiers else ""
    )  # .shared::cta names the same window
    if named in _ADDRESSES and named != "generic":
        space = named
        modifiers.pop(0)
    type_ = named_type(name)
    vector = 1
    unknown = []
    for modifier in modifiers:
        if modifier in ("v2", "v4"):
            vector = int(modifier[1])
        elif (
            modifier not in _HINTS
            and modifier != "nc"
            and not modifier.startswith(("L1::", "L2::"))
        ):
            unknown.append(modifier)
    if (
        unknown
        or type_ is None
        or name in ("pred", "f16", "bf16")
        or type_.size * vector > 16
        or ("nc" in modifiers and space != "global")
        or (orders & _STRONG and not orders & _SCOPES)
    ):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    return space, type_, vector, orders | set(modifiers)


def address_of(
    operands: Operands, instruction: Instruction, address: Operand, space: str
) -> tuple[int, int]:
    """(slot of the base, byte offset)."""
    if not isinstance(address, Address):
        raise operands.error(TypeMismatch, instruction, "an address in brackets is missing")
    base = address.base
    if isinstance(base, Register):
        allowed = _ADDRESSES[space]
        if base.cls not in allowed:
            raise operands.error(
                TypeMismatch,
                instruction,
                f"a {space} address needs a .{' or .'.join(allowed)} register, but {base.name} is .{base.cls}",
            )
        return base.index, address.offset
    if base is None and space in ("shared", "local"):
        return operands.constant(np.zeros(1, np.uint32)), address.offset
    found = operands.symbol(base.name) if isinstance(base, Name) else None
    if found is None and space in ("global", "generic"):
        raise operands.error(
            ParseError, instruction, f"a {space} address needs a register or a variable"
        )
    if found is None or found[0] != space:
        raise operands.error(
            ParseError, instruction, f"{getattr(base, 'name', base)} is no {space} variable"
        )
    return operands.constant(np.array([found[1]], np.uint64)), address.offset


def _items(
    operands: Operands, instruction: Instruction, operand: Operand, vector: int
) -> tuple[Register | Immediate, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if (
        len(items) != vector
        or isinstance(operand, Vector) != (vector > 1)
        or not all(isinstance(r, Register | Immediate) for r in items)
    ):
        raise operands.error(
            TypeMismatch, instruction, f"{instruction.opcode} moves {vector} register(s)"
        )
    return items  # type: ignore[return-value]


def _elements(
    operands: Operands, instruction: Instruction, operand: Operand, vector: int
) -> tuple[Register, ...]:
    items = _items(operands, instruction, operand, vector)
    registers = tuple(item for item in items if isinstance(item, Register))
    if len(registers) != vector:
        raise operands.error(
            TypeMismatch, instruction, f"{instruction.opcode} moves {vector} register(s)"
        )
    return registers


def _load_parameter(operands: Operands, instruction: Instruction) -> Step:
    """A parameter of the entry: its bytes as the launch gave them."""
    destination, address = instruction.operands
    type_ = named_type(instruction.opcode.rsplit(".", 1)[1])
    if instruction.opcode.count(".") != 2 or type_ is None or type_.name in ("pred", "f16", "bf16"):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
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
    untyped = instruction.opcode.rsplit(".", 1)[1][0] == "b"
    slot, convert = operands.destination(
        destination, type_, instruction, untyped=untyped, wider=True
    )
    dtype, end = type_.dtype, offset + type_.size

    def run(batch: Batch, frame: Frame) -> None:
        value = batch.parameters[number][offset:end].view(dtype)
        frame.regs[slot] = value if convert is None else convert(value)

    return Step(run, (), (slot,))


@compiles("cvta")
def compile_address_conversion(operands: Operands, instruction: Instruction) -> Step:
    """cvta: between generic addresses and those of a memory."""
    parts = instruction.opcode.split(".")
    to, space = "to" in parts, parts[-2]
    if (
        parts not in (["cvta", space, "u64"], ["cvta", "to", space, "u64"])
        or space not in _ADDRESSES
    ):
        raise operands.error(
            UnknownInstruction, instruction, f"{instruction.opcode} is no known instruction"
        )
    operands.count(instruction, 2)
    destination, source = instruction.operands
    type_ = named_type("u64")
    assert type_ is not None
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

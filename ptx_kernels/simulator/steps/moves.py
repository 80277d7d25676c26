"""Simulates mov: registers, special registers, shared addresses, packing, unpacking of vectors."""

from __future__ import annotations

import numpy as np

from ...ptx.instructions import CLUSTERS, NAMED_TYPES, is_untyped, named_type
from ...ptx.types import REGISTER_DTYPES
from ..batch import Batch
from ..errors import ParseError, TypeMismatch
from ..frame import Frame
from ..text.program import Immediate, Instruction, Name, Register, Vector
from .operands import REGISTER_SIZES, Operands
from .registry import compiles
from .step import Step

_INDEXED = {f"%{r}.{axis}" for r in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}
_CLUSTERS = {
    f"%{r}.{axis}"
    for r in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
    for axis in "xyz"
} | {"%cluster_ctarank", "%cluster_nctarank"}
_MASKS = {f"%lanemask_{relation}" for relation in ("eq", "lt", "le", "gt", "ge")}
SPECIAL = _INDEXED | _CLUSTERS | _MASKS | {"%laneid", "%warpid", "%nwarpid"}


@compiles("mov")
def compile_move(operands: Operands, instruction: Instruction) -> Step:
    parts = instruction.opcode.split(".")
    type_ = named_type(parts[1]) if len(parts) == 2 else None
    if type_ is None or parts[1] in ("u8", "s8", "b8", "f16", "bf16"):
        raise operands.unknown(instruction)
    operands.count(instruction, 2)
    destination, source = instruction.operands
    untyped = is_untyped(parts[1])
    if isinstance(destination, Vector):
        return _unpack(operands, instruction, destination, source, type_.size)
    if isinstance(source, Vector):
        return _pack(operands, instruction, destination, source, type_.size)
    if isinstance(source, Name):
        return _named(operands, instruction, source.name)
    slot, convert = operands.destination(destination, type_, instruction, untyped=untyped)
    origin, _ = operands.source(source, type_, instruction, untyped=untyped)
    held = REGISTER_DTYPES[destination.cls]  # type: ignore[union-attr]

    def run(batch: Batch, frame: Frame) -> None:
        value = frame.regs[origin]
        if value is None:
            value = frame.fetch(origin, instruction)
        frame.regs[slot] = value if value.dtype == held else value.view(held)

    return Step(run, operands.register_read(origin), (slot,))


def _named(operands: Operands, instruction: Instruction, name: str) -> Step:
    destination = instruction.operands[0]
    kind = instruction.opcode.split(".")[1]
    if (
        not isinstance(destination, Register)
        or destination.cls not in ("b32", "b64")
        or kind[0] == "f"
        or REGISTER_SIZES[destination.cls] * 8 != int(kind[1:])
    ):
        raise operands.error(
            TypeMismatch, instruction, f"{name} needs a .b32 or .b64 register of the opcode's size"
        )
    slot, dtype = destination.index, REGISTER_DTYPES[destination.cls]
    if name in SPECIAL:
        if destination.cls != "b32":
            raise operands.error(TypeMismatch, instruction, f"{name} is a .u32")
        if name in _CLUSTERS:
            operands.needs(instruction, CLUSTERS)

        def run(batch: Batch, frame: Frame) -> None:
            frame.regs[slot] = frame.of_lanes(batch.layout.special(name))
    elif (symbol := operands.symbol(name)) is not None:
        value = np.array([symbol[1]], dtype)

        def run(batch: Batch, frame: Frame) -> None:
            frame.regs[slot] = value
    else:
        raise operands.error(
            ParseError, instruction, f"{name} is neither a variable nor a special register"
        )
    return Step(run, (), (slot,))


def _check_vector(
    operands: Operands, instruction: Instruction, vector: Vector, size: int
) -> np.dtype:
    """Returns the unsigned dtype of the vector's elements; raises if its size does not fit."""
    sizes = {REGISTER_SIZES[r.cls] for r in vector.items if isinstance(r, Register)}
    if (
        len(vector.items) not in (2, 4)
        or len(sizes) != 1
        or 0 in sizes
        or sizes.pop() * len(vector.items) != size
    ):
        raise operands.error(
            TypeMismatch, instruction, f"the vector's registers do not make up {size} bytes"
        )
    return np.dtype(f"u{size // len(vector.items)}")


def _unpack(
    operands: Operands, instruction: Instruction, vector: Vector, source: object, size: int
) -> Step:
    element = _check_vector(operands, instruction, vector, size)
    if not isinstance(source, Register | Immediate):
        raise operands.error(TypeMismatch, instruction, "a vector is unpacked from a register")
    type_ = NAMED_TYPES[f"u{8 * size}"]
    origin, _ = operands.source(source, type_, instruction, untyped=True)
    slots = [(r.index, REGISTER_DTYPES[r.cls]) for r in vector.items if isinstance(r, Register)]
    if len(slots) != len(vector.items):
        raise operands.error(TypeMismatch, instruction, "a vector is unpacked into registers")

    def run(batch: Batch, frame: Frame) -> None:
        value = frame.regs[origin]
        if value is None:
            value = frame.fetch(origin, instruction)
        # the low bits come first
        pieces = np.ascontiguousarray(value.view(element).reshape(value.size, -1).T)
        for (slot, held), piece in zip(slots, pieces, strict=True):
            frame.regs[slot] = piece.view(held)

    return Step(run, operands.register_read(origin), tuple(slot for slot, _ in slots))


def _pack(
    operands: Operands, instruction: Instruction, destination: object, vector: Vector, size: int
) -> Step:
    element = _check_vector(operands, instruction, vector, size)
    if not isinstance(destination, Register) or REGISTER_SIZES[destination.cls] != size:
        raise operands.error(
            TypeMismatch, instruction, f"a vector of {size} bytes needs a register of that size"
        )
    slot, held = destination.index, REGISTER_DTYPES[destination.cls]
    part = NAMED_TYPES[f"u{8 * element.itemsize}"]
    sources = [operands.source(item, part, instruction, untyped=True)[0] for item in vector.items]

    def run(batch: Batch, frame: Frame) -> None:
        values = [frame.fetch(s, instruction) for s in sources]
        packed = np.empty((max(v.size for v in values), len(values)), element)
        for column, value in enumerate(values):
            packed[:, column] = value.view(element)
        frame.regs[slot] = packed.view(held).reshape(-1)

    return Step(run, tuple(r for s in sources for r in operands.register_read(s)), (slot,))

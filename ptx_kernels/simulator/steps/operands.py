"""Maps operands to slots of the register file, and checks their types against the opcode."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...ptx.instructions import Version
from ...ptx.types import REGISTER_DTYPES, Type
from ..address_space import buffer_base
from ..errors import ParseError, SimulationError, TypeMismatch, UnknownInstruction
from ..text.program import Address, Immediate, Instruction, Name, Operand, Program, Register

REGISTER_SIZES = {"pred": 0, "b16": 2, "b32": 4, "b64": 8, "f32": 4}

#: State space -> register classes that can hold its addresses.
ADDRESS_CLASSES = {
    "global": ("b64",),
    "const": ("b64",),
    "generic": ("b64",),
    "shared": ("b32", "b64"),
    "shared::cluster": ("b32", "b64"),
    "local": ("b32", "b64"),
}

Convert = Callable[[np.ndarray], np.ndarray]


class Operands:
    """Assigns slots to operands: registers first, then constants, one per distinct immediate."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants: list[np.ndarray] = []
        self._known: dict[tuple[str, bytes], int] = {}

    def error(
        self, error: type[SimulationError], instruction: Instruction, message: str
    ) -> SimulationError:
        shown = f"line {instruction.line}: {instruction.text}"
        return error(f"kernel {self.program.name}: {message}\n  {shown}", instruction.line)

    def unknown(self, instruction: Instruction) -> SimulationError:
        what = f"{instruction.opcode} is no known instruction"
        return self.error(UnknownInstruction, instruction, what)

    def count(self, instruction: Instruction, *allowed: int) -> None:
        if len(instruction.operands) not in allowed:
            raise self.error(
                ParseError,
                instruction,
                f"{instruction.opcode} takes {' or '.join(map(str, allowed))} "
                f"operands, got {len(instruction.operands)}",
            )

    def needs(self, instruction: Instruction, needs: Version) -> None:
        """Raises ParseError if the text declares a lower PTX version or target than needed."""
        program = self.program
        if needs[0] > program.version or needs[1] > program.target:
            (major, minor), sm = needs
            raise self.error(
                ParseError,
                instruction,
                f"{instruction.opcode} needs PTX {major}.{minor} and sm_{sm}; the text "
                f"declares {program.version[0]}.{program.version[1]} and sm_{program.target}",
            )

    def constant(self, value: np.ndarray) -> int:
        """Returns the slot of a constant of shape (1,), which is added if it is new."""
        key = value.dtype.str, value.tobytes()
        if key not in self._known:
            self._known[key] = len(self.program.registers) + len(self.constants)
            self.constants.append(value)
        return self._known[key]

    def symbol(self, name: str) -> tuple[str, int] | None:
        """Returns (state space, address in it) of a variable; None for an unknown name."""
        program = self.program
        if name in program.symbols:
            return "shared", program.symbols[name]
        if name in program.local_symbols:
            return "local", program.local_symbols[name]
        if name in program.data:  # a launch places these before its buffers
            return program.data[name].space, buffer_base(list(program.data).index(name))
        return None

    def address(self, instruction: Instruction, address: Operand, space: str) -> tuple[int, int]:
        """Returns (slot of the base, byte offset) of an address in a state space."""
        if not isinstance(address, Address):
            raise self.error(TypeMismatch, instruction, "an address in brackets is missing")
        base = address.base
        if isinstance(base, Register):
            allowed = ADDRESS_CLASSES[space]
            if base.cls not in allowed:
                what = (
                    f"a {space} address needs a .{' or .'.join(allowed)} register, "
                    f"but {base.name} is .{base.cls}"
                )
                raise self.error(TypeMismatch, instruction, what)
            return base.index, address.offset
        if base is None and space in ("shared", "shared::cluster", "local"):
            return self.constant(np.zeros(1, np.uint32)), address.offset
        found = self.symbol(base.name) if isinstance(base, Name) else None
        if found is None and space in ("global", "generic"):
            what = f"a {space} address needs a register or a variable"
            raise self.error(ParseError, instruction, what)
        if found is None or found[0] != space:
            what = f"{getattr(base, 'name', base)} is no {space} variable"
            raise self.error(ParseError, instruction, what)
        return self.constant(np.array([found[1]], np.uint64)), address.offset

    def register_read(self, slot: int) -> tuple[int, ...]:
        """Returns (slot,) for a register; () for a constant, which is always defined."""
        return (slot,) if slot < len(self.program.registers) else ()

    def source(
        self,
        operand: Operand,
        type: Type,
        instruction: Instruction,
        *,
        untyped: bool = False,
        wider: bool = False,
    ) -> tuple[int, Convert | None]:
        """Returns (slot, conversion to the type's dtype; None if the register holds it already).

        Args:
          untyped: whether registers of another class but the same size fit (`.b32` with an f32
            register).
          wider: whether a register wider than the type fits; its low bits count (`ld`, `st` and
            `cvt` only).
        """
        if isinstance(operand, Immediate):
            return self.constant(self.immediate(operand, type, instruction, untyped)), None
        if not isinstance(operand, Register):
            raise self.error(
                TypeMismatch,
                instruction,
                f"{instruction.opcode} needs a register or a number of type {type}, not {operand}",
            )
        self.check_class(operand, type, instruction, untyped, wider)
        held = REGISTER_DTYPES[operand.cls]
        if held == type.dtype:
            return operand.index, None
        if held.itemsize == type.dtype.itemsize:
            return operand.index, _view(type.dtype)
        return operand.index, _truncate(type.dtype)

    def check_class(
        self, register: Register, type: Type, instruction: Instruction, untyped: bool, wider: bool
    ) -> None:
        size = REGISTER_SIZES[register.cls]
        fits = register.cls == type.register
        if not fits and type.size and size == REGISTER_SIZES[type.register]:
            fits = untyped or register.cls[0] == "b"  # .b registers hold any type of their size
        if not fits and wider and register.cls[0] == "b" and not type.name == "f32":
            fits = size > type.size
        if not fits:
            raise self.error(
                TypeMismatch,
                instruction,
                f"{instruction.opcode} needs {type} in a .{type.register} "
                f"register, but {register.name} is .{register.cls}",
            )

    def destination(
        self,
        operand: Operand,
        type: Type,
        instruction: Instruction,
        *,
        untyped: bool = False,
        wider: bool = False,
    ) -> tuple[int, Convert | None]:
        """Returns (slot, conversion of the type's dtype to the register's; None if not needed)."""
        if not isinstance(operand, Register):
            raise self.error(
                TypeMismatch, instruction, f"the destination must be a register, not {operand}"
            )
        self.check_class(operand, type, instruction, untyped, wider)
        return operand.index, from_type(type, operand.cls)

    def immediate(
        self, operand: Immediate, type: Type, instruction: Instruction, untyped: bool
    ) -> np.ndarray:
        value, dtype = operand.value, type.dtype
        if type.name == "pred" and value in (0, 1, -1):
            return np.array([value != 0])
        if type.name == "f32" and isinstance(value, float):
            return np.array([value], np.float32)
        if untyped and operand.float_bits and type.size == 4:
            return np.array([value], np.float32).view(dtype)
        bits = 8 * dtype.itemsize
        if isinstance(value, int) and dtype.kind in "iu" and type.name != "bf16":
            if not -(1 << bits - 1) <= value < 1 << bits:
                raise self.error(TypeMismatch, instruction, f"{operand.text} does not fit {type}")
            unsigned = np.dtype(f"u{dtype.itemsize}")
            return np.array([value % (1 << bits)], unsigned).view(dtype)
        raise self.error(TypeMismatch, instruction, f"{operand.text} is no number of type {type}")


def from_type(type: Type, cls: str) -> Convert | None:
    """Returns the conversion of `type` to its register's dtype, by zero or sign extension.

    None if no conversion is needed.
    """
    held = REGISTER_DTYPES[cls]
    if held == type.dtype:
        return None
    if held.itemsize == type.dtype.itemsize:
        return _view(held)
    return _extend(type.dtype, held)


def _view(dtype: np.dtype) -> Convert:
    return lambda value: value.view(dtype)


def _truncate(dtype: np.dtype) -> Convert:
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return lambda value: value.astype(unsigned).view(dtype)


def _extend(dtype: np.dtype, held: np.dtype) -> Convert:
    if dtype.kind == "i":
        signed = np.dtype(f"i{held.itemsize}")
        return lambda value: value.astype(signed).view(held)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return lambda value: value.view(unsigned).astype(held)

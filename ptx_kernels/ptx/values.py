"""Values in GPU registers, whose Python operators emit instructions.

Types are never converted implicitly: both sides have one type, or one is a Python number, which
becomes an immediate of the other's type.
"""

from __future__ import annotations

import functools
import operator
import struct
from typing import Union

from .errors import KernelError
from .instructions import INSTRUCTIONS, Instruction
from .text import Text
from .types import Type, bf16, bf16x2, f16, f16x2, f32, pred, s32, s64, u16, u32, u64

Operand = Union["Value", int, float]

_INTEGERS = (u32, s32, u64, s64)
_FLOATS = (f32, f16x2, bf16x2)
#: Operations on bits; their opcodes name the register class.
_UNTYPED = ("mov", "and", "or", "xor", "not", "shl", "selp")
_ROUNDED = ("add", "sub", "mul", "fma", "div", "sqrt")

#: (from, to) -> opcode, for conversions that are one instruction.
_CONVERSIONS: dict[tuple[Type, Type], str] = {
    (u32, f32): "cvt.rn.f32.u32",
    (s32, f32): "cvt.rn.f32.s32",
    (f32, s32): "cvt.rni.s32.f32",
    (f16, f32): "cvt.f32.f16",
    (f32, f16): "cvt.rn.f16.f32",
    (f32, bf16): "cvt.rn.bf16.f32",
    (u32, u64): "cvt.u64.u32",
    (s32, s64): "cvt.s64.s32",
    (u64, u32): "cvt.u32.u64",
    (u16, u32): "cvt.u32.u16",
    (u32, u16): "cvt.u16.u32",
}


def immediate(value: int | float, type: Type) -> str:
    """Returns the PTX spelling of a Python number as an immediate of `type`.

    Raises KernelError when it does not fit.
    """
    if type is f32:
        try:
            return "0f" + struct.pack(">f", value).hex().upper()
        except (struct.error, OverflowError) as error:
            raise KernelError(f"{value!r} cannot stand where an f32 is needed") from error
    if not type.is_integer or isinstance(value, (bool, float)):
        raise KernelError(f"{value!r} cannot stand where a {type} is needed")
    bits = 8 * type.size
    low, high = (-(1 << bits - 1), 1 << bits - 1) if type.is_signed else (0, 1 << bits)
    if not low <= value < high:
        raise KernelError(f"{value} is outside the range of {type}")
    return str(value)


def spell(operation: str, type: Type) -> str:
    """Returns the opcode of an operation on a type: (`mul`, u32) gives `mul.lo.u32`.

    Floats round to nearest even.
    """
    if operation in _UNTYPED:
        return f"{operation}.{type.register}"
    if operation in _ROUNDED and not type.is_integer:
        return f"{operation}.rn.{type}"
    return f"{'mul.lo' if operation == 'mul' else operation}.{type}"


def register(text: Text, type: Type) -> Value:
    """Allocates a new register of a type; returns it as a `Value`."""
    return Value(text, type, text.register_name(type.register))


def operand(value: Operand, type: Type, what: str) -> str:
    """Returns the text of `value` as an operand of type `type`; a number becomes an immediate."""
    if not isinstance(value, Value):
        return immediate(value, type)
    if value.type != type:
        raise KernelError(f"{what} needs {type}, got {value.type}")
    return value.name


def _row(opcode: str) -> Instruction:
    if opcode not in INSTRUCTIONS:
        raise KernelError(f"{opcode} is not in the instruction table")
    return INSTRUCTIONS[opcode]


def emit(
    text: Text, opcode: str, *operands: str, result: Type | None = None, into: Var | None = None
) -> Value:
    """Emits an instruction of the table; returns a new value, or the variable `into`."""
    row = _row(opcode)
    if len(operands) != len(row.operands):
        raise KernelError(f"{opcode} takes {len(row.operands)} operands, got {len(operands)}")
    text.require(row.needs)
    value = into if into is not None else register(text, result or row.result)
    text.write(row.template(value.name, operands))
    return value


def instruction(text: Text, opcode: str, *operands: Operand) -> Value:
    """Emits an instruction of the table with typed operands, for opcodes without a method."""
    types = _row(opcode).operands
    names = (operand(value, type, opcode) for value, type in zip(operands, types, strict=True))
    return emit(text, opcode, *names)


def apply(text: Text, operation: str, first: Value, *others: Operand) -> Value:
    """Emits an operation whose operands and result all have the first operand's type."""
    opcode = spell(operation, first.type)
    names = (operand(other, first.type, opcode) for other in others)
    return emit(text, opcode, first.name, *names, result=first.type)


def guard(condition: Value | None) -> str:
    """Returns the text that predicates an instruction on a condition; empty for None."""
    if condition is None:
        return ""
    if condition.type is not pred:
        raise KernelError(f"a condition is a predicate, not {condition.type}")
    return f"@{condition.name} "


def clear(text: Text, value: Value) -> None:
    """Emits a move of 0 to a register."""
    zero = immediate(0.0, f32) if value.type is f32 else "0"
    text.write(f"{spell('mov', value.type)} {value.name}, {zero};")


class Value:
    """An immutable value in a register. `name` is the register's name in the text."""

    __slots__ = ("name", "text", "type")

    def __init__(self, text: Text, type: Type, name: str) -> None:
        self.text = text
        self.type = type
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.type} {self.name}>"

    def __bool__(self) -> bool:
        raise KernelError(
            "a GPU value has no truth value while the kernel is built: use k.when(condition)"
        )

    __hash__ = object.__hash__

    def _binary(
        self, opcode: str, other: Operand, *, result: Type | None = None, swap: bool = False
    ) -> Value:
        b = operand(other, self.type, opcode)
        a = self.name
        return emit(self.text, opcode, *((b, a) if swap else (a, b)), result=result or self.type)

    def _arithmetic(self, operation: str, other: Operand, swap: bool = False) -> Value:
        if self.type not in (*_INTEGERS, *_FLOATS):
            raise KernelError(f"{operation} has no meaning for {self.type}: convert it first")
        return self._binary(spell(operation, self.type), other, swap=swap)

    def __add__(self, other: Operand) -> Value:
        return self._arithmetic("add", other)

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Value:
        return self._arithmetic("sub", other)

    def __rsub__(self, other: Operand) -> Value:
        return self._arithmetic("sub", other, swap=True)

    def __mul__(self, other: Operand) -> Value:
        return self._arithmetic("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand) -> Value:
        if self.type is not f32:
            raise KernelError(f"/ divides f32; for {self.type} write // (u32 only)")
        return self._binary(spell("div", f32), other)

    def __floordiv__(self, other: Operand) -> Value:
        self._require("//", u32)
        if isinstance(other, int) and other > 0 and other & (other - 1) == 0:
            return self >> (other.bit_length() - 1)
        return self._binary(spell("div", u32), other)

    def __mod__(self, other: Operand) -> Value:
        self._require("%", u32)
        if isinstance(other, int) and other > 0 and other & (other - 1) == 0:
            return self & (other - 1)
        return self._binary(spell("rem", u32), other)

    def __neg__(self) -> Value:
        self._require("unary -", f32)
        return emit(self.text, spell("neg", f32), self.name)

    def _bitwise(self, operation: str, other: Operand) -> Value:
        if self.type not in (pred, *_INTEGERS):
            raise KernelError(f"{operation} has no meaning for {self.type}")
        return self._binary(spell(operation, self.type), other)

    def __and__(self, other: Operand) -> Value:
        return self._bitwise("and", other)

    def __or__(self, other: Operand) -> Value:
        return self._bitwise("or", other)

    def __xor__(self, other: Operand) -> Value:
        return self._bitwise("xor", other)

    def __invert__(self) -> Value:
        return emit(self.text, spell("not", self.type), self.name, result=self.type)

    def _shift(self, operation: str, amount: Operand) -> Value:
        if self.type not in _INTEGERS:
            raise KernelError(f"a shift has no meaning for {self.type}")
        opcode = spell(operation, self.type)
        return emit(self.text, opcode, self.name, operand(amount, u32, opcode), result=self.type)

    def __lshift__(self, amount: Operand) -> Value:
        return self._shift("shl", amount)

    def __rshift__(self, amount: Operand) -> Value:
        return self._shift("shr", amount)

    def _compare(self, relation: str, other: Operand) -> Value:
        if self.type not in (*_INTEGERS, f32):
            raise KernelError(f"{self.type} values cannot be compared")
        return self._binary(spell(f"setp.{relation}", self.type), other, result=pred)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return self._compare("eq", other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return self._compare("ne", other)

    def __lt__(self, other: Operand) -> Value:
        return self._compare("lt", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("le", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare("gt", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare("ge", other)

    def _immutable(self, other: Operand) -> Value:
        raise KernelError(f"{self!r} is immutable: only a k.var(...) can be updated in place")

    __iadd__ = __isub__ = __imul__ = __iand__ = __ior__ = __ixor__ = _immutable

    def _require(self, what: str, *types: Type) -> None:
        if self.type not in types:
            raise KernelError(f"{what} takes {' or '.join(map(str, types))}, not {self.type}")

    def to(self, type: Type) -> Value:
        """Emits a conversion to `type`, rounding to nearest even; f32 -> s32 saturates."""
        if type == self.type:
            return self
        if self.type is bf16 and type is f32:
            return (emit(self.text, "cvt.u32.u16", self.name) << 16).bits(f32)
        opcode = _CONVERSIONS.get((self.type, type))
        if opcode is None:
            raise KernelError(f"no conversion from {self.type} to {type}")
        if type is bf16 and not self.text.has(_row(opcode).needs):
            return (rounded_to_bf16(self) >> 16).to(u16).bits(bf16)
        return emit(self.text, opcode, self.name, result=type)

    def bits(self, type: Type) -> Value:
        """Returns the bits reinterpreted as another type of the same size."""
        if type.size != self.type.size:
            raise KernelError(
                f"bits of {self.type} cannot be read as {type}:"
                f" {self.type.size} and {type.size} bytes"
            )
        if type.register == self.type.register:
            return Value(self.text, type, self.name)
        return emit(self.text, "mov.b32", self.name, result=type)


def rounded_to_bf16(x: Value) -> Value:
    """Emits the rounding of an f32 to the nearest bf16; returns its bits, then 16 others, as a u32.

    The instructions are those of any architecture. A NaN becomes 0x7FFF.
    """
    bits = x.bits(u32)
    rounded = bits + ((bits >> 16 & 1) + 0x7FFF)
    nan = emit(x.text, "setp.nan.f32", x.name, x.name)
    return emit(x.text, "selp.b32", str(0x7FFF0000), rounded.name, nan.name)


def all_of(*conditions: Value | None) -> Value | None:
    """Returns the conjunction of conditions; a condition (or the result) of None is always true."""
    given = [condition for condition in conditions if condition is not None]
    return functools.reduce(operator.and_, given) if given else None


class Var(Value):
    """A mutable register: `+=` and similar operators update it, `set` overwrites it."""

    __slots__ = ()

    def set(self, value: Operand) -> None:
        move = spell("mov", self.type)
        self.text.write(f"{move} {self.name}, {operand(value, self.type, move)};")

    def _update(self, operation: str, other: Operand) -> Var:
        opcode = spell(operation, self.type)
        emit(self.text, opcode, self.name, operand(other, self.type, opcode), into=self)
        return self

    def __iadd__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("add", other)

    def __isub__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("sub", other)

    def __imul__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("mul", other)

    def __iand__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("and", other)

    def __ior__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("or", other)

    def __ixor__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("xor", other)


def variable(text: Text, type: Type, initial: Operand | None = None) -> Var:
    """Returns a new variable set to `initial`; with None it must be set before it is read."""
    created = Var(text, type, text.register_name(type.register))
    if initial is not None:
        created.set(initial)
    return created

"""Values that live in GPU registers, and pointers: what a kernel's Python handles while it writes
PTX.

Python's operators emit instructions. Types never convert by themselves: both sides have one type,
or one is a Python number, which becomes an immediate of the other's type.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Union, overload

from .errors import KernelError
from .types import Type, bf16, f16, f32, pred, s8, s16, s32, s64, u8, u16, u32, u64

if TYPE_CHECKING:
    from .builder import Builder

Operand = Union["Value", int, float]

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
    """PTX spelling of a Python number as an immediate of `type`; raises KernelError when it does
    not fit.
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


class Value:
    """An immutable value in a register. `name` is the register's name in the text."""

    __slots__ = ("builder", "name", "type")

    def __init__(self, builder: Builder, type: Type, name: str) -> None:
        self.builder = builder
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
        b = self.builder.operand(other, self.type, opcode)
        a = self.name
        return self.builder.emit(opcode, *((b, a) if swap else (a, b)), result=result or self.type)

    def _arithmetic(self, name: str, other: Operand, swap: bool = False) -> Value:
        t = self.type
        if t is f32:
            return self._binary(f"{name}.rn.f32", other, swap=swap)
        if t in (u32, s32, u64, s64):
            return self._binary(f"{'mul.lo' if name == 'mul' else name}.{t}", other, swap=swap)
        raise KernelError(f"{name} has no meaning for {t}: convert it first")

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
        return self._binary("div.rn.f32", other)

    def __floordiv__(self, other: Operand) -> Value:
        self._require("//", u32)
        if isinstance(other, int) and other > 0 and other & (other - 1) == 0:
            return self >> (other.bit_length() - 1)
        return self._binary("div.u32", other)

    def __mod__(self, other: Operand) -> Value:
        self._require("%", u32)
        if isinstance(other, int) and other > 0 and other & (other - 1) == 0:
            return self & (other - 1)
        return self._binary("rem.u32", other)

    def __neg__(self) -> Value:
        self._require("unary -", f32)
        return self.builder.emit("neg.f32", self.name, result=f32)

    def _bitwise(self, name: str, other: Operand) -> Value:
        if self.type is pred:
            return self._binary(f"{name}.pred", other)
        if self.type not in (u32, s32, u64, s64):
            raise KernelError(f"{name} has no meaning for {self.type}")
        return self._binary(f"{name}.b{8 * self.type.size}", other)

    def __and__(self, other: Operand) -> Value:
        return self._bitwise("and", other)

    def __or__(self, other: Operand) -> Value:
        return self._bitwise("or", other)

    def __xor__(self, other: Operand) -> Value:
        return self._bitwise("xor", other)

    def __invert__(self) -> Value:
        suffix = "pred" if self.type is pred else f"b{8 * self.type.size}"
        return self.builder.emit(f"not.{suffix}", self.name, result=self.type)

    def _shift(self, opcode: str, amount: Operand) -> Value:
        if self.type not in (u32, s32, u64, s64):
            raise KernelError(f"a shift has no meaning for {self.type}")
        return self.builder.emit(
            opcode, self.name, self.builder.operand(amount, u32, opcode), result=self.type
        )

    def __lshift__(self, amount: Operand) -> Value:
        return self._shift(f"shl.b{8 * self.type.size}", amount)

    def __rshift__(self, amount: Operand) -> Value:
        return self._shift(f"shr.{self.type}", amount)

    def _compare(self, name: str, other: Operand) -> Value:
        if self.type not in (u32, s32, u64, s64, f32):
            raise KernelError(f"{self.type} values cannot be compared")
        return self._binary(f"setp.{name}.{self.type}", other, result=pred)

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
        """The value converted to `type` (rounding to nearest even; f32 -> s32 saturates)."""
        if type == self.type:
            return self
        if self.type is bf16 and type is f32:
            return (self.builder.emit("cvt.u32.u16", self.name, result=u32) << 16).bits(f32)
        opcode = _CONVERSIONS.get((self.type, type))
        if opcode is None:
            raise KernelError(f"no conversion from {self.type} to {type}")
        return self.builder.emit(opcode, self.name, result=type)

    def bits(self, type: Type) -> Value:
        """The same bits read as another type of the same size."""
        if type.size != self.type.size:
            raise KernelError(
                f"bits of {self.type} cannot be read as {type}: {self.type.size} and {type.size} bytes"
            )
        if type.register == self.type.register:
            return Value(self.builder, type, self.name)
        return self.builder.emit("mov.b32", self.name, result=type)


def all_of(*conditions: Value | None) -> Value | None:
    """The conjunction of conditions; None, of one or of all, says that it always holds."""
    given = [condition for condition in conditions if condition is not None]
    return functools.reduce(operator.and_, given) if given else None


class Var(Value):
    """A mutable register: `+=` and the like update it, `set` overwrites it."""

    __slots__ = ()

    def set(self, value: Operand) -> None:
        move = f"mov.{self.type.register}"
        self.builder.write(f"{move} {self.name}, {self.builder.operand(value, self.type, move)};")

    def _update(self, name: str, other: Operand) -> Var:
        t = self.type
        opcode = (
            f"{name}.rn.f32"
            if t is f32
            else f"{name}.pred"
            if t is pred
            else (f"{name}.b{8 * t.size}" if name in ("and", "or", "xor") else f"{name}.{t}")
        )
        self.builder.emit(opcode, self.name, self.builder.operand(other, t, opcode), into=self)
        return self

    def __iadd__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("add", other)

    def __isub__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("sub", other)

    def __imul__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("mul" if self.type is f32 else "mul.lo", other)

    def __iand__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("and", other)

    def __ior__(self, other: Operand) -> Var:  # type: ignore[override]
        return self._update("or", other)


#: Memory type -> (type of the value once loaded, suffix of ld and st). Narrow integers widen to 32
#: bits.
_MEMORY: dict[Type, tuple[Type, str]] = {
    u8: (u32, "u8"),
    s8: (s32, "s8"),
    u16: (u32, "u16"),
    s16: (s32, "s16"),
    f16: (f16, "b16"),
    bf16: (bf16, "b16"),
    u32: (u32, "u32"),
    s32: (s32, "s32"),
    u64: (u64, "u64"),
    s64: (s64, "s64"),
    f32: (f32, "f32"),
}


class Pointer:
    """An address in global or shared memory, of elements of one type.

    Attributes:
      address: u64 (global) or u32 (shared) register.
      offset: bytes added to it as an immediate.
      constant: no kernel of the same sequence of launches writes the buffer, so loads may be
        non-coherent.
      shape: dimensions of the buffer that `at` indexes, outermost first.
    """

    def __init__(
        self,
        builder: Builder,
        type: Type,
        address: Value,
        *,
        space: str = "global",
        offset: int = 0,
        constant: bool = False,
        shape: tuple[int, ...] = (),
    ) -> None:
        self.builder = builder
        self.type = type
        self.address = address
        self.space = space
        self.offset = offset
        self.constant = constant
        self.shape = shape

    def _with(
        self,
        *,
        type: Type | None = None,
        address: Value | None = None,
        offset: int | None = None,
        shape: tuple[int, ...] = (),
    ) -> Pointer:
        return Pointer(
            self.builder,
            type or self.type,
            self.address if address is None else address,
            space=self.space,
            offset=self.offset if offset is None else offset,
            constant=self.constant,
            shape=shape,
        )

    def cast(self, type: Type) -> Pointer:
        """The same address, read as elements of `type`; the last axis counts those."""
        if not self.shape:
            return self._with(type=type)
        *leading, last = self.shape
        if last * self.type.size % type.size:
            raise KernelError(f"rows of {last} {self.type} are no whole number of {type}")
        return self._with(type=type, shape=(*leading, last * self.type.size // type.size))

    def reshape(self, *shape: int) -> Pointer:
        """The same address as that of a buffer of another shape."""
        return self._with(shape=shape)

    def at(self, *indices: Value | int) -> Pointer:
        """Address of element [i, j, ...] of the buffer; missing trailing indices are 0.

        Indices are u32 and multiplied out in 64 bits for global memory.
        """
        shape = self.shape or (0,)
        if len(indices) > len(shape):
            raise KernelError(f"{len(indices)} indices for a buffer of shape {shape}")
        pointer, stride = self, self.type.size
        strides = []
        for extent in reversed(shape):
            strides.append(stride)
            stride *= extent
        for index, step in zip(indices, reversed(strides), strict=False):
            pointer = pointer._advanced(index, step)
        return pointer._with(shape=())

    def _advanced(self, index: Value | int, step: int) -> Pointer:
        if isinstance(index, int):
            return self._with(offset=self.offset + index * step)
        k = self.builder
        if index.type is u64 and self.space == "global":
            return self._with(
                address=k.emit("mad.lo.u64", index.name, str(step), self.address.name, result=u64)
            )
        if index.type is not u32:
            raise KernelError(f"an index is u32 or u64, not {index.type}")
        if self.space == "shared":
            return self._with(
                address=k.emit("mad.lo.u32", index.name, str(step), self.address.name, result=u32)
            )
        if step >= 1 << 32:
            return self._advanced(index.to(u64), step)
        return self._with(
            address=k.emit("mad.wide.u32", index.name, str(step), self.address.name, result=u64)
        )

    def moving(self) -> Pointer:
        """A pointer whose address is a variable, for `advance`; loads at fixed offsets from it cost
        no arithmetic.
        """
        return self._with(
            address=self.builder.var(self.address.type, self.address), shape=self.shape
        )

    def advance(self, count: int) -> None:
        """Moves a `moving` pointer by `count` elements."""
        if not isinstance(self.address, Var):
            raise KernelError("only a moving() pointer can advance")
        self.address += count * self.type.size

    @overload
    def load(
        self, index: Value | int = 0, *, vector: Literal[1] = 1, where: Value | None = None
    ) -> Value: ...
    @overload
    def load(
        self, index: Value | int = 0, *, vector: Literal[2, 4], where: Value | None = None
    ) -> tuple[Value, ...]: ...
    @overload
    def load(
        self, index: Value | int = 0, *, vector: int, where: Value | None = None
    ) -> Value | tuple[Value, ...]: ...
    def load(
        self, index: Value | int = 0, *, vector: int = 1, where: Value | None = None
    ) -> Value | tuple[Value, ...]:
        """Loads one element, or `vector` (2 or 4) neighbours, aligned as a whole; zeros where
        `where` is false.
        """
        values = self._load(index, vector, where)
        return values[0] if vector == 1 else tuple(values)

    def load_run(self, index: int, count: int, *, where: Value | None = None) -> list[Value]:
        """Loads `count` neighbours in vectors as wide as divide them, the first of which is aligned
        as a whole.

        Zeros where `where` is false.
        """
        width = self._run_width(count)
        return [
            value
            for i in range(index, index + count, width)
            for value in self._load(i, width, where)
        ]

    def _run_width(self, count: int) -> int:
        """Elements of the widest vector that divides a run of `count`: 4, and 16 bytes, at most."""
        return math.gcd(count, min(4, 16 // self.type.size))

    def _load(self, index: Value | int, vector: int, where: Value | None) -> list[Value]:
        k = self.builder
        place = self._advanced(index, self.type.size)
        type, suffix = _MEMORY[self.type]
        values = [k.register(type) for _ in range(vector)]
        if where is not None:
            for value in values:
                k.zero(value)
        opcode = f"ld.{self.space}{'.nc' if self.constant else ''}{f'.v{vector}' if vector > 1 else ''}.{suffix}"
        names = values[0].name if vector == 1 else "{" + ", ".join(v.name for v in values) + "}"
        k.write(f"{k.guard(where)}{opcode} {names}, {place.operand()};")
        return values

    def atomic_add(
        self, index: Value | int, value: Operand, *, where: Value | None = None
    ) -> Value:
        """Adds to one element (u32, s32, u64, f32) in one step; returns what was there, 0 where
        `where` is false.
        """
        return self._atomic(
            "add", self._typed("add", u32, s32, u64, f32).name, index, (value,), where
        )

    def atomic_min(
        self, index: Value | int, value: Operand, *, where: Value | None = None
    ) -> Value:
        """As `atomic_add`, the smaller of two integers."""
        return self._atomic(
            "min", self._typed("min", u32, s32, u64, s64).name, index, (value,), where
        )

    def atomic_max(
        self, index: Value | int, value: Operand, *, where: Value | None = None
    ) -> Value:
        """As `atomic_add`, the larger of two integers."""
        return self._atomic(
            "max", self._typed("max", u32, s32, u64, s64).name, index, (value,), where
        )

    def atomic_and(
        self, index: Value | int, value: Operand, *, where: Value | None = None
    ) -> Value:
        """As `atomic_add`, bitwise and of 4 or 8 bytes."""
        return self._atomic("and", self._bits("and"), index, (value,), where)

    def atomic_or(self, index: Value | int, value: Operand, *, where: Value | None = None) -> Value:
        """As `atomic_add`, bitwise or of 4 or 8 bytes."""
        return self._atomic("or", self._bits("or"), index, (value,), where)

    def atomic_exchange(
        self, index: Value | int, value: Operand, *, where: Value | None = None
    ) -> Value:
        """As `atomic_add`, replaces 4 or 8 bytes."""
        return self._atomic("exch", self._bits("exch"), index, (value,), where)

    def atomic_cas(
        self, index: Value | int, expected: Operand, value: Operand, *, where: Value | None = None
    ) -> Value:
        """As `atomic_add`, replaces 4 or 8 bytes if they equal `expected`."""
        return self._atomic("cas", self._bits("cas"), index, (expected, value), where)

    def _typed(self, name: str, *types: Type) -> Type:
        if self.type not in types:
            raise KernelError(f"atomic {name} takes {', '.join(map(str, types))}, not {self.type}")
        return self.type

    def _bits(self, name: str) -> str:
        return f"b{8 * self._typed(name, u32, s32, u64, s64, f32).size}"

    def _atomic(
        self,
        name: str,
        suffix: str,
        index: Value | int,
        values: tuple[Operand, ...],
        where: Value | None,
    ) -> Value:
        k = self.builder
        place = self._advanced(index, self.type.size)
        result = k.register(self.type)
        if where is not None:
            k.zero(result)
        opcode = f"atom.{self.space}.{name}.{suffix}"
        text = ", ".join(k.operand(v, self.type, opcode) for v in values)
        k.write(f"{k.guard(where)}{opcode} {result.name}, {place.operand()}, {text};")
        return result

    def store(
        self, index: Value | int, value: Operand | tuple[Value, ...], *, where: Value | None = None
    ) -> None:
        """Stores one element, or a tuple of 2 or 4 neighbours; narrow integers keep the value's low
        bits.
        """
        k = self.builder
        place = self._advanced(index, self.type.size)
        type, suffix = _MEMORY[self.type]
        values = value if isinstance(value, tuple) else (value,)
        names = [k.operand(v, type, f"st of {self.type}") for v in values]
        vector = f".v{len(names)}" if len(names) > 1 else ""
        text = names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"
        k.write(f"{k.guard(where)}st.{self.space}{vector}.{suffix} {place.operand()}, {text};")

    def store_run(self, index: int, values: Sequence[Value], *, where: Value | None = None) -> None:
        """Stores neighbours in vectors as wide as divide them (see `load_run`)."""
        width = self._run_width(len(values))
        for i in range(0, len(values), width):
            self.store(index + i, tuple(values[i : i + width]), where=where)

    def operand(self) -> str:
        """The address as instructions spell it."""
        return f"[{self.address.name}{f'+{self.offset}' if self.offset else ''}]"

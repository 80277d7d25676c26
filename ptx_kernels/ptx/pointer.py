"""Pointers into global and shared memory: emits address arithmetic, loads, stores and atomics.

Shared memory of other thread blocks (`shared::cluster`) supports only loads and stores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

from .errors import KernelError
from .instructions import STREAMED_LOADS, STREAMED_LOADS_128
from .issue import braced, issue
from .text import Text
from .types import Type, bf16, f16, f32, s8, s16, s32, s64, u8, u16, u32, u64
from .values import Operand, Value, Var, clear, emit, operand, register, spell, variable

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
      address: u64 (global) or u32 (shared, shared::cluster) register.
      offset: bytes added to the address as an immediate.
      constant: no kernel of the same sequence of launches writes the buffer, so loads may be
        non-coherent.
      streamed: constant, and no lane loads any of it twice; loads do not allocate in L1 and
        prefetch 256 bytes into L2.
      shape: dimensions of the buffer that `at` indexes, outermost first.
    """

    def __init__(
        self,
        text: Text,
        type: Type,
        address: Value,
        *,
        space: str = "global",
        offset: int = 0,
        constant: bool = False,
        streamed: bool = False,
        shape: tuple[int, ...] = (),
    ) -> None:
        self.text = text
        self.type = type
        self.address = address
        self.space = space
        self.offset = offset
        self.constant = constant
        self.streamed = streamed
        self.shape = shape

    def _with(
        self,
        *,
        type: Type | None = None,
        address: Value | None = None,
        space: str = "",
        offset: int | None = None,
        shape: tuple[int, ...] = (),
    ) -> Pointer:
        return Pointer(
            self.text,
            type or self.type,
            self.address if address is None else address,
            space=space or self.space,
            offset=self.offset if offset is None else offset,
            constant=self.constant,
            streamed=self.streamed,
            shape=shape,
        )

    def cast(self, type: Type) -> Pointer:
        """Returns the same address, read as elements of `type`; the last axis is resized."""
        if not self.shape:
            return self._with(type=type)
        *leading, last = self.shape
        if last * self.type.size % type.size:
            raise KernelError(f"rows of {last} {self.type} are no whole number of {type}")
        return self._with(type=type, shape=(*leading, last * self.type.size // type.size))

    def reshape(self, *shape: int) -> Pointer:
        """Returns the same address as a buffer of shape `shape`."""
        return self._with(shape=shape)

    def at(self, *indices: Value | int) -> Pointer:
        """Returns the address of element [i, j, ...]; missing trailing indices are 0.

        Indices are u32 and are multiplied in 64 bits for global memory.
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
        if index.type is u64 and self.space == "global":
            return self._moved("mad.lo.u64", index, step)
        if index.type is not u32:
            raise KernelError(f"an index is u32 or u64, not {index.type}")
        if self.space != "global":
            return self._moved("mad.lo.u32", index, step)
        if step >= 1 << 32:
            return self._moved("mad.lo.u64", index.to(u64), step)
        return self._moved("mad.wide.u32", index, step)

    def _moved(self, opcode: str, index: Value, step: int) -> Pointer:
        return self._with(address=emit(self.text, opcode, index.name, str(step), self.address.name))

    def where(self, condition: Value, other: Pointer) -> Pointer:
        """Returns this address where the condition is true, else `other`, a buffer like this."""
        for name in ("type", "space", "shape", "offset"):
            if (mine := getattr(self, name)) != (its := getattr(other, name)):
                raise KernelError(
                    f"pointers with {name} {mine} and {its} cannot replace each other"
                )
        names = self.address.name, other.address.name, condition.name
        opcode = spell("selp", self.address.type)
        address = emit(self.text, opcode, *names, result=self.address.type)
        return self._with(address=address, shape=self.shape)

    def moving(self) -> Pointer:
        """Returns a pointer whose address is a variable, for `advance`.

        Loads at fixed offsets from the variable need no address arithmetic.
        """
        return self._with(
            address=variable(self.text, self.address.type, self.address), shape=self.shape
        )

    def advance(self, count: int) -> None:
        """Advances a `moving` pointer by `count` elements."""
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
        """Emits a load of one element, or of a `vector` of 2 or 4; zeros if `where` is false.

        The address must be aligned to the size of the vector.
        """
        values = self._load(index, vector, where)
        return values[0] if vector == 1 else tuple(values)

    def load_run(self, index: int, count: int, *, where: Value | None = None) -> list[Value]:
        """Emits loads of `count` adjacent elements in the widest vectors that divide the count.

        The address must be aligned to the size of a vector. Elements are zero if `where` is false.
        """
        width = self._run_width(count)
        return [
            value
            for i in range(index, index + count, width)
            for value in self._load(i, width, where)
        ]

    def load_into(
        self, index: int, variables: Sequence[Var], *, where: Value | None = None
    ) -> None:
        """Emits loads of adjacent elements into variables, in the widest vectors (see `load_run`).

        If `where` is false the variables keep their values.
        """
        type, suffix = _MEMORY[self.type]
        names = [operand(variable, type, f"ld of {self.type}") for variable in variables]
        width = self._run_width(len(names))
        opcode = f"ld.{self.space}{self._hints()}{_vector(width)}.{suffix}"
        for i in range(0, len(names), width):
            place = self._advanced(index + i, self.type.size)
            issue(self.text, opcode, braced(names[i : i + width]), place, where=where)

    def _hints(self) -> str:
        """Returns the cache hints of a load, as part of its opcode."""
        if not self.streamed:
            return ".nc" if self.constant else ""
        whole = self.text.has(STREAMED_LOADS)
        self.text.require(STREAMED_LOADS if whole else STREAMED_LOADS_128)
        return f".nc.L1::no_allocate.L2::{256 if whole else 128}B"

    def _run_width(self, count: int) -> int:
        """Returns the widest vector width that divides `count`: at most 4 elements and 16 bytes."""
        return math.gcd(count, min(4, 16 // self.type.size))

    def _load(self, index: Value | int, vector: int, where: Value | None) -> list[Value]:
        place = self._advanced(index, self.type.size)
        type, suffix = _MEMORY[self.type]
        values = [register(self.text, type) for _ in range(vector)]
        if where is not None:
            for value in values:
                clear(self.text, value)
        opcode = f"ld.{self.space}{self._hints()}{_vector(vector)}.{suffix}"
        issue(self.text, opcode, braced([value.name for value in values]), place, where=where)
        return values

    def store(
        self, index: Value | int, value: Operand | tuple[Value, ...], *, where: Value | None = None
    ) -> None:
        """Emits a store of one element, or of a tuple of 2 or 4 adjacent elements.

        Integers are truncated to a narrower element type.
        """
        place = self._advanced(index, self.type.size)
        type, suffix = _MEMORY[self.type]
        values = value if isinstance(value, tuple) else (value,)
        names = [operand(v, type, f"st of {self.type}") for v in values]
        opcode = f"st.{self.space}{_vector(len(names))}.{suffix}"
        issue(self.text, opcode, place, braced(names), where=where)

    def store_run(self, index: int, values: Sequence[Value], *, where: Value | None = None) -> None:
        """Emits stores of adjacent elements in the widest vectors (see `load_run`)."""
        width = self._run_width(len(values))
        for i in range(0, len(values), width):
            self.store(index + i, tuple(values[i : i + width]), where=where)

    def atomic_add(
        self,
        index: Value | int,
        value: Operand,
        *,
        where: Value | None = None,
        ordered: bool = False,
    ) -> Value:
        """Emits an atomic addition to one element (u32, s32, u64, f32); returns the previous value.

        The result is 0 if `where` is false. `ordered` (shared memory only): a thread that reads
        another thread's value also sees that thread's earlier writes (`.acq_rel.cta`).
        """
        self._require_atomic("add", u32, s32, u64, f32)
        if ordered and self.space != "shared":
            raise KernelError(f"ordered=True is for shared memory, not {self.space}")
        return self._atomic(f"add.{self.type}", index, (value,), where, ".acq_rel.cta" * ordered)

    def atomic_max(
        self, index: Value | int, value: Operand, *, where: Value | None = None
    ) -> Value:
        """Like `atomic_add`, but stores the larger of two integers."""
        self._require_atomic("max", u32, s32, u64, s64)
        return self._atomic(f"max.{self.type}", index, (value,), where)

    def atomic_cas(
        self, index: Value | int, expected: Operand, value: Operand, *, where: Value | None = None
    ) -> Value:
        """Like `atomic_add`, but replaces 4 or 8 bytes if they equal `expected`."""
        self._require_atomic("cas", u32, s32, u64, s64, f32)
        return self._atomic(f"cas.b{8 * self.type.size}", index, (expected, value), where)

    def _require_atomic(self, operation: str, *types: Type) -> None:
        if self.type not in types:
            names = ", ".join(map(str, types))
            raise KernelError(f"atomic {operation} takes {names}, not {self.type}")

    def _atomic(
        self,
        operation: str,
        index: Value | int,
        values: tuple[Operand, ...],
        where: Value | None,
        order: str = "",
    ) -> Value:
        place = self._advanced(index, self.type.size)
        result = register(self.text, self.type)
        if where is not None:
            clear(self.text, result)
        opcode = f"atom{order}.{self.space}.{operation}"
        names = [operand(v, self.type, opcode) for v in values]
        issue(self.text, opcode, result.name, place, *names, where=where)
        return result

    def operand(self) -> str:
        """Returns the PTX text of the address as an operand."""
        return f"[{self.address.name}{f'+{self.offset}' if self.offset else ''}]"


def _vector(count: int) -> str:
    return f".v{count}" if count > 1 else ""

"""Emits operations whose instructions older architectures lack, by others where they must run.

A text's `oldest` architecture decides. Results are the same bits, except for a NaN's and for the
order in which tensor cores add floats.
"""

from __future__ import annotations

from collections.abc import Sequence

from .instructions import INSTRUCTIONS, machine_row
from .issue import issue
from .pointer import Pointer
from .text import Text
from .types import Type, f16, f32, s32, u16, u32
from .values import (
    Operand,
    Value,
    all_of,
    apply,
    emit,
    instruction,
    operand,
    register,
    rounded_to_bf16,
    spell,
)

_NAN = "0f7FFFFFFF"  # the NaN that instructions return


def has_row(k: Text, opcode: str) -> bool:
    """Returns whether all architectures that must run the text have an instruction."""
    if opcode in INSTRUCTIONS:
        return k.has(INSTRUCTIONS[opcode].needs)
    spelled = machine_row(opcode)
    assert spelled is not None, opcode
    return k.has(spelled.row.needs)


def maximum_or_nan(k: Text, a: Value, b: Operand) -> Value:
    """Emits the maximum of two f32, NaN if one of them is."""
    if has_row(k, spell("max.NaN", a.type)):
        return apply(k, "max.NaN", a, b)
    larger = apply(k, "max", a, b)
    nan = emit(k, "setp.nan.f32", a.name, operand(b, f32, "setp.nan.f32"))
    return emit(k, "selp.f32", _NAN, larger.name, nan.name)


def pair(k: Text, low: Value, high: Value, type: Type) -> Value:
    """Emits the rounding of two f32 to f16 or bf16; returns both in a u32."""
    opcode = f"cvt.rn.{type}x2.f32"
    if has_row(k, opcode):
        return instruction(k, opcode, high, low).bits(u32)
    if type is f16:
        lower, upper = (emit(k, "cvt.u32.u16", x.to(f16).name) for x in (low, high))
        return upper << 16 | lower
    return instruction(k, "prmt.b32", rounded_to_bf16(low), rounded_to_bf16(high), 0x7632)


def copy_now(
    k: Text, target: Pointer, source: Pointer, nbytes: int, size: Value | None, where: Value | None
) -> None:
    """Emits a copy from global to shared memory through registers; arguments like `cp_async`'s."""
    unit = u32 if size is None or nbytes > 4 else u16  # `size` may end inside a word
    count = nbytes // unit.size
    valid = None if size is None else all_of(where, size != 0)
    source, target = source.cast(unit), target.cast(unit)
    if size is None:
        target.store_run(0, source.load_run(0, count, where=where), where=where)
        return
    if unit is u32:
        target.store_run(0, source.load_run(0, count, where=valid), where=where)
        return
    for i in range(count):
        inside = all_of(where, size > i * unit.size)
        target.store(i, source.load(i, where=inside), where=where)


def small_mma(
    k: Text,
    a: Sequence[Value],
    b: Sequence[Value],
    c: Sequence[Value],
    types: tuple[Type, Type],
) -> tuple[Value, ...]:
    """Emits c + A B in products of 16 bytes of depth, of 8 rows for integers.

    Arguments like `mma`'s.
    """
    total = tuple(c)
    for i, column in enumerate(b):
        rows = a[2 * i : 2 * i + 2]
        if types[0] is f16:
            d = tuple(register(k, f32) for _ in range(4))
            opcode = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
            issue(k, opcode, d, tuple(rows), (column,), total)
        else:
            d = tuple(register(k, s32) for _ in range(4))
            opcode = f"mma.sync.aligned.m8n8k16.row.col.s32.{types[0]}.{types[1]}.s32"
            for j, row in enumerate(rows):
                half = slice(2 * j, 2 * j + 2)
                issue(k, opcode, d[half], (row,), (column,), total[half])
        total = d
    return total

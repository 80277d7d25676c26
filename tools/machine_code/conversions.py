"""Conversions between integers and floats, and between float types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction, Operand
from .errors import UnknownInstructionFault
from .floats import DIRECTIONS, directed, flushed
from .operands import Reader
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine

_INTEGERS = {
    "U8": np.uint8,
    "S8": np.int8,
    "U16": np.uint16,
    "S16": np.int16,
    "U32": np.uint32,
    "S32": np.int32,
}


def _integer(operand: Operand, m: Machine, name: str) -> Reader:
    """Reads an integer, or the byte or half that the operand's part names, as float64."""
    read, kind = m.operands.u32(operand), _INTEGERS[name]
    size = np.dtype(kind).itemsize
    part = int(operand.part[1:]) if operand.part else 0

    def number() -> np.ndarray:
        word = np.ascontiguousarray(read())
        return word.view(kind)[..., part :: 4 // size].astype(np.float64)

    return number


@instruction("I2F", "I2FP", "UI2F", "UI2FP")
def _to_float(i: Instruction, m: Machine) -> Step:
    if i.one_of("F16", "F64", "BF16"):
        raise UnknownInstructionFault("only conversions to float32 are known")
    read = _integer(i.operands[1], m, i.one_of(*_INTEGERS, default="S32"))
    put, direction = m.operands.put_f32(i.operands[0]), i.one_of(*DIRECTIONS)
    if direction:
        return lambda mask: put(directed(read(), direction), mask)
    return lambda mask: put(read().astype(np.float32), mask)


_ROUNDINGS = {"TRUNC": np.trunc, "FLOOR": np.floor, "CEIL": np.ceil}


@instruction("F2I", "UF2I")
def _to_integer(i: Instruction, m: Machine) -> Step:
    """Rounds and saturates. A NaN gives zero with NTZ, else the integer with only its top bit."""
    if i.one_of("S64", "U64", "F16", "F64"):
        raise UnknownInstructionFault("only float32 to 32 bits is known")
    read, put = m.operands.f32(i.operands[1]), m.operands.put(i.operands[0])
    rounding = _ROUNDINGS.get(i.one_of(*_ROUNDINGS), np.rint)
    unsigned = "U32" in i
    low, high = (0, 2**32 - 1) if unsigned else (-(2**31), 2**31 - 1)
    of_nan = 0 if "NTZ" in i else 1 << 31

    def step(mask: Mask) -> None:
        value = flushed(read()) if "FTZ" in i else read()
        whole = np.clip(rounding(value.astype(np.float64)), low, high)
        nan = np.isnan(whole)
        bits = np.where(nan, 0, whole).astype(np.int64).astype(np.uint32)
        put(np.where(nan, np.uint32(of_nan), bits), mask)

    return step


@instruction("FRND")
def _round(i: Instruction, m: Machine) -> Step:
    read, put = m.operands.f32(i.operands[1]), m.operands.put_f32(i.operands[0])
    rounding = _ROUNDINGS.get(i.one_of(*_ROUNDINGS), np.rint)
    flush = flushed if "FTZ" in i else lambda x: x
    return lambda mask: put(flush(rounding(flush(read()))), mask)


def half_bits(value: np.ndarray, name: str) -> np.ndarray:
    """Rounds float32 to the bits of F16 or BF16, to nearest even; NaN have one pattern."""
    if name == "F16":
        bits = value.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        word = value.view(np.uint32)
        even = (word >> np.uint32(16)) & np.uint32(1)
        bits = (word + even + np.uint32(0x7FFF)) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), bits)


@instruction("F2F")
def _between_floats(i: Instruction, m: Machine) -> Step:
    kinds = i.modifiers[:2]
    source = i.operands[1]
    if kinds in (("F16", "F32"), ("BF16", "F32")) and len(i.modifiers) == 2:
        read, put = m.operands.f32(source), m.operands.put(i.operands[0])
        return lambda mask: put(half_bits(read(), kinds[0]), mask)
    raise UnknownInstructionFault("float types")


@instruction("F2FP")
def _packed(i: Instruction, m: Machine) -> Step:
    """Rounds two float32 to halves of a register, the first to the upper one."""
    if set(i.modifiers) - {"BF16", "F16", "F32", "PACK_AB"}:
        raise UnknownInstructionFault("float types")
    high, low = m.operands.f32(i.operands[1]), m.operands.f32(i.operands[2])
    put, name = m.operands.put(i.operands[0]), "BF16" if "BF16" in i else "F16"
    return lambda mask: put(
        (half_bits(high(), name) << np.uint32(16)) | half_bits(low(), name), mask
    )

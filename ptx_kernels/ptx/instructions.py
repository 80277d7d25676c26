"""The instruction table: what every computing instruction is called and what it means.

The builder emits only opcodes that are listed here, and the simulator parses the text and looks the same
opcode up, so that a wrong spelling or operand order shows as a wrong result. Memory accesses, branches,
barriers and shuffles have no row: they need the machine's state, and the simulator defines them.
Meanings follow PTX ISA 9.1, section 9.7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .types import Type, bf16, f16, f32, pred, s8, s16, s32, s64, u8, u16, u32, u64

Version = tuple[tuple[int, int], int]
BASELINE: Version = ((7, 0), 61)  # (PTX ISA, sm): dp4a needs sm_61; 7.0 is what CUDA 11 drivers read


@dataclass(frozen=True)
class Instruction:
    """One row: `template` is the PTX text, `meaning` the same operation on NumPy arrays.

    `meaning` gets one array per operand, its register's bits viewed as the operand's type (bf16 as uint16), and
    returns an array of the result's type. Arrays broadcast: an immediate operand is an array of one element.
    """

    opcode: str
    result: Type
    operands: tuple[Type, ...]
    meaning: Callable[..., np.ndarray]
    needs: Version = BASELINE

    def template(self, result: str, operands: tuple[str, ...]) -> str:
        return f"{self.opcode} {', '.join((result, *operands))};"


INSTRUCTIONS: dict[str, Instruction] = {}


def _define(
    opcode: str, result: Type, operands: tuple[Type, ...], meaning: Callable, needs: Version = BASELINE
) -> None:
    if opcode in INSTRUCTIONS:
        raise ValueError(f"{opcode} is defined twice")
    INSTRUCTIONS[opcode] = Instruction(opcode, result, operands, meaning, needs)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) -> float32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits (uint16), round to nearest even; NaN becomes the canonical 0x7fff."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def _fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Fused multiply-add with one rounding.

    The product of two float32 is exact in float64. Rounding their sum to float64 and then to float32 goes wrong
    only where the float64 lies halfway between two float32, or below the normal ones, whose spacing is coarser:
    those few are done again with care.
    """
    total = a.astype(np.float64) * b.astype(np.float64) + c
    rounded = total.astype(np.float32)
    suspect = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000  # the 29 bits that float32 lacks
    small = np.abs(rounded) <= np.finfo(np.float32).smallest_normal
    if small.any():
        suspect |= small & (total != 0)
    if suspect.any():
        where = np.flatnonzero(suspect)
        rounded[where] = _fma_to_odd(*(np.broadcast_to(x, total.shape)[where] for x in (a, b, c)))
    return rounded


def _fma_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounds the float64 sum to odd by the error of the addition (Boldo and Melquiond 2008), then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # Knuth's two-sum: total + error is exact
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64).astype(np.float32)


def _dp4a(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_signed: bool, b_signed: bool) -> np.ndarray:
    """c + the dot product of the four bytes of a and b; the sum wraps at 32 bits."""
    a, b, total = a.view(np.int32), b.view(np.int32), c.view(np.int32)
    for i in range(4):
        total = total + _byte(a, i, a_signed) * _byte(b, i, b_signed)
    return total.view(c.dtype)


def _byte(word: np.ndarray, i: int, signed: bool) -> np.ndarray:
    """Byte i (0 the lowest) of int32, extended by its sign or by zero."""
    if signed:
        return word << (24 - 8 * i) >> 24
    return word >> (8 * i) & 0xFF


def _shift(operation: Callable, bits: int) -> Callable:
    """Shift amounts are u32 and clamp at the width: what is shifted out is gone (or the sign, for s types)."""

    def meaning(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
        signed = a.dtype.kind == "i"
        if amount.size == 1 and amount[0] < bits:
            return operation(a, amount.astype(a.dtype))
        clamped = np.minimum(amount, bits - 1).astype(a.dtype)
        shifted = operation(a, clamped)
        return shifted if signed else np.where(amount >= bits, a.dtype.type(0), shifted)

    return meaning


def _bfe(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Bit field extract of 32-bit values; sign-extends for s32, whose field past bit 31 repeats the sign."""
    pos, count = position & 0xFF, length & 0xFF
    wide = a.astype(np.int64)
    if a.dtype == np.uint32:
        mask = (np.int64(1) << np.minimum(count, 32).astype(np.int64)) - 1
        return np.where(pos < 32, (wide >> np.minimum(pos, 32).astype(np.int64)) & mask, 0).astype(np.uint32)
    up = 64 - np.minimum(np.minimum(count, 32).astype(np.int64), 64)
    field = (wide >> np.minimum(pos, 31).astype(np.int64)) << up >> up
    return np.where(count == 0, 0, field).astype(np.int32)


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Picks four of the eight bytes of (b, a); bit 3 of a selector nibble repeats the byte's sign instead."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(1, np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(0xF)
        byte = ((both >> (np.uint64(8) * (nibble & np.uint32(7)))) & np.uint64(0xFF)).astype(np.uint32)
        if (nibble & np.uint32(8)).any():
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            byte = np.where(nibble & np.uint32(8), sign, byte)
        result = result | byte << np.uint32(8 * i)
    return result


def _max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.fmax(a, b)  # PTX max drops a NaN operand, as fmax does


def _min(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.fmin(a, b)


def _round_to_s32(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, saturate; NaN becomes 0."""
    with np.errstate(invalid="ignore"):
        rounded = np.clip(np.rint(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1)
    return np.where(np.isnan(x), 0, rounded).astype(np.int32)


def _select(a: np.ndarray, b: np.ndarray, condition: np.ndarray) -> np.ndarray:
    return np.where(condition, a, b)


def _narrow_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a * b


def _wide_product(to: type) -> Callable:
    return lambda a, b: a.astype(to) * b.astype(to)


_INTEGERS = (u32, s32, u64, s64)
_COMPARISONS: dict[str, Callable] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

for _t in _INTEGERS:
    _define(f"add.{_t}", _t, (_t, _t), np.add)
    _define(f"sub.{_t}", _t, (_t, _t), np.subtract)
    _define(f"mul.lo.{_t}", _t, (_t, _t), _narrow_product)
    _define(f"mad.lo.{_t}", _t, (_t, _t, _t), lambda a, b, c: a * b + c)
    _define(f"min.{_t}", _t, (_t, _t), np.minimum)
    _define(f"max.{_t}", _t, (_t, _t), np.maximum)
    _define(f"shr.{_t}", _t, (_t, u32), _shift(np.right_shift, 8 * _t.size))
for _t in (u32, s32):
    _wide = {"u32": u64, "s32": s64}[_t.name]
    _define(f"mul.wide.{_t}", _wide, (_t, _t), _wide_product(_wide.dtype.type))
    _define(
        f"mad.wide.{_t}", _wide, (_t, _t, _wide), lambda a, b, c, to=_wide.dtype.type: a.astype(to) * b.astype(to) + c
    )
    _define(f"bfe.{_t}", _t, (_t, u32, u32), _bfe)
_define("div.u32", u32, (u32, u32), np.floor_divide)
_define("rem.u32", u32, (u32, u32), np.remainder)
for _bits, _t in (("b32", u32), ("b64", u64)):
    _define(f"shl.{_bits}", _t, (_t, u32), _shift(np.left_shift, 8 * _t.size))
    _define(f"and.{_bits}", _t, (_t, _t), np.bitwise_and)
    _define(f"or.{_bits}", _t, (_t, _t), np.bitwise_or)
    _define(f"xor.{_bits}", _t, (_t, _t), np.bitwise_xor)
    _define(f"not.{_bits}", _t, (_t,), np.bitwise_not)
_define("prmt.b32", u32, (u32, u32, u32), _prmt)
_define("popc.b32", u32, (u32,), lambda a: np.bitwise_count(a).astype(np.uint32))
for _a, _b, _c in ((u32, u32, u32), (u32, s32, s32), (s32, u32, s32), (s32, s32, s32)):
    _define(f"dp4a.{_a}.{_b}", _c, (u32, u32, _c), lambda a, b, c, x=_a.is_signed, y=_b.is_signed: _dp4a(a, b, c, x, y))

_define("add.rn.f32", f32, (f32, f32), np.add)
_define("sub.rn.f32", f32, (f32, f32), np.subtract)
_define("mul.rn.f32", f32, (f32, f32), np.multiply)
_define("div.rn.f32", f32, (f32, f32), np.divide)
_define("fma.rn.f32", f32, (f32, f32, f32), _fma_f32)
_define("sqrt.rn.f32", f32, (f32,), np.sqrt)
_define("rcp.rn.f32", f32, (f32,), lambda a: (np.float32(1) / a).astype(np.float32))
_define("neg.f32", f32, (f32,), np.negative)
_define("abs.f32", f32, (f32,), np.abs)
_define("max.f32", f32, (f32, f32), _max)
_define("min.f32", f32, (f32, f32), _min)
# .approx results are the correctly rounded ones here; hardware may differ by the documented error (2 ulp, 1 ulp)
_define("max.NaN.f32", f32, (f32, f32), np.maximum, needs=((7, 0), 80))
_define("ex2.approx.f32", f32, (f32,), lambda a: np.exp2(a.astype(np.float64)).astype(np.float32))
_define("rcp.approx.f32", f32, (f32,), lambda a: (1.0 / a.astype(np.float64)).astype(np.float32))
_define("rsqrt.approx.f32", f32, (f32,), lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32))

for _t in (*_INTEGERS, f32):
    for _name, _compare in _COMPARISONS.items():
        if _t is f32 and _name == "ne":  # ordered, as all of these: false if an operand is NaN
            _define("setp.ne.f32", pred, (f32, f32), lambda a, b: (a < b) | (a > b))
        else:
            _define(f"setp.{_name}.{_t}", pred, (_t, _t), _compare)
_define("setp.neu.f32", pred, (f32, f32), np.not_equal)  # unordered: true if an operand is NaN
for _bits, _t in (("b32", u32), ("b64", u64), ("f32", f32)):
    _define(f"selp.{_bits}", _t, (_t, _t, pred), _select)
_define("and.pred", pred, (pred, pred), np.logical_and)
_define("or.pred", pred, (pred, pred), np.logical_or)
_define("xor.pred", pred, (pred, pred), np.logical_xor)
_define("not.pred", pred, (pred,), np.logical_not)

for _bits, _t in (("b16", u16), ("b32", u32), ("b64", u64), ("f32", f32), ("pred", pred)):
    _define(f"mov.{_bits}", _t, (_t,), lambda a: a)  # mov.b32 between an f32 and a b32 register moves the bits
_define("cvt.u64.u32", u64, (u32,), lambda a: a.astype(np.uint64))
_define("cvt.s64.s32", s64, (s32,), lambda a: a.astype(np.int64))
_define("cvt.u32.u64", u32, (u64,), lambda a: a.astype(np.uint32))
_define("cvt.u32.u16", u32, (u16,), lambda a: a.astype(np.uint32))
_define("cvt.u16.u32", u16, (u32,), lambda a: a.astype(np.uint16))
_define("cvt.u32.u8", u32, (u8,), lambda a: a.astype(np.uint32))
_define("cvt.s32.s8", s32, (s8,), lambda a: a.astype(np.int32))
_define("cvt.s32.s16", s32, (s16,), lambda a: a.astype(np.int32))
_define("cvt.rn.f32.s32", f32, (s32,), lambda a: a.astype(np.float32))
_define("cvt.rn.f32.u32", f32, (u32,), lambda a: a.astype(np.float32))
_define("cvt.rni.s32.f32", s32, (f32,), _round_to_s32)
_define("cvt.f32.f16", f32, (f16,), lambda a: a.astype(np.float32))
_define("cvt.rn.f16.f32", f16, (f32,), lambda a: a.astype(np.float16))
_define("cvt.rn.bf16.f32", bf16, (f32,), f32_to_bf16, needs=((7, 0), 80))

"""Table rows of integer arithmetic, bit fields, shifts, byte dot products.

PTX ISA 9.7.1, 9.7.2, 9.7.8.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..types import Type, s16, s32, s64, u16, u32, u64
from .row import define

WORDS = (u32, s32, u64, s64)
_ALL = (u16, s16, *WORDS)
_WIDER = {u16: u32, s16: s32, u32: u64, s32: s64}


def _wide_product(to: np.dtype) -> Callable:
    return lambda a, b: a.astype(to) * b.astype(to)


def _high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the upper half of the double-width product a * b."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (a.astype(wide) * b.astype(wide) >> wide.type(bits)).astype(a.dtype)
    if a.dtype.kind == "i":
        x, y = a.view(np.uint64), b.view(np.uint64)
        high = (
            _high_product(x, y)
            - np.where(a < 0, y, np.uint64(0))
            - np.where(b < 0, x, np.uint64(0))
        )
        return high.view(np.int64)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    carry = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> half) + (carry >> half)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divides, rounding toward zero. Division by zero is unspecified in PTX; it gives 0 here."""
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        inexact = (quotient * b != a) & ((a < 0) != (b < 0)) & (b != 0)
        quotient = quotient + inexact.astype(a.dtype)
    return quotient


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the remainder of a / b, with the dividend's sign."""
    return a - _divide(a, b) * b


def _sad(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return c + np.where(a < b, b - a, a - b)


def _saturating(operation: Callable) -> Callable:
    """Returns an operation with .sat of s32, which clamps instead of wrapping."""

    def meaning(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exact = operation(a.astype(np.int64), b.astype(np.int64))
        return np.clip(exact, -(1 << 31), (1 << 31) - 1).astype(np.int32)

    return meaning


def _dp4a(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, a_signed: bool, b_signed: bool
) -> np.ndarray:
    """Returns c + the dot product of the four bytes of a and b; the sum wraps at 32 bits."""
    a, b, total = a.view(np.int32), b.view(np.int32), c.view(np.int32)
    for i in range(4):
        total = total + _byte(a, i, a_signed) * _byte(b, i, b_signed)
    return total.view(c.dtype)


def _byte(word: np.ndarray, i: int, signed: bool) -> np.ndarray:
    """Returns byte i (0 the lowest) of int32, sign- or zero-extended."""
    if signed:
        return word << (24 - 8 * i) >> 24
    return word >> (8 * i) & 0xFF


def _shift(operation: Callable, bits: int) -> Callable:
    """Returns a function that shifts by an amount, u32, that clamps at the width.

    Vacated bits are zeros, or copies of the sign for s types.
    """

    def meaning(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
        signed = a.dtype.kind == "i"
        if amount.size == 1 and amount[0] < bits:
            return operation(a, amount.astype(a.dtype))
        clamped = np.minimum(amount, bits - 1).astype(a.dtype)
        shifted = operation(a, clamped)
        return shifted if signed else np.where(amount >= bits, a.dtype.type(0), shifted)

    return meaning


def _funnel(left: bool, wrap: bool) -> Callable:
    """Returns a funnel shift: the upper (`left`) or lower half of the shifted 64-bit (b, a).

    The amount is taken modulo 32 (`wrap`) or clamped to 32.
    """

    def meaning(a: np.ndarray, b: np.ndarray, amount: np.ndarray) -> np.ndarray:
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        n = (amount & np.uint32(31) if wrap else np.minimum(amount, np.uint32(32))).astype(
            np.uint64
        )
        shifted = both << n >> np.uint64(32) if left else both >> n
        return shifted.astype(np.uint32)

    return meaning


def _bfe(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Extracts a bit field; s types extend the sign, and a field past the last bit repeats it."""
    bits = 8 * a.dtype.itemsize
    pos, count = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
    end = np.minimum(pos + count, bits)
    if a.dtype.kind == "u":
        down = np.minimum(pos, bits - 1).astype(a.dtype)
        keep = np.where(
            count >= bits,
            ~a.dtype.type(0),
            (a.dtype.type(1) << np.minimum(count, bits - 1).astype(a.dtype)) - a.dtype.type(1),
        )
        return np.where(pos < bits, (a >> down) & keep, a.dtype.type(0))
    up = (bits - end).astype(a.dtype)
    field = np.where(
        (pos < bits) & (count > 0),
        a
        << np.minimum(up, bits - 1).astype(a.dtype)
        >> np.clip(bits - end + pos, 0, bits - 1).astype(a.dtype),
        a >> a.dtype.type(bits - 1),
    )
    return np.where(count == 0, a.dtype.type(0), field)


def _bfi(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Returns b with `length` bits from `position` on replaced by the lowest bits of a."""
    bits = 8 * a.dtype.itemsize
    pos, count = (position & 0xFF).astype(np.int64), (length & 0xFF).astype(np.int64)
    one, down = a.dtype.type(1), np.minimum(pos, bits - 1).astype(a.dtype)
    ones = np.where(
        count >= bits, ~a.dtype.type(0), (one << np.minimum(count, bits - 1).astype(a.dtype)) - one
    )
    mask = np.where(pos < bits, ones << down, a.dtype.type(0))
    return (b & ~mask) | ((a << down) & mask)


def _highest_bit(a: np.ndarray) -> np.ndarray:
    """Returns the position of the highest 1 bit (of a negative number: 0 bit), or -1 as u32."""
    word = np.where(a < 0, ~a, a).astype(a.dtype) if a.dtype.kind == "i" else a
    word = word.view(np.dtype(f"u{a.dtype.itemsize}")).astype(np.uint64)
    position = np.full(word.shape, -1, np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        high = word >> np.uint64(step)
        position = np.where(high != 0, position + step, position)
        word = np.where(high != 0, high, word)
    return np.where(word != 0, position + 1, position).astype(np.int32).view(np.uint32)


def _shift_to_top(a: np.ndarray) -> np.ndarray:
    """bfind.shiftamt: returns the left shift that moves the highest bit to the top."""
    found = _highest_bit(a)
    return np.where(found == 0xFFFFFFFF, found, np.uint32(8 * a.dtype.itemsize - 1) - found)


def _leading_zeros(a: np.ndarray) -> np.ndarray:
    return np.uint32(8 * a.dtype.itemsize - 1) - _highest_bit(a)


def _reverse_bits(a: np.ndarray) -> np.ndarray:
    result = np.zeros_like(a)
    bits = 8 * a.dtype.itemsize
    for i in range(bits):
        result |= (a >> a.dtype.type(i) & a.dtype.type(1)) << a.dtype.type(bits - 1 - i)
    return result


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Looks up each bit triple of (a, b, c), a the highest bit, in the table's 8 bits."""
    result = np.zeros(1, np.uint32)
    for i in range(8):
        chosen = np.where(table >> np.uint32(i) & np.uint32(1), np.uint32(0xFFFFFFFF), np.uint32(0))
        here = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        result = result | (here & chosen)
    return result


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Picks four of the eight bytes of (b, a).

    Bit 3 of a selector nibble replicates the byte's sign instead.
    """
    if selector.size == 1:
        return _prmt_of_all(a, b, int(selector[0]))
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(1, np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(0xF)
        byte = ((both >> (np.uint64(8) * (nibble & np.uint32(7)))) & np.uint64(0xFF)).astype(
            np.uint32
        )
        if (nibble & np.uint32(8)).any():
            sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
            byte = np.where(nibble & np.uint32(8), sign, byte)
        result = result | byte << np.uint32(8 * i)
    return result


def _prmt_of_all(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """Like `_prmt`, with one selector for all lanes, as kernels use it; moves columns of bytes."""
    columns = [np.ascontiguousarray(word).view(np.uint8).reshape(-1, 4) for word in (a, b)]
    result = np.empty((max(a.size, b.size), 4), np.uint8)
    for i in range(4):
        nibble = selector >> 4 * i & 0xF
        byte = columns[nibble >> 2 & 1][:, nibble & 3]
        result[:, i] = byte.view(np.int8) >> 7 if nibble & 8 else byte
    return result.view(np.uint32).reshape(-1)


#: mode of prmt -> the four bytes that each value of selector & 3 picks, the lowest first
_PRMT_MODES = {
    "f4e": ("0123", "1234", "2345", "3456"),
    "b4e": ("0765", "1076", "2107", "3210"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("0123", "1123", "2223", "3333"),
    "ecr": ("0000", "0111", "0122", "0123"),
    "rc16": ("0101", "2323", "0101", "2323"),
}


def _prmt_mode(picks: tuple[str, ...]) -> Callable:
    selectors = np.array(
        [sum(int(byte) << 4 * i for i, byte in enumerate(pick)) for pick in picks], np.uint32
    )
    return lambda a, b, c: _prmt(a, b, selectors[c & np.uint32(3)])


for _t in _ALL:
    define(f"add.{_t}", _t, (_t, _t), np.add)
    define(f"sub.{_t}", _t, (_t, _t), np.subtract)
    define(f"mul.lo.{_t}", _t, (_t, _t), np.multiply)
    define(f"mul.hi.{_t}", _t, (_t, _t), _high_product)
    define(f"mad.lo.{_t}", _t, (_t, _t, _t), lambda a, b, c: a * b + c)
    define(f"mad.hi.{_t}", _t, (_t, _t, _t), lambda a, b, c: _high_product(a, b) + c)
    define(f"div.{_t}", _t, (_t, _t), _divide)
    define(f"rem.{_t}", _t, (_t, _t), _remainder)
    define(f"sad.{_t}", _t, (_t, _t, _t), _sad)
    define(f"min.{_t}", _t, (_t, _t), np.minimum)
    define(f"max.{_t}", _t, (_t, _t), np.maximum)
    define(f"shr.{_t}", _t, (_t, u32), _shift(np.right_shift, 8 * _t.size))
    if _t.is_signed:
        define(f"abs.{_t}", _t, (_t,), np.abs)
        define(f"neg.{_t}", _t, (_t,), np.negative)
for _t, _wide in _WIDER.items():
    define(f"mul.wide.{_t}", _wide, (_t, _t), _wide_product(_wide.dtype))
    define(
        f"mad.wide.{_t}",
        _wide,
        (_t, _t, _wide),
        lambda a, b, c, to=_wide.dtype: a.astype(to) * b.astype(to) + c,
    )
for _t in WORDS:
    define(f"bfe.{_t}", _t, (_t, u32, u32), _bfe)
    define(f"bfind.{_t}", u32, (_t,), _highest_bit)
    define(f"bfind.shiftamt.{_t}", u32, (_t,), _shift_to_top)
define("add.sat.s32", s32, (s32, s32), _saturating(np.add))
define("sub.sat.s32", s32, (s32, s32), _saturating(np.subtract))

_BITS: tuple[tuple[str, Type], ...] = (("b16", u16), ("b32", u32), ("b64", u64))
for _bits, _t in _BITS:
    define(f"shl.{_bits}", _t, (_t, u32), _shift(np.left_shift, 8 * _t.size))
    define(f"shr.{_bits}", _t, (_t, u32), _shift(np.right_shift, 8 * _t.size))
    define(f"and.{_bits}", _t, (_t, _t), np.bitwise_and)
    define(f"or.{_bits}", _t, (_t, _t), np.bitwise_or)
    define(f"xor.{_bits}", _t, (_t, _t), np.bitwise_xor)
    define(f"not.{_bits}", _t, (_t,), np.bitwise_not)
    define(f"cnot.{_bits}", _t, (_t,), lambda a: (a == 0).astype(a.dtype))
for _bits, _t in _BITS[1:]:
    define(f"popc.{_bits}", u32, (_t,), lambda a: np.bitwise_count(a).astype(np.uint32))
    define(f"clz.{_bits}", u32, (_t,), _leading_zeros)
    define(f"brev.{_bits}", _t, (_t,), _reverse_bits)
    define(f"bfi.{_bits}", _t, (_t, _t, u32, u32), _bfi)
define("lop3.b32", u32, (u32, u32, u32, u32), _lop3, immediates=1)
for _direction in "lr":
    for _mode in ("wrap", "clamp"):
        define(
            f"shf.{_direction}.{_mode}.b32",
            u32,
            (u32, u32, u32),
            _funnel(_direction == "l", _mode == "wrap"),
        )
define("prmt.b32", u32, (u32, u32, u32), _prmt)
for _mode, _picks in _PRMT_MODES.items():
    define(f"prmt.b32.{_mode}", u32, (u32, u32, u32), _prmt_mode(_picks))
for _a, _b, _c in ((u32, u32, u32), (u32, s32, s32), (s32, u32, s32), (s32, s32, s32)):
    define(
        f"dp4a.{_a}.{_b}",
        _c,
        (u32, u32, _c),
        lambda a, b, c, x=_a.is_signed, y=_b.is_signed: _dp4a(a, b, c, x, y),
    )

"""Table rows of mov of single registers, and cvt (PTX ISA 9.7.9)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..types import Type, bf16, bf16x2, f16, f16x2, f32, pred, s8, s16, s32, s64, u8, u16, u32, u64
from .rounding import (
    MODES,
    bf16_to_f32,
    f32_to_bf16,
    f32_to_bf16_toward_zero,
    flush,
    integer_to_odd,
    round_to,
    saturate,
)
from .row import SM80, Meaning, Version, define

_INTEGERS = (u8, s8, u16, s16, u32, s32, u64, s64)
#: rounding to an integer: nearest even, toward zero, down, up
_ROUND: dict[str, Callable] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _range(type_: Type) -> tuple[int, int]:
    info = np.iinfo(type_.dtype)
    return int(info.min), int(info.max)


def _clamp(to: Type) -> Meaning:
    """Returns a function that clamps integers to the range of `to`."""
    low, high = _range(to)

    def meaning(a: np.ndarray) -> np.ndarray:
        info = np.iinfo(a.dtype)
        return np.clip(a, max(low, int(info.min)), min(high, int(info.max))).astype(to.dtype)

    return meaning


def _float_to_integer(round_: Callable, to: Type) -> Meaning:
    """Returns a function that rounds floats to integers of type `to`, and saturates.

    NaN gives 0, or only the highest bit for 64-bit results.
    """
    low, high = _range(to)
    bits = 8 * to.size
    nan = 0 if bits < 64 else (1 << 63 if not to.is_signed else -(1 << 63))
    beyond = 2.0 ** (bits - to.is_signed)  # high + 1, exact in float64 even if `high` is not

    def meaning(x: np.ndarray) -> np.ndarray:
        rounded = round_(x.astype(np.float64))
        inside = (rounded >= low) & (rounded < beyond)
        result = np.where(inside, rounded, 0).astype(to.dtype)
        result = np.where(rounded >= beyond, to.dtype.type(high), result)
        result = np.where(rounded < low, to.dtype.type(low), result)
        return np.where(np.isnan(x), to.dtype.type(nan), result)

    return meaning


def _integer_to_float(dtype: type[np.floating], mode: str) -> Meaning:
    def meaning(a: np.ndarray) -> np.ndarray:
        exact = integer_to_odd(a) if a.dtype.itemsize == 8 else a.astype(np.float64)
        return round_to(exact, dtype, mode)

    return meaning


def _pack(convert: Meaning) -> Meaning:
    """Returns a function that packs two f32 into a pair, the first operand in the upper half."""

    def meaning(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        upper, lower = (convert(v).view(np.uint16).astype(np.uint32) for v in (a, b))
        return upper << np.uint32(16) | lower

    return meaning


def _to_f16(mode: str) -> Meaning:
    return lambda a: round_to(a.astype(np.float64), np.float16, mode)


for _bits, _t in (("b16", u16), ("b32", u32), ("b64", u64), ("f32", f32), ("pred", pred)):
    # mov.b32 between an f32 and a b32 register moves the bits
    define(f"mov.{_bits}", _t, (_t,), lambda a: a)

for _to in _INTEGERS:
    for _from in _INTEGERS:
        if _to is not _from:
            define(f"cvt.{_to}.{_from}", _to, (_from,), lambda a, to=_to.dtype: a.astype(to))
        (_low, _high), (_least, _most) = _range(_to), _range(_from)
        if _least < _low or _most > _high:
            define(f"cvt.sat.{_to}.{_from}", _to, (_from,), _clamp(_to))
for _from in _INTEGERS:
    for _mode in MODES:
        define(f"cvt.{_mode}.f32.{_from}", f32, (_from,), _integer_to_float(np.float32, _mode))
        define(f"cvt.{_mode}.f16.{_from}", f16, (_from,), _integer_to_float(np.float16, _mode))
for _to in _INTEGERS:
    for _mode, _round in _ROUND.items():
        _meaning = _float_to_integer(_round, _to)
        define(f"cvt.{_mode}.{_to}.f32", _to, (f32,), _meaning)
        define(f"cvt.{_mode}.ftz.{_to}.f32", _to, (f32,), lambda a, f=_meaning: f(flush(a)))
        define(f"cvt.{_mode}.{_to}.f16", _to, (f16,), _meaning)
for _mode, _round in _ROUND.items():
    define(f"cvt.{_mode}.f32.f32", f32, (f32,), _round)
    define(f"cvt.{_mode}.ftz.f32.f32", f32, (f32,), lambda a, f=_round: f(flush(a)))
    define(f"cvt.{_mode}.f16.f16", f16, (f16,), _round)
define("cvt.sat.f32.f32", f32, (f32,), saturate)
define("cvt.ftz.f32.f32", f32, (f32,), flush)
define("cvt.ftz.sat.f32.f32", f32, (f32,), lambda a: saturate(flush(a)))
define("cvt.f32.f16", f32, (f16,), lambda a: a.astype(np.float32))
define("cvt.f32.bf16", f32, (bf16,), bf16_to_f32, ((7, 8), 90))
for _mode in MODES:
    define(f"cvt.{_mode}.f16.f32", f16, (f32,), _to_f16(_mode))


def _define_narrow(mode: str, type_: Type, pair: Type, meaning: Meaning, needs: Version) -> None:
    if type_ is bf16:
        define(f"cvt.{mode}.bf16.f32", bf16, (f32,), meaning, needs)
    define(f"cvt.{mode}.{pair}.f32", pair, (f32, f32), _pack(meaning), needs)


_define_narrow("rn", f16, f16x2, _to_f16("rn"), SM80)
_define_narrow("rz", f16, f16x2, _to_f16("rz"), SM80)
_define_narrow("rn", bf16, bf16x2, f32_to_bf16, SM80)
_define_narrow("rz", bf16, bf16x2, f32_to_bf16_toward_zero, SM80)

"""Table rows of comparisons, selection and predicates (PTX ISA 9.7.6)."""

from __future__ import annotations

import numpy as np

from ..types import Type, bf16, f16, f32, pred, s16, s32, s64, u16, u32, u64
from .rounding import bf16_to_f32, flush
from .row import BASELINE, Meaning, Version, define

_SM90: Version = ((7, 8), 90)
_INTEGERS: dict[str, Meaning] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED: dict[str, Meaning] = {
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
#: Ordered comparisons are false if an operand is NaN; unordered ones (with a u) are true.
_FLOATS: dict[str, Meaning] = _INTEGERS | {
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _select(a: np.ndarray, b: np.ndarray, condition: np.ndarray) -> np.ndarray:
    return np.where(condition, a, b)


def _by_sign(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a where c is at least 0, else b (slct); a NaN selects b."""
    return np.where(c >= 0, a, b)


def _define_comparisons(type_: Type, table: dict[str, Meaning], needs: Version = BASELINE) -> None:
    for name, meaning in table.items():
        define(f"setp.{name}.{type_}", pred, (type_, type_), meaning, needs)


_BITS: tuple[tuple[str, Type], ...] = (("b16", u16), ("b32", u32), ("b64", u64))
for _t in (u16, s16, u32, s32, u64, s64):
    _define_comparisons(_t, _INTEGERS)
    if not _t.is_signed:
        _define_comparisons(_t, _UNSIGNED)
for _t in (f32, f16):
    _define_comparisons(_t, _FLOATS)
for _name, _meaning in _FLOATS.items():
    define(
        f"setp.{_name}.ftz.f32", pred, (f32, f32), lambda a, b, f=_meaning: f(flush(a), flush(b))
    )
    define(
        f"setp.{_name}.bf16",
        pred,
        (bf16, bf16),
        lambda a, b, f=_meaning: f(bf16_to_f32(a), bf16_to_f32(b)),
        _SM90,
    )
for _bits, _t in _BITS:
    define(f"setp.eq.{_bits}", pred, (_t, _t), np.equal)
    define(f"setp.ne.{_bits}", pred, (_t, _t), np.not_equal)
    define(f"selp.{_bits}", _t, (_t, _t, pred), _select)
for _t in (u16, s16, u32, s32, u64, s64, f32):
    define(f"selp.{_t}", _t, (_t, _t, pred), _select)
for _bits, _t in _BITS:
    define(f"slct.{_bits}.s32", _t, (_t, _t, s32), _by_sign)
for _t in (u32, s32, u64, s64, f32):
    define(f"slct.{_t}.s32", _t, (_t, _t, s32), _by_sign)
define("slct.b32.f32", u32, (u32, u32, f32), _by_sign)
define("slct.f32.f32", f32, (f32, f32, f32), _by_sign)
define("and.pred", pred, (pred, pred), np.logical_and)
define("or.pred", pred, (pred, pred), np.logical_or)
define("xor.pred", pred, (pred, pred), np.logical_xor)
define("not.pred", pred, (pred,), np.logical_not)

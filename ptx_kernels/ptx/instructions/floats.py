"""Table rows of f32 arithmetic (PTX ISA 9.7.3), in every rounding mode, with and without .ftz.

`add.f32`, `sub.f32` and `mul.f32` without a mode round to nearest here, but ptxas may contract them
to fma. Our own kernels never use these; nvcc's text does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..types import f32, pred
from .rounding import (
    MODES,
    flush,
    fma_to_odd,
    maximum,
    maximum_or_nan,
    minimum,
    minimum_or_nan,
    round_to,
    saturate,
    signed_zero,
    sum_to_odd,
)
from .row import BASELINE, SM80, Error, Meaning, Version, define

_ONE = np.ones(1, np.float32)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns the fused multiply-add a * b + c with one rounding.

    The product of two float32 is exact in float64. Rounding the sum to float64 and then to float32
    is wrong only if the float64 lies halfway between two float32, or below the normal range, where
    the spacing is coarser. These few cases are recomputed.
    """
    total = a.astype(np.float64) * b.astype(np.float64) + c
    rounded = total.astype(np.float32)
    suspect = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000  # the 29 bits that float32 lacks
    small = np.abs(rounded) <= np.finfo(np.float32).smallest_normal
    if small.any():
        suspect |= small & (total != 0)
    if suspect.any():
        where = np.flatnonzero(suspect)
        operands = (x if x.size == 1 else x[where] for x in (a, b, c))
        rounded[where] = fma_to_odd(*operands).astype(np.float32)
    return rounded


def _directed_add(mode: str) -> Meaning:
    def meaning(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = round_to(sum_to_odd(a.astype(np.float64), b.astype(np.float64)), np.float32, mode)
        return signed_zero(result, np.signbit(a) | np.signbit(b)) if mode == "rm" else result

    return meaning


def _directed_fma(mode: str) -> Meaning:
    def meaning(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        exact = fma_to_odd(a, b, c)
        result = round_to(exact, np.float32, mode)
        minus = (np.signbit(a) ^ np.signbit(b)) | np.signbit(c)
        return signed_zero(result, minus & (exact == 0)) if mode == "rm" else result

    return meaning


def _directed(operation: Callable, mode: str) -> Meaning:
    """Returns a function that rounds an operation's float64 result to float32 in one direction.

    The float64 result must lie on the same side of every float32 as the exact one. Products are
    exact. Quotients and square roots of 24-bit numbers are no closer than 2^-50 to a 25-bit number
    that they do not equal.
    """
    return lambda *x: round_to(operation(*(v.astype(np.float64) for v in x)), np.float32, mode)


def _nearest(operation: Callable) -> Meaning:
    """Returns a function with an approximate instruction's exact result, rounded to nearest."""
    return lambda *x: operation(*(v.astype(np.float64) for v in x)).astype(np.float32)


def _both(
    opcode: str,
    count: int,
    meaning: Meaning,
    needs: Version = BASELINE,
    error: Error | None = None,
    sat: bool = False,
) -> None:
    """Adds table rows of an instruction, plain and with .ftz; if `sat`, also with .sat.

    .ftz of f32 treats subnormal operands and results as 0.
    """
    name, _, type_ = opcode.rpartition(".")
    operands = (f32,) * count
    define(opcode, f32, operands, meaning, needs, error)
    define(
        f"{name}.ftz.{type_}",
        f32,
        operands,
        lambda *x: flush(meaning(*map(flush, x))),
        needs,
        error,
    )
    if sat:
        define(f"{name}.sat.{type_}", f32, operands, lambda *x: saturate(meaning(*x)), needs, error)


_both("add.f32", 2, np.add, sat=True)
_both("sub.f32", 2, np.subtract, sat=True)
_both("mul.f32", 2, np.multiply, sat=True)
_both("add.rn.f32", 2, np.add, sat=True)
_both("sub.rn.f32", 2, np.subtract, sat=True)
_both("mul.rn.f32", 2, np.multiply, sat=True)
_both("fma.rn.f32", 3, _fma, sat=True)
_both("div.rn.f32", 2, np.divide)
_both("sqrt.rn.f32", 1, np.sqrt)
_both("rcp.rn.f32", 1, lambda a: _ONE / a)
for _mode in MODES[1:]:
    _add = _directed_add(_mode)
    _both(f"add.{_mode}.f32", 2, _add)
    _both(f"sub.{_mode}.f32", 2, lambda a, b, add=_add: add(a, -b))
    _both(f"mul.{_mode}.f32", 2, _directed(np.multiply, _mode))
    _both(f"fma.{_mode}.f32", 3, _directed_fma(_mode))
    _both(f"div.{_mode}.f32", 2, _directed(np.divide, _mode))
    _both(f"sqrt.{_mode}.f32", 1, _directed(np.sqrt, _mode))
    _both(f"rcp.{_mode}.f32", 1, _directed(np.reciprocal, _mode))
_both("neg.f32", 1, np.negative)
_both("abs.f32", 1, np.abs)
_both("max.f32", 2, maximum)  # a NaN operand is dropped
_both("min.f32", 2, minimum)
_both("max.NaN.f32", 2, maximum_or_nan, SM80)
_both("min.NaN.f32", 2, minimum_or_nan, SM80)
define("copysign.f32", f32, (f32, f32), lambda a, b: np.copysign(b, a))

# The meaning of .approx instructions is the correctly rounded result. Hardware may differ by the
# documented error.
_DIVISORS = (2.0**-126, 2.0**126)
_both("div.approx.f32", 2, _nearest(np.divide), error=Error(ulps=2, domain=_DIVISORS))
_both("div.full.f32", 2, _nearest(np.divide), error=Error(ulps=2, domain=_DIVISORS))
_both("rcp.approx.f32", 1, _nearest(np.reciprocal), error=Error(ulps=1))
_both("sqrt.approx.f32", 1, _nearest(np.sqrt), error=Error(relative=2.0**-23))
_both("rsqrt.approx.f32", 1, _nearest(lambda a: 1.0 / np.sqrt(a)), error=Error(relative=2.0**-22.9))
_both("ex2.approx.f32", 1, _nearest(np.exp2), error=Error(ulps=2))
_both("lg2.approx.f32", 1, _nearest(np.log2), error=Error(relative=2.0**-22, absolute=2.0**-22.6))
_both(
    "sin.approx.f32", 1, _nearest(np.sin), error=Error(absolute=2.0**-20.5, domain=(0.0, 2 * np.pi))
)
_both(
    "cos.approx.f32", 1, _nearest(np.cos), error=Error(absolute=2.0**-20.5, domain=(0.0, 2 * np.pi))
)
define("tanh.approx.f32", f32, (f32,), _nearest(np.tanh), ((7, 0), 75), Error(relative=2.0**-11))


def _subnormal(a: np.ndarray) -> np.ndarray:
    return (np.abs(a) < np.finfo(np.float32).smallest_normal) & (a != 0)


_TESTS: dict[str, Meaning] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: ~np.isnan(a),
    "notanumber": np.isnan,
    "normal": lambda a: np.isfinite(a) & ~_subnormal(a),  # zero counts as normal
    "subnormal": _subnormal,
}
for _name, _test in _TESTS.items():
    define(f"testp.{_name}.f32", pred, (f32,), _test)

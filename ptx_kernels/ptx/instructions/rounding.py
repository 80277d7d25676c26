"""Rounds exact results to f32, f16 and bf16 in every direction, by rounding to odd.

A float64 rounded to odd (inexact results get an odd last bit) stays on the same side of every
narrower float, and of every midpoint between two, as the exact value. Rounding it again is
therefore correct in any mode (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums:
proved algorithms using rounding to odd", 2008).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: PTX suffix -> direction: nearest (even), zero, minus infinity, plus infinity
MODES = ("rn", "rz", "rm", "rp")


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Converts bf16 bits (uint16) to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Converts float32 to bf16 bits (uint16), rounded to nearest even.

    NaN becomes the canonical 0x7fff.
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def f32_to_bf16_toward_zero(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), np.uint16(0x7FFF), (bits >> np.uint32(16)).astype(np.uint16))


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a + b in float64, rounded to odd."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # Knuth's two-sum: total + error is exact
    return _to_odd(total, error)


def _to_odd(total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Rounds the exact `total + error` to odd: the last bit is odd if the error is not 0."""
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, bits + toward, bits).view(np.float64)


def fma_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a * b + c in float64, rounded to odd.

    The product of a and b must be exact in float64.
    """
    return sum_to_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def integer_to_odd(x: np.ndarray) -> np.ndarray:
    """Converts a 64-bit integer to float64, rounded to odd."""
    low = (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return sum_to_odd((x >> x.dtype.type(32)).astype(np.float64) * 2.0**32, low)


def round_to(x: np.ndarray, dtype: type[np.floating], mode: str) -> np.ndarray:
    """Rounds float64 (exact, or rounded to odd) to float32 or float16 in one of MODES."""
    rounded = x.astype(dtype)
    if mode == "rn":
        return rounded
    back = rounded.astype(np.float64)
    too_high, too_low = back > x, back < x
    if mode == "rz":
        too_high, too_low = too_high & (x > 0), too_low & (x < 0)
        target = np.zeros(1, dtype)
    else:
        target = np.array([-np.inf if mode == "rm" else np.inf], dtype)
        too_high, too_low = (
            (too_high, too_low & False) if mode == "rm" else (too_high & False, too_low)
        )
    return np.where(too_high | too_low, np.nextafter(rounded, target), rounded)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounds float64 (exact, or rounded to odd) to bf16 bits, to nearest even."""
    narrow = x.astype(np.float32)
    error = x - narrow.astype(np.float64)
    bits = narrow.view(np.int32)
    overflow = np.isinf(narrow) & np.isfinite(x)
    inexact = ((error != 0) & np.isfinite(narrow) & ((bits & 1) == 0)) | overflow
    away = (error > 0) == (x > 0)
    odd = np.where(inexact, np.where(away & ~overflow, bits + 1, bits - 1), bits)
    return f32_to_bf16(odd.astype(np.int32).view(np.float32))


def signed_zero(result: np.ndarray, minus: np.ndarray) -> np.ndarray:
    """Returns the result with its zeros made negative where `minus` is true.

    x + (-x) is -0 when rounding toward minus infinity.
    """
    return np.where((result == 0) & minus, -np.abs(result), result)


def ordered_zeros(
    extreme: Callable[..., np.ndarray], *, largest: bool
) -> Callable[..., np.ndarray]:
    """Wraps NumPy's maximum or minimum to order +0 above -0 (PTX ISA 9.7.3.11 and 9.7.3.12).

    NumPy itself returns either zero.
    """
    minus = np.logical_and if largest else np.logical_or

    def meaning(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = extreme(a, b)
        if not (result == 0).any():
            return result
        zero = result.dtype.type(0)
        signed = np.where(minus(np.signbit(a), np.signbit(b)), -zero, zero)
        return np.where((a == 0) & (b == 0), signed, result)

    return meaning


maximum, minimum = ordered_zeros(np.fmax, largest=True), ordered_zeros(np.fmin, largest=False)
maximum_or_nan, minimum_or_nan = (
    ordered_zeros(np.maximum, largest=True),
    ordered_zeros(np.minimum, largest=False),
)


def flush(x: np.ndarray) -> np.ndarray:
    """Applies .ftz: subnormal f32 become zeros of the same sign; other types are unchanged."""
    if x.dtype != np.float32:
        return x
    return np.where(
        np.abs(x) < np.finfo(np.float32).smallest_normal, np.copysign(np.float32(0), x), x
    )


def saturate(x: np.ndarray) -> np.ndarray:
    """Applies .sat: clamps to [0, 1]; NaN becomes +0."""
    clamped = np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))
    return clamped.astype(x.dtype)

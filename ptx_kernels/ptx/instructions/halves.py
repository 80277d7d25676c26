"""Table rows of f16 and bf16 arithmetic, single and in pairs (PTX ISA 9.7.4)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..types import Type, bf16, bf16x2, f16, f16x2
from .rounding import bf16_to_f32, f32_to_bf16, fma_to_odd, maximum, minimum, to_bf16
from .row import BASELINE, SM80, Meaning, Version, define

_SM90: Version = ((7, 8), 90)


def _pairs(meaning: Meaning, dtype: type) -> Meaning:
    """Returns a function that applies `meaning` to both halves of 32-bit registers."""

    def both(*x: np.ndarray) -> np.ndarray:
        halves: Iterator[np.ndarray] = (
            np.ascontiguousarray(v).view(dtype).reshape(v.size, 2) for v in x
        )
        return np.ascontiguousarray(meaning(*halves), dtype).view(np.uint32).reshape(-1)

    return both


def _define(
    name: str, type_: Type, count: int, meaning: Meaning, needs: Version = BASELINE
) -> None:
    """Adds table rows of an instruction for single values and for pairs."""
    pair, dtype = (f16x2, np.float16) if type_ is f16 else (bf16x2, np.uint16)
    define(f"{name}.{type_}", type_, (type_,) * count, meaning, needs)
    define(f"{name}.{pair}", pair, (pair,) * count, _pairs(meaning, dtype), needs)


def _fma_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return fma_to_odd(a, b, c).astype(np.float16)


def _fma_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return to_bf16(fma_to_odd(bf16_to_f32(a), bf16_to_f32(b), bf16_to_f32(c)))


def _of_f32(operation: Meaning) -> Meaning:
    """Returns a function that computes an operation on bf16 in f32.

    With 24 bits, the second rounding of a sum or product of 8-bit numbers changes nothing.
    """
    return lambda *x: f32_to_bf16(operation(*map(bf16_to_f32, x)))


def _relu(x: np.ndarray) -> np.ndarray:
    """Replaces negative values by 0; NaN stays, as confirmed on an H100."""
    return np.where(np.isnan(x), x, np.fmax(x, np.float16(0)))


for _suffix in ("", ".rn"):
    _define(f"add{_suffix}", f16, 2, np.add)
    _define(f"sub{_suffix}", f16, 2, np.subtract)
    _define(f"mul{_suffix}", f16, 2, np.multiply)
    _define(f"add{_suffix}", bf16, 2, _of_f32(np.add), _SM90)
    _define(f"sub{_suffix}", bf16, 2, _of_f32(np.subtract), _SM90)
    _define(f"mul{_suffix}", bf16, 2, _of_f32(np.multiply), _SM90)
_define("fma.rn", f16, 3, _fma_f16)
_define("fma.rn.relu", f16, 3, lambda a, b, c: _relu(_fma_f16(a, b, c)), SM80)
_define("fma.rn", bf16, 3, _fma_bf16, SM80)
_define("neg", f16, 1, np.negative)
_define("abs", f16, 1, np.abs)
_define("min", f16, 2, minimum, SM80)
_define("max", f16, 2, maximum, SM80)
_define("neg", bf16, 1, lambda a: a ^ np.uint16(0x8000), SM80)
_define("abs", bf16, 1, lambda a: a & np.uint16(0x7FFF), SM80)
_define("min", bf16, 2, _of_f32(minimum), SM80)
_define("max", bf16, 2, _of_f32(maximum), SM80)

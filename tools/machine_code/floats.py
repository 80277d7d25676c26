"""Arithmetic of float32: rounded once, to nearest even unless a modifier says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction
from .errors import UnknownInstructionFault
from .integers import COMBINATIONS, COMPARISONS
from .operands import Reader
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine

_TINY = np.float32(2.0**-126)
_HALF_BITS = np.uint64((1 << 29) - 1)  # of a float64, those that a float32 does not keep
_TIE = np.uint64(1 << 28)
DIRECTIONS = ("RM", "RP", "RZ")


def flushed(value: np.ndarray) -> np.ndarray:
    """Replaces subnormal numbers by zeros of their signs."""
    small = np.abs(value) < _TINY
    return np.where(small, np.copysign(np.float32(0), value), value) if small.any() else value


def odd_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Adds float64 numbers, rounded to odd: a second rounding then gives the exact sum's rounding.

    The error term is Knuth's two-sum.
    """
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = np.isfinite(total) & (error != 0) & ~np.isnan(error)
    bits = total.view(np.int64).copy()
    bits[inexact & (np.signbit(error) != np.signbit(total))] -= 1
    bits[inexact] |= 1
    return bits.view(np.float64)


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Computes a * b + c in float32 with one rounding, to nearest."""
    product = a.astype(np.float64) * b
    total = product + c
    bits = total.view(np.uint64) & _HALF_BITS
    size = np.abs(total)
    if (bits == _TIE).any() or ((size < _TINY) & (size > 0)).any():
        both = np.broadcast_arrays(product, c.astype(np.float64))
        return odd_sum(*both).astype(np.float32)
    return total.astype(np.float32)


def directed(value: np.ndarray, direction: str) -> np.ndarray:
    """Rounds float64, exact or rounded to odd, to float32 down (RM), up (RP) or to zero (RZ)."""
    near = value.astype(np.float32)
    back = near.astype(np.float64)
    if direction == "RZ":
        return np.where(np.abs(back) > np.abs(value), np.nextafter(near, np.float32(0)), near)
    if direction == "RM":
        return np.where(back > value, np.nextafter(near, np.float32(-np.inf)), near)
    return np.where(back < value, np.nextafter(near, np.float32(np.inf)), near)


def _sources(i: Instruction, m: Machine, start: int, count: int) -> list[Reader]:
    readers = [m.operands.f32(operand) for operand in i.operands[start : start + count]]
    if "FTZ" not in i:
        return readers

    def flushing(read: Reader) -> Reader:
        return lambda: flushed(read())

    return [flushing(read) for read in readers]


def finished(i: Instruction, value: np.ndarray) -> np.ndarray:
    """Applies FTZ and SAT to a result."""
    if "FTZ" in i:
        value = flushed(value)
    if "SAT" in i:
        value = np.where(np.isnan(value), np.float32(0), np.clip(value, 0, 1)).astype(np.float32)
    return value


@instruction("FADD", "FMUL")
def _add_multiply(i: Instruction, m: Machine) -> Step:
    a, b = _sources(i, m, 1, 2)
    put = m.operands.put_f32(i.operands[0])
    operation = np.add if i.name == "FADD" else np.multiply
    if direction := i.one_of(*DIRECTIONS):

        def exact(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            wide = x.astype(np.float64), np.broadcast_to(y, x.shape).astype(np.float64)
            return odd_sum(*wide) if i.name == "FADD" else wide[0] * wide[1]

        return lambda mask: put(
            finished(i, directed(exact(*np.broadcast_arrays(a(), b())), direction)), mask
        )
    if "FTZ" in i or "SAT" in i:
        return lambda mask: put(finished(i, operation(a(), b())), mask)
    return lambda mask: put(operation(a(), b()), mask)


@instruction("FFMA")
def _fused(i: Instruction, m: Machine) -> Step:
    a, b, c = _sources(i, m, 1, 3)
    put = m.operands.put_f32(i.operands[0])
    direction = i.one_of(*DIRECTIONS)

    def step(mask: Mask) -> None:
        if direction:
            product, addend = np.broadcast_arrays(
                a().astype(np.float64) * b(), c().astype(np.float64)
            )
            put(finished(i, directed(odd_sum(product, addend), direction)), mask)
        else:
            put(finished(i, _multiply_add(a(), b(), c())), mask)

    return step


@instruction("FMNMX")
def _minimum_maximum(i: Instruction, m: Machine) -> Step:
    """Takes the smaller or larger; -0 is below +0; a number before a NaN unless NAN is asked."""
    a, b = _sources(i, m, 1, 2)
    smaller = m.operands.predicate(i.operands[3])
    put = m.operands.put_f32(i.operands[0])

    def step(mask: Mask) -> None:
        x, y = a(), b()
        first = (x < y) | ((x == y) & np.signbit(x))
        value = np.where(first == smaller(), x, y)
        x_nan, y_nan = np.isnan(x), np.isnan(y)
        if "NAN" in i:
            value = np.where(x_nan | y_nan, np.float32(np.nan), value)
        else:
            value = np.where(x_nan, y, np.where(y_nan, x, value))
        put(finished(i, value), mask)

    return step


@instruction("FSETP")
def _compare(i: Instruction, m: Machine) -> Step:
    """Compares; names that end with U also hold for unordered operands."""
    outs = [m.operands.put_predicate(operand) for operand in i.operands[:2]]
    a, b = _sources(i, m, 2, 2)
    with_ = m.operands.predicate(i.operands[4])
    how = i.modifiers[0]
    unordered = how.endswith("U") and how != "NUM"
    compare = COMPARISONS.get(how.removesuffix("U"))
    if compare is None and how not in ("NUM", "NAN"):
        raise UnknownInstructionFault(f"comparison {how}")
    combine = COMBINATIONS[i.one_of(*COMBINATIONS)]

    def step(mask: Mask) -> None:
        x, y = a(), b()
        nan = np.isnan(x) | np.isnan(y)
        if compare is None:
            result = nan if how == "NAN" else ~nan
        else:
            result = compare(x, y)
            result = result | nan if unordered else result & ~nan
        other = with_()
        values = combine(result, other), combine(~result, other)
        outs[0](values[0], mask)
        outs[1](values[1], mask)

    return step


@instruction("FSEL")
def _select(i: Instruction, m: Machine) -> Step:
    a, b = _sources(i, m, 1, 2)
    which = m.operands.predicate(i.operands[3])
    put = m.operands.put(i.operands[0])
    return lambda mask: put(np.where(which(), a(), b()).view(np.uint32), mask)


@instruction("FCHK")
def _check_division(i: Instruction, m: Machine) -> Step:
    """Finds divisions whose quick way can overflow or lose bits; the slow way is always right."""
    a, b = (m.operands.raw(operand) for operand in i.operands[1:3])
    put = m.operands.put_predicate(i.operands[0])

    def step(mask: Mask) -> None:
        x, y = ((bits() >> np.uint32(23) & np.uint32(255)).astype(np.int32) for bits in (a, b))
        far = np.abs(x - y) > 90
        put(far | (x < 32) | (x == 255) | (y < 8) | (y > 246), mask)

    return step


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "RCP": lambda x: 1 / x,
    "RSQ": lambda x: 1 / np.sqrt(x),
    "SQRT": np.sqrt,
    "EX2": np.exp2,
    "LG2": np.log2,
    "SIN": np.sin,
    "COS": np.cos,
    "TANH": np.tanh,
}


@instruction("MUFU")
def _approximate(i: Instruction, m: Machine) -> Step:
    """Computes the nearest float32, without subnormals; hardware may differ in the last bits."""
    name = i.one_of(*_FUNCTIONS)
    if not name or len(i.modifiers) > 1:
        raise UnknownInstructionFault("function of MUFU")
    read, put = m.operands.f32(i.operands[1]), m.operands.put_f32(i.operands[0])
    function = _FUNCTIONS[name]
    return lambda mask: put(
        flushed(function(flushed(read()).astype(np.float64)).astype(np.float32)), mask
    )

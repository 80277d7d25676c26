"""Arithmetic of pairs of float16 in a register."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction, Operand
from .errors import UnknownInstructionFault
from .floats import odd_sum
from .operands import NAN, Reader
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine

_NAN = np.uint16(NAN & 0xFFFF)


def _pair(operand: Operand, m: Machine) -> Reader:
    """Reads a register's halves as float64 (2, lanes, warps); a part names one half for both."""
    read = m.operands.raw(operand)

    def halves() -> np.ndarray:
        word = read()
        low = (word & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
        high = (word >> np.uint32(16)).astype(np.uint16).view(np.float16)
        if operand.part == "H0_H0":
            high = low
        if operand.part == "H1_H1":
            low = high
        both = np.stack([low, high]).astype(np.float64)
        both = np.abs(both) if operand.absolute else both
        return -both if operand.negative else both

    return halves


def _constant(high: Operand, low: Operand) -> Reader:
    """Reads two immediates, the upper half's first."""
    names = {"INF": np.inf, "QNAN": np.nan}

    def number(operand: Operand) -> float:
        sign = -1 if operand.body.startswith("-") else 1
        name = operand.body.lstrip("+-")
        return sign * names[name] if name in names else float(operand.body)

    value = np.array([number(low), number(high)], np.float16).astype(np.float64)[:, None, None]
    return lambda: value


def _sources(i: Instruction, m: Machine) -> list[Reader]:
    found, rest = list[Reader](), list(i.operands[1:])
    while rest:
        operand = rest.pop(0)
        if operand.kind in ("register", "uniform", "constant"):
            found.append(_pair(operand, m))
        elif operand.kind == "integer" and operand.body.startswith("0x"):
            found.append(_pair(operand, m))
        elif operand.is_predicate:
            continue
        elif rest:
            found.append(_constant(operand, rest.pop(0)))
        else:
            raise UnknownInstructionFault(f"operand {operand.text}")
    return found


def packed(both: np.ndarray) -> np.ndarray:
    """Rounds float64 halves (2, ...) to float16 and packs them; NaN have one pattern."""
    bits = np.where(np.isnan(both), _NAN, both.astype(np.float16).view(np.uint16)).astype(np.uint32)
    return bits[0] | (bits[1] << np.uint32(16))


def _pairwise(i: Instruction, m: Machine, function: Callable[..., np.ndarray]) -> Step:
    if set(i.modifiers) - {"MMA"}:
        raise UnknownInstructionFault("only pairs of float16 are known")
    sources, put = _sources(i, m), m.operands.put(i.operands[0])
    return lambda mask: put(packed(function(*(source() for source in sources))), mask)


@instruction("HADD2")
def _add(i: Instruction, m: Machine) -> Step:
    if i.modifiers == ("F32",):
        return _widened(i, m)
    return _pairwise(i, m, np.add)


@instruction("HMUL2")
def _multiply(i: Instruction, m: Machine) -> Step:
    return _pairwise(i, m, np.multiply)


@instruction("HFMA2")
def _fused(i: Instruction, m: Machine) -> Step:
    def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return odd_sum(*np.broadcast_arrays(a * b, c))

    sources = _sources(i, m)
    if i.operands[1].text == "-RZ" and i.operands[2].text == "RZ" and len(sources) == 3:
        constant, put = packed(sources[2]()), m.operands.put(i.operands[0])
        if not set(i.modifiers) - {"MMA"}:
            return lambda mask: put(constant, mask)
    return _pairwise(i, m, fused)


def _widened(i: Instruction, m: Machine) -> Step:
    """Adds halves as float32; with -RZ this converts one half."""
    put = m.operands.put_f32(i.operands[0])
    readers = [
        _pair(operand, m) if operand.part else _plain(operand, m) for operand in i.operands[1:3]
    ]

    def step(mask: Mask) -> None:
        a, b = (read()[0].astype(np.float32) for read in readers)
        put(a + b, mask)

    return step


def _plain(operand: Operand, m: Machine) -> Reader:
    if operand.text not in ("RZ", "-RZ"):
        raise UnknownInstructionFault(f"operand {operand.text} without a half")
    return _pair(operand, m)

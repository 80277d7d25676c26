"""Exchanges between the lanes of a warp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction
from .errors import AbsentLaneFault, UnknownInstructionFault
from .state import BITS, LANES, Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine


@instruction("SHFL")
def _shuffle(i: Instruction, m: Machine) -> Step:
    """Reads another lane's register.

    The last operand has the bound of the source lane in bits 0 to 4, and in bits 8 to 12 a mask of
    lane bits that stay (PTX manual, shfl.sync).
    """
    how = i.modifiers[0]
    value, other, limits = (m.operands.u32(operand) for operand in i.operands[2:5])
    put, out = m.operands.put(i.operands[1]), m.operands.put_predicate(i.operands[0])
    shape = m.state.counter.shape

    def step(mask: Mask) -> None:
        amount = other().astype(np.int64) & 31
        bound, segment = limits().astype(np.int64) & 31, limits().astype(np.int64) >> 8 & 31
        first = LANES & segment
        last = first | (bound & ~segment)
        if how == "UP":
            source = LANES - amount
            inside = source >= last
        elif how == "DOWN":
            source = LANES + amount
            inside = source <= last
        elif how == "BFLY":
            source = LANES ^ amount
            inside = source <= last
        elif how == "IDX":
            source = first | (amount & ~segment)
            inside = source <= last
        else:
            raise UnknownInstructionFault(f"kind {how}")
        source = np.broadcast_to(np.where(inside, source, LANES), shape)
        if mask is not None:
            there = np.take_along_axis(mask, source, axis=0)
            if (mask & ~there).any():
                raise AbsentLaneFault("a shuffle from a lane that is elsewhere")
        found = np.take_along_axis(np.broadcast_to(value(), shape), source, axis=0)
        put(found, mask)
        out(np.broadcast_to(inside, shape), mask)

    return step


def _lanes(mask: Mask, m: Machine) -> np.ndarray:
    return np.ones(m.state.counter.shape, bool) if mask is None else mask


@instruction("VOTE", "VOTEU")
def _vote(i: Instruction, m: Machine) -> Step:
    """Combines a predicate of the lanes that vote; a register result has a bit for each."""
    source = m.operands.predicate([o for o in i.operands if o.is_predicate][-1])
    results = list(i.operands[:-1])
    words = [m.operands.put(operand) for operand in results if not operand.is_predicate]
    truths = [m.operands.put_predicate(operand) for operand in results if operand.is_predicate]
    how = i.one_of("ANY", "ALL", "EQ")

    def step(mask: Mask) -> None:
        lanes = _lanes(mask, m)
        yes = lanes & source()
        some, none = yes.any(axis=0, keepdims=True), ~yes.any(axis=0, keepdims=True)
        all_ = ~(lanes & ~source()).any(axis=0, keepdims=True)
        truth = np.asarray({"ANY": some, "ALL": all_, "EQ": all_ | none}[how])
        ballot = np.bitwise_or.reduce(np.where(yes, BITS, np.uint32(0)), axis=0)[None]
        for put in words:
            put(ballot, mask)
        for put in truths:
            put(truth, mask)

    return step


_REDUCTIONS = {
    "MIN": (np.minimum, 2**40),
    "MAX": (np.maximum, -(2**40)),
    "AND": (np.bitwise_and, -1),
    "OR": (np.bitwise_or, 0),
    "XOR": (np.bitwise_xor, 0),
    "SUM": (np.add, 0),
}


@instruction("REDUX", "CREDUX")
def _reduce(i: Instruction, m: Machine) -> Step:
    name = i.one_of(*_REDUCTIONS, default="SUM")
    if i.one_of("F32", "64"):
        raise UnknownInstructionFault("only 32-bit integers are known")
    function, neutral = _REDUCTIONS[name]
    read = m.operands.s32(i.operands[1]) if "S32" in i else m.operands.u32(i.operands[1])
    put = m.operands.put(i.operands[0])

    def step(mask: Mask) -> None:
        values = np.where(_lanes(mask, m), read().astype(np.int64), np.int64(neutral))
        put(function.reduce(values, axis=0, keepdims=True).astype(np.uint32), mask)

    return step

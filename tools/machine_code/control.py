"""Branches, convergence of a warp's lanes, and barriers.

A control step takes the lanes that execute it and those that came to it, and returns the index of
the next instruction of the latter, or STOP if their counters say where each goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction, Operand
from .errors import UnknownInstructionFault
from .state import AT_BARRIER, AT_CLUSTER, AT_CONVERGENCE, AT_WARP_SYNC, DONE, Mask, bits_of
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine

STOP = -1
ControlStep = Callable[[Mask, Mask, int], int]
CONTROL: dict[str, Callable[[Instruction, Machine], ControlStep]] = {}


def _control(*names: str) -> Callable:
    def add(function: Callable[[Instruction, Machine], ControlStep]) -> Callable:
        CONTROL.update(dict.fromkeys(names, function))
        return function

    return add


def _array(mask: Mask, m: Machine) -> np.ndarray:
    return np.ones(m.state.counter.shape, bool) if mask is None else mask


def _part(mask: Mask, came: Mask) -> bool:
    """Whether some lanes that came do not execute the instruction."""
    return mask is not came and not (mask is None or (came is not None and (mask == came).all()))


# --- branches


def _target(i: Instruction, m: Machine) -> int:
    label = next(
        operand for operand in i.operands if operand.kind == "other" and "(" in operand.text
    )
    return m.code.labels[label.text.split("(")[1].rstrip(")")]


@_control("BRA", "CALL", "JMP")
def _branch(i: Instruction, m: Machine) -> ControlStep:
    if "DIV" in i or "CONV" in i:
        return lambda mask, came, at: at + 1
    target = _target(i, m)
    conditions = [m.operands.predicate(o) for o in i.operands if o.is_predicate]

    def step(mask: Mask, came: Mask, at: int) -> int:
        for condition in conditions:
            mask = _array(mask, m) & condition()
            if not mask.any():
                return at + 1
        if not _part(mask, came):
            return target
        lanes, everyone = _array(mask, m), _array(came, m)
        m.state.counter[everyone] = at + 1
        m.state.counter[lanes] = target
        return STOP

    return step


@_control("RET")
def _return(i: Instruction, m: Machine) -> ControlStep:
    if "REL" not in i:
        raise UnknownInstructionFault("absolute return")
    address = m.operands.raw(i.operands[0])

    def step(mask: Mask, came: Mask, at: int) -> int:
        lanes = _array(mask, m)
        m.state.counter[_array(came, m)] = at + 1
        where = np.broadcast_to(address(), lanes.shape)[lanes]
        m.state.counter[lanes] = where // 16
        return STOP

    return step


@_control("EXIT")
def _exit(i: Instruction, m: Machine) -> ControlStep:
    conditions = [m.operands.predicate(o) for o in i.operands if o.is_predicate]

    def step(mask: Mask, came: Mask, at: int) -> int:
        lanes = _array(mask, m)
        for condition in conditions:
            lanes = lanes & condition()
        m.state.counter[_array(came, m)] = at + 1
        m.state.waits[lanes] = DONE
        return STOP

    return step


# --- convergence


def _number(operand: Operand) -> int:
    return int(operand.text[1:])


@instruction("BSSY")
def _begin(i: Instruction, m: Machine) -> Step:
    place = m.state.convergence[_number(i.operands[0])]

    def step(mask: Mask) -> None:
        lanes = _array(mask, m)
        np.copyto(place, bits_of(lanes)[None], where=lanes)

    return step


@instruction("BMOV")
def _clear(i: Instruction, m: Machine) -> Step:
    """Forgets the lanes of a convergence register, as ptxas does for sm_75 before BSSY."""
    if i.modifiers != ("32", "CLEAR") or i.operands[0].text != "RZ":
        raise UnknownInstructionFault("only clearing is known")
    place = m.state.convergence[_number(i.operands[1])]
    return lambda mask: np.copyto(place, np.uint32(0), where=_array(mask, m))


@instruction("BREAK")
def _leave(i: Instruction, m: Machine) -> Step:
    place = m.state.convergence[_number(i.operands[-1])]
    conditions = [m.operands.predicate(o) for o in i.operands if o.is_predicate]

    def step(mask: Mask) -> None:
        lanes = _array(mask, m)
        for condition in conditions:
            lanes = lanes & condition()
        np.bitwise_and(place, ~bits_of(lanes)[None], out=place)

    return step


def _hold(m: Machine, mask: Mask, came: Mask, at: int, why: int, what: object) -> int:
    """Makes lanes wait; a release looks at them when nothing else can go on."""
    lanes = _array(mask, m)
    m.state.counter[_array(came, m)] = at + 1
    m.state.waits[lanes] = why
    np.copyto(m.state.waits_for, np.asarray(what, np.int64), where=lanes)
    return STOP


@_control("BSYNC")
def _meet(i: Instruction, m: Machine) -> ControlStep:
    number = _number(i.operands[0])
    place = m.state.convergence[number]

    def step(mask: Mask, came: Mask, at: int) -> int:
        lanes = _array(mask, m)
        missing = place & ~(bits_of(lanes) | bits_of(m.state.waits == DONE))
        if not (missing != 0)[lanes].any():
            return at + 1
        return _hold(m, mask, came, at, AT_CONVERGENCE, number)

    return step


@_control("WARPSYNC")
def _meet_all(i: Instruction, m: Machine) -> ControlStep:
    whole = Operand("0xffffffff", "integer", 0xFFFFFFFF)
    operands = [operand for operand in i.operands if not operand.is_predicate]
    wanted = m.operands.raw(operands[0] if operands and "ALL" not in i else whole)

    def step(mask: Mask, came: Mask, at: int) -> int:
        lanes = _array(mask, m)
        missing = wanted() & ~(bits_of(lanes) | bits_of(m.state.waits == DONE))
        if not (np.broadcast_to(missing, lanes.shape)[lanes] != 0).any():
            return at + 1
        return _hold(m, mask, came, at, AT_WARP_SYNC, wanted().astype(np.int64))

    return step


# --- barriers


@_control("BAR")
def _barrier(i: Instruction, m: Machine) -> ControlStep:
    """Waits for all threads of the block, or for as many as the second operand says."""
    if i.modifiers[:1] != ("SYNC",) or i.operands[0].kind != "integer":
        raise UnknownInstructionFault("kind of barrier")
    number = i.operands[0].index
    threads = i.operands[1].index if len(i.operands) > 1 else 0

    def step(mask: Mask, came: Mask, at: int) -> int:
        if mask is None and not threads:
            return at + 1
        return _hold(m, mask, came, at, AT_BARRIER, number | threads << 8)

    return step


@instruction("UCGABAR_ARV")
def _arrive(i: Instruction, m: Machine) -> Step:
    def step(mask: Mask) -> None:
        m.arrived[_array(mask, m)] = True

    return step


@_control("UCGABAR_WAIT")
def _wait(i: Instruction, m: Machine) -> ControlStep:
    return lambda mask, came, at: _hold(m, mask, came, at, AT_CLUSTER, 0)


# --- the order of memory, caches and hints change nothing here


@instruction("NOP", "MEMBAR", "ERRBAR", "CGAERRBAR", "CCTL", "YIELD", "FENCE", "UBLKPF", "CCTLL")
def _nothing(i: Instruction, m: Machine) -> Step:
    return lambda mask: None


# --- release of waiting lanes


def release(m: Machine) -> bool:
    """Lets lanes go on whose partners have come; returns whether there were any."""
    for kind in (_release_converged, _release_synced, _release_barriers, _release_clusters):
        ready = kind(m)
        if ready.any():
            m.state.waits[ready] = 0
            return True
    return False


def _release_converged(m: Machine) -> np.ndarray:
    state, ready = m.state, np.zeros(m.state.waits.shape, bool)
    waiting, gone = state.waits == AT_CONVERGENCE, bits_of(state.waits == DONE)
    for number in np.unique(state.waits_for[waiting]):
        lanes = waiting & (state.waits_for == number)
        missing = state.convergence[number] & ~(bits_of(lanes) | gone)
        ready |= lanes & (missing == 0)
    return ready


def _release_synced(m: Machine) -> np.ndarray:
    state = m.state
    lanes = state.waits == AT_WARP_SYNC
    there = bits_of(lanes | (state.waits == DONE)).astype(np.int64)
    return lanes & (state.waits_for & ~there == 0)


def _release_barriers(m: Machine) -> np.ndarray:
    state, ready = m.state, np.zeros(m.state.waits.shape, bool)
    waiting, gone = state.waits == AT_BARRIER, (state.waits == DONE).sum(axis=0)
    for what in np.unique(state.waits_for[waiting]):
        lanes = waiting & (state.waits_for == what)
        there = lanes.sum(axis=0) if what >> 8 else lanes.sum(axis=0) + gone
        wanted = what >> 8 or m.warps_per_block * 32
        full = there.reshape(-1, m.warps_per_block).sum(axis=1) >= wanted
        ready |= lanes & np.repeat(full, m.warps_per_block)
    return ready


def _release_clusters(m: Machine) -> np.ndarray:
    state = m.state
    waiting = state.waits == AT_CLUSTER
    there = (m.arrived | (state.waits == DONE)).all(axis=0)
    of_block = there.reshape(-1, m.warps_per_block).all(axis=1)
    of_cluster = of_block[m.shared.members].all(axis=1)
    full = np.repeat(of_cluster[m.shared.clusters], m.warps_per_block)
    ready = waiting & full
    if ready.any():
        m.arrived[:, full] = False
    return ready

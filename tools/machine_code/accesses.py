"""Loads, stores and atomic operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .code import Instruction, Operand
from .errors import OutOfBoundsFault, UnknownInstructionFault
from .memory import LOCAL_BYTES
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine

_SIZES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
#: Upper half of generic addresses in the shared window.
WINDOW = 1


def size_of(i: Instruction) -> int:
    """Returns the bytes that a lane accesses."""
    return _SIZES[name] if (name := i.one_of(*_SIZES)) else 4


def address_operand(i: Instruction) -> Operand:
    return next(operand for operand in i.operands if operand.kind == "address")


class _Target:
    """Registers that a load fills."""

    def __init__(self, operand: Operand, m: Machine, i: Instruction) -> None:
        size = size_of(i)
        self._signed = {"S8": np.int8, "S16": np.int16}.get(i.one_of("S8", "S16"))
        zero = operand.body == "RZ"
        self._places = (
            [] if zero else [m.state.registers[operand.index + k] for k in range(max(1, size // 4))]
        )

    def fill(self, values: np.ndarray, mask: Mask) -> None:
        """Spreads values of the mask's lanes, in the order of `Machine.lanes`."""
        if self._signed:
            values = values.view(self._signed).astype(np.int32).view(np.uint32)
        for k, place in enumerate(self._places):
            column = values[:, k] if values.ndim == 2 else values
            if mask is None:
                place.reshape(-1)[:] = column
            else:
                place[mask] = column


def _source(operand: Operand, m: Machine, size: int) -> Callable[[Mask], np.ndarray]:
    """Returns a function that collects what the mask's lanes store."""
    readers = [m.operands.raw(operand, word) for word in range(max(1, size // 4))]

    def collect(mask: Mask) -> np.ndarray:
        columns = [m.lanes(read(), mask) for read in readers]
        if size > 4:
            return np.stack(columns, axis=-1)
        return columns[0].astype(f"u{size}")

    return collect


# --- global


@instruction("LDG")
def _load_global(i: Instruction, m: Machine) -> Step:
    size, target = size_of(i), _Target(i.operands[0], m, i)
    address = m.operands.address(address_operand(i), extended=True)

    def step(mask: Mask) -> None:
        memory = m.memory
        target.fill(memory.load(memory.place(m.lanes(address(), mask), size), size), mask)

    return step


@instruction("LD")
def _load_generic(i: Instruction, m: Machine) -> Step:
    """Loads from shared memory if the address is in its window, else from global memory."""
    size, target = size_of(i), _Target(i.operands[0], m, i)
    address = m.operands.address(address_operand(i), extended=True)

    def step(mask: Mask) -> None:
        addresses, blocks = m.lanes(address(), mask), m.lanes(m.blocks, mask)
        shared = addresses >> 32 == WINDOW
        shape = (len(addresses),) if size <= 4 else (len(addresses), size // 4)
        values = np.zeros(shape, np.uint32 if size >= 4 else f"u{size}")
        if shared.any():
            low = addresses[shared] & 0xFFFFFFFF
            values[shared] = m.shared.load(m.shared.place(low, size, blocks[shared]), size)
        if not shared.all():
            memory = m.memory
            values[~shared] = memory.load(memory.place(addresses[~shared], size), size)
        target.fill(values, mask)

    return step


@instruction("STG")
def _store_global(i: Instruction, m: Machine) -> Step:
    size = size_of(i)
    address = m.operands.address(i.operands[0], extended=True)
    source = _source(i.operands[1], m, size)

    def step(mask: Mask) -> None:
        memory = m.memory
        memory.store(memory.place(m.lanes(address(), mask), size), size, source(mask))

    return step


# --- shared


@instruction("LDS")
def _load_shared(i: Instruction, m: Machine) -> Step:
    size, target = size_of(i), _Target(i.operands[0], m, i)
    address = m.operands.address(i.operands[1], extended=False)

    def step(mask: Mask) -> None:
        places = m.shared.place(m.lanes(address(), mask), size, m.lanes(m.blocks, mask))
        target.fill(m.shared.load(places, size), mask)

    return step


@instruction("STS")
def _store_shared(i: Instruction, m: Machine) -> Step:
    size = size_of(i)
    address = m.operands.address(i.operands[0], extended=False)
    source = _source(i.operands[1], m, size)

    def step(mask: Mask) -> None:
        places = m.shared.place(m.lanes(address(), mask), size, m.lanes(m.blocks, mask))
        m.shared.store(places, size, source(mask))

    return step


# --- local: spilled registers


def _local(i: Instruction, operand: Operand, m: Machine) -> Callable[[Mask], tuple]:
    address, size = m.operands.address(operand, extended=False), size_of(i)
    if size < 4:
        raise UnknownInstructionFault("narrow local accesses")

    def place(mask: Mask) -> tuple:
        addresses = m.lanes(address(), mask)
        if ((addresses % size != 0) | (addresses < 0) | (addresses + size > LOCAL_BYTES)).any():
            raise OutOfBoundsFault(f"local address {int(addresses[0]):#x}")
        return addresses // 4, m.lanes(m.lane_numbers, mask), m.lanes(m.warp_numbers, mask)

    return place


@instruction("LDL")
def _load_local(i: Instruction, m: Machine) -> Step:
    target, place = _Target(i.operands[0], m, i), _local(i, i.operands[1], m)
    count = size_of(i) // 4

    def step(mask: Mask) -> None:
        word, lane, warp = place(mask)
        values = [m.local[word + k, lane, warp] for k in range(count)]
        target.fill(np.stack(values, axis=-1), mask)

    return step


@instruction("STL")
def _store_local(i: Instruction, m: Machine) -> Step:
    place, size = _local(i, i.operands[0], m), size_of(i)
    source = _source(i.operands[1], m, size)

    def step(mask: Mask) -> None:
        word, lane, warp = place(mask)
        values = source(mask).reshape(len(word), -1)
        for k in range(size // 4):
            m.local[word + k, lane, warp] = values[:, k]

    return step


# --- constants


@instruction("LDC", "ULDC", "LDCU")
def _load_constant(i: Instruction, m: Machine) -> Step:
    size, source = size_of(i), i.operands[1]
    if size < 4 or "R" in source.body.replace("URZ", ""):
        raise UnknownInstructionFault("narrow or indexed constants")
    count = size // 4
    values = [m.operands.raw(source, word) for word in range(count)]
    puts = [m.operands.put(i.operands[0], word) for word in range(count)]

    def step(mask: Mask) -> None:
        for value, put in zip(values, puts, strict=True):
            put(value(), mask)

    return step


# --- atomic operations: one lane after another, in the order of lanes and warps


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def _float_sum(old: int, value: int) -> int:
    bits = np.array([old, value], np.uint32).view(np.float32)
    return int((bits[:1] + bits[1:]).view(np.uint32)[0])


def _operation(i: Instruction) -> Callable[[int, int, int], int]:
    """Returns f(old, operand, second operand) -> new."""
    name = i.one_of("ADD", "MIN", "MAX", "AND", "OR", "XOR", "EXCH", "CAS", "INC")
    if i.one_of("64", "F16", "BF16", "F16x2") or ("F32" in i and name != "ADD"):
        raise UnknownInstructionFault("types of atomic operations")
    if name == "ADD" and ("F32" in i):
        return lambda old, value, _: _float_sum(old, value)
    key = _signed if "S32" in i else int
    operations: dict[str, Callable[[int, int, int], int]] = {
        "ADD": lambda old, value, _: old + value,
        "MIN": lambda old, value, _: min(old, value, key=key),
        "MAX": lambda old, value, _: max(old, value, key=key),
        "AND": lambda old, value, _: old & value,
        "OR": lambda old, value, _: old | value,
        "XOR": lambda old, value, _: old ^ value,
        "EXCH": lambda old, value, _: value,
        "CAS": lambda old, value, new: new if old == value else old,
        "INC": lambda old, value, _: 0 if old >= value else old + 1,
    }
    if name not in operations:
        raise UnknownInstructionFault("operation")
    return operations[name]


@instruction("ATOMS", "ATOMG", "ATOM", "RED", "REDG")
def _atomic(i: Instruction, m: Machine) -> Step:
    operation, shared = _operation(i), i.name == "ATOMS"
    operands = [operand for operand in i.operands if not operand.is_predicate]
    target = None if i.name.startswith("RED") else _Target(operands.pop(0), m, i)
    address = m.operands.address(operands[0], extended=not shared)
    sources = [_source(operand, m, 4) for operand in operands[1:]]

    def step(mask: Mask) -> None:
        addresses = m.lanes(address(), mask)
        first, *more = (source(mask) for source in sources)
        second = more[0] if more else first
        if shared:
            places = m.shared.place(addresses, 4, m.lanes(m.blocks, mask))
            load, store = m.shared.load, m.shared.store
        else:
            places = m.memory.place(addresses, 4)
            load, store = m.memory.load, m.memory.store
        # in the order of warps, then lanes
        order = np.lexsort((m.lanes(m.lane_numbers, mask), m.lanes(m.warp_numbers, mask)))
        before = np.zeros(len(places), np.uint32)
        for k in order:
            place = places[k : k + 1]
            before[k] = load(place, 4)[0]
            new = operation(int(before[k]), int(first[k]), int(second[k]))
            store(place, 4, np.array([new & 0xFFFFFFFF], np.uint32))
        if target:
            target.fill(before, mask)

    return step

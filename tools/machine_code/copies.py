"""Asynchronous copies from global to shared memory.

A copy's bytes may be accessed once its thread has waited for the copy's group. Until then they are
pending. `late` copies also write there no earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .accesses import size_of
from .code import Instruction
from .errors import PendingCopyFault
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine


@dataclass
class _Copy:
    """A copy of some threads that nobody has waited for; arrays have one entry per thread."""

    threads: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    size: int
    values: np.ndarray

    def split(self, ready: np.ndarray) -> tuple[_Copy, _Copy]:
        def part(which: np.ndarray) -> _Copy:
            threads, groups = self.threads[which], self.groups[which]
            return _Copy(threads, groups, self.places[which], self.size, self.values[which])

        return part(ready), part(~ready)


class Copies:
    """Copies in flight, and the number of groups that each thread has committed."""

    def __init__(self, machine: Machine, late: bool) -> None:
        self._machine, self._late = machine, late
        self._committed = np.zeros(machine.state.counter.size, np.int64)
        self._pending: list[_Copy] = []

    def start(self, mask: Mask, places: np.ndarray, size: int, values: np.ndarray) -> None:
        shared = self._machine.shared
        shared.expect(places, size)
        if not self._late:
            shared.write(places, size, values)
        threads = self._machine.lanes(self._machine.thread_numbers, mask)
        self._pending.append(_Copy(threads, self._committed[threads], places, size, values))

    def commit(self, mask: Mask) -> None:
        self._committed[self._machine.lanes(self._machine.thread_numbers, mask)] += 1

    def wait(self, mask: Mask, allowed: int) -> None:
        """Waits until each thread has at most `allowed` groups in flight."""
        waiting = np.zeros(self._committed.size, bool)
        waiting[self._machine.lanes(self._machine.thread_numbers, mask)] = True
        left = []
        for copy in self._pending:
            ready = waiting[copy.threads] & (copy.groups < self._committed[copy.threads] - allowed)
            done, rest = (copy, None) if ready.all() else copy.split(ready)
            if len(done.threads):
                if self._late:
                    self._machine.shared.write(done.places, done.size, done.values)
                self._machine.shared.arrive(done.places, done.size)
            if rest is not None:
                left.append(rest)
        self._pending = left

    def check_exit(self) -> None:
        """Checks that every copy was waited for.

        Raises:
          PendingCopyFault.
        """
        if any(len(copy.threads) for copy in self._pending):
            raise PendingCopyFault("the kernel ends before an asynchronous copy that nobody awaits")


@instruction("LDGSTS")
def _copy(i: Instruction, m: Machine) -> Step:
    """Copies; where the last operand is false, and with ZFILL beyond the bytes asked for, zeros.

    With ZFILL the lowest bits of the global address are the number of bytes that are missing.
    """
    size = size_of(i)
    target = m.operands.address(i.operands[0], extended=False)
    source = m.operands.address(i.operands[1], extended=True)
    reads = m.operands.predicate(i.operands[2]) if len(i.operands) > 2 else None

    def step(mask: Mask) -> None:
        places = m.shared.place(m.lanes(target(), mask), size, m.lanes(m.blocks, mask))
        addresses = m.lanes(source(), mask)
        missing = addresses % size if "ZFILL" in i else np.zeros_like(addresses)
        shape = (len(places),) if size <= 4 else (len(places), size // 4)
        values = np.zeros(shape, np.uint32 if size >= 4 else f"u{size}")
        wanted = np.ones(len(places), bool) if reads is None else m.lanes(reads(), mask)
        if wanted.any():
            begin, used = (addresses - missing)[wanted], (size - missing)[wanted]
            found = m.memory.load(m.memory.place(begin, size, used), size)
            if missing.any():
                of_bytes = np.ascontiguousarray(found).view(np.uint8).reshape(-1, size)
                of_bytes[np.arange(size) >= used[:, None]] = 0
                found = of_bytes.view(found.dtype).reshape(found.shape)
            values[wanted] = found
        m.copies.start(mask, places, size, values)

    return step


@instruction("LDGDEPBAR")
def _commit(i: Instruction, m: Machine) -> Step:
    return lambda mask: m.copies.commit(mask)


@instruction("DEPBAR")
def _wait(i: Instruction, m: Machine) -> Step:
    allowed = i.operands[1].index if len(i.operands) > 1 else 0
    return lambda mask: m.copies.wait(mask, allowed)

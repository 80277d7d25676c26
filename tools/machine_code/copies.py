"""Asynchronous copies from global to shared memory.

A copy's bytes may be accessed once its thread has waited for the copy's group. Until then they are
pending. `late` copies also write there no earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .accesses import size_of
from .code import Instruction
from .state import Mask
from .table import Step, instruction

if TYPE_CHECKING:
    from .machine import Machine


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

"""membar and fence: with the strong accesses beside them they release and acquire.

PTX ISA 9.1, 9.7.13.5.
"""

from __future__ import annotations

from ..batch import Batch
from ..errors import UnknownInstruction
from ..frame import Frame
from ..races.strong import semantics_of
from ..text.program import Instruction
from .operands import Operands
from .registry import compiles
from .step import Step

#: Whether it reaches beyond the block.
_LEVELS = {"membar.cta": False, "membar.gl": True, "membar.sys": True}
_SCOPES = ("cta", "cluster", "gpu", "sys")


@compiles("membar", "fence")
def compile_fence(operands: Operands, instruction: Instruction) -> Step:
    opcode = instruction.opcode
    first, *parts = opcode.split(".")
    *semantics, scope = parts or [""]
    known = first == "fence" and semantics in ([], ["sc"], ["acq_rel"]) and scope in _SCOPES
    if opcode not in _LEVELS and not known:
        raise operands.error(UnknownInstruction, instruction, f"{opcode} is no known instruction")
    operands.count(instruction, 0)
    wide = _LEVELS.get(opcode, semantics_of(opcode).wide)

    def run(batch: Batch, frame: Frame) -> None:
        batch.order.fence(frame.all_lanes, wide)

    return Step(run, (), (), synchronizes=True)

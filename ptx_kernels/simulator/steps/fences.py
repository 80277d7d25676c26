"""membar and fence: what they let other threads see, they alone or together with the strong
accesses beside them. PTX ISA 9.1, 9.7.13.5."""

from __future__ import annotations

from ..errors import UnknownInstruction
from ..frame import Frame
from ..races.vector_clock import semantics_of
from ..text.program import Instruction
from .operands import Operands, Step

_LEVELS = {
    "membar.cta": False,
    "membar.gl": True,
    "membar.sys": True,
}  # whether it reaches beyond the block
_SCOPES = ("cta", "cluster", "gpu", "sys")
#: what a thread has seen, asynchronous copies that it or a thread after it starts see from now on
_PROXY = ("fence.proxy.async", "fence.proxy.async.shared::cta")
#: after an mbarrier's init, where other blocks of a cluster use it: there are none
_INIT = "fence.mbarrier_init.release.cluster"


def compile_fence(operands: Operands, instruction: Instruction) -> Step:
    opcode = instruction.opcode
    first, *parts = opcode.split(".")
    *semantics, scope = parts or [""]
    memory = opcode in _LEVELS or (
        first == "fence" and semantics in ([], ["sc"], ["acq_rel"]) and scope in _SCOPES
    )
    if not memory and opcode not in (*_PROXY, _INIT):
        raise operands.error(UnknownInstruction, instruction, f"{opcode} is no known instruction")
    operands.count(instruction, 0)
    if memory:
        wide = _LEVELS.get(opcode, semantics_of(opcode).wide)
        return Step(lambda frame: frame.batch.order.fence(frame.all_lanes, wide), (), ())
    operands.needs(instruction, ((8, 0), 90))
    if opcode == _INIT:
        return Step(_nothing, (), ())
    return Step(lambda frame: frame.batch.order.fence_proxy(frame.all_lanes), (), ())


def _nothing(frame: Frame) -> None:
    pass

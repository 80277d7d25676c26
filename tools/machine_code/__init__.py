"""Executes the machine code that ptxas makes of kernels, to confirm the simulator.

It shares no code with `ptx_kernels.simulator` and the meanings in `ptx_kernels.ptx.instructions`,
and was written without a look at them: a misread instruction shows as a difference between the two.
"""

from . import (  # noqa: F401  registers the instructions
    accesses,
    control,
    conversions,
    copies,
    floats,
    halves,
    integers,
    matrices,
    warps,
)
from .errors import (
    AbsentLaneFault,
    DeadlockFault,
    Fault,
    MisalignedFault,
    OutOfBoundsFault,
    PendingCopyFault,
    UnknownInstructionFault,
    UnwrittenFault,
)
from .launch import Program, Run, load, run

__all__ = [
    "AbsentLaneFault",
    "DeadlockFault",
    "Fault",
    "MisalignedFault",
    "OutOfBoundsFault",
    "PendingCopyFault",
    "Program",
    "Run",
    "UnknownInstructionFault",
    "UnwrittenFault",
    "load",
    "run",
]

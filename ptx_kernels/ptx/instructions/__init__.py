"""Instruction table: the spelling, operands and meaning of every instruction.

The builder emits only opcodes that are listed here. The simulator parses the text and looks up the
same opcode, so a wrong spelling or operand order shows as a wrong result. The row of a compute
instruction holds its NumPy meaning. Memory accesses, shuffles, matrices, barriers and copies need
the machine's state: their rows list the operands, and the simulator adds the meaning.

Meanings follow PTX ISA 9.1, section 9.7. `bar.sync`, `barrier.cluster`, `bra`, `ret` and `ld.param`
have no rows: they form a kernel's frame and control flow, and the builder writes them directly.

There is one file per kind of instruction; importing it adds its rows.
"""

from __future__ import annotations

from . import (  # noqa: F401  (they fill the table)
    clusters,
    compare,
    convert,
    copies,
    floats,
    halves,
    hopper,
    integers,
    memory,
    warps,
)
from .clusters import CLUSTER_BARRIERS, CLUSTERS
from .machine_row import (
    NAMED_TYPES,
    At,
    From,
    Number,
    Spelled,
    To,
    Words,
    is_untyped,
    machine_row,
    named_type,
)
from .memory import STREAMED_LOADS, STREAMED_LOADS_128
from .rounding import bf16_to_f32, f32_to_bf16
from .row import BASELINE, INSTRUCTIONS, Error, Instruction, Version

__all__ = [
    "BASELINE",
    "CLUSTERS",
    "CLUSTER_BARRIERS",
    "INSTRUCTIONS",
    "NAMED_TYPES",
    "At",
    "Error",
    "From",
    "Instruction",
    "Number",
    "STREAMED_LOADS",
    "STREAMED_LOADS_128",
    "Spelled",
    "To",
    "Version",
    "Words",
    "bf16_to_f32",
    "f32_to_bf16",
    "is_untyped",
    "machine_row",
    "named_type",
]

"""The instruction table: what every computing instruction is called and what it means.

The builder emits only opcodes that are listed here, and the simulator parses the text and looks the
same opcode up, so that a wrong spelling or operand order shows as a wrong result. Memory accesses,
branches,
barriers, shuffles and matrix instructions have no row: they need the machine's state, and the
simulator defines them. Meanings follow PTX ISA 9.1, section 9.7.

One file per kind of instruction; importing it adds its rows.
"""

from __future__ import annotations

from . import compare, convert, floats, halves, integers  # noqa: F401  (they fill the table)
from .rounding import bf16_to_f32, f32_to_bf16
from .row import BASELINE, INSTRUCTIONS, Error, Instruction, Version

__all__ = [
    "BASELINE",
    "INSTRUCTIONS",
    "Error",
    "Instruction",
    "Version",
    "bf16_to_f32",
    "f32_to_bf16",
]

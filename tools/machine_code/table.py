"""Table of instructions: name -> function that compiles an instruction to a step.

A step takes the mask of lanes that execute. Steps of arithmetic compute all lanes and write those
of the mask; steps that access memory do so for the mask's lanes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .code import Instruction
from .errors import UnknownInstructionFault
from .state import Mask

if TYPE_CHECKING:
    from .machine import Machine

Step = Callable[[Mask], None]
Compile = Callable[[Instruction, "Machine"], Step]
INSTRUCTIONS: dict[str, Compile] = {}


def instruction(*names: str) -> Callable[[Compile], Compile]:
    """Adds a function to the table under each name."""

    def add(function: Compile) -> Compile:
        for name in names:
            if name in INSTRUCTIONS:
                raise ValueError(f"{name} is in the table already")
            INSTRUCTIONS[name] = function
        return function

    return add


def compiled(instruction: Instruction, machine: Machine) -> Step:
    """Compiles an instruction.

    Raises:
      UnknownInstructionFault: the table does not have it.
    """
    if instruction.name not in INSTRUCTIONS:
        raise UnknownInstructionFault("the table does not have this instruction")
    return INSTRUCTIONS[instruction.name](instruction, machine)

"""Registry that maps opcode prefixes to functions that compile an instruction to a step."""

from __future__ import annotations

from collections.abc import Callable

from ..text.program import Instruction
from .operands import Operands
from .step import Step

Compile = Callable[[Operands, Instruction], Step]

_HANDLERS: dict[str, Compile] = {}


def compiles(*starts: str) -> Callable[[Compile], Compile]:
    """Decorator that registers a compile function for opcodes that begin with one of `starts`."""

    def register(function: Compile) -> Compile:
        for start in starts:
            if start in _HANDLERS:
                raise ValueError(f"{start} is compiled twice")
            _HANDLERS[start] = function
        return function

    return register


def handler(opcode: str) -> Compile | None:
    """Returns the function registered for the longest matching prefix of the opcode, else None."""
    words = opcode.split(".")
    for count in range(len(words), 0, -1):
        if (found := _HANDLERS.get(".".join(words[:count]))) is not None:
            return found
    return None

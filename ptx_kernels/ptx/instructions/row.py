"""The instruction table and the rows of compute instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..types import Type

Version = tuple[tuple[int, int], int]
# (PTX ISA, sm): dp4a needs sm_61; 7.0 is what CUDA 11 drivers read
BASELINE: Version = (
    (7, 0),
    61,
)
SM70: Version = ((7, 0), 70)
SM75: Version = ((7, 0), 75)
SM80: Version = ((7, 0), 80)

Meaning = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Error:
    """Error bound of an `.approx` instruction (PTX ISA 9.1, section 9.7.3).

    It bounds the distance of the hardware's result from the exact one. The largest of the three
    bounds counts.

    Attributes:
      ulps: units in the last place of the result.
      relative, absolute: error of the result.
      domain: magnitudes of the last operand for which the bound is documented.
    """

    ulps: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    domain: tuple[float, float] = (0.0, float("inf"))


@dataclass(frozen=True)
class Instruction:
    """Table row of a compute instruction: its PTX text and the same operation in NumPy.

    `template` is the PTX text. `meaning` gets one array per operand, its register's bits viewed as
    the operand's type (bf16 as uint16, pairs as uint32), and returns an array of the result's type.
    Arrays broadcast: an immediate is an array of one element.

    Attributes:
      needs: the lowest PTX version and sm that have the instruction.
      error: how far hardware may differ from `meaning`; None for exact instructions.
      immediates: number of trailing operands that must be numbers in the text.
    """

    opcode: str
    result: Type
    operands: tuple[Type, ...]
    meaning: Meaning
    needs: Version = BASELINE
    error: Error | None = None
    immediates: int = 0

    def template(self, result: str, operands: tuple[str, ...]) -> str:
        return f"{self.opcode} {', '.join((result, *operands))};"


INSTRUCTIONS: dict[str, Instruction] = {}


def define(
    opcode: str,
    result: Type,
    operands: tuple[Type, ...],
    meaning: Meaning,
    needs: Version = BASELINE,
    error: Error | None = None,
    immediates: int = 0,
) -> None:
    if opcode in INSTRUCTIONS:
        raise ValueError(f"{opcode} is defined twice")
    INSTRUCTIONS[opcode] = Instruction(opcode, result, operands, meaning, needs, error, immediates)

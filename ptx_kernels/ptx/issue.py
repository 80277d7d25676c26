"""Emits instructions that need the machine, by their rows of the instruction table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .errors import KernelError
from .instructions import NAMED_TYPES, At, From, Number, To, is_untyped, machine_row
from .text import Text
from .values import Operand, Value, guard, operand


class Address(Protocol):
    """Address in a state space, as an operand of instructions."""

    space: str

    def operand(self) -> str:
        """Returns the PTX text of the address as an operand."""


#: Placeholder for a destination whose result is not used.
SINK = "_"
#: An operand: a value or a number, several values for a vector, or an address.
Given = Operand | tuple[Value, ...] | list[Value] | Address


def issue(text: Text, opcode: str, *operands: Given | str, where: Value | None = None) -> None:
    """Emits an instruction with its operands, destinations first; `where` predicates it.

    An operand may be text that is already spelled.

    Raises:
      KernelError: an opcode without a row, or operands that do not fit it.
    """
    spelled = machine_row(opcode)
    if spelled is None:
        raise KernelError(f"{opcode} is not in the instruction table")
    text.require(spelled.row.needs)
    kinds, least = spelled.operands, spelled.least
    if not least <= len(operands) <= len(kinds):
        counts = " or ".join(map(str, range(least, len(kinds) + 1)))
        raise KernelError(f"{opcode} takes {counts} operands, got {len(operands)}")
    for kind in kinds[least : len(operands)]:
        text.require(kind.needs)
    spellings = []
    for kind, given in zip(kinds, operands, strict=False):
        if isinstance(given, str):
            if given == SINK:
                text.require(kind.needs)
            spellings.append(given)
        else:
            spellings.append(_spelling(kind, given, opcode))
    names = f" {', '.join(spellings)}" if spellings else ""
    text.write(f"{guard(where)}{opcode}{names};")


def braced(names: Sequence[str]) -> str:
    """Returns the text of registers as a vector in braces; of one register, only its name."""
    return names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"


def _spelling(kind: To | From | At | Number, given: Any, opcode: str) -> str:
    if isinstance(kind, At):
        if getattr(given, "space", None) != kind.space:
            raise KernelError(f"{opcode} needs an address in {kind.space} memory")
        return given.operand()
    if isinstance(kind, Number):
        return str(given)
    if kind.count is None:
        return _value(kind, given, opcode)
    if len(given) != kind.count:
        raise KernelError(f"{opcode} takes {kind.count} registers, not {len(given)}")
    return "{" + ", ".join([_value(kind, value, opcode) for value in given]) + "}"


def _value(kind: To | From, given: Operand, opcode: str) -> str:
    """Returns the text of a register or number; raises unless it fits the operand's type.

    An untyped operand accepts any register of its size.
    """
    if isinstance(given, Value) and is_untyped(kind.type):
        return given.name
    return operand(given, NAMED_TYPES[kind.type], opcode)

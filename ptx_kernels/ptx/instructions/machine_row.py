"""Table rows of instructions that need the machine: memory, barriers, warp instructions, copies.

A row lists how the opcode is spelled, its operands and the version it needs. The builder writes
text from the row. The simulator takes operands and liveness from it, and adds the meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..types import TYPES, Type
from .row import BASELINE, Version

#: Untyped spellings -> the type whose bits they move.
BIT_TYPES = {"b8": TYPES["u8"], "b16": TYPES["u16"], "b32": TYPES["u32"], "b64": TYPES["u64"]}
#: Spelling of an operand's type -> the type.
NAMED_TYPES: dict[str, Type] = TYPES | BIT_TYPES


def named_type(name: str) -> Type | None:
    """Returns the type of a spelling (`u32`, `b32`); None if there is none."""
    return NAMED_TYPES.get(name)


def is_untyped(name: str) -> bool:
    """Returns whether `name` is a `.b` spelling, which fits registers of any class of its size."""
    return name in BIT_TYPES


@dataclass(frozen=True)
class To:
    """Declares a destination operand.

    Attributes:
      type: a type's spelling; `.b` types take registers of any class of their size.
      count: registers in braces; None for one register without braces.
      second: type of the destination after `|`, which may be omitted.
      sink: whether `_` may replace the destination; `needs`: version that this requires.
      wider: whether a register wider than the type fits.
    """

    type: str
    count: int | None = None
    second: str = ""
    sink: bool = False
    needs: Version = BASELINE
    wider: bool = False


@dataclass(frozen=True)
class From:
    """Declares a source operand: a register or a number.

    Attributes:
      type, count, wider: as in `To`.
      untyped: whether registers of another class but the same size fit, as for `.b` types.
      registers: whether only registers fit, no numbers.
      negatable: whether `!` may precede the register.
      optional: whether the operand may be omitted; `needs`: version that is required to pass it.
    """

    type: str
    count: int | None = None
    wider: bool = False
    untyped: bool = False
    registers: bool = False
    negatable: bool = False
    optional: bool = False
    needs: Version = BASELINE


@dataclass(frozen=True)
class At:
    """Declares an address operand in a state space."""

    space: str
    optional: bool = False
    needs: Version = BASELINE


@dataclass(frozen=True)
class Number:
    """Declares an immediate operand.

    Attributes:
      what: description for messages.
      choices: allowed values; empty means any of at least 0.
    """

    what: str
    choices: tuple[int, ...] = ()
    optional: bool = False
    needs: Version = BASELINE


OperandKind = To | From | At | Number
Words = Mapping[str, str]
Operands = tuple[OperandKind, ...]

_SLOT = re.compile(r"\{(\.?)(\w+)\}")


@dataclass(frozen=True)
class MachineRow:
    """Table row of an instruction that needs the machine.

    Attributes:
      name: the opcode's first words, by which the simulator looks up the meaning.
      spelling: regular expression of the full opcodes, compiled on the first use of one that may
        match; named groups are its words.
      operands: operands of an opcode with these words.
      needs: the lowest PTX version and sm that have the instruction.
    """

    name: str
    spelling: str
    operands: Callable[[Words], Operands]
    needs: Version


@dataclass(frozen=True)
class Spelled:
    """A full opcode with its row, words and operands.

    Attributes:
      least: minimum number of operands.
    """

    opcode: str
    row: MachineRow
    words: Words
    operands: Operands
    least: int


_ROWS: dict[str, list[MachineRow]] = {}  # first word of the opcode -> rows


def define_machine(
    name: str,
    rest: str,
    operands: Operands | Callable[[Words], Operands],
    *,
    needs: Version = BASELINE,
    **words: str,
) -> None:
    """Adds a table row for the opcodes `name` + `rest`.

    `rest` has placeholders for words: `{type}`, or `{.space}` for one that may be omitted with its
    dot.

    Args:
      words: alternatives of each placeholder, as a regular expression.
    """

    def place(match: re.Match[str]) -> str:
        word = f"(?P<{match[2]}>{words[match[2]]})"
        return rf"(?:\.{word})?" if match[1] else word

    template, pattern, end = name + rest, "", 0
    for match in _SLOT.finditer(template):
        pattern += re.escape(template[end : match.start()]) + place(match)
        end = match.end()
    pattern += re.escape(template[end:])
    given = operands if callable(operands) else lambda words: operands
    row = MachineRow(name, pattern, given, needs)
    _ROWS.setdefault(name.split(".")[0], []).append(row)


@lru_cache(maxsize=4096)
def machine_row(opcode: str) -> Spelled | None:
    """Returns an opcode's row with its words and operands; None if no row matches."""
    for row in _ROWS.get(opcode.split(".")[0], ()):
        if match := re.fullmatch(row.spelling, opcode):
            words = {name: word or "" for name, word in match.groupdict().items()}
            operands = row.operands(words)
            least = sum(not getattr(kind, "optional", False) for kind in operands)
            return Spelled(opcode, row, words, operands, least)
    return None


def machine_names() -> set[str]:
    """Returns the names of all machine rows."""
    return {row.name for rows in _ROWS.values() for row in rows}

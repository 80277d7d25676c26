"""Rows of instructions that need the machine: memory, barriers, lanes of a warp, copies.

A row says how the opcode is spelled, which operands it takes and what it needs. The builder writes
text from it; the simulator takes operands and liveness from it, and adds the meaning.
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
    """The type of a spelling (`u32`, `b32`), or None."""
    return NAMED_TYPES.get(name)


def is_untyped(name: str) -> bool:
    """True of `.b` spellings: of operands that registers of any class of their size hold."""
    return name in BIT_TYPES


@dataclass(frozen=True)
class To:
    """A destination.

    Attributes:
      type: a type's spelling; `.b` types take registers of any class of their size.
      count: registers in braces; None for one register without them.
      second: type of the destination after `|`, which may be left out.
      sink: `_` may stand in its place; `needs`: version from which on it may.
      wider: a register wider than the type will do.
    """

    type: str
    count: int | None = None
    second: str = ""
    sink: bool = False
    needs: Version = BASELINE
    wider: bool = False


@dataclass(frozen=True)
class From:
    """A source: a register or a number.

    Attributes:
      type, count, wider: as of `To`.
      untyped: registers of another class but the same size will do, as for `.b` types.
      registers: numbers will not do.
      negatable: `!` may come before it.
      optional: it may be left out; `needs`: version from which on it may be given.
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
    """An address in a state space."""

    space: str
    optional: bool = False
    needs: Version = BASELINE


@dataclass(frozen=True)
class Number:
    """An immediate: one of `choices`, or any of at least 0; `what`: what it says, in words."""

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
    """One row.

    Attributes:
      name: the opcode's first words, by which the simulator knows the meaning.
      spelling: regular expression of its full opcodes, compiled at the first use of one that may
        match; named groups are its words.
      operands: of an opcode with these words.
      needs: the lowest PTX version and sm that have it.
    """

    name: str
    spelling: str
    operands: Callable[[Words], Operands]
    needs: Version


@dataclass(frozen=True)
class Spelled:
    """An opcode and what its row says of it; `least`: how many operands must be there."""

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
    """Adds a row for the opcodes `name` + `rest`.

    `rest` has places for words: `{type}`, or `{.space}` for one that may be left out with its dot.

    Args:
      words: alternatives of each place, as a regular expression.
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
    """The row of an opcode, with its words and operands; None if there is none."""
    for row in _ROWS.get(opcode.split(".")[0], ()):
        if match := re.fullmatch(row.spelling, opcode):
            words = {name: word or "" for name, word in match.groupdict().items()}
            operands = row.operands(words)
            least = sum(not getattr(kind, "optional", False) for kind in operands)
            return Spelled(opcode, row, words, operands, least)
    return None


def machine_names() -> set[str]:
    """Names of all rows."""
    return {row.name for rows in _ROWS.values() for row in rows}

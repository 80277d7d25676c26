"""Parses nvdisasm's listing: instructions with their guards and operands, and labels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x?_?\w+|\$[\w$]+|[A-Za-z_]\w*):")
_COMMENT = re.compile(r"\(\*.*?\*\)")
_REGISTER = re.compile(r"^(UR|R|UP|P)(\d+|Z|T)((?:\.\w+)*)$")
_CONSTANT = re.compile(r"^c\[(0x[0-9a-f]+)\]\[(.*)\]$")
_SYMBOL = re.compile(r"^32@(lo|hi)\((\w+)\)$")
_NUMBER = re.compile(r"^-?(0x[0-9a-f]+|\d+)$")
_FLOAT = re.compile(r"^[+-]?(INF|QNAN|SNAN|[\d.]+(e[+-]?\d+)?)$")
_KINDS = {"R": "register", "UR": "uniform", "P": "predicate", "UP": "uniform predicate"}
#: Index of RZ, URZ, PT and UPT.
ZERO, TRUE = 255, 7


@dataclass(frozen=True)
class Operand:
    """An operand as printed.

    Attributes:
      kind: `register`, `uniform`, `predicate`, `uniform predicate`, `constant`, `symbol`,
        `integer`, `float`, `address` or `other`.
      index: number of the register, bank of the constant, or value of the integer.
      negative, inverted, absolute: the marks `-`, `~` or `!`, and `|...|`.
      part: suffix such as `H0_H0`, `B1`, `64`, or empty; without `reuse`.
      body: text without marks; of an address and a constant, what is between the last brackets.
    """

    text: str
    kind: str
    index: int = 0
    negative: bool = False
    inverted: bool = False
    absolute: bool = False
    part: str = ""
    body: str = ""

    @property
    def is_predicate(self) -> bool:
        return self.kind.endswith("predicate")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      address: byte offset in the section.
      guard: predicate that decides which lanes take part, or None.
      name, modifiers: `LDG` and `("E", "128")` of `LDG.E.128`.
    """

    address: int
    guard: Operand | None
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str

    def __contains__(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def one_of(self, *modifiers: str, default: str = "") -> str:
        """Returns the modifier among these, or the default."""
        return next((m for m in self.modifiers if m in modifiers), default)


@dataclass(frozen=True)
class Code:
    """A function's instructions in address order; labels are indices of instructions."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def index_of(self, address: int) -> int:
        """Returns the index of the instruction at an address; they are 16 bytes long."""
        return address // 16


def parse(listing: str, name: str) -> Code:
    """Parses the section `.text.NAME` of the output of `nvdisasm -c`.

    Raises:
      ValueError: the listing has no such section, or an instruction's text is not understood.
    """
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for line in listing.splitlines():
        if line.startswith(".text."):
            inside = line.startswith(f".text.{name}:")
        elif line.strip().startswith(".section"):
            inside = False
        elif inside and (label := _LABEL.match(line)):
            labels[label[1]] = len(found)
        elif inside and (match := _LINE.match(_COMMENT.sub("", line))):
            address, inverted, guard, opcode, operands = match.groups()
            first, *modifiers = opcode.split(".")
            found.append(
                Instruction(
                    int(address, 16),
                    parse_operand(inverted + guard) if guard else None,
                    first,
                    tuple(modifiers),
                    tuple(map(parse_operand, _split(operands))),
                    " ".join(line.split(";")[0].split()[1:]),
                )
            )
    if not found:
        raise ValueError(f"the listing has no code of {name}")
    if [i.address for i in found] != list(range(0, 16 * len(found), 16)):
        raise ValueError(f"a line of {name} was not understood: addresses have gaps")
    return Code(tuple(found), labels)


def parse_operand(text: str) -> Operand:
    """Parses one operand such as `-R4.reuse`, `|R2|` or `desc[UR4][R2.64+0x10]`."""
    body, marks = text.strip().replace(".reuse", ""), dict[str, Any]()
    text = body
    if body.startswith("-") and not (_NUMBER.match(body) or _FLOAT.match(body)):
        marks["negative"], body = True, body[1:]
    if body.startswith(("~", "!")):
        marks["inverted"], body = True, body[1:]
    if body.startswith("|"):
        marks["absolute"], body = True, body.replace("|", "")
    if match := _REGISTER.match(body):
        kind = _KINDS[match[1]]
        index = {"Z": ZERO, "T": TRUE}.get(match[2]) or int(match[2].replace("T", "7"))
        return Operand(text, kind, index, part=match[3][1:], body=body, **marks)
    if match := _CONSTANT.match(body):
        return Operand(text, "constant", int(match[1], 16), body=match[2], **marks)
    if match := _SYMBOL.match(body):
        return Operand(text, "symbol", 32 * (match[1] == "hi"), body=match[2], **marks)
    if _NUMBER.match(body):
        return Operand(text, "integer", int(body, 0), body=body, **marks)
    if _FLOAT.match(body):
        return Operand(text, "float", body=body, **marks)
    if body.endswith("]"):
        return Operand(text, "address", body=body[body.rindex("[") + 1 : -1], **marks)
    return Operand(text, "other", body=body, **marks)


def _split(operands: str) -> list[str]:
    """Splits at commas outside of brackets; a label may follow a register after a space."""
    spaced = re.sub(r"\s+(`\()", r", \1", operands)
    return [part for part in (p.strip() for p in re.split(r",(?![^\[(]*[\])])", spaced)) if part]

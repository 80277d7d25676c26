"""Resolves names in the nested scopes of a function, and parses operands."""

from __future__ import annotations

import re
import struct

from .program import (
    Address,
    Arguments,
    Immediate,
    Name,
    Negated,
    Operand,
    Pair,
    Parameter,
    Register,
    Vector,
)
from .source import Source, parts

_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
_ADDRESS = re.compile(r"([\w$%.]+?)?\s*(?:([+-])\s*(-?(?:0[xX][0-9a-fA-F]+|\d+)))?")
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]|cluster_n?ctarank|"
    r"laneid|warpid|nwarpid|lanemask_\w\w)"
)


class Scopes:
    """Names of a function's registers, parameters, variables and labels, by nested scope."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.blocks: list[dict[str, Register | Parameter | Name]] = []

    def declare(self, name: str, what: Register | Parameter | Name, position: int) -> None:
        """Adds a name to the innermost scope; raises if it is declared there already."""
        if name in self.blocks[-1]:
            kind = {Register: "register ", Parameter: "parameter "}.get(type(what), "")
            raise self.source.fail(position, f"{kind}{name} is declared twice")
        self.blocks[-1][name] = what

    def named(self, name: str) -> Register | Parameter | Name | None:
        for block in reversed(self.blocks):
            if name in block:
                return block[name]
        return None

    def register(self, name: str, position: int) -> Register:
        found = self.named(name)
        if not isinstance(found, Register):
            raise self.source.fail(position, f"register {name} is not declared")
        return found

    def operand(self, text: str, position: int) -> Operand:
        """Parses an operand of an instruction."""
        if text.startswith("{") and text.endswith("}"):
            items = map(str.strip, text[1:-1].split(","))
            return Vector(tuple(number(p) or self.register(p, position) for p in items))
        if text.startswith("[") and text.endswith("]"):
            return self._address(text[1:-1].strip(), position)
        if text.startswith("(") and text.endswith(")"):
            named = [self.named(p) for p in parts(text[1:-1])]
            if not all(isinstance(p, Parameter) for p in named):
                raise self.source.fail(position, f"`{text}` are not all .param variables")
            return Arguments(tuple(p for p in named if isinstance(p, Parameter)))
        if text.startswith("!"):
            return Negated(self.register(text[1:].strip(), position))
        if "|" in text:
            first, second = map(str.strip, text.split("|", 1))
            return Pair(self.register(first, position), self.register(second, position))
        found = self.named(text) or number(text)
        if found is not None:
            return found
        if re.fullmatch(r"[\w$%.]+", text):
            if text.startswith("%") and not _SPECIAL.fullmatch(text):
                raise self.source.fail(position, f"register {text} is not declared")
            return Name(text)
        raise self.source.fail(position, f"`{text}` is no operand")

    def _address(self, text: str, position: int) -> Address:
        if _INTEGER.fullmatch(text):
            return Address(None, int(text, 0))
        match = _ADDRESS.fullmatch(text)
        if not match or not match[1]:
            raise self.source.fail(position, f"[{text}] is no address")
        offset = int(match[3], 0) * (-1 if match[2] == "-" else 1) if match[3] else 0
        base = self.named(match[1])
        if base is None and match[1].startswith("%"):
            raise self.source.fail(position, f"register {match[1]} is not declared")
        return Address(base or Name(match[1]), offset)


def number(text: str) -> Immediate | None:
    """Parses a number; returns None if the text is none."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Immediate(struct.unpack(">f", bytes.fromhex(text[2:]))[0], text, float_bits=True)
    if _INTEGER.fullmatch(text):
        return Immediate(int(text.rstrip("U"), 0 if "x" in text.lower() else 10), text)
    if _FLOAT.fullmatch(text):
        return Immediate(float(text), text)
    return None

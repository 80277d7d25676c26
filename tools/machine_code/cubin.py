"""Reads what a launch needs from a cubin (ELF): parameters' place, initialized global variables.

Layout: the ELF specification, and CUDA's binary utilities for `.nv.info` and `.nv.constant4`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_PARAMETERS = 0x0A  # attribute of .nv.info: symbol, offset (u16) and bytes (u16) in bank 0
_WITH_SIZE = 0x04  # format of an attribute that has a size; others are four bytes in all
_RELA, _REL = 4, 9


@dataclass(frozen=True)
class Variable:
    """A symbol's place in a section."""

    section: int
    offset: int


@dataclass(frozen=True)
class Cubin:
    """A kernel's cubin.

    Attributes:
      parameters: byte offset of the first parameter in constant bank 0.
      variables: initialized global variables by name, and their section's number.
      data: contents of the sections that hold them.
      addresses: byte offset in constant bank 4 -> (variable, addend) whose address it holds.
    """

    parameters: int
    variables: dict[str, Variable]
    data: dict[int, bytes]
    addresses: dict[int, tuple[str, int]]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: bytes
    target: int  # of relocations: the section that they change


def read(cubin: bytes, kernel: str) -> Cubin:
    """Reads a cubin with the entry `kernel`.

    Raises:
      ValueError: the file is not a 64-bit ELF, or names no place of the entry's parameters.
    """
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    symbols = _symbols(by_name)
    variables = {
        name: Variable(index, value)
        for name, value, index in symbols
        if index < len(sections) and sections[index].name.startswith(".nv.global")
    }
    addresses: dict[int, tuple[str, int]] = {}
    for section in sections:
        bank = sections[section.target].name if section.kind in (_REL, _RELA) else ""
        if bank.startswith(".nv.constant4"):
            layout = "<QQ" if section.kind == _REL else "<QQq"
            for offset, info, *addend in struct.iter_unpack(layout, section.data):
                addresses[offset] = (symbols[info >> 32][0], *(addend or [0]))  # type: ignore[assignment]
    return Cubin(
        _parameters(by_name[f".nv.info.{kernel}"].data, kernel),
        variables,
        {v.section: sections[v.section].data for v in variables.values()},
        addresses,
    )


def _sections(cubin: bytes) -> list[_Section]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("a cubin must be a 64-bit ELF")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + size * i) for i in range(count)]
    strings = headers[names][4]
    found = []
    for name, kind, _, _, offset, length, _, target in headers:
        end = cubin.index(b"\0", strings + name)
        data = b"" if kind == 8 else cubin[offset : offset + length]
        found.append(_Section(cubin[strings + name : end].decode(), kind, data, target))
    return found


def _symbols(sections: dict[str, _Section]) -> list[tuple[str, int, int]]:
    """Returns (name, value, section) of each symbol."""
    strings = sections[".strtab"].data
    return [
        (strings[name : strings.index(b"\0", name)].decode(), value, section)
        for name, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", sections[".symtab"].data)
    ]


def _parameters(info: bytes, kernel: str) -> int:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if attribute == _PARAMETERS and form == _WITH_SIZE:
            return int(struct.unpack_from("<H", info, at + 8)[0])
        at += 4 + (size if form == _WITH_SIZE else 0)
    raise ValueError(f"the cubin does not say where the parameters of {kernel} are")

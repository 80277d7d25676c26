"""Detects truncated shared libraries by comparing the file's length with its ELF tables.

dlopen maps a truncated file, for instance after a full disk, and the process then dies of SIGBUS.
"""

from __future__ import annotations

import struct
from pathlib import Path

_IDENT = b"\x7fELF\x02\x01"  # 64 bits, little-endian, like every processor with kernels
#: From byte 32: offsets of the tables of segments and sections; size and number of their entries.
_TABLES = struct.Struct("<QQ I H HH HH H")
#: A segment, from its byte 8: offset, two addresses, bytes in the file.
_SEGMENT = struct.Struct("<QQQQ")


def bytes_missing(path: Path) -> int:
    """Returns how many bytes a shared library lacks at its end, by its ELF tables and segments.

    Returns 0 for a complete file, and for a file that is not an ELF library. Raises OSError.
    """
    with open(path, "rb") as file:
        header = file.read(64)
        size = file.seek(0, 2)
        if not header.startswith(_IDENT):
            return 0
        if len(header) < 64:
            return 64 - len(header)
        segments, sections, _, _, entry, count, of_section, number, _ = _TABLES.unpack_from(
            header, 32
        )
        ends = [segments + entry * count, sections + of_section * number]
        file.seek(segments)
        table = file.read(entry * count)
        for at in range(8, len(table) - _SEGMENT.size + 1, entry or len(table)):
            offset, _, _, in_file = _SEGMENT.unpack_from(table, at)
            ends.append(offset + in_file)
    return max(0, max(ends) - size)

"""Reads and checks the header of a GGUF file: counts, metadata and tensor descriptions."""

from __future__ import annotations

import dataclasses
import io
import os
import struct
import warnings
from typing import Any

from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUF_VERSION, GGUFValueType

from ..errors import GGUFError
from . import metadata as values
from . import tensors as infos
from .source import Cursor, Source
from .tensors import TensorInfo

VERSIONS = (2, GGUF_VERSION)
MAX_ALIGNMENT = 1 << 20
#: Limit on metadata entries and on tensors; each costs hundreds of bytes of Python objects.
MAX_ENTRIES = 1 << 16

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Header:
    """A checked header: every tensor's bytes lie inside the file, and no two tensors overlap.

    For a model in several files, the header describes all files: `parts` has their names,
    `file_size` is their total size, and offsets count from the first byte of the first file.
    """

    version: int
    alignment: int  # bytes
    metadata: values.Metadata
    tensors: dict[str, TensorInfo]
    data_start: int  # position in the file that tensor offsets count from
    file_size: int
    parts: tuple[str, ...] = ()  # empty for a single file


def open_source(path: str | os.PathLike[str]) -> io.FileIO:
    """Opens a regular file for unbuffered reading; a pipe or a device could block forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise GGUFError(os.fsdecode(path), "path", "must be a regular file")
    return open(path, "rb", buffering=0)


def parse_source(source: Source) -> Header:
    """Reads the header of one open file, which may be a part of a split model."""
    cursor = Cursor(source)
    version, tensor_count, entry_count = _preamble(cursor)
    metadata = values.Metadata()
    alignment = GGUF_DEFAULT_ALIGNMENT
    for index in range(entry_count):
        key = values.read_key(cursor, f"metadata entry {index}")
        if key in metadata:
            cursor.fail(f"metadata entry {index}: key", f"duplicate of {key!r}")
        kind, metadata[key] = values.read_value(cursor, key)
        if kind is not GGUFValueType.ARRAY:
            metadata.types[key] = kind
        if key == "general.alignment":
            alignment = _alignment(cursor, kind, metadata[key])
    if cursor.replaced:
        shown = ", ".join(cursor.replaced[:3]) + (", ..." if len(cursor.replaced) > 3 else "")
        problem = (
            f"{len(cursor.replaced)} texts are not UTF-8; invalid bytes read as \\xNN: {shown}"
        )
        warnings.warn(f"{source.name}: {problem}", stacklevel=2)
    values.check_tokenizer(source, metadata)
    tensors: dict[str, TensorInfo] = {}
    for index in range(tensor_count):
        info = infos.read_info(cursor, index)
        if info.name in tensors:
            cursor.fail(f"tensor {index}: name", f"duplicate of {info.name!r}")
        tensors[info.name] = info
    data_start = -(-cursor.position // alignment) * alignment
    infos.check_ranges(source, list(tensors.values()), data_start, alignment)
    return Header(version, alignment, metadata, tensors, data_start, source.size)


def _preamble(cursor: Cursor) -> tuple[int, int, int]:
    """Reads the version, the number of tensors and the number of metadata entries."""
    magic = cursor.unpack(_U32, "magic")
    if magic != GGUF_MAGIC:
        cursor.fail("magic", f"expected b'GGUF', got {_U32.pack(magic)!r}")
    version = cursor.unpack(_U32, "version")
    if version not in VERSIONS:
        swapped = int.from_bytes(_U32.pack(version), "big")
        big_endian = f"{swapped} in big-endian order, which is not supported"
        found = big_endian if swapped in VERSIONS else version
        cursor.fail("version", f"expected {' or '.join(map(str, VERSIONS))}, got {found}")
    tensor_count = cursor.unpack(_U64, "tensor count")
    entry_count = cursor.unpack(_U64, "metadata count")
    for field, count, size in (
        ("tensor count", tensor_count, infos.MIN_ENTRY),
        ("metadata count", entry_count, values.MIN_ENTRY),
    ):
        if count > cursor.remaining // size:
            have = f"more than the {cursor.remaining} bytes left"
            cursor.fail(field, f"{count} entries of at least {size} bytes are {have}")
        if count > MAX_ENTRIES:
            cursor.fail(field, f"must be at most {MAX_ENTRIES}, not {count}")
    return version, tensor_count, entry_count


def _alignment(cursor: Cursor, kind: GGUFValueType, value: Any) -> int:
    if kind is not GGUFValueType.UINT32:
        cursor.fail("general.alignment", f"must be of type UINT32, not {kind.name}")
    if value == 0 or value & (value - 1) or value > MAX_ALIGNMENT:
        problem = f"must be a power of two up to {MAX_ALIGNMENT}, not {value}"
        cursor.fail("general.alignment", problem)
    return value

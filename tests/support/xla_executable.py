"""Reads the arguments of kernel launches from a program that XLA compiled and serialized for a GPU.

XLA writes a `GpuExecutableProto` (xla/service/gpu/gpu_executable.proto) that Snappy compresses
(google/snappy, format_description.txt).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple


class Argument(NamedTuple):
    """A buffer that a kernel's parameter points to.

    Attributes:
      buffer: number of the allocation.
      size: bytes.
      written: whether XLA takes it for a result.
    """

    buffer: int
    size: int
    written: bool


def launch_arguments(executable: bytes, kernel: str) -> list[Argument]:
    """Returns the arguments of the only launch of `kernel`, in the order of its parameters."""
    (launch,) = _launches(_decompressed(executable), kernel.encode())
    slices = [_fields(_fields(argument)[1][0]) for argument in launch[1]]
    assert all(s.get(1, [0]) == [0] for s in slices), "offsets in allocations"
    found = [
        Argument(s.get(3, [0])[0], s[2][0], bool(written))
        for s, written in zip(slices, launch[2][0], strict=True)
    ]
    ((loaded,),) = (_fields(custom_kernel)[2] for custom_kernel in launch[3])
    parameters = [_fields(_fields(p)[1][0]) for p in _fields(_fields(loaded)[5][0])[1]]
    assert all(p[1] == [1] for p in parameters), "a parameter is no pointer to an argument"
    return [found[p.get(2, [0])[0]] for p in parameters]


def _launches(message: bytes, kernel: bytes) -> Iterator[dict[int, list[Any]]]:
    """Yields the `CustomKernelThunkProto`s of this kernel: field 36 of a thunk, at any depth."""
    for number, values in _fields(message).items():
        for value in values:
            if not isinstance(value, bytes) or kernel not in value:
                continue
            try:
                inner = _fields(value)
            except (ValueError, IndexError):
                continue  # a text
            if number == 36 and _fields(inner[3][0])[1] == [kernel]:
                yield inner
            else:
                yield from _launches(value, kernel)


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Returns the values of each field of a protocol buffer; raises ValueError if it is none."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: int | bytes
        if key & 7 == 0:
            value, at = _varint(message, at)
        elif key & 7 in (1, 2, 5):
            size, at = _varint(message, at) if key & 7 == 2 else (8 if key & 7 == 1 else 4, at)
            value, at = message[at : at + size], at + size
        else:
            raise ValueError("not a protocol buffer")
        if key < 8 or at > len(message):
            raise ValueError("not a protocol buffer")
        found.setdefault(key >> 3, []).append(value)
    return found


def _decompressed(executable: bytes) -> bytes:
    """Returns the GpuExecutableProto, which begins with its name.

    jaxlib 0.11 and newer have another message around it; only 0.11 compresses that one, too.
    """
    for name in (b"xla.ExecutableAndOptionsProto", b"xla.gpu.GpuExecutableProto"):
        at = executable.find(b"\n%c" % len(name) + name)
        if at < 0:
            continue
        found = [b""]
        for start in range(at - 8, at - 1):  # of two sizes; other starts read nothing or fail
            with contextlib.suppress(ValueError, IndexError):
                found.append(_snappy(executable, start))
        executable = max(found, key=len) or executable
    return executable


def _snappy(data: bytes, at: int) -> bytes:
    size, at = _varint(data, at)
    found = bytearray()
    while len(found) < size:
        tag, at = data[at], at + 1
        kind, length = tag & 3, (tag >> 2) + 1
        if kind == 0:
            if length > 60:
                digits = length - 60
                length, at = int.from_bytes(data[at : at + digits], "little") + 1, at + digits
            found += data[at : at + length]
            at += length
            continue
        if kind == 1:
            offset, length, at = (tag >> 5) << 8 | data[at], (tag >> 2 & 7) + 4, at + 1
        else:
            end = at + 2 * (kind - 1)
            offset, at = int.from_bytes(data[at:end], "little"), end
        if not 0 < offset <= len(found):
            raise ValueError("not Snappy's format")
        for _ in range(length):
            found.append(found[-offset])
    if len(found) != size:
        raise ValueError("not Snappy's format")
    return bytes(found)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns an integer of seven bits per byte, and the position after it."""
    value = shift = 0
    while True:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at

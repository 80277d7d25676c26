"""Reads an untrusted file by offset, with every bound checked.

The file is read, not memory-mapped. A mapped file that shrinks kills the process with SIGBUS, and
its pages count as resident memory in addition to the copies of the tensors. A short read is an
ordinary error.
"""

from __future__ import annotations

import io
import os
import struct
import threading
from typing import Any, NoReturn

import numpy as np

from ..errors import GGUFError

WINDOW = 1 << 18  # bytes buffered while parsing
MAX_STRING = 1 << 24  # bytes; the longest real strings, chat templates, have less than 2^20
MAX_STRINGS = 1 << 22  # per array; the largest vocabularies and merge lists have less than 2^20

#: Error handler for text that need not be UTF-8: an invalid byte reads as \\xNN.
REPLACED = "backslashreplace"

_U64 = struct.Struct("<Q")


class Source:
    """A seekable binary file of fixed size, safe to read from several threads."""

    def __init__(self, file: io.FileIO | io.BytesIO, name: str) -> None:
        self._file = file
        self._lock = threading.Lock()  # held between a seek and its read
        self.name = name
        self.size = file.seek(0, io.SEEK_END)

    def fail(self, field: str, problem: str) -> NoReturn:
        raise GGUFError(self.name, field, problem)

    def file_at(self, offset: int) -> Source:
        """Returns the Source whose file contains the byte at `offset`, for errors: itself."""
        return self

    def read_into(self, offset: int, target: memoryview, field: str) -> None:
        """Fills `target` with the bytes from `offset`; the caller has checked the range."""
        self._fill(offset, target, field)

    def read(self, offset: int, size: int, field: str) -> bytes:
        """Returns `size` bytes from `offset`; the caller has checked the range."""
        data = bytearray(size)
        self._fill(offset, memoryview(data), field)
        return bytes(data)

    def _fill(self, offset: int, target: memoryview, field: str) -> None:
        done = 0
        while done < len(target):
            count = self._read_at(offset + done, target[done:])
            if not count:
                problem = "the file shrank while it was read: expected"
                self.fail(field, f"{problem} {len(target)} bytes at byte {offset}, got {done}")
            done += count

    def _read_at(self, offset: int, target: memoryview) -> int:
        """Reads up to `target`'s size by one system call; returns the number of bytes."""
        if isinstance(self._file, io.FileIO) and hasattr(os, "preadv"):
            # preadv takes the offset, so threads share no position.
            return os.preadv(self._file.fileno(), [target], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(target)


class Cursor:
    """Reads a file's header front to back.

    Allocates no more memory than the rest of the file can fill.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._window = b""
        self._base = 0  # file offset of the window
        self._at = 0  # position in the window
        self.replaced: list[str] = []  # fields whose invalid bytes were replaced

    @property
    def position(self) -> int:
        return self._base + self._at

    @property
    def remaining(self) -> int:
        return self.source.size - self.position

    def fail(self, field: str, problem: str) -> NoReturn:
        self.source.fail(field, problem)

    def unpack(self, layout: struct.Struct, field: str) -> Any:
        """Reads one little-endian scalar."""
        start = self._take(layout.size, field)
        return layout.unpack_from(self._window, start)[0]

    def string(self, field: str, limit: int = MAX_STRING, errors: str = "strict") -> str:
        """Reads a string: its length in 8 bytes, then that many bytes of UTF-8.

        errors: REPLACED accepts invalid bytes, and adds the field to `replaced`.
        """
        size = self.unpack(_U64, f"{field}: length")
        if size > self.remaining:
            self.fail(
                field, f"length {size} is more than the {self.remaining} bytes left in the file"
            )
        if size > limit:
            self.fail(field, f"length {size} must be at most {limit} bytes")
        start = self._take(size, field)
        with memoryview(self._window) as view:
            try:
                return str(view[start : start + size], "utf-8")
            except UnicodeDecodeError as error:
                if errors == "strict":
                    self.fail(field, f"expected UTF-8, got {error.reason} at byte {error.start}")
                self.replaced.append(field)
                return str(view[start : start + size], "utf-8", errors)

    def strings(self, count: int, field: str) -> list[str]:
        """Reads `count` strings; a fast path takes those that lie completely in the window.

        Accepts invalid bytes, see `string`.
        """
        if count > MAX_STRINGS:
            self.fail(field, f"{count} strings: an array may hold at most {MAX_STRINGS}")
        values: list[str] = []
        unpack, window, at = _U64.unpack_from, self._window, self._at
        while len(values) < count:
            if at + 8 <= len(window):
                (size,) = unpack(window, at)
                if size <= len(window) - at - 8:
                    data = window[at + 8 : at + 8 + size]
                    try:
                        values.append(data.decode())
                    except UnicodeDecodeError:
                        self.replaced.append(f"{field}[{len(values)}]")
                        values.append(data.decode(errors=REPLACED))
                    at += 8 + size
                    continue
            self._at = at
            values.append(self.string(f"{field}[{len(values)}]", errors=REPLACED))
            window, at = self._window, self._at
        self._at = at
        return values

    def array(self, dtype: np.dtype, count: int, field: str) -> np.ndarray:
        """Reads `count` numbers into a new array; the caller has checked them with `remaining`."""
        values = np.empty(count, dtype)
        if count:
            self.source.read_into(self.position, values.data.cast("B"), field)
        self._base, self._at, self._window = self.position + values.nbytes, 0, b""
        return values

    def _take(self, size: int, field: str) -> int:
        """Advances by `size` bytes; returns where they begin in the buffered window."""
        if size > self.remaining:
            have = f"{self.remaining} are left of {self.source.size}"
            self.fail(field, f"truncated: expected {size} bytes at byte {self.position}, {have}")
        if size > len(self._window) - self._at:
            base, length = self.position, min(max(size, WINDOW), self.remaining)
            self._window = b""  # freed before the next one is allocated
            self._window, self._base, self._at = self.source.read(base, length, field), base, 0
        start = self._at
        self._at += size
        return start

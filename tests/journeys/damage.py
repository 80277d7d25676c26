"""Files that may replace a program's file in the cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from jax_q4k.cache.compiled_files import MAGIC


def programs(folder: Path) -> list[Path]:
    """Lists the program files of a folder."""
    return sorted(folder.glob("*.program"))


def _with_header(text: bytes) -> Callable[[Path], object]:
    """Writes a file whose header has the right checksum."""

    def write(file: Path) -> None:
        size = len(text).to_bytes(4, "little")
        file.write_bytes(MAGIC + size + hashlib.sha256(text).digest() + text + b"body")

    return write


def _cut(share: float) -> Callable[[Path], object]:
    return lambda file: os.truncate(file, int(file.stat().st_size * share))


def _flip(share: float) -> Callable[[Path], object]:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(len(data) * share)] ^= 0x10
        file.write_bytes(data)

    return flip


def _instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


def _neighbour(file: Path) -> None:
    """Overwrites the file with another program of the folder."""
    others = [other for other in programs(file.parent) if other != file]
    file.write_bytes(others[0].read_bytes())


#: Files that can be read to the end.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": _cut(0),
    "cut in the header": _cut(0.001),
    "cut in the body": _cut(0.7),
    "a bit of the header": _flip(0.002),
    "a bit of the body": _flip(0.5),
    "another program": _neighbour,
    "a folder": _instead(lambda file: file.mkdir()),
    "a dangling link": _instead(lambda file: file.symlink_to("nowhere")),
    "no UTF-8": _with_header(b"\xff\xfe{}"),
    "no JSON": _with_header(b"{"),
    "other fields": _with_header(b'{"program": "start"}'),
    "deep JSON": _with_header(b"[" * 100_000),
    "a long number": _with_header(b"1" * 5000),
    "not readable": lambda file: file.chmod(0),
}

#: Files whose reading never ends, or exhausts memory first.
ENDLESS: dict[str, Callable[[Path], object]] = {
    "a pipe": _instead(os.mkfifo),
    "a link to /dev/zero": _instead(lambda file: file.symlink_to("/dev/zero")),
    "200 GB of nothing": lambda file: os.truncate(file, 200 << 30),
}

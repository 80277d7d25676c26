"""On-disk cache of the output of CUDA tools, in the folder that `$PTX_KERNELS_CACHE` names.

Assembling all kernels takes minutes, and equal text gives equal machine code. Without the variable
nothing is cached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from ..regular_files import read_regular

VARIABLE = "PTX_KERNELS_CACHE"
_LARGEST_FILE = 1 << 28


@functools.cache
def _tool_id(tool: Path) -> str:
    """Returns the tool's version text, which differs between builds of one release."""
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout


def cached(
    tool: Path, arguments: str, source: bytes, run: Callable[[], tuple[str, bytes]]
) -> tuple[str, bytes]:
    """Returns (printed text, output file) of a tool's run, from the cache if it is there.

    The key covers everything that determines the result: the tool's version, its arguments and the
    source. Files are written under a temporary name first. They contain a hash of their contents; a
    file whose hash does not match is replaced by a new run.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return run()
    key = hashlib.sha256(json.dumps([_tool_id(tool), arguments]).encode() + source).hexdigest()
    path = Path(folder) / key[:2] / key
    if found := _read(path):
        return found
    printed, made = run()
    _write(path, printed, made)
    return printed, made


def _read(path: Path) -> tuple[str, bytes] | None:
    try:
        data = read_regular(path, _LARGEST_FILE)
        os.utime(path)  # least recently used files are removed first
    except OSError:
        return None
    digest, rest = data[:32], data[32:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    length = int.from_bytes(rest[:8], "little")
    try:
        return rest[8 : 8 + length].decode(), rest[8 + length :]
    except UnicodeDecodeError:
        return None


def _write(path: Path, printed: str, made: bytes) -> None:
    text = printed.encode()
    rest = len(text).to_bytes(8, "little") + text + made
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(hashlib.sha256(rest).digest() + rest)
        partial.replace(path)
    except OSError:  # a full disk or a read-only folder: nothing is cached
        with contextlib.suppress(OSError):
            partial.unlink()


def remove_oldest(folder: Path, most_bytes: int) -> None:
    """Removes the folder's least recently used files until at most `most_bytes` bytes remain."""
    files = [(file.stat(), file) for file in folder.rglob("*") if file.is_file()]
    size = sum(stat.st_size for stat, _ in files)
    for stat, file in sorted(files, key=lambda pair: pair[0].st_mtime):
        if size <= most_bytes:
            return
        file.unlink(missing_ok=True)
        size -= stat.st_size

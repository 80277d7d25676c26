"""Detects changes of a file, for keys of caches of data read from the file."""

from __future__ import annotations

import os


def file_stamp(path: str) -> tuple[int, ...]:
    """Returns numbers that change whenever the file changes; () if it does not exist."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino

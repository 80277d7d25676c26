"""Whether a file has changed: part of the keys of what was made from it."""

from __future__ import annotations

import os


def file_stamp(path: str) -> tuple[int, ...]:
    """Numbers that change where a file does; none of one that is not there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino

"""Reads files that may have been replaced by pipes, devices or endless files."""

from __future__ import annotations

import errno
import os
import stat


def read_regular(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Returns the bytes of a regular file; never blocks, and reads at most `max_bytes`.

    Raises OSError if the file cannot be read, is larger, or is not a regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(number, "rb") as file:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fsdecode(path))
        if found.st_size > max_bytes:
            problem = f"has {found.st_size} bytes, more than {max_bytes}"
            raise OSError(errno.EFBIG, problem, os.fsdecode(path))
        return file.read(max_bytes)

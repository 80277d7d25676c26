"""Replaces files atomically: a file is written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove_partials", "replacing"]

_partials: set[Path] = set()  # temporary files of this process


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], suffix: str = "") -> Iterator[Path]:
    """Yields a path to write to; at the end of the block, that file replaces `path`.

    If the block raises, the written file is removed and `path` is unchanged.

    A killed process leaves its temporary file, named `.HEX` + suffix + `.partial`. A process that
    exits inside the block without an exception must call `remove_partials` first.
    """
    target = Path(os.path.realpath(os.fsdecode(path)))  # a symlink stays a symlink
    partial = target.parent / f".{secrets.token_hex(8)}{suffix}.partial"
    _partials.add(partial)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        yield partial
        os.replace(partial, target)
    except OSError as error:
        if error.filename not in (None, str(partial)):  # an error of another file, such as a source
            raise
        raise OSError(error.errno, error.strerror or str(error), os.fsdecode(path)) from error
    finally:
        partial.unlink(missing_ok=True)
        _partials.discard(partial)


def remove_partials() -> None:
    """Removes the temporary files of this process's unfinished `replacing` blocks.

    For signal handlers that end the process.
    """
    for partial in list(_partials):
        with contextlib.suppress(OSError):
            partial.unlink()

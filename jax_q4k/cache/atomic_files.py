"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove_partials", "replacing"]

_partials: set[Path] = set()  # of this process


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], suffix: str = "") -> Iterator[Path]:
    """A path beside `path` for a new file, which replaces it unless the block raises.

    A process that is killed leaves the part it wrote there, `.HEX` + suffix + `.partial`; one that
    ends of its own accord, inside the block and without an exception, calls `remove_partials`.
    """
    target = Path(os.path.realpath(os.fsdecode(path)))  # a link stays one
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
        if error.filename not in (None, str(partial)):  # of what the pieces are made from
            raise
        raise OSError(error.errno, error.strerror or str(error), os.fsdecode(path)) from error
    finally:
        partial.unlink(missing_ok=True)
        _partials.discard(partial)


def remove_partials() -> None:
    """Removes what this process has written in part, for a signal's handler that ends it."""
    for partial in list(_partials):
        with contextlib.suppress(OSError):
            partial.unlink()

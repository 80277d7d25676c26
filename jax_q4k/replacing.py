"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], suffix: str = "") -> Iterator[Path]:
    """A path beside `path` for a new file, which replaces it unless the block raises.

    A process that is killed leaves the part it wrote there, `.HEX` + suffix + `.partial`.
    """
    target = Path(os.path.realpath(os.fsdecode(path)))  # a link stays one
    partial = target.parent / f".{secrets.token_hex(8)}{suffix}.partial"
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

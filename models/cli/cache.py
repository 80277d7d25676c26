"""On-disk cache of compiled programs for the command line."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from rich.console import Console
from rich.markup import escape

from jax_q4k.cache.program_cache import ProgramCache

from .output import printable

#: Size limit of JAX's cache, and of the program cache, in bytes. Least recently used programs are
#: evicted; those of a large model on a GPU take a few megabytes.
MAX_BYTES = 1 << 27

#: Also caches short compilations, of which the first run of a model has many.
_SETTINGS = {
    "jax_compilation_cache_max_size": MAX_BYTES,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


class _UnusableError(Exception):
    """The folder cannot hold a cache; the message gives the reason."""


def folder() -> Path:
    """Returns the cache's folder, `jax-q4k/programs` in the XDG cache folder of the user."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):  # the specification says to ignore relative paths
        return Path(cache_home) / "jax-q4k" / "programs"
    return Path("~/.cache/jax-q4k/programs").expanduser()


def _usable() -> Path:
    path = folder()
    try:
        if not path.is_absolute():
            raise _UnusableError("there is no home directory")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A cached program is machine code that this process runs. Anyone who can write to the
        # parent folder could replace the cache.
        for each in (path, path.parent):
            found = each.stat()
            if found.st_uid != os.geteuid():
                raise _UnusableError(f"{each} belongs to another user")
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise _UnusableError(f"{each} can be written by other users")
    except OSError as error:
        raise _UnusableError(f"{path}: {error.strerror}") from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise _UnusableError(f"{path} cannot be written")
    return path


@contextlib.contextmanager
def programs(notes: Console, *, wanted: bool = True) -> Iterator[ProgramCache | None]:
    """Enables JAX's compilation cache inside the block, or disables it if not `wanted`.

    Yields the on-disk cache of complete programs, with which programs need no tracing either; None
    if there is none. If JAX_COMPILATION_CACHE_DIR already selects a cache, only that is used,
    unchanged. If the folder cannot hold a cache, prints one line with the reason.
    """
    settings: dict[str, object] = {}
    program_cache: ProgramCache | None = None
    if not wanted:
        settings = {"jax_enable_compilation_cache": False}
    elif _setting("jax_compilation_cache_dir") is None and _setting("jax_enable_compilation_cache"):
        try:
            usable = _usable()
            if _has_names():
                settings = {"jax_compilation_cache_dir": str(usable), **_SETTINGS}
            else:
                settings = {"jax_enable_compilation_cache": False}
            program_cache = ProgramCache(usable, MAX_BYTES)
        except _UnusableError as error:
            reason = escape(printable(str(error)))
            notes.print(f"[dim]compiled programs are not cached: {reason}[/]", soft_wrap=True)
    if not settings:
        yield None
        return
    before = {name: _setting(name) for name in settings}
    try:
        _update(settings)
        yield program_cache
    finally:
        _update(before)


def _has_names() -> bool:
    """Returns whether this user and group have names, which those of a container may lack.

    JAX's cache evicts through etils' paths, whose `stat` raises KeyError for an owner without one.
    """
    try:
        pwd.getpwuid(os.geteuid())
        grp.getgrgid(os.getegid())
    except KeyError:
        return False
    return True


def _setting(name: str) -> object:
    return getattr(jax.config, name)


def _update(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()  # JAX reads the settings when it first compiles

"""Compiled programs in a folder: a later process that needs the same neither traces nor compiles.

A file's name is a digest of all that its program depends on, which is known before tracing. Its
header says the same, and the file is checked as `compiled` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import ptx_kernels

from . import compiled
from .errors import CompiledFileError
from .implementation import current_selection

__all__ = ["KeptPrograms"]

_SUFFIX = ".program"
#: Beginnings of the names of environment variables that change what is compiled.
_VARIABLES = ("XLA_", "TF_XLA_", "JAX_Q4K_")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KeptPrograms:
    """A folder of programs for one device.

    Attributes:
      folder: one that nobody else may write: what lies there runs.
      max_bytes: of all files; those used least recently make room.
    """

    folder: Path
    max_bytes: int

    def get(
        self,
        name: str,
        program: Any,
        arguments: Sequence[Any],
        device: jax.Device,
        *,
        model: str,
        about: dict[str, Any],
    ) -> compiled.LoadedProgram:
        """The executable of a jitted function: the folder's, or compiled and left there.

        What is in the folder and cannot be used is compiled again; JAX's option
        `jax_explain_cache_misses` says why.

        Args:
          program: jitted with `keep_unused`.
          arguments: of it, arrays in pytrees.
          model, about: what it depends on besides its arguments' shapes; `about` is JSON.
        """
        said = {
            "about": about,
            "arguments": [[a.shape, str(a.dtype)] for a in jax.tree.leaves(arguments)],
            "settings": _settings(device),
        }
        shapes = json.loads(json.dumps(said))  # tuples as lists, as a file gives them back
        header = compiled.header(name, model, shapes, device)
        path = self.folder / f"{name}-{_digest(dataclasses.asdict(header))[:32]}{_SUFFIX}"
        try:
            _, loaded = compiled.read(
                path, name=name, model=model, device=device, shapes=lambda _: shapes
            )
        except (CompiledFileError, OSError) as error:
            _say(f"{name} is compiled: {error}")
            loaded, body = compiled.compile_here(program, arguments, device)
            self._keep(path, header, body)
        else:
            with contextlib.suppress(OSError):
                os.utime(path)
        return loaded

    def _keep(self, path: Path, header: compiled.Header, body: bytes) -> None:
        try:
            compiled.write(path, header, body)
            found = [(file.stat(), file) for file in self.folder.glob(f"*{_SUFFIX}")]
            size = 0
            for stat, file in sorted(found, key=lambda pair: pair[0].st_mtime_ns, reverse=True):
                size += stat.st_size
                if size > self.max_bytes:
                    file.unlink(missing_ok=True)
        except OSError as error:
            _say(f"{header.program} is not kept: {error}")


def _say(what: str) -> None:
    loud = jax.config.values["jax_explain_cache_misses"]
    _log.log(logging.WARNING if loud else logging.DEBUG, what)


def _settings(device: jax.Device) -> dict[str, Any]:
    """What has an effect on tracing or compiling, from outside."""
    selection = current_selection()
    fused = None if selection.fused is None else sorted(selection.fused)
    config = {name: repr(v) for name, v in jax.config.values.items() if "cache" not in name}
    variables = {
        name: [value, _stamp(value)]  # the value may name a file, as of a tuning table
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES)
    }
    return {
        "selection": [selection.implementation, selection.activations, fused],
        "jax.config": _digest(config),
        "environment": _digest(variables),
        "platform": device.client.platform_version,
        "sources": _sources(),
    }


@functools.cache
def _sources() -> str:
    """A digest of the packages' files: those of a checkout change while its version stays."""
    stamps = []
    for package in (__file__, ptx_kernels.__file__):
        for folder, _, names in os.walk(os.path.dirname(package), followlinks=True):
            if not folder.endswith("__pycache__"):
                stamps += [_stamp(os.path.join(folder, name)) for name in names]
    return _digest(sorted(filter(None, stamps)))


def _stamp(path: str) -> list[Any] | None:
    """What changes where a file does; None: there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return [path, found.st_size, found.st_mtime_ns]


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

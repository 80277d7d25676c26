"""On-disk cache of compiled programs, shared by processes: a hit skips tracing and compiling.

The file name is a digest of everything that the program depends on, which is known before tracing.
The header repeats these dependencies, and `compiled_files.read` checks them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import ptx_kernels
from ptx_kernels.file_stamp import file_stamp

from ..errors import CompiledFileError
from ..jax_internals import trace_context
from ..selection import current_selection
from . import compiled_files

__all__ = ["ProgramCache", "Types", "settings", "trace_context"]

_SUFFIX = ".program"
#: Prefixes of environment variables in the cache key: they change what is compiled or what runs.
_VARIABLES = ("XLA_", "TF_XLA_", "JAX_Q4K_", "NPROC", "PJRT_NPROC", "CUDA_", "NVIDIA_")
#: Packages that take part in tracing, besides those in `compiled_files.Header`.
_PACKAGES = ("flax", "numpy")
#: Suffixes of package files that are not hashed: unused, or in the CPU kernels' fingerprint.
_NO_SOURCES = (".gguf", ".md", ".pyc", ".so", ".cpp", ".h")

_IMPORTED = time.time_ns()

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ProgramCache:
    """On-disk program cache for one device.

    Attributes:
      folder: folder of the cache; must be writable by this user only, because the programs in it
        are run.
      max_bytes: limit on the total size of all files; the least recently used are deleted.
    """

    folder: Path
    max_bytes: int

    def get(
        self,
        name: str,
        program: Any,
        arguments: Sequence[Any],
        results: Any,
        device: jax.Device,
        *,
        model: str,
        about: dict[str, Any],
    ) -> compiled_files.LoadedProgram:
        """Returns the executable of a jitted function from the cache; on a miss, compiles it.

        A compiled program is stored in the folder. If a file cannot be used, its program is
        compiled again; JAX's option `jax_explain_cache_misses` logs the reason.

        Args:
          program: function jitted with `keep_unused`.
          arguments: its arguments, arrays in pytrees.
          results: expected shapes and dtypes of its results, in pytrees; part of the key.
          model, about: parts of the key besides the types: the model's fingerprint, and JSON.
        """
        said = {
            "about": about,
            "arguments": _listed(arguments),
            "results": _listed(results),
            "settings": settings(device),
        }
        shapes = json.loads(json.dumps(said))  # tuples become lists, as in a file
        header = compiled_files.header(name, model, shapes, device)
        path = self.folder / f"{name}-{_digest(dataclasses.asdict(header))[:32]}{_SUFFIX}"
        try:
            _, loaded = compiled_files.read(
                path, name=name, model=model, device=device, shapes=lambda _: shapes, private=True
            )
        except (CompiledFileError, OSError) as error:
            _say(f"{name} is compiled: {error}")
            loaded, body = compiled_files.compile_here(program, arguments, results, device)
            if _sources_have_changed():  # the files hashed for the key may not be those imported
                _say(f"{name} is not cached: the package's files have changed since the import")
            else:
                self._keep(path, header, body)
        else:
            with contextlib.suppress(OSError):
                os.utime(path)
        return loaded

    def _keep(self, path: Path, header: compiled_files.Header, body: bytes) -> None:
        try:
            path.unlink(missing_ok=True)  # `write` would follow a link and refuse a pipe
            compiled_files.write(path, header, body)
            found = [(file.lstat(), file) for file in self.folder.glob(f"*{_SUFFIX}")]
            size = 0
            for about, file in sorted(found, key=lambda pair: pair[0].st_mtime_ns, reverse=True):
                size += about.st_size
                if size > self.max_bytes or not compiled_files.is_of_this_format(file):
                    file.unlink(missing_ok=True)
        except OSError as error:
            _say(f"{header.program} is not cached: {error}")


class Types:
    """Hashable tree structure, shapes and dtypes of pytrees of arrays, as part of a cache key.

    The hash is computed once, because the types of a model's weights are in every call's key.
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, arrays: Any) -> None:
        leaves, tree = jax.tree.flatten(arrays)
        types = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]
        self._items = tree, *types
        self._hash = hash(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or isinstance(other, Types) and self._items == other._items


def _listed(arrays: Any) -> list[Any]:
    leaves, tree = jax.tree.flatten(arrays)
    return [str(tree), *([leaf.shape, str(leaf.dtype)] for leaf in leaves)]


def _say(what: str) -> None:
    loud = jax.config.values["jax_explain_cache_misses"]
    _log.log(logging.WARNING if loud else logging.DEBUG, what)


def settings(device: jax.Device) -> dict[str, Any]:
    """Returns settings, such as JAX options, that change how programs are traced or compiled.

    The result is JSON.
    """
    selection = current_selection()._asdict()
    config = {name: repr(v) for name, v in jax.config.values.items() if "cache" not in name}
    variables = {
        name: [value, file_stamp(value)]  # the value may name a file, such as a tuning table
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES)
    }
    return {
        "selection": {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in selection.items()
        },
        "jax.config": _digest(config),
        "environment": _digest(variables),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "platform": device.client.platform_version,
        "packages": _packages(),
        "sources": _sources(),
    }


@functools.cache
def _packages() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def _source_files() -> list[str]:
    return [
        os.path.join(folder, name)
        for package in (Path(__file__).parents[1], Path(ptx_kernels.__file__).parent)
        for folder, _, names in os.walk(package, followlinks=True)
        if not folder.endswith("__pycache__")
        for name in sorted(names)
        if not name.endswith(_NO_SOURCES)
    ]


@functools.cache
def _sources() -> str:
    """Returns a digest of the source files of this project's packages.

    A version number is not enough: a checkout changes while its version stays.
    """
    digest = hashlib.sha256()
    for path in sorted(_source_files()):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            data = file.read()
            digest.update(f"{path} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _sources_have_changed() -> bool:
    """Returns whether a source file changed after this process imported the packages."""
    with contextlib.suppress(FileNotFoundError):  # a file deleted meanwhile counts as changed
        return any(os.stat(path).st_mtime_ns > _IMPORTED for path in _source_files())
    return True


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
